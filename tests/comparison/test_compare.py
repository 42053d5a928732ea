import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from edits import edit_json, put
from tiny_models import CALIBRATION, EVALUATION

from quantkit import verify
from quantkit.comparison.compare import Comparison, compare
from quantkit.conversion import convert
from quantkit.errors import QuantkitError
from quantkit.evaluation import evaluate as evaluation
from quantkit.formats.source import open_model
from quantkit.records.artifact import CARD, MANIFEST
from quantkit.records.recipe import CompareRecipe
from quantkit.records.report import read_report, this_machine
from quantkit.report.table import read_tables
from quantkit.system.files import cache_folder, sha256_of

VARIANTS = ["gguf:Q8_0", {"method": "ctranslate2", "bits": "int8"}, "rtn:4"]
SETTINGS = {"calibration": CALIBRATION, "evaluation": {**EVALUATION, "new_tokens": 4, "repeats": 2}}
FILES = ["artifacts", "perplexity-size.png", "perplexity-size.svg", "reports", "table.csv", "table.json", "table.md"]
OTHER = this_machine().model_copy(update={"cpu": "Another CPU"})
REPORT, MADE = Path("reports", "rtn-4.json"), Path("artifacts", "rtn-4", MANIFEST)


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    """A comparison that was interrupted in its second conversion, again in the judgement after it, then finished.

    Its table grew a row at a time.
    """
    out = tmp_path_factory.mktemp("compare") / "out"
    rows = []

    def row(table):
        rows.append(table.columns)
        assert (out / "table.md").read_text(encoding="utf-8") == table.to_markdown()
        assert not (out / "perplexity-size.png").exists()

    for owner, name, calls_before, row_hook in ((convert, "run", 1, row), (evaluation, "measure", 0, None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupted_after(calls_before, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                compare(str(tiny), VARIANTS, out=out, row=row_hook, **SETTINGS)
    assert rows == [["bfloat16"], ["bfloat16", "gguf-Q8_0"]]
    artifacts, reports = times(out / "artifacts"), times(out / "reports")
    assert {path.parent.name for path in artifacts} == {"gguf-Q8_0", "ctranslate2-int8"}
    assert [path.name for path in reports] == ["bfloat16.json", "gguf-Q8_0.json"]
    table = compare(str(tiny), VARIANTS, out=out, row=row, **SETTINGS)
    assert [len(columns) for columns in rows] == [1, 2, 1, 2, 3, 4]
    # The figures have gone into the cards; nothing else was touched.
    now = times(out / "artifacts")
    assert {path.name for path, when in artifacts.items() if now[path] != when} == {CARD, MANIFEST}
    assert times(out / "reports").items() >= reports.items()
    return out, table


def interrupted_after(calls_before, call):
    calls = []

    def run(*arguments, **named):
        calls.append(1)
        if len(calls) > calls_before:
            raise KeyboardInterrupt
        return call(*arguments, **named)

    return run


def times(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def forbidden(*_, **__):
    raise AssertionError("this was done already")


def test_an_interrupted_comparison_goes_on_to_its_table(done):
    out, table = done
    assert table.columns == ["bfloat16", "gguf-Q8_0", "ctranslate2-int8", "rtn-4"]
    assert [row.title for row in table.rows()] == [
        *("perplexity", "KLD from source", "KLD, 99th percentile", "same top token", "file size", "bits per weight"),
        *("ms/token @ 1 thread", "ms to first token @ 1 thread", "peak memory", "engine"),
    ]
    assert table.rows()[-1].cells == ("transformers", "llamacpp", "ctranslate2", "reference")
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert (out / "table.md").read_text(encoding="utf-8") == table.to_markdown()
    assert read_tables(out / "table.json") == [(None, table)]
    assert len({report.windows.tokens_sha256 for report in table.reports}) == 1
    assert [report.find("perplexity").n for report in table.reports] == [62] * 4
    for label in table.columns[1:]:
        verify(out / "artifacts" / label)
        text = (out / "artifacts" / label / CARD).read_text()
        assert f"| Model | Measure | bfloat16 | {label} |" in text
        for row in table.rows():
            assert f"| tiny | {row.title} | {row.cells[0]} | {row.cells[table.columns.index(label)]} |" in text


def test_a_second_run_makes_again_what_is_damaged_and_nothing_else(done, tiny, monkeypatch):
    out, table = done
    monkeypatch.setattr(evaluation, "measure", forbidden)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "run", forbidden)
        artifacts, reports = times(out / "artifacts"), times(out / "reports")
        assert compare(str(tiny), VARIANTS, out=out, **SETTINGS) == table
        assert (times(out / "artifacts"), times(out / "reports")) == (artifacts, reports)
    path = out / "artifacts" / "rtn-4" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert compare(str(tiny), VARIANTS, out=out, **SETTINGS) == table
    assert path.read_bytes() == data


@pytest.fixture
def out(done, tmp_path):
    return Path(shutil.copytree(done[0], tmp_path / "out", copy_function=shutil.copy2))


def test_quality_measured_on_another_machine_is_used_where_that_is_asked_for(out, tiny):
    recipe = CompareRecipe(model=str(tiny), variants=(), evaluation=SETTINGS["evaluation"], out=str(out))
    strict, anywhere = Comparison(recipe), Comparison(recipe, any_machine=True)
    judgement = strict.prepare(open_model(str(out / "artifacts" / "rtn-4")))
    path = strict.report_path(judgement.model)
    report = read_report(path)
    there = report.hardware.model_copy(update={"cpu": "another"})
    on_gpu = replace(judgement, engine=replace(judgement.engine, device="cuda"))
    edit_json(path, put("hardware", value=there.model_dump()))
    edit_json(path, put("engine", "device", value="cuda (NVIDIA H200)"))
    edit_json(path, put("fingerprint", value=on_gpu.fingerprint(report.baseline, there)))
    assert anywhere.reusable_report(judgement).hardware == there
    assert strict.reusable_report(judgement) is None


@pytest.mark.parametrize(("place", "value"), [
    (["calibration_sha256"], "00" * 32), (["source", "hashes"], {"config.json": "00" * 32}), (["recipe", "seed"], 3),
    (["options", "group_size"], 64), (["format"], "awq"), (["bits_per_weight"], 7.5),
])  # fmt: skip
def test_an_artifact_of_another_conversion_is_not_used(place, value, out, tiny, monkeypatch):
    edit_json(out / "artifacts" / "rtn-4" / MANIFEST, put(*place, value=value))
    monkeypatch.setattr(convert, "run", forbidden)
    monkeypatch.setattr(evaluation, "measure", lambda *_: pytest.fail("it was used and judged"))
    if place != ["bits_per_weight"]:  # that one shows in the files; another conversion may be true to its own
        monkeypatch.setattr("quantkit.comparison.compare.refuse_untrue", lambda _artifact: None)
    with pytest.raises(AssertionError, match="done already"):
        compare(str(tiny), VARIANTS, out=out, **SETTINGS)


def another_baseline(_, place, patch):
    folder = Path(shutil.copytree(cache_folder() / "baselines", place / "baselines"))
    for facts in folder.glob("*.json"):
        values = json.loads(facts.read_text())
        states = np.fromfile(facts.with_suffix(".f16"), np.float16)
        states[0] += np.float16(0.5)
        states.tofile(facts.with_suffix(".f16"))
        facts.write_text(json.dumps(values | {"sha256": sha256_of(facts.with_suffix(".f16"))}))
    patch.setenv("QUANTKIT_CACHE", str(place))


CHANGES = {
    "another machine": lambda _, __, patch: patch.setattr(evaluation, "this_machine", lambda: OTHER),
    "another baseline": another_baseline,
    "other bytes": lambda out, _, __: edit_json(out / MADE, put("notes", value=["made otherwise"])),
    "a report that is cut off": lambda out, _, __: (out / REPORT).write_text("{"),
    "a report without a fingerprint": lambda out, _, __: edit_json(out / REPORT, put("fingerprint", value=None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_report_of_another_judgement_is_not_used(change, out, tiny, tmp_path, monkeypatch):
    CHANGES[change](out, tmp_path, monkeypatch)
    converted = RuntimeError("the artifacts are those of the same conversions")
    monkeypatch.setattr(convert, "run", Mock(side_effect=converted))
    monkeypatch.setattr(evaluation, "measure", forbidden)
    with pytest.raises(AssertionError, match="done already"):
        compare(str(tiny), VARIANTS, out=out, **SETTINGS)


def test_the_same_source_elsewhere_is_used_unless_its_tokenizer_is_another(done, tiny, tmp_path, monkeypatch):
    other = Path(shutil.copytree(tiny, tmp_path / "tiny"))
    monkeypatch.setattr(convert, "run", forbidden)
    monkeypatch.setattr(evaluation, "measure", forbidden)
    assert compare(str(other), VARIANTS, out=done[0], **SETTINGS) == done[1]
    monkeypatch.setattr(evaluation, "measure", lambda *_: done[1].reports[0])
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(AssertionError, match="done already"):
        compare(str(other), VARIANTS, out=done[0], **SETTINGS)


@pytest.mark.parametrize(("second", "evaluation", "says"), [
    ("gptk", {}, "unknown method 'gptk'"),
    ({"method": "rtn", "options": {"group_size": 100}}, {}, "group_size 100 does not divide"),
    ({"method": "gguf", "bits": "q8_0"}, {}, "two variants are named gguf-Q8_0"),
    ("rtn", {"text": "missing.txt"}, "missing.txt does not exist"),
    ("rtn", {"n_ctx": 1_000_000}, "too short"),
])  # fmt: skip
def test_a_bad_second_variant_or_evaluation_is_refused_before_the_first_conversion(
    second, evaluation, says, tiny, here, monkeypatch
):
    monkeypatch.setattr(convert, "run", forbidden)
    settings = {"calibration": CALIBRATION, "evaluation": {**EVALUATION, **evaluation}}
    with pytest.raises(QuantkitError) as error:
        compare(str(tiny), ["gguf:Q8_0", second], out=here / "out", **settings)
    assert says in str(error.value)
    assert list(here.iterdir()) == []
