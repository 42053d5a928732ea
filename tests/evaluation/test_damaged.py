import json
import shutil
import stat
import sys
from contextlib import nullcontext

import pytest
from tiny_models import EVALUATION, SAMPLE, changed_copy
from transformers import AutoModelForCausalLM, GPT2Config

from quantkit.contracts.model import Model
from quantkit.data.texts import load_text
from quantkit.errors import ArtifactError, EngineError, ReportError, SourceError, UnsupportedError
from quantkit.evaluation.baseline import list_cache
from quantkit.evaluation.cross_check import cross_check
from quantkit.evaluation.engine_choice import ChosenEngine
from quantkit.evaluation.evaluate import evaluate
from quantkit.evaluation.process import BaselineRequest, LoadRequest, TasksRequest, read_request, run_child
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_source
from quantkit.records.artifact import Artifact
from quantkit.records.recipe import EngineSpec, ModelRef, TaskSpec
from quantkit.records.report import read_report
from quantkit.report.table import read_tables
from quantkit.system.progress import Progress

QUICK = {**EVALUATION, "probes": ("perplexity",)}
FLOAT32 = EngineSpec(dtype="float32")
UNUSABLE = "sent an invalid event about demo"
DAMAGE = {
    "no percentile": lambda values: next(m for m in values["measurements"] if m["name"] == "kld")["details"].pop("p99"),
    "not a number": lambda values: values["measurements"][0].update(value=float("nan")),
    "endless count": lambda values: values["measurements"][0].update(n=10**400),
    "a wrong key": lambda values: values.update(subject=values.pop("model")),
}


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    def change(tensors):
        tensors["model.norm.weight"][0] += 1

    return changed_copy(tiny, tmp_path_factory.mktemp("models") / "other", change)


def test_another_source_than_the_artifact_was_made_from_is_refused(gguf, tiny, other, tmp_path, new_cache):
    settings = {key: value for key, value in EVALUATION.items() if key != "threads"}
    for command in (evaluate, cross_check):
        with pytest.raises(ArtifactError, match=r"model\.safetensors has the sha256"):
            command(gguf, source=other, **settings)
    changed = changed_copy(tiny, tmp_path / "changed", rms_norm_eps=1e-3)
    with pytest.raises(ArtifactError, match=r"config\.json has the sha256"):
        evaluate(gguf, source=changed, **QUICK)
    assert list_cache() == []


def load_by(python):
    engine = ChosenEngine("reference", "1", None, python, "cpu", "cpu")
    return LoadRequest(model=ModelRef(model="demo"), engine=engine, threads=1)


@pytest.mark.parametrize("change", [{"kind": "measure"}, {"load": "[" * 100_000}])
def test_a_damaged_request_is_one_line(change):
    request = BaselineRequest(load=load_by(sys.executable), windows="cut.npz", key="k")
    assert read_request(request.model_dump_json()) == request
    with pytest.raises(EngineError, match="the request to the evaluation process is invalid"):
        read_request(json.dumps(request.model_dump() | change))


def child(told, folder):
    """Run a child whose interpreter only tells this, and ends with code 7 if it is nothing."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable} -S\nimport os, sys\nsys.exit(0 if os.write(int(sys.argv[-1]), {told!r}.encode()) else 7)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    run_child(TasksRequest(load=load_by(str(program)), tasks=TaskSpec(tasks=("wikitext",))), folder, Progress())


@pytest.mark.parametrize(("told", "error", "says"), [
    ("[" * 100_000 + "\n", EngineError, UNUSABLE),
    ('{"strange": 1}\n', EngineError, UNUSABLE),
    ('{"measurement": {"name": "x", "value": "y"}}\n', EngineError, UNUSABLE),
    ('{"error": {"type": "ArtifactError", "message": "broken"}}\n', ArtifactError, "broken"),
    ('{"error": {"type": "Path", "message": "broken"}}\n', EngineError, "broken"),  # none of ours
    ("", EngineError, "ended with code 7"),
])  # fmt: skip
def test_what_a_child_tells_amiss_is_an_error_of_ours(told, error, says, tmp_path):
    with pytest.raises(error, match=says) as caught:
        child(told, tmp_path)
    assert type(caught.value) is error


def test_a_single_position_is_evaluated_and_its_baseline_stored(tiny, tmp_path):
    text = tmp_path / "word.txt"
    text.write_text(" = A = \n\n a")
    report = evaluate(str(tiny), **{**QUICK, "text": str(text), "protocol": "lm-eval", "limit": 1}, engine=FLOAT32)
    assert report.baseline is not None
    again = tmp_path / "report.json"
    again.write_text(report.model_dump_json())
    assert read_report(again).windows == report.windows


def test_windows_beyond_a_table_of_positions_are_refused(tiny, tmp_path):
    config = GPT2Config(vocab_size=304, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path / "gpt2")
    with pytest.raises(UnsupportedError, match="longer than the model's 64 positions"):
        evaluate(str(tmp_path / "gpt2"), **{**QUICK, "n_ctx": 65})


def test_token_ids_beyond_the_embedding_are_refused(tiny):
    source, text = open_source(str(tiny)), load_text(str(SAMPLE), "evaluation")
    windows = cut(text, source.tokenizer(), "papers", 64, 2, source.config).windows
    largest = max(int(window.ids.max()) for window in windows)
    cut(text, source.tokenizer(), "papers", 64, 2, source.config | {"vocab_size": largest + 1})
    for inner in ({"vocab_size": largest}, {"text_config": {"vocab_size": largest}}):
        with pytest.raises(SourceError, match=f"the embedding has {largest} rows"):
            cut(text, source.tokenizer(), "papers", 64, 2, source.config | inner)


def test_end_tokens_are_those_of_all_files_and_none_that_cannot_be(gguf, tiny, tmp_path):
    for number, (ends, want) in enumerate((([7, 8], {7, 8}), (-1, set()), (["</s>"], "eos_token_id"))):
        folder = changed_copy(tiny, tmp_path / str(number), eos_token_id=ends)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
        with pytest.raises(UnsupportedError, match=want) if isinstance(want, str) else nullcontext():
            assert Model(None, open_source(str(folder))).end_tokens == {2, 9} | want
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(EngineError, match=r"generation_config\.json"):
        _ = Model(Artifact(folder, gguf.manifest), None).end_tokens


@pytest.fixture(scope="module")
def report(tiny):
    return evaluate(str(tiny), **{**QUICK, "probes": ("size", "perplexity")}, engine=FLOAT32)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_report_is_one_line_alone_and_in_a_table(damage, report, tmp_path):
    one, table = tmp_path / "report.json", tmp_path / "table.json"
    values = json.loads(report.model_dump_json())
    one.write_text(json.dumps(values))
    table.write_text(json.dumps({"reports": [values]}))
    assert read_report(one) == read_tables(table)[0][1].reports[0] == report
    DAMAGE[damage](values)
    one.write_text(json.dumps(values))
    table.write_text(json.dumps({"reports": [values]}))
    for read, path in ((read_report, one), (read_tables, table)):
        with pytest.raises(ReportError) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 2000
