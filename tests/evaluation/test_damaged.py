"""What judging reads and is told by others: damaged caches are computed again, all else ends as one line."""

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import EVALUATION, EVALUATION_FLAGS, SAMPLE, changed_copy, quantkit, save_tiny
from transformers import GPT2Config

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.conversion.convert import convert
from quantkit.data.texts import load_text
from quantkit.errors import (
    ArtifactError,
    EngineError,
    QuantkitError,
    RecipeError,
    ReportError,
    SourceError,
    UnsupportedError,
)
from quantkit.evaluation.baseline import BaselineFiles, ensure
from quantkit.evaluation.cache import clear_cache, list_cache
from quantkit.evaluation.cross_check import cross_check
from quantkit.evaluation.evaluate import evaluate
from quantkit.evaluation.process import run_child
from quantkit.evaluation.protocols import cut
from quantkit.evaluation.request import LoadRequest, TaskSpec, TasksRequest
from quantkit.formats.source import open_source
from quantkit.progress import Progress
from quantkit.report.records import BaselineEntry, Report, read_report
from quantkit.report.table import Table, table_from_json

QUICK: dict[str, Any] = {**EVALUATION, "probes": ("perplexity",)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return convert(str(tiny), "gguf", "Q8_0", tmp_path_factory.mktemp("artifacts") / "gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "baselines").mkdir(parents=True)
    return tmp_path / "cache"


# The source of an artifact


@pytest.fixture(scope="module")
def other(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model but for one weight."""

    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][0] += 1

    return changed_copy(tiny, tmp_path_factory.mktemp("models") / "other", change)


@pytest.mark.parametrize("judge", [evaluate, cross_check])
def test_another_source_than_the_artifact_was_made_from_is_refused(
    judge: Callable[..., object], gguf: Artifact, other: Path, cache: Path
) -> None:
    settings = {key: value for key, value in EVALUATION.items() if key != "threads"}
    with pytest.raises(ArtifactError) as caught:
        judge(gguf, source=other, **settings)
    for digest in (gguf.manifest.source.hashes, open_source(str(other)).hashes):
        assert digest["model.safetensors"][:12] in str(caught.value)
    assert "model.safetensors has the sha256" in str(caught.value)
    assert list_cache() == []


def test_another_source_is_told_by_the_command_line(gguf: Artifact, other: Path, cache: Path) -> None:
    for command in ("eval-ppl", "eval"):
        ended = quantkit(command, gguf.folder, "--source", other, *EVALUATION_FLAGS)
        assert ended.code == 1
        assert f"{other} is not the model that {gguf.folder} was made from" in ended.err
        assert ended.err.count("\n") == 1


def test_a_source_whose_config_alone_differs_is_refused(gguf: Artifact, tiny: Path, tmp_path: Path) -> None:
    changed = changed_copy(tiny, tmp_path / "changed", rms_norm_eps=1e-3)
    with pytest.raises(ArtifactError, match=r"config\.json has the sha256"):
        evaluate(gguf, source=changed, **QUICK)


def test_a_source_beside_a_model_that_is_one_itself_is_refused(tiny: Path, other: Path) -> None:
    with pytest.raises(RecipeError, match="is a source itself"):
        evaluate(str(tiny), source=other, **QUICK)


# What a child process tells


def child(told: str, folder: Path, code: int = 0) -> None:
    """Run a child whose interpreter only tells this."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable} -S\nimport os, sys\nos.write(int(sys.argv[-1]), {told!r}.encode())\n")
    program.write_text(program.read_text() + f"sys.exit({code})\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    load = LoadRequest(model="demo", revision=None, engine="reference", threads=1, python=str(program))
    run_child(TasksRequest(load=load, tasks=TaskSpec(tasks=("wikitext",))), folder, Progress())


@pytest.mark.parametrize(
    "told",
    [
        "no json", "[]", "5", "{}", '{"a": 1, "b": 2}', '{"strange": 1}', '{"measurements": []}', '{"__class__": {}}',
        '{"loaded": 5}', '{"tasks": null}', '{"measurement": {}}', '{"measurement": {"name": "x", "value": "y"}}',
        '{"step": {}}', '{"step": 5}', '{"error": 5}', '{"error": {"type": 5, "message": "x"}}', "[" * 100_000,
        '{"error": {"type": "ArtifactError"}}',
    ],
)  # fmt: skip
def test_an_unusable_word_of_a_child_is_one_line(told: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="told something unusable of demo"):
        child(f"{told}\n", tmp_path)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("ArtifactError", ArtifactError), ("Path", EngineError), ("annotations", EngineError), ("re", EngineError)],
)
def test_only_an_error_of_ours_is_raised_by_its_name(kind: str, error: type[QuantkitError], tmp_path: Path) -> None:
    with pytest.raises(error, match="broken") as caught:
        child(json.dumps({"error": {"type": kind, "message": "broken"}}) + "\n", tmp_path)
    assert type(caught.value) is error


def test_a_child_that_ends_without_a_word_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ended without a word"):
        child("", tmp_path)
    with pytest.raises(EngineError, match="ended with code 7"):
        child("", tmp_path, 7)


# The cache

FACTS: dict[str, Any] = {
    "format": 1, "model": "m", "dtype": "float32", "protocol": "papers", "n_ctx": 8, "windows": 1, "positions": 1,
    "width": 4, "rounding": 0.0, "noise": 0.0, "noise_stderr": 0.0,
}  # fmt: skip


def write_baseline(files: BaselineFiles, **changes: Any) -> None:
    import hashlib

    states = np.arange(4, dtype=np.float16).tobytes()
    files.states.write_bytes(states)
    facts = {**FACTS, "sha256": hashlib.sha256(states).hexdigest(), **changes}
    files.facts.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": float("nan")}, {"noise": None}, {"rounding": float("inf")}, {"positions": -1}, {"width": 10**30},
        {"format": 2}, {"sha256": "0" * 64}, {"windows": "many"}, {"positions": 2}, {"extra": 1},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_facts_of_a_baseline_are_not_believed(changes: dict[str, Any], cache: Path) -> None:
    files = BaselineFiles("0" * 32)
    write_baseline(files)
    assert isinstance(files.read_facts(), BaselineEntry)
    write_baseline(files, **changes)
    assert files.read_facts() is None
    told: list[str] = []
    ensure(files, lambda: write_baseline(files), told.append)
    assert told == [f"the baseline {files.states.name} was damaged and is computed again"]
    assert files.read_facts() is not None


@pytest.mark.parametrize("content", [b"", b"[1]", b"5", b"[" * 100_000, b"\xff\xfe", b'{"a":' * 90 + b"1" + b"}" * 90])
def test_facts_that_are_none_are_made_again_listed_and_cleared(content: bytes, cache: Path) -> None:
    files = BaselineFiles("0" * 32)
    write_baseline(files)
    files.facts.write_bytes(content)
    assert [entry.what for entry in list_cache()] == [f"unfinished baseline {files.key}"]
    ensure(files, lambda: write_baseline(files), lambda _line: None)
    files.facts.write_bytes(content)
    assert len(clear_cache()) == 1
    assert list_cache() == []


def test_a_folder_in_the_cache_is_left_alone(cache: Path) -> None:
    (cache / "baselines" / "strange.f16").mkdir()
    (cache / "evaluations").mkdir()
    (cache / "evaluations" / "strange.positions").mkdir()
    assert list_cache() == clear_cache() == []


def test_a_baseline_that_does_not_read_back_names_its_disk(cache: Path) -> None:
    files = BaselineFiles("0" * 32)
    with pytest.raises(EngineError, match=rf"is the disk of {cache / 'baselines'} sound\? Set QUANTKIT_CACHE"):
        ensure(files, lambda: write_baseline(files, sha256="0" * 64), lambda _line: None)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngineError, match=r"cannot be written.*Set QUANTKIT_CACHE"):
        ensure(BaselineFiles("0" * 32), lambda: None, lambda _line: None)


def test_a_single_position_is_judged_and_its_baseline_kept(tiny: Path, tmp_path: Path, cache: Path) -> None:
    text = tmp_path / "word.txt"
    text.write_text(" = A = \n\n a")
    report = evaluate(str(tiny), **{**QUICK, "text": str(text), "protocol": "lm-eval", "dtype": "float32", "limit": 1})
    assert report.baseline is not None
    again = tmp_path / "report.json"
    again.write_text(report.model_dump_json())
    assert read_report(again).windows == report.windows


# Tokens and positions


def save_gpt2(tiny: Path, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    config = GPT2Config(vocab_size=304, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


def test_windows_beyond_the_context_get_a_note(tiny: Path, tmp_path: Path) -> None:
    short = changed_copy(tiny, tmp_path / "short", max_position_embeddings=32)
    settings = {**QUICK, "divergence": False}
    report = evaluate(str(short), **settings)
    note = "windows of 64 tokens are longer than the context of 32 tokens that the model was made for"
    assert report.notes == (note,)
    assert any(note in line for line in Table((report,)).notes())
    assert evaluate(str(tiny), **settings).notes == ()


def test_windows_beyond_a_table_of_positions_are_refused(tiny: Path, tmp_path: Path) -> None:
    gpt2 = save_gpt2(tiny, tmp_path / "gpt2")
    evaluate(str(gpt2), **{**QUICK, "divergence": False})
    with pytest.raises(UnsupportedError, match="windows of 65 tokens are longer than the 64 positions"):
        evaluate(str(gpt2), **{**QUICK, "n_ctx": 65})


def test_token_ids_beyond_the_embedding_are_refused(tiny: Path) -> None:
    source, text = open_source(str(tiny)), load_text(str(SAMPLE), "evaluation")
    windows = cut(text, source.tokenizer(), "papers", 64, 2, source.config).windows
    largest = max(int(window.ids.max()) for window in windows)
    cut(text, source.tokenizer(), "papers", 64, 2, source.config | {"vocab_size": largest + 1})
    for inner in ({"vocab_size": largest}, {"text_config": {"vocab_size": largest}}):
        with pytest.raises(SourceError, match=f"the embedding has {largest} rows"):
            cut(text, source.tokenizer(), "papers", 64, 2, source.config | inner)


# End tokens


@pytest.mark.parametrize("content", ["[1]", "{", "5", "[" * 100_000])
def test_a_damaged_generation_config_is_told(content: str, gguf: Artifact, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(gguf.folder, tmp_path / "copy"))
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(EngineError, match=r"generation_config\.json"):
        _ = Model(Artifact(folder, gguf.manifest), None).end_tokens


@pytest.mark.parametrize(("ends", "want"), [(7, {7}), ([7, 8], {7, 8}), (-1, set()), (None, set()), ([], set())])
def test_end_tokens_are_those_of_all_files(ends: Any, want: set[int], tiny: Path, tmp_path: Path) -> None:
    folder = changed_copy(tiny, tmp_path / "changed", eos_token_id=ends)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Model(None, open_source(str(folder))).end_tokens == {2, 9} | want


@pytest.mark.parametrize("ends", ["</s>", ["</s>"], [[2]], 1.5, {"a": 2}, True])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_end_tokens_that_are_none_are_refused(ends: Any, name: str, tiny: Path, tmp_path: Path) -> None:
    folder = changed_copy(tiny, tmp_path / "changed")
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(values | {"eos_token_id": ends}))
    with pytest.raises((EngineError, SourceError), match="eos_token_id"):
        _ = Model(None, open_source(str(folder))).end_tokens


# Reports


@pytest.fixture(scope="module")
def report(tiny: Path) -> Report:
    return evaluate(str(tiny), **{**QUICK, "dtype": "float32", "probes": ("size", "perplexity")})


def without_p99(values: dict[str, Any]) -> None:
    kld = next(m for m in values["measurements"] if m["name"] == "kld")
    del kld["details"]["p99"]


def first(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["measurements"][0].update(changes)


DAMAGE: list[Callable[[dict[str, Any]], object]] = [
    without_p99,
    first(value=None), first(value=float("nan")), first(value="x"), first(n=-1), first(n=10**400), first(details=5),
    first(details={"a": float("inf")}),
    lambda values: values.update(measurements=5), lambda values: values.update(windows=None),
    lambda values: values["hardware"].update(memory_bytes=10**400), lambda values: values.pop("model"),
    lambda values: values["baseline"].update(noise=None), lambda values: values.update(settings={"text": 5}),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_report_is_one_line_alone_and_in_a_table(
    damage: Callable[[dict[str, Any]], object], report: Report, tmp_path: Path
) -> None:
    one, table = tmp_path / "report.json", tmp_path / "table.json"
    plain = report.model_copy(update={"seal": None})  # whoever changes it on purpose takes the seal off
    values = json.loads(plain.model_dump_json())
    one.write_text(json.dumps(values))
    table.write_text(json.dumps({"reports": [values]}))
    assert read_report(one) == table_from_json(table).reports[0] == plain
    damage(values)
    one.write_text(json.dumps(values))
    table.write_text(json.dumps({"reports": [values]}))
    for read, path in ((read_report, one), (table_from_json, table)):
        with pytest.raises(ReportError) as caught:
            read(path)  # type: ignore[operator]
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("content", ["", "[1]", "5", "[" * 100_000, '{"reports": 5}', '{"reports": [5]}', "{}"])
def test_what_is_no_report_is_told(content: str, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    for read in (read_report, table_from_json):
        with pytest.raises(ReportError):
            read(path)  # type: ignore[operator]
