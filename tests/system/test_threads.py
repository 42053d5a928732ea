"""Threads in the background."""

import threading

from quantkit.system.threads import in_background


def test_nobody_waits_for_what_runs_in_the_background():
    told = threading.Event()
    in_background(told.wait, 20)
    in_background(told.set)
    assert told.wait(20)
