import hashlib
import json
import os
import time
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from filelock import FileLock
from killed import forked
from made_up_reports import BASELINE
from tiny_models import EVALUATION
from transformers import AutoModelForCausalLM

from quantkit.engines._torch_model import TorchModel
from quantkit.errors import EngineError
from quantkit.evaluation import baseline
from quantkit.evaluation.baseline import (
    Baseline,
    BaselineFiles,
    SourceHead,
    clear_cache,
    ensure,
    key_of,
    list_cache,
)
from quantkit.evaluation.evaluate import evaluate
from quantkit.formats.source import open_source
from quantkit.records.recipe import EngineSpec
from quantkit.records.report import BaselineEntry

QUICK = {**EVALUATION, "probes": ("perplexity",)}


@pytest.fixture(autouse=True)
def cache(new_cache):
    (new_cache / "baselines").mkdir(parents=True)
    return new_cache


@pytest.fixture(scope="module")
def source(tiny):
    return open_source(str(tiny))


def loaded(source):
    return AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()


def compute(files, source, windows, model=None, advance=lambda *_: None):
    baseline.make(files, source, model or TorchModel(loaded(source), "float32"), windows, advance)


def made(source, windows, model=None):
    files = BaselineFiles(key_of(source, windows, "float32"))
    return files, ensure(files, partial(compute, files, source, windows, model), lambda _line: None)


def counted(source):
    """A model of the source, and a list of the types and numbers of windows that it is asked for."""
    model = TorchModel(loaded(source), "float32")
    asked = []
    states = model.states

    def noted(some):
        asked.append((model.dtype, len(some)))
        return states(some)

    model.states = noted
    return model, asked


def exact(source, windows):
    model = loaded(source)
    with torch.no_grad():
        every = [model(torch.from_numpy(w.ids)[None]).logits[0].numpy() for w in windows.windows]
    return np.concatenate([e[w.first : w.first + len(w.targets)] for e, w in zip(every, windows.windows, strict=True)])


def test_its_logits_are_those_of_the_source_and_its_floors_those_of_their_states(source, windows):
    model, asked = counted(source)
    files, facts = made(source, windows, model)
    assert asked == [("float32", 6), ("bfloat16", baseline.NOISE_WINDOWS)]  # none is computed twice
    assert (facts.positions, facts.windows, facts.dtype) == (6 * 15, 6, "float32")
    assert files.states.stat().st_size == 6 * 15 * 2 * facts.width
    read = Baseline(files, facts, source)
    got = np.concatenate([read.logits(start, min(7, 90 - start)) for start in range(0, 90, 7)])
    assert np.allclose(got, exact(source, windows), atol=2e-3)
    assert 0 <= facts.rounding < 1e-5
    assert facts.rounding < facts.noise < 0.01
    assert ensure(files, lambda: pytest.fail("it was computed again"), lambda _line: None) == facts
    few = replace(windows, windows=windows.windows[: baseline.NOISE_WINDOWS])
    want = torch.from_numpy(exact(source, few)).log_softmax(1).double()
    coarse = torch.cat(list(TorchModel(loaded(source).bfloat16(), "bfloat16").states(few.windows)))
    noisy = SourceHead(source).logits(coarse.float().numpy())
    for figure, logits in ((facts.noise, noisy), (facts.rounding, read.logits(0, len(want)))):
        divergence = (want.exp() * (want - torch.from_numpy(logits).log_softmax(1).double())).sum(1)
        assert figure == pytest.approx(float(divergence.mean()), rel=0.05, abs=2e-8)
    assert facts.noise_stderr > 0


def test_its_logits_do_not_depend_on_where_somebody_begins_to_read(source, windows, monkeypatch):
    """An evaluation that goes on after a kill has the figures of a quiet one."""
    files, facts = made(source, windows)
    asked = []
    compute = SourceHead.logits

    def note(head, states):
        asked.append((int(states[0, 0].view(np.uint16)), len(states)))
        return compute(head, states)

    monkeypatch.setattr(baseline, "ROWS", 16)
    monkeypatch.setattr(SourceHead, "logits", note)
    whole = Baseline(files, facts, source).logits(0, 90)
    blocks, asked[:] = list(asked), []
    assert [rows for _, rows in blocks] == [16, 16, 16, 16, 16, 10]
    assert np.array_equal(Baseline(files, facts, source).logits(37, 53), whole[37:])
    assert asked == blocks[2:]


def test_an_interrupted_one_goes_on_after_its_whole_batches(source, windows, monkeypatch):
    """The third window is computed again with the fourth, since their last digits are those of both together."""
    monkeypatch.setattr("quantkit.contracts.engine.BATCH_TOKENS", 2 * 32)
    monkeypatch.setattr(baseline, "NOISE_WINDOWS", 3)
    files, facts = made(source, windows)
    assert facts.noise > 0
    whole = files.states.read_bytes()
    files.states.unlink()
    files.facts.unlink()
    files.partial.write_bytes(whole[: 2 * facts.width * 15 * 3 + 11])  # three windows and a torn one
    model, asked = counted(source)
    compute(files, source, windows, model)
    assert asked == [("float32", 4), ("float32", 6), ("bfloat16", 3)]  # what is left, as far as the noise, the noise
    assert files.states.read_bytes() == whole
    assert files.read_facts() == facts
    assert not files.partial.exists()


def endless(files, folder, windows):
    """Make a baseline, and come to no end after the third window."""
    source, told = open_source(str(folder)), count()

    def advance(*_):
        if next(told) == 3:
            time.sleep(600)

    ensure(files, lambda: compute(files, source, windows, advance=advance), lambda _line: None)


def test_two_at_once_share_a_baseline_and_one_may_be_killed(source, windows, tmp_path, monkeypatch):
    files, facts = made(source, windows)
    want = files.states.read_bytes()
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "other"))
    files = BaselineFiles(files.key)
    other = forked(partial(endless, files, source.folder, windows), tmp_path / "log")
    while not files.partial.exists():
        assert other.code is None, other.wait()
        time.sleep(0.01)
    told = []

    def kill(line):
        told.append(line)
        other.process.kill()

    assert ensure(files, partial(compute, files, source, windows), kill) == facts
    assert files.states.read_bytes() == want
    assert told == [f"another process computes this baseline of the source; waiting for it ({files.lock})"]


def test_what_float16_costs_is_measured_and_states_beyond_it_are_refused(source, windows):
    """With states so large that float32 tells what float16 costs from zero."""
    model = loaded(source)
    model.model.norm.weight.data.mul_(100)
    _, facts = made(source, windows, TorchModel(model, "float32"))
    assert 1e-6 < facts.rounding < facts.noise
    model = loaded(source)
    model.model.norm.weight.data.mul_(1e6)
    with pytest.raises(EngineError, match="do not fit into float16"):
        compute(BaselineFiles("0"), source, windows, TorchModel(model, "float32"))


def write_baseline(files, **changes):
    states = np.arange(4, dtype=np.float16).tobytes()
    files.states.write_bytes(states)
    one = {"format": baseline.FORMAT, "windows": 1, "positions": 1, "width": 4}
    one["sha256"] = hashlib.sha256(states).hexdigest()
    files.facts.write_text(json.dumps(BASELINE.model_dump() | one | changes))


DAMAGE = {
    "changed states": lambda files: files.states.write_bytes(np.arange(1, 5, dtype=np.float16).tobytes()),
    "states cut short": lambda files: os.truncate(files.states, 4),
    "nested facts": lambda files: files.facts.write_bytes(b"[" * 100_000),
    "another size": lambda files: write_baseline(files, positions=2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_told_and_made_again(damage):
    files = BaselineFiles("0" * 32)
    write_baseline(files)
    assert isinstance(files.read_facts(), BaselineEntry)
    DAMAGE[damage](files)
    assert files.read_facts() is None
    told = []
    ensure(files, lambda: write_baseline(files), told.append)
    assert told == [f"the baseline {files.states.name} was damaged and is computed again"]
    assert files.read_facts() is not None


def test_a_cache_that_cannot_be_written_is_told(cache, monkeypatch):
    files = BaselineFiles("0" * 32)
    (cache / "file").write_text("")
    monkeypatch.setenv("QUANTKIT_CACHE", str(cache / "file"))
    with pytest.raises(EngineError, match=r"cannot be written.*Set QUANTKIT_CACHE"):
        ensure(files, lambda: None, lambda _line: None)


def test_the_cache_lists_and_clears_what_is_not_in_use(cache, source, windows):
    (cache / "baselines" / "strange.f16").mkdir()  # which is left alone
    files, _ = made(source, windows)
    other, kept = BaselineFiles("f" * 32), baseline.resume_folder() / "e.positions"
    other.partial.write_bytes(b"123")
    kept.parent.mkdir()
    kept.write_bytes(b"12345")
    size = files.states.stat().st_size + files.facts.stat().st_size
    assert sorted(entry.bytes for entry in list_cache()) == [3, 5, size]
    assert f"{source.name} in float32, llama.cpp, 6 windows of 32" in [entry.what for entry in list_cache()]
    with FileLock(other.lock):
        assert len(clear_cache()) == 2
    assert [entry.what for entry in list_cache()] == [f"unfinished baseline {other.key}"]
    assert len(clear_cache()) == 1


def test_an_artifact_is_evaluated_against_its_source(cache, gguf, tiny):
    report = evaluate(gguf, **QUICK, source=tiny)
    assert report.baseline is not None
    assert 1e-6 < report.find("kld").value < 0.05
    assert any("nats per token, against the source in float32" in line for line in report.quality())
    itself = evaluate(str(tiny), **QUICK, engine=EngineSpec(dtype="float32"))
    assert abs(itself.find("kld").value) < 1e-5
    assert itself.baseline == report.baseline
    assert not list((cache / "evaluations").glob("*.positions"))
    report = evaluate(gguf, **QUICK)
    assert report.find("kld") is None
    assert report.notes == (f"no divergence from the source: give its folder ({tiny.name}) with --source",)
