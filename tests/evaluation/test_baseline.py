"""The source's baseline: what is kept, found again, shared between processes, and never believed when it is damaged."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EVALUATION, SAMPLE, save_tiny

from quantkit.artifact import Artifact
from quantkit.contracts.windows import Cut
from quantkit.conversion.convert import convert
from quantkit.data.texts import load_text
from quantkit.engines._torch_model import TorchModel
from quantkit.errors import EngineError
from quantkit.evaluation import baseline
from quantkit.evaluation.baseline import Baseline, BaselineFiles, SourceHead, ensure, key_of
from quantkit.evaluation.cache import clear_cache, list_cache
from quantkit.evaluation.evaluate import evaluate
from quantkit.evaluation.protocols import cut
from quantkit.formats.float.checkpoint import Checkpoint
from quantkit.formats.source import open_source
from quantkit.report.records import Report

QUICK: dict[str, Any] = {**EVALUATION, "probes": ("perplexity",)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def source(tiny: Path) -> Checkpoint:
    return open_source(str(tiny))


@pytest.fixture(scope="module")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return convert(str(tiny), "gguf", "Q8_0", tmp_path_factory.mktemp("artifacts") / "gguf")


@pytest.fixture(scope="module")
def windows(source: Checkpoint) -> Cut:
    return cut(load_text(str(SAMPLE), "evaluation"), source.tokenizer(), "llama.cpp", 32, 6)


def loaded(source: Checkpoint) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()


def made(source: Checkpoint, windows: Cut) -> tuple[BaselineFiles, Any]:
    files = BaselineFiles(key_of(source, windows, "float32"))

    def make() -> None:
        baseline.make(files, source, TorchModel(loaded(source), "float32"), windows, lambda *_, **__: None)

    return files, ensure(files, make, lambda _line: None)


def exact(source: Checkpoint, windows: Cut) -> np.ndarray:
    model = loaded(source)
    with torch.no_grad():
        every = [model(torch.from_numpy(w.ids)[None]).logits[0].numpy() for w in windows.windows]
    return np.concatenate([e[w.first : w.first + len(w.targets)] for e, w in zip(every, windows.windows, strict=True)])


def test_its_logits_are_those_of_the_source(cache: Path, source: Checkpoint, windows: Cut) -> None:
    files, facts = made(source, windows)
    assert (facts.positions, facts.windows, facts.dtype) == (6 * 15, 6, "float32")
    assert files.states.stat().st_size == 6 * 15 * 2 * facts.width
    read = Baseline(files, facts, source)
    got = np.concatenate([read.logits(start, min(7, 90 - start)) for start in range(0, 90, 7)])
    assert np.allclose(got, exact(source, windows), atol=2e-3)
    assert 0 <= facts.rounding < 1e-5
    assert facts.rounding < facts.noise < 0.01


def test_its_logits_do_not_depend_on_where_somebody_begins_to_read(
    cache: Path, source: Checkpoint, windows: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that goes on after a kill has the figures of a quiet one."""
    files, facts = made(source, windows)
    asked: list[tuple[int, int]] = []
    compute = SourceHead.logits

    def note(head: SourceHead, states: np.ndarray) -> np.ndarray:
        asked.append((int(states[0, 0].view(np.uint16)), len(states)))
        return compute(head, states)

    monkeypatch.setattr(baseline, "ROWS", 16)
    monkeypatch.setattr(SourceHead, "logits", note)
    whole = Baseline(files, facts, source).logits(0, 90)
    blocks, asked[:] = list(asked), []
    assert [rows for _, rows in blocks] == [16, 16, 16, 16, 16, 10]
    assert np.array_equal(Baseline(files, facts, source).logits(37, 53), whole[37:])
    assert asked == blocks[2:]


def test_a_second_evaluation_does_not_compute_it_again(cache: Path, source: Checkpoint, windows: Cut) -> None:
    files, facts = made(source, windows)

    def never() -> None:
        raise AssertionError

    assert ensure(files, never, lambda _line: None) == facts


def test_the_key_tells_what_it_depends_on(source: Checkpoint, windows: Cut, tmp_path: Path) -> None:
    text = load_text(str(SAMPLE), "evaluation")
    other = open_source(str(save_tiny(tmp_path / "other", intermediate_size=96)))
    keys = {
        key_of(source, windows, "float32"),
        key_of(source, windows, "bfloat16"),
        key_of(other, windows, "float32"),
        key_of(source, cut(text, source.tokenizer(), "llama.cpp", 32, 5), "float32"),
        key_of(source, cut(text, source.tokenizer(), "papers", 32, 6), "float32"),
    }
    assert len(keys) == 5


@pytest.mark.parametrize("damage", ["states", "cut short", "facts", "no facts"])
def test_a_damaged_one_is_told_and_made_again(damage: str, cache: Path, source: Checkpoint, windows: Cut) -> None:
    files, facts = made(source, windows)
    if damage == "states":
        content = bytearray(files.states.read_bytes())
        content[100] ^= 1
        files.states.write_bytes(content)
    elif damage == "cut short":
        os.truncate(files.states, 100)
    elif damage == "facts":
        files.facts.write_text("{")
    else:
        files.facts.unlink()
    told: list[str] = []

    def make() -> None:
        baseline.make(files, source, TorchModel(loaded(source), "float32"), windows, lambda *_, **__: None)

    assert ensure(files, make, told.append) == facts
    assert told == [f"the baseline {files.states.name} was damaged and is computed again"]


def test_an_interrupted_one_goes_on_after_its_whole_windows(
    cache: Path, source: Checkpoint, windows: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third is computed again with the fourth, since their last digits are those of both together."""
    monkeypatch.setattr("quantkit.contracts.windows.BATCH_TOKENS", 2 * 32)
    monkeypatch.setattr(baseline, "NOISE_WINDOWS", 3)
    files, facts = made(source, windows)
    assert facts.noise > 0
    whole = files.states.read_bytes()
    files.states.unlink()
    files.facts.unlink()
    files.partial.write_bytes(whole[: 2 * facts.width * 15 * 3 + 11])  # three windows and a torn one
    model = TorchModel(loaded(source), "float32")
    asked: list[int] = []
    states = model.states

    def counted(some: Any) -> Any:
        asked.append(len(some))
        return states(some)

    model.states = counted  # type: ignore[method-assign]
    baseline.make(files, source, model, windows, lambda *_, **__: None)
    assert asked == [4, 4, 3]  # what is left, the whole batches that noise is measured in, these in bfloat16
    assert files.states.read_bytes() == whole
    assert files.read_facts() == facts
    assert not files.partial.exists()


def test_the_windows_that_noise_is_measured_on_are_computed_once(cache: Path, source: Checkpoint, windows: Cut) -> None:
    """In float32; and the floors are those of their states, position by position."""
    model = TorchModel(loaded(source), "float32")
    asked: list[tuple[str, int]] = []
    states = model.states

    def counted(some: Any) -> Any:
        asked.append((model.dtype, len(some)))
        return states(some)

    model.states = counted  # type: ignore[method-assign]
    files = BaselineFiles(key_of(source, windows, "float32"))
    ensure(files, partial(baseline.make, files, source, model, windows, lambda *_, **__: None), lambda _line: None)
    assert asked == [("float32", 6), ("bfloat16", baseline.NOISE_WINDOWS)]
    facts = files.read_facts()
    assert facts is not None
    few = replace(windows, windows=windows.windows[: baseline.NOISE_WINDOWS])
    want = torch.from_numpy(exact(source, few)).log_softmax(1).double()
    model = TorchModel(loaded(source).bfloat16(), "bfloat16")
    head, coarse = SourceHead(source), torch.cat(list(model.states(few.windows))).float().numpy()
    for figure, logits in (
        (facts.noise, head.logits(coarse)),
        (facts.rounding, Baseline(files, facts, source).logits(0, len(want))),
    ):
        got = torch.from_numpy(logits).log_softmax(1).double()
        divergence = (want.exp() * (want - got)).sum(1)
        assert figure == pytest.approx(float(divergence.mean()), rel=0.05, abs=2e-8)
    assert facts.noise_stderr > 0


def test_what_float16_costs_is_measured(cache: Path, source: Checkpoint, windows: Cut) -> None:
    """With states so large that float32 tells it from zero."""
    model = loaded(source)
    model.model.norm.weight.data.mul_(100)
    (cache / "baselines").mkdir(parents=True)
    files = BaselineFiles("0")
    baseline.make(files, source, TorchModel(model, "float32"), windows, lambda *_, **__: None)
    facts = files.read_facts()
    assert facts is not None
    assert 1e-6 < facts.rounding < facts.noise


def test_a_cost_that_float32_cannot_tell_from_zero_is_zero(
    cache: Path, source: Checkpoint, windows: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline, "_divergences", lambda *_: [np.full(3, -1e-8), np.full(3, 0.25)])
    _, facts = made(source, windows)
    assert (facts.rounding, facts.noise) == (0, 0.25)


def test_states_beyond_float16_are_refused(cache: Path, source: Checkpoint, windows: Cut) -> None:
    model = loaded(source)
    model.model.norm.weight.data.mul_(1e6)
    (cache / "baselines").mkdir(parents=True)
    with pytest.raises(EngineError, match="do not fit into float16"):
        baseline.make(BaselineFiles("0"), source, TorchModel(model, "float32"), windows, lambda *_, **__: None)


def test_the_cache_lists_and_clears_what_is_not_in_use(cache: Path, source: Checkpoint, windows: Cut) -> None:
    from filelock import FileLock

    files, facts = made(source, windows)
    other = BaselineFiles("f" * 32)
    other.partial.write_bytes(b"123")
    kept = baseline.resume_folder() / "e.positions"
    kept.parent.mkdir()
    kept.write_bytes(b"12345")
    size = files.states.stat().st_size + files.facts.stat().st_size
    assert sorted(entry.bytes for entry in list_cache()) == [3, 5, size]
    assert f"{source.name} in float32, llama.cpp, 6 windows of 32" in [entry.what for entry in list_cache()]
    with FileLock(other.lock):
        assert len(clear_cache()) == 2
    assert [entry.what for entry in list_cache()] == [f"unfinished baseline {other.key}"]
    assert len(clear_cache()) == 1
    assert list_cache() == []
    assert facts.windows == 6


def divergence(report: Report) -> float:
    found = report.find("kld")
    assert found is not None
    return found.value


def test_an_artifact_is_judged_against_its_source(cache: Path, gguf: Artifact, tiny: Path) -> None:
    report = evaluate(gguf, **QUICK, source=tiny)
    names = [m.name for m in report.measurements]
    assert names == [
        "perplexity", "kld", "same_top_p", "delta_p", "delta_p_rms", "nll_correlation",
        "ln_perplexity_ratio", "source_perplexity",
    ]  # fmt: skip
    assert report.baseline is not None
    assert 1e-6 < divergence(report) < 0.05
    lines = report.quality()
    assert any("nats from the source in float32" in line for line in lines)
    itself = evaluate(str(tiny), **QUICK, dtype="float32")
    assert abs(divergence(itself)) < 1e-5
    assert itself.baseline == report.baseline
    assert (cache / "evaluations").is_dir()
    assert not list((cache / "evaluations").glob("*.positions"))


def test_without_its_source_an_artifact_says_so(cache: Path, gguf: Artifact, tiny: Path) -> None:
    report = evaluate(gguf, **QUICK)
    assert report.find("kld") is None
    assert report.notes == (f"no divergence from the source: give its folder ({tiny.name}) with --source",)
    assert evaluate(gguf, **QUICK, divergence=False).notes == ()


MANY: dict[str, Any] = {**QUICK, "limit": 24, "dtype": "float32"}
EVALUATE = """
import json, sys
from quantkit import evaluate
report = evaluate(sys.argv[1], **json.loads(sys.argv[2]))
print(report.find("perplexity").value, report.find("kld").value)
"""


def test_two_at_once_share_a_baseline_and_one_may_be_killed(
    cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here() -> list[float]:
        report = evaluate(str(tiny), **MANY)
        perplexity = report.find("perplexity")
        assert perplexity is not None
        return [perplexity.value, divergence(report)]

    with monkeypatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(cache.with_name("quiet")))
        want = here()
    command = [sys.executable, "-c", EVALUATE, str(tiny), json.dumps(MANY)]
    one, two = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) for _ in range(2))
    while not list(cache.glob("baselines/*.partial")):
        assert one.poll() is None or two.poll() is None
        time.sleep(0.01)
    os.killpg(one.pid, signal.SIGKILL)
    got, _ = two.communicate()
    one.communicate()
    assert two.returncode == 0
    figures = [float(value) for value in got.split()]
    assert figures == pytest.approx(want, rel=1e-6, abs=1e-7)
    [entry] = list_cache()
    assert "24 windows of 64" in entry.what
    assert here() == figures


def test_facts_are_plain_json(cache: Path, source: Checkpoint, windows: Cut) -> None:
    files, facts = made(source, windows)
    assert json.loads(files.facts.read_text()) == facts.model_dump()
