"""The processor: its name, what Linux tells of it, and how many of its cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
