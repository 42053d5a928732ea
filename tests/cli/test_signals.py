import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial

import pytest
from killed import Ends, started
from tiny_models import conversion_by

from quantkit import verify
from quantkit.checkpoints.spool import Spool
from quantkit.cli import app as signals
from quantkit.cli.app import signals_that_end


def ignore():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Ends(Spool, "finish_block", number=signal.SIGINT)()


def test_an_interrupt_that_is_ignored_on_entry_stays_ignored(tiny, tmp_path):
    """As a shell has it for a command in the background."""
    assert started(conversion_by("rtn", tiny, tmp_path / "out"), tmp_path / "log", ignore).wait(0) == ""
    verify(tmp_path / "out")


class Destroyed:
    """Gets a signal while it is destroyed, where Python drops what is raised."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)
        sum(range(100))


def dropped(number):
    def hold(*_):
        Destroyed(number)
        time.sleep(600)

    Spool.finish_block = hold


def swallowed(number):
    def hold(*_):
        with suppress(BaseException):  # as a library does that tries whether it can do something
            os.kill(os.getpid(), number)
            time.sleep(600)
        time.sleep(600)

    signals.SWALLOWED = 0.5
    Spool.finish_block = hold


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("lost", [dropped, swallowed], ids=["by Python", "by a library"])
def test_a_signal_that_is_lost_comes_again(lost, number, code, tiny, tmp_path):
    err = started(conversion_by("gptq", tiny, tmp_path / "out"), tmp_path / "log", partial(lost, number)).wait(code)
    assert err.replace("Aborted.\n", "").strip() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_the_handlers_of_the_caller_are_back():
    numbers = (signal.SIGTERM, signal.SIGALRM, signal.SIGINT)
    before = [*map(signal.getsignal, numbers), sys.unraisablehook]
    with signals_that_end():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [*map(signal.getsignal, numbers), sys.unraisablehook] == before
