"""Free and peak memory, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from quantkit.system.device import AUTO, CPU, device_memory, memory_of
from quantkit.system.ranks import joined_shards
from quantkit.system.sizes import in_one_unit

GROWTH = 48_000_000  # bytes
CGROUP = Path("/sys/fs/cgroup")
STATUS = Path("/proc/self/status")  # its sizes are in KiB, though it says kB
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated peak bytes of a device's memory: `process` plus the largest of `phases`."""

    process: int
    phases: Mapping[str, int] = field(default_factory=dict)
    device: str = CPU

    @property
    def memory(self) -> int:
        return self.process + max(self.phases.values(), default=0)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    def compared_with(self, available: int) -> tuple[str, str]:
        """Return (needed memory with its parts, `available` memory) as texts for an error."""
        needed, limited = in_one_unit(self.memory, available)
        process, phase = (f"{part / 1e9:.2f} GB" for part in (self.process, self.phases[self.peak_phase]))
        what = f"{needed} of {memory_of(self.device)} ({process} for the process, {phase} for {self.peak_phase})"
        return what, limited


def trim_heap() -> None:
    """Return freed heap memory to the system, if the C library supports it (glibc)."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


class MemoryTrimmer:
    """Returns freed memory to the system whenever the process has grown by `GROWTH` beyond its previous need.

    Small live allocations between large freed ones fragment the heap. Smaller amounts are left alone, since getting
    memory back from the system costs time.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._mark = self._process.memory_info().rss + GROWTH

    def trim(self) -> None:
        if self._process.memory_info().rss > self._mark:
            trim_heap()
            self._mark = max(self._mark, self._process.memory_info().rss + GROWTH)


def available_memory() -> int:
    """Return the bytes that this process may still use: free memory, its control group's and its own limit.

    Ranks on one machine get equal shares.
    """
    available = int(psutil.virtual_memory().available)
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        available = min(available, addresses - psutil.Process().memory_info().vms)
    for folder, limit, used in (
        (CGROUP, "memory.max", "memory.current"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            ceiling, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            # Cached files count as used there but are freed on demand.
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        available = min(available, ceiling - max(taken - cached, 0))
    return max(available, 0) // joined_shards().local_size


def free_memory(device: str) -> int:
    """Return a device's free memory in bytes; sys.maxsize if unknown."""
    if device in (AUTO, CPU):
        return available_memory()
    memory = device_memory(device)
    return sys.maxsize if memory is None else memory[0]


def peak_of_children_bytes() -> int:
    """Return the peak resident bytes of the largest child process that has been waited for."""
    return _max_rss(resource.RUSAGE_CHILDREN)


def peak_rss_bytes() -> int:
    """Return this process's peak resident bytes.

    On Linux from VmHWM: ru_maxrss also counts the parent's memory, which a child shares until it starts.
    """
    if STATUS.is_file():
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _max_rss(resource.RUSAGE_SELF)


def _max_rss(who: int) -> int:
    peak = resource.getrusage(who).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def restart_peak() -> None:
    """Reset the peak of `peak_rss_bytes`, if the system can (Linux: write 5 to clear_refs, see proc(5))."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def device_peak_bytes() -> int:
    """Return torch's peak GPU memory in bytes since the process began; 0 without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return 0
    count = getattr(torch.get_device_module(), "max_memory_allocated", int)
    return int(count())
