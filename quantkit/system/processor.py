"""The processor: name, /proc/cpuinfo, and the number of usable cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpuinfo() -> str:
    """Return the text of Linux's /proc/cpuinfo; empty on other systems."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def processor_name() -> str:
    """Return the processor's model name."""
    for line in cpuinfo().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def threads(count: int) -> str:
    """Return ``1 thread``, ``2 threads`` and so on."""
    return f"{count} thread{'s' if count != 1 else ''}"
