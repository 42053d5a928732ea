"""What decides the figures of a judgement: each part of it makes another fingerprint, and so another measurement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import EVALUATION, SAMPLE, save_tiny

from quantkit import convert, evaluate
from quantkit.artifact import Artifact
from quantkit.contracts.registry import engines
from quantkit.conversion.manifest import PACKAGE
from quantkit.data.texts import Text, load_text
from quantkit.evaluation import evaluate as evaluation
from quantkit.evaluation.baseline import key_of
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import Judgement, prepare
from quantkit.evaluation.forecast import memory
from quantkit.evaluation.protocols import cut
from quantkit.formats.source import open_model, open_source
from quantkit.probes._scores import RECORD
from quantkit.progress import Progress, Step
from quantkit.recipe import EngineSpec, EvaluationSpec
from quantkit.report.records import BaselineEntry, Report, this_machine
from quantkit.system.processor import usable_cores

BASELINE = BaselineEntry(
    format=1, model="tiny", dtype="float32", protocol="llama.cpp", n_ctx=64, windows=2, positions=62, width=64,
    sha256="aa" * 32, rounding=1e-9, noise=1e-4, noise_stderr=1e-5,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return convert(str(tiny), "gguf", "Q8_0", out=tmp_path_factory.mktemp("out") / "gguf")


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text(str(SAMPLE), "evaluation")


@pytest.fixture
def judgement(tiny: Path, text: Text) -> Judgement:
    model = open_model(str(tiny))
    return prepare(model, EvaluationSpec(**EVALUATION), text, choose(model, EngineSpec()))


def installed(package: str, number: str, place: Path, patch: pytest.MonkeyPatch) -> None:
    """Let another version of a package be found first."""
    facts = place / f"{package.replace('-', '_')}-{number}.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    patch.syspath_prepend(str(place))


Change = Callable[[Judgement, Path, pytest.MonkeyPatch], tuple[Judgement, BaselineEntry | None]]


def model_of_other_bytes(given: Judgement, place: Path, _: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    copy = Path(shutil.copytree(given.model.folder, place / given.model.name))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    return replace(given, model=open_model(str(copy))), BASELINE


def other_ends(given: Judgement, place: Path, _: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    copy = Path(shutil.copytree(given.model.folder, place / given.model.name))
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return replace(given, model=open_model(str(copy))), BASELINE


def other_text(given: Judgement, _: Path, __: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    return replace(given, text=replace(given.text, content=given.text.content + "\n")), BASELINE


def text_of_another_name(given: Judgement, _: Path, __: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    return replace(given, text=replace(given.text, name="other.txt")), BASELINE


def other_windows(given: Judgement, _: Path, __: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    return replace(given, judged=cut(given.text, given.model.tokenizer(), "llama.cpp", 64, 1)), BASELINE


def setting(**changes: Any) -> Change:
    def change(given: Judgement, _: Path, __: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
        return replace(given, spec=given.spec.model_copy(update=changes)), BASELINE

    return change


def engine(**changes: Any) -> Change:
    def change(given: Judgement, _: Path, __: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
        return replace(given, engine=replace(given.engine, **changes)), BASELINE

    return change


def another_variable(given: Judgement, _: Path, patch: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    patch.setenv("ATEN_CPU_CAPABILITY", "default")
    return given, BASELINE


def another_version(given: Judgement, place: Path, patch: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    installed("torch", "99.0", place, patch)
    return given, BASELINE


def other_code(given: Judgement, place: Path, patch: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.txt")
    package = Path(shutil.copytree(PACKAGE, place / "quantkit", ignore=ignored))
    with (package / "probes" / "speed.py").open("a") as file:
        file.write("\n")
    patch.setattr(evaluation, "PACKAGE", package)
    return given, BASELINE


def machine(**changes: Any) -> Change:
    def change(given: Judgement, _: Path, patch: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry]:
        other = this_machine().model_copy(update=changes)
        patch.setattr(evaluation, "this_machine", lambda: other)
        return given, BASELINE

    return change


def baseline(**changes: Any) -> Change:
    def change(given: Judgement, _: Path, __: pytest.MonkeyPatch) -> tuple[Judgement, BaselineEntry | None]:
        return given, BASELINE.model_copy(update=changes) if changes else None

    return change


CHANGES: dict[str, tuple[str, Change]] = {
    "bytes": ("model", model_of_other_bytes),
    "end tokens": ("ends", other_ends),
    "text": ("text", other_text),
    "name of the text": ("text", text_of_another_name),
    "windows": ("windows", other_windows),
    "threads": ("settings", setting(threads=(1, 2))),
    "repeats": ("settings", setting(repeats=4)),
    "engine": ("engine", engine(name="reference")),
    "engine's version": ("engine", engine(version="0.0.1")),
    "dtype": ("engine", engine(dtype="float32")),
    "device": ("engine", engine(device="cuda")),
    "walk": ("engine", engine(walk=True)),
    "interpreter": ("python", engine(python="/other/bin/python")),
    "variable": ("variables", another_variable),
    "package": ("versions", another_version),
    "code": ("code", other_code),
    "processor": ("hardware", machine(cpu="Another CPU")),
    "cores": ("hardware", machine(cores=1000)),
    "no baseline": ("baseline", baseline()),
    "baseline's dtype": ("baseline", baseline(dtype="bfloat16")),
    "baseline's bytes": ("baseline", baseline(sha256="bb" * 32)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_makes_another_fingerprint(
    name: str, judgement: Judgement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, change = CHANGES[name]
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before, fingerprint = judgement.decides(BASELINE), judgement.fingerprint(BASELINE)
    assert judgement.fingerprint(BASELINE) == fingerprint
    other, kept = change(judgement, tmp_path, monkeypatch)
    after = other.decides(kept)
    differing = {key for key in before if before[key] != after[key]}
    # Another engine has other process variables.
    assert differing - {"variables" if name == "engine" else ""} == {part}
    assert other.fingerprint(kept) != fingerprint


def test_no_part_is_forgotten_above(judgement: Judgement) -> None:
    assert {part for part, _ in CHANGES.values()} == set(judgement.decides(BASELINE))


@pytest.mark.parametrize(
    ("name", "variable"),
    [("ctranslate2", "CT2_USE_MKL"), ("llamacpp", "GGML_X"), ("vllm", "VLLM_X"), ("transformers", "BNB_X"),
     *((name, "DNNL_MAX_CPU_ISA") for name in engines())],
)  # fmt: skip
def test_variables_that_change_what_an_engine_computes_count(
    name: str, variable: str, judgement: Judgement, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(judgement.engine, name=name)
    monkeypatch.setenv("UNRELATED", "1")
    before = chosen.variables
    monkeypatch.setenv(variable, "1")
    assert sorted({*chosen.variables} - {*before}) == [f"{variable}=1"]
    assert "UNRELATED=1" not in before


# The baseline of a source


def test_each_part_makes_another_baseline(
    judgement: Judgement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, judged = open_source(str(judgement.model.folder)), judgement.judged

    def key(hashes: dict[str, str] | None = None, dtype: str = "float32", **about: Any) -> str:
        source.hashes = hashes or plain
        return key_of(source, replace(judged, about=judged.about.model_copy(update=about)), dtype)

    plain = dict(source.hashes)
    assert set(plain) == {"config.json", "model.safetensors"}
    keys = [
        key(),
        key(dtype="bfloat16"),
        *(key({**plain, name: "00" * 32}) for name in plain),
        key(tokens_sha256="00" * 32),
        key(protocol="papers"),
        key(scored=5),
    ]
    assert key() == keys[0]
    assert key(n_ctx=99) == keys[0]  # the tokens tell
    installed("transformers", "99.0", tmp_path / "site", monkeypatch)
    keys.append(key())
    monkeypatch.setattr("quantkit.evaluation.baseline.FORMAT", 99)
    keys.append(key())
    assert len({*keys}) == len(keys)


# Windows of an interrupted evaluation


def interrupted(model: Artifact, after: int, **settings: Any) -> None:
    def interrupt(step: Step) -> None:
        if step.done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, ("perplexity",), **settings, progress=Progress(interrupt))


def first_done(model: Artifact, **settings: Any) -> float:
    """How many windows are done when the first is told."""
    seen: list[float] = []
    evaluate(model, ("perplexity",), **settings, progress=Progress(lambda step: seen.append(step.done)))
    return min(done for done in seen if done)


MANY: dict[str, Any] = {**EVALUATION, "limit": 8, "divergence": False}


@pytest.mark.parametrize("change", ["nothing", "variables", "version", "threads"])
def test_kept_windows_are_used_only_where_nothing_else_is(
    change: str, gguf: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    interrupted(gguf, 3, **MANY)
    [kept] = (tmp_path / "cache" / "evaluations").glob("*.positions")
    assert kept.stat().st_size >= 3 * 31 * RECORD.itemsize
    settings = dict(MANY)
    if change == "variables":
        monkeypatch.setenv("GGML_QUANTKIT_TEST", "1")
    elif change == "version":
        installed("numpy", "0.0.1", tmp_path / "site", monkeypatch)
    elif change == "threads":
        if usable_cores() < 2:
            pytest.skip("one core")
        settings["threads"] = (2,)
    assert first_done(gguf, **settings) == (1 if change != "nothing" else pytest.approx(4, abs=1))
    assert kept.exists() == (change != "nothing")


@pytest.fixture(scope="module")
def judged(gguf: Artifact, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A cache folder with the source's baseline, and the report that it was made for."""
    cache = tmp_path_factory.mktemp("judged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(cache))
        return cache, evaluate(gguf, ("perplexity",), **EVALUATION, source=tiny)


def prepared(gguf: Artifact, tiny: Path, text: Text) -> Judgement:
    model, spec = open_model(gguf), EvaluationSpec(**EVALUATION, probes=("perplexity",))
    return prepare(model, spec, text, choose(model, EngineSpec()), open_source(str(tiny)))


def test_a_report_carries_the_fingerprint_of_its_judgement(
    judged: tuple[Path, Report], gguf: Artifact, tiny: Path, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, report = judged
    monkeypatch.setenv("QUANTKIT_CACHE", str(cache))
    again = prepared(gguf, tiny, text)
    assert report.baseline is not None
    assert again.kept_baseline() == report.baseline
    assert report.fingerprint == again.fingerprint(report.baseline)
    assert again.fingerprint(None) != report.fingerprint


def test_a_kept_baseline_takes_no_memory(
    judged: tuple[Path, Report], gguf: Artifact, tiny: Path, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one name however it is computed: the bytes are the same."""
    monkeypatch.setattr(memory, "available_memory", lambda: 10**12)
    monkeypatch.setattr(memory, "walked", lambda *_: memory.Need("reference", True))
    names = {True: prepared(gguf, tiny, text).baseline}
    need = prepared(gguf, tiny, text).settled.model.memory
    assert need is not None
    monkeypatch.setattr(memory, "available_memory", lambda: need)  # the source in float32 takes more
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    without = prepared(gguf, tiny, text)
    assert (without.settled.baseline.walk, without.settled.engine.walk) == (True, False)
    [note] = without.notes
    assert note.startswith("the source, for divergences, was computed block by block by our own reader: transformers")
    monkeypatch.setenv("QUANTKIT_CACHE", str(judged[0]))
    kept = prepared(gguf, tiny, text)
    assert (kept.settled.baseline.walk, kept.notes) == (False, ())
    assert {True: without.baseline} == names


def test_without_a_text_the_part_for_evaluation_is_judged(gguf: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    report = evaluate(gguf, ("size",), **EVALUATION | {"text": None})
    assert report.text.name == "quantkit's bundled sample, evaluation part"
