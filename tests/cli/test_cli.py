import json
import re
from pathlib import Path

import pytest
from tiny_models import EVALUATION_FLAGS, SAMPLE, quantkit

from quantkit.contracts.registry import formats_for, methods
from quantkit.records.artifact import Manifest, open_artifact
from quantkit.records.report import Report
from quantkit.report.table import read_tables

pytestmark = pytest.mark.usefixtures("here")


def done(*arguments):
    """Run a command that must succeed and be silent on standard error."""
    ended = quantkit(*arguments)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def read(name):
    text = Path(name).read_text(encoding="utf-8")
    assert text.endswith("}\n")
    return json.loads(text)


def test_help_lists_the_commands_and_each_has_a_json_option():
    text = done("--help")
    judging = ("eval-ppl", "eval", "eval-tasks", "compare", "bench")
    for command in ("convert", *judging, "run", "inspect", "verify", "methods", "cache"):
        assert re.search(rf"│ {command} ", text)
        own = done(command, "--help")
        assert "--json" in own
        assert "Write the result as JSON to this file" in own


def test_help_of_convert_shows_the_options_of_the_method_that_is_named_and_of_no_other():
    flags = {m.name: {f"--{name.replace('_', '-')}" for name in m.Options.model_fields} for m in methods().values()}
    plain = done("convert", "--help")
    assert "--method METHOD --help" in plain
    for name, own in flags.items():
        text = done("convert", "--method", name, "--help")
        assert (f"Options of {name} " in text) == bool(own)
        shown = {flag for flag in set.union(*flags.values()) if re.search(rf"{flag}[ ,]", text)}
        assert shown == own
        assert not any(re.search(rf"{flag}[ ,]", plain) for flag in own)
    assert "largest of 128, 64, 32 that divides. Default: auto." in done("convert", "--method", "gptq", "--help")


def test_methods(tmp_path):
    text = done("methods", "--json", "methods.json")
    listed = read("methods.json")
    assert set(listed) == set(methods())
    for name, method in methods().items():
        assert f"│ {name} " in text
        assert listed[name]["bits"] == list(method.bits)
        assert listed[name]["formats"] == list(formats_for(method))
    assert listed["gptq"]["options"]["damp_percent"] == 0.01


def test_convert_names_its_folder_itself(tiny):
    text = done("convert", tiny, "--method", "rtn", "--bits", "8", "--group-size=64", "--json", "made.json")
    folder = Path("tiny-rtn-8-group_size-64")
    artifact = open_artifact(folder)
    assert Manifest.model_validate(read("made.json")) == artifact.manifest
    m = artifact.manifest
    assert text.startswith(f"{folder}: rtn-8 group_size=64 of {tiny.name}\n")
    for part in (f"{m.bits_per_weight:.2f} bits per weight", "tensors: 8 float16, 21 int8", "error: mean 0.0"):
        assert part in text


def test_inspect_and_verify(gguf):
    text = done("inspect", gguf.folder, "--json", "inspect.json")
    assert Manifest.model_validate(read("inspect.json")) == gguf.manifest
    assert "gguf-Q8_0 of " in text
    for name, entry in gguf.manifest.files.items():
        assert f"{entry.bytes:,} bytes  {name}" in text
    text = done("verify", gguf.folder, "--json", "verify.json")
    assert text == f"{gguf.folder}: {len(gguf.manifest.files)} files as written, all tensors finite\n"
    assert Manifest.model_validate(read("verify.json")) == gguf.manifest


def test_eval_ppl(gguf):
    text = done("eval-ppl", gguf.folder, *EVALUATION_FLAGS, "--json", "report.json")
    report = Report.model_validate(read("report.json"))
    [m] = report.measurements
    assert text == (
        f"gguf-Q8_0: perplexity {m.value:.4f} ± {m.stderr:.4f} (protocol llama.cpp, 2 windows of 64, "
        f"62 targets, text {SAMPLE.name}, engine llamacpp in the file's own types)\n"
        "  note: no divergence from the source: give its folder (tiny) with --source\n"
    )


def test_eval_by_the_papers_protocol(gguf):
    flags = ["--protocol", "papers", "--threads", "1", "--probes", "perplexity,size"]
    text = done("eval", gguf.folder, *EVALUATION_FLAGS, *flags, "--notes", "--json", "report.json")
    report = Report.model_validate(read("report.json"))
    assert [m.name for m in report.measurements] == ["weight_bytes", "bits_per_weight", "perplexity"]
    assert (report.windows.protocol, report.windows.scored) == ("papers", 2 * 63)
    for part in ("gguf-Q8_0", "file size", "every token scored (126 tokens)", "llamacpp"):
        assert part in text


def test_run_converts_and_compare_compares(one_block):
    Path("one.yaml").write_text(f"model: {one_block}\nmethod: gguf\nbits: Q8_0\nout: one\n")
    text = done("run", "one.yaml", "--json", "one.json")
    assert text.startswith("one: gguf-Q8_0 of ")
    assert Manifest.model_validate(read("one.json")) == open_artifact("one").manifest
    assert quantkit("run", "one.yaml").code == 1
    done("run", "one.yaml", "--force")
    done("run", "one.yaml", "--out", "two")
    assert open_artifact("two").manifest == open_artifact("one").manifest

    flags = [*EVALUATION_FLAGS, "--threads", "1", "--out", "all", "--json", "table.json", "--price-per-hour", "2"]
    shown = done("compare", one_block, "--methods", "gguf:Q8_0", *flags)
    [(_, table)] = read_tables(Path("table.json"))
    assert table.columns == ["bfloat16", "gguf-Q8_0"]
    assert "cost per 1,000 tokens @ 1 thread" in [row.title for row in table.rows()]
    for row in table.rows():
        assert re.search(
            rf"│ {re.escape(row.title)} +│ +{re.escape(row.cells[0])} │ +{re.escape(row.cells[1])} │", shown
        )

    # The recipe of the same comparison finds everything done.
    evaluation = f"{{text: {SAMPLE}, n_ctx: 64, limit: 2, threads: [1], price_per_hour: 2}}"
    variants = "[{method: gguf, bits: Q8_0}]"
    Path("all.yaml").write_text(f"model: {one_block}\nvariants: {variants}\nevaluation: {evaluation}\nout: all\n")
    assert done("run", "all.yaml", "--json", "again.json") == shown
    assert read("again.json") == read("table.json")
