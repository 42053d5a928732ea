"""Forecast the memory, disk space and time of a conversion; the time is measured on its first units of work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.contracts.method import CheckedJob, with_layer_bits
from quantkit.contracts.run import Run
from quantkit.conversion.check import ReadyJob
from quantkit.conversion.forecast import Forecast
from quantkit.system.files import temporary_folder
from quantkit.system.progress import Progress, Step


@dataclass(frozen=True)
class DryRun:
    """Memory forecast (None if the method has none), disk space in bytes, and time in seconds."""

    forecast: Forecast | None
    disk: int
    out: Path
    device: str
    before_seconds: float
    work_seconds: float

    def to_values(self) -> dict[str, object]:
        """Return a dict for JSON, in bytes and seconds."""
        memory = None if self.forecast is None else self.forecast.memory
        phases = {} if self.forecast is None else self.forecast.phases
        return {
            "memory_bytes": memory,
            "phases_bytes": phases,
            "device": self.device,
            "device_bytes": None if self.forecast is None else self.forecast.on_device,
            "disk_bytes": self.disk,
            "before_seconds": self.before_seconds,
            "work_seconds": self.work_seconds,
        }


def dry_run(ready: ReadyJob) -> DryRun:
    """Forecast a checked job by running its first units of work in a temporary folder."""
    before, work = _measure(ready.job)
    return DryRun(ready.forecast, ready.disk_bytes, ready.out, ready.job.device, before, work)


class _StopTrial(Exception):  # noqa: N818 - a signal, not an error
    """Signal that ends a trial after the first units of work."""


def _measure(job: CheckedJob) -> tuple[float, float]:
    """Start the conversion in a temporary folder; return (seconds before the first unit of work, seconds of all units).

    The first unit, usually a decoder block, is extrapolated to all. A bit search has units of its own and is timed
    first; if it is not finished, the timing of the writing goes on without its result.
    """
    with temporary_folder() as folder:
        job.source.copy_side_files(folder)
        run = Run(folder)
        before, work = 0.0, 0.0
        if job.method.bit_search is not None:
            chosen: list[CheckedJob] = []
            before, work = _trial(run, lambda: chosen.append(with_layer_bits(job, run)))
            job = chosen[0] if chosen else job
        further = _trial(run, lambda: job.method.write(job, run))
        return before + further[0], work + further[1]


def _trial(run: Run, work: Callable[[], object]) -> tuple[float, float]:
    """Start `work` and stop it early; return (seconds before its first unit, estimated seconds of all units)."""
    begun: list[float] = []
    measured: list[tuple[float, float]] = []
    start = time.monotonic()

    def listen(step: Step) -> None:
        if not step.work or step.ended:
            return
        now = time.monotonic()
        if not begun:
            begun.append(now)
        # Layers of one block differ much; a thirtieth of all layers is about one block.
        elif step.done >= max(1.0, step.total / 30):
            measured.append((begun[0] - start, (now - begun[0]) * step.total / step.done))
            raise _StopTrial

    run.progress = Progress(listen)
    try:
        work()
    except _StopTrial:
        pass
    else:
        measured.append((0.0, time.monotonic() - start))
    return measured[-1] if measured else (0.0, math.nan)
