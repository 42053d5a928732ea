"""Freed memory goes back to the system while work goes on, and what is available is known."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantkit.system import memory
from quantkit.system.memory import MemoryTrimmer

GROWING = """
import psutil, torch
from quantkit.system.memory import GROWTH, MemoryTrimmer

def resident():
    return psutil.Process().memory_info().rss

trimmer = MemoryTrimmer()
before = resident()
small, large = [], []
for _ in range(2000):
    large.append(torch.ones(100_000, dtype=torch.uint8))
    small.append(torch.ones(4096, dtype=torch.uint8))
del large
high = resident()
trimmer.trim()
low = resident()
assert high > before + 2 * GROWTH, (before, high)
assert low < before + GROWTH / 2, (before, high, low)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc gives freed memory back")
def test_a_process_that_has_grown_gives_freed_memory_back() -> None:
    """Small tensors that stay, each above a large one that went: the C library keeps all the room between them.

    In a process of its own: what other tests left free would take the new tensors in.
    """
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_that_has_not_grown_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory, "trim_heap", lambda: calls.append(1))
    trimmer = MemoryTrimmer()
    trimmer.trim()
    assert not calls


def test_what_it_had_to_hold_once_it_may_hold_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """(resident before, after a return or None): room up to what was needed before is not given back each time."""
    calls: list[int] = []
    monkeypatch.setattr(memory, "trim_heap", lambda: calls.append(1))
    grown = memory.GROWTH + 1
    course = [
        (grown, grown),
        (1, None),
        (grown, None),
        (2 * grown, 0),
        (grown + 1, None),
        (2 * grown, 0),
        (3 * grown, 5),
    ]
    sizes = iter([0, *(size for pair in course for size in pair if size is not None)])
    monkeypatch.setattr(memory.psutil.Process, "memory_info", lambda _self: SimpleNamespace(rss=next(sizes)))
    trimmer = MemoryTrimmer()
    for number, (_, after) in enumerate(course):
        calls.clear()
        trimmer.trim()
        assert bool(calls) == (after is not None), number


def test_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = memory.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 100\n")
    assert memory.available_memory() == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory.available_memory() == 5000 - 600
    (tmp_path / "memory.max").write_text("500\n")
    assert memory.available_memory() == 0
