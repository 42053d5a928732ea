"""Memory that was freed goes back to the system: the C library keeps it for itself otherwise."""

from __future__ import annotations

import ctypes

import psutil

GROWTH = 48_000_000  # bytes

_LIBC = ctypes.CDLL(None)


def give_back_freed() -> None:
    """Return freed memory to the system where the C library can (glibc)."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


class Tide:
    """Returns freed memory while work goes on: each time that the process has grown by `GROWTH` since the last time.

    Where small pieces that stay lie among large ones that come and go, the C library finds less and less room.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._mark = self._process.memory_info().rss + GROWTH

    def look(self) -> None:
        """Return freed memory if the process has grown."""
        if self._process.memory_info().rss > self._mark:
            give_back_freed()
            self._mark = self._process.memory_info().rss + GROWTH
