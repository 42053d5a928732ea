"""Memory: the process's peak resident memory after loading and generating, before perplexity is measured."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from quantkit.registry import Probe, ProbeJob
from quantkit.report import Measurement


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes.

    On Linux from VmHWM: ru_maxrss would count the parent's memory too, which the child shares until it starts.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run(_job: ProbeJob) -> list[Measurement]:
    return [Measurement(name="peak_bytes", value=peak_bytes(), unit="bytes")]


PROBE = Probe(
    name="memory",
    summary="peak resident memory of a fresh process that loads and generates",
    run=_run,
    order=20,
)
