"""Freed memory goes back to the system."""

import subprocess
import sys

import pytest

GROWING = """
import psutil, torch
from quantkit.freed import give_back_freed

def resident():
    return psutil.Process().memory_info().rss

before = resident()
small, large = [], []
for _ in range(2000):
    large.append(torch.ones(100_000, dtype=torch.uint8))
    small.append(torch.ones(4096, dtype=torch.uint8))
del large
high = resident()
give_back_freed()
low = resident()
assert high > before + 100_000_000, (before, high)
assert low < before + 25_000_000, (before, high, low)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc gives freed memory back")
def test_freed_memory_goes_back() -> None:
    """Small tensors that stay, each above a large one that went: the C library keeps all the room between them.

    In a process of its own: what other tests left free would take the new tensors in.
    """
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
