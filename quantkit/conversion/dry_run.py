"""What a conversion would take: memory, disk, and time, measured on the work's first unit."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.contracts.job import Job
from quantkit.contracts.registry import find_method
from quantkit.conversion.check import check
from quantkit.conversion.convert import default_out
from quantkit.conversion.forecast import Forecast
from quantkit.conversion.staging import refuse_existing
from quantkit.progress import Progress, Step


@dataclass(frozen=True)
class DryRun:
    """What a conversion would take: a forecast where the method has one, disk bytes, and seconds of the work."""

    forecast: Forecast | None
    disk: int
    out: Path
    before_seconds: float
    work_seconds: float

    def to_values(self) -> dict[str, object]:
        """Plain values for JSON: bytes and seconds."""
        memory = None if self.forecast is None else self.forecast.memory
        phases = {} if self.forecast is None else self.forecast.phases
        return {
            "memory_bytes": memory,
            "phases_bytes": phases,
            "disk_bytes": self.disk,
            "before_seconds": self.before_seconds,
            "work_seconds": self.work_seconds,
        }


def dry_run(job: Job, out: str | Path | None = None, *, force: bool = False, memory: int | None = None) -> DryRun:
    """Check a prepared job and forecast it; the first decoder block is really worked on, in a temporary folder."""
    out = Path(out) if out is not None else default_out(job.recipe)
    refuse_existing(out, force)
    found = check(job, out, memory)
    before, work = measure(job)
    return DryRun(found, job.disk_bytes, out, before, work)


class _Enough(Exception):  # noqa: N818 - a signal, not an error
    """Ends the trial: the first units of the work are done."""


def measure(job: Job) -> tuple[float, float]:
    """Begin the conversion in a temporary folder; (seconds before the first unit, seconds of the whole work).

    The work's first unit, a decoder block where the method has such, stands for all.
    """
    method = find_method(job.recipe.method)
    begun: list[float] = []
    found: list[tuple[float, float]] = []
    start = time.monotonic()

    def listen(step: Step) -> None:
        if not step.title.startswith(f"{method.name}:") or step.ended:
            return
        now = time.monotonic()
        if not begun:
            begun.append(now)
        # Layers of one block differ much; a thirtieth of them is a block of most models.
        elif step.done >= max(1.0, step.total / 30):
            found.append((begun[0] - start, (now - begun[0]) * step.total / step.done))
            raise _Enough

    with tempfile.TemporaryDirectory(prefix="quantkit-forecast-") as folder:
        trial = replace(
            job, folder=Path(folder), progress=Progress(listen), notes=[], tensor_types={}, resolved=dict(job.resolved)
        )
        try:
            method.write(trial)
        except _Enough:
            pass
        else:
            found.append((0.0, time.monotonic() - start))
    return found[-1] if found else (0.0, math.nan)
