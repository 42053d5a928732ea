"""Memory that was freed goes back to the system: the C library keeps it for itself otherwise."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)


def give_back_freed() -> None:
    """Return freed memory to the system where the C library can (glibc)."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
