"""A dry run: forecasts from the first units of the work, and nothing is written."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit

from quantkit.contracts.method import Job
from quantkit.contracts.run import Findings, Run
from quantkit.conversion import dry_run as module
from quantkit.conversion.check import prepare_job
from quantkit.conversion.convert import convert
from quantkit.conversion.dry_run import dry_run
from quantkit.formats.gguf import writer
from quantkit.progress import Progress, Step

FORECAST = ("rtn", "gptq", "awq", "nf4", "ctranslate2")  # methods that say what memory they take


@pytest.mark.parametrize(
    "method", ["rtn", "gptq", "gguf", "ctranslate2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("awq", "nf4"))]
)
def test_a_dry_run_tells_and_writes_nothing(
    method: str, tiny: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str] = []
    monkeypatch.setattr(Findings, "count", lambda _findings, kind: packed.append(kind))
    monkeypatch.setattr(writer, "_threads", lambda: 1)
    monkeypatch.setattr("quantkit.methods.ctranslate2._prove", lambda *_: pytest.fail("proven"))
    ended = quantkit("convert", tiny, "--method", method, *CALIBRATION_FLAGS, "--dry-run", "--json", "f.json")
    assert (ended.code, ended.err) == (0, "")
    assert [path.name for path in here.iterdir()] == ["f.json"]
    values = json.loads((here / "f.json").read_text())
    assert values["disk_bytes"] > 0
    assert 0 < values["work_seconds"] < 60
    assert math.isfinite(values["before_seconds"])
    known = method in FORECAST
    assert (values["memory_bytes"] is not None) == known
    assert (re.search(r"[MG]B at the peak", ended.out) is not None) == known
    assert "time: about" in ended.out
    assert method != "gguf" or len(packed) == 1


def test_the_time_is_that_of_the_first_units_times_their_share(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thirtieth of 300 layers, which take one second and three in turn."""
    clock = [1000.0]

    def write(_job: Job, run: Run) -> None:
        for title, total, seconds, work in (("before", 10, [15.0] * 10, False), ("work", 300, [1.0, 3.0] * 150, True)):
            with run.progress.step(title, total, work=work) as advance:
                for each in seconds[: None if work else 1]:
                    clock.append(clock[-1] + each)
                    advance(1.0)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    job = prepare_job(str(tiny), "rtn")
    trial = dry_run(job.changed(method=dataclasses.replace(job.method, write=write)), tmp_path / "out")
    assert (trial.before_seconds, trial.work_seconds) == (15.0, pytest.approx(600.0))
    assert len(clock) == 1 + 1 + 10


@pytest.mark.parametrize(("method", "units"), [("rtn", 14), ("nf4", 14), ("gptq", 2), ("awq", 2), ("gguf", 20)])
def test_the_units_of_a_method_are_all_of_its_work(
    method: str, units: int, tiny_with: Callable[..., Path], tmp_path: Path
) -> None:
    """A step that says too few or too many would make the forecast wrong by as much."""
    steps: dict[str, Step] = {}
    progress = Progress(lambda step: steps.update({step.title: step}))
    convert(
        str(tiny_with(num_hidden_layers=2)), method, out=tmp_path / "out", calibration=CALIBRATION, progress=progress
    )
    [work] = [step for step in steps.values() if step.work]
    assert (work.total, work.done, work.ended) == (units, units, True)
