"""Threads: they begin or it is told, and results and errors reach the one who asked."""

import _thread
import threading
import time

import pytest

from quantkit.system import threads
from quantkit.system.threads import in_background, workers


def test_workers_do_all_that_is_submitted_at_once() -> None:
    together = threading.Barrier(3)
    with workers(3) as pool:
        futures = [pool.submit(lambda number: (together.wait(20), number)[1], number) for number in range(9)]
        assert [future.result() for future in futures] == list(range(9))
    # The end waits for what was submitted.
    done = []
    with workers(2) as pool:
        for number in range(4):
            pool.submit(lambda number=number: (time.sleep(0.05), done.append(number)))
    assert sorted(done) == [0, 1, 2, 3]


def test_an_error_and_what_was_given_up() -> None:
    started, go_on = threading.Event(), threading.Event()
    with workers(1) as pool:
        first = pool.submit(lambda: (started.set(), go_on.wait(20)))
        failing, given_up = pool.submit(int, "x"), pool.submit(list)
        started.wait(20)
        assert given_up.cancel()
        go_on.set()
        with pytest.raises(ValueError, match="invalid literal"):
            failing.result()
    assert first.done()


def test_a_thread_that_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does whose first step gets no memory: it is gone, and nobody is told."""
    real, calls = _thread.start_new_thread, []

    def second_is_lost(action: object, arguments: tuple[object, ...]) -> int:
        calls.append(action)
        return 0 if len(calls) == 2 else real(action, arguments)

    monkeypatch.setattr(_thread, "start_new_thread", second_is_lost)
    monkeypatch.setattr(threads, "BEGIN", 0.2)
    with pytest.raises(MemoryError, match="no memory to begin"), workers(2):
        raise AssertionError("unreachable")
    assert len(calls) == 2


def test_nobody_waits_for_what_runs_in_the_background() -> None:
    told = threading.Event()
    in_background(told.wait, 20)
    in_background(told.set)
    assert told.wait(20)
