"""Reports: what was measured, on what, with what; written as JSON so that figures can be traced and compared."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
from pydantic import Field

from quantkit.errors import RecipeError, ReportError
from quantkit.protocol import Windows
from quantkit.recipe import EvaluationSpec, Strict, parse


class Measurement(Strict):
    """One figure: its unit, the number of observations `n`, and its standard error where it has one."""

    name: str
    value: float
    unit: str
    n: int | None = None
    stderr: float | None = None
    details: dict[str, float | str] = Field(default_factory=dict)


class SubjectEntry(Strict):
    """What was judged. `digest` identifies its bytes; `model` is the source model."""

    label: str
    model: str
    method: str | None
    digest: str
    notes: tuple[str, ...] = ()


class TextEntry(Strict):
    """The text that was used."""

    name: str
    sha256: str
    bundled: bool


class RuntimeEntry(Strict):
    """The engine that computed, the type it computed in, and its remarks."""

    name: str
    version: str
    dtype: str
    notes: tuple[str, ...] = ()


class Hardware(Strict):
    """The machine."""

    cpu: str
    cores: int
    memory_bytes: int


class Report(Strict):
    """All measurements of one subject."""

    subject: SubjectEntry
    text: TextEntry
    windows: Windows
    runtime: RuntimeEntry
    hardware: Hardware
    settings: EvaluationSpec
    measurements: tuple[Measurement, ...]

    def find(self, name: str) -> Measurement | None:
        """The first measurement of that name."""
        return next((m for m in self.measurements if m.name == name), None)


def read_report(path: Path) -> Report:
    """Read a report's JSON; raises ReportError."""
    import json

    try:
        return parse(Report, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RecipeError) as error:
        raise ReportError(f"the report {path} cannot be read: {error}") from None


def this_machine() -> Hardware:
    """Name of the processor, number of usable cores, memory in bytes."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return Hardware(cpu=cpu, cores=usable_cores(), memory_bytes=psutil.virtual_memory().total)


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
