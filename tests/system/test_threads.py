"""Threads in the background, and those of a pool."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quantkit.system.threads import in_background, result_of


def test_nobody_waits_for_what_runs_in_the_background():
    told = threading.Event()
    in_background(told.wait, 20)
    in_background(told.set)
    assert told.wait(20)


def test_nobody_waits_for_a_pool_whose_threads_ended_before_they_began(monkeypatch):
    with ThreadPoolExecutor(1, "lively") as pool:
        assert result_of(pool.submit(max, 1, 2), "lively") == 2
    monkeypatch.setattr(threading.Thread, "run", lambda _self: None)
    with ThreadPoolExecutor(1, "lost") as pool, pytest.raises(MemoryError):
        result_of(pool.submit(max, 1, 2), "lost")
