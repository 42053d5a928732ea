import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from killed import forked

from quantkit.system import memory, processor
from quantkit.system.memory import MemoryTrimmer
from quantkit.system.processor import processor_name
from quantkit.system.threads import in_background, result_of


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc gives freed memory back")
def test_a_process_that_has_grown_gives_freed_memory_back(tmp_path):
    """In a process of its own: what other tests left free would take the new tensors in."""
    forked(grow_and_trim, tmp_path / "log").wait(0)


def grow_and_trim():
    """Small tensors that stay, each above a large one that goes: the C library keeps all the room between them."""
    trimmer, resident = MemoryTrimmer(), lambda: psutil.Process().memory_info().rss
    before = resident()
    small, large = [], []
    for _ in range(2000):
        large.append(torch.ones(100_000, dtype=torch.uint8))
        small.append(torch.ones(4096, dtype=torch.uint8))
    del large
    high = resident()
    trimmer.trim()
    low = resident()
    assert high > before + 2 * memory.GROWTH, (before, high)
    assert low < before + memory.GROWTH / 2, (before, high, low)


def test_the_control_group_counts(tmp_path, monkeypatch):
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


def test_the_name_is_that_of_cpuinfo_or_of_the_machine(monkeypatch):
    text = "processor\t: 0\nmodel name\t: Some CPU: 3 GHz\nmodel name\t: another\n"
    monkeypatch.setattr(processor, "cpuinfo", lambda: text)
    assert processor_name() == "Some CPU: 3 GHz"
    monkeypatch.setattr(processor, "cpuinfo", str)
    assert processor_name() == (platform.processor() or platform.machine())


def test_nobody_waits_for_the_background_nor_for_a_pool_whose_threads_ended_before_they_began(monkeypatch):
    told = threading.Event()
    in_background(told.wait, 20)
    in_background(told.set)
    assert told.wait(20)
    with ThreadPoolExecutor(1, "lively") as pool:
        assert result_of(pool.submit(max, 1, 2), "lively") == 2
    monkeypatch.setattr(threading.Thread, "run", lambda _self: None)
    with ThreadPoolExecutor(1, "lost") as pool, pytest.raises(MemoryError):
        result_of(pool.submit(max, 1, 2), "lost")
