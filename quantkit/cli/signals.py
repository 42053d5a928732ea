"""Signals that end a command cleanly, even where Python drops the exceptions that they raise."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from quantkit.system.ranks.group import told
from quantkit.system.threads import in_background

AGAIN = 0.02  # seconds
GRACE = 4.0  # seconds in which a rank cleans up


def _end_in_any_case() -> None:
    """End the process a moment after SIGTERM or SIGINT, even where it waits for other ranks and Python cannot act."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        ending = {signal.SIGTERM, signal.SIGINT}
        while not (caught := ending & set(os.read(read_end, 64))):
            pass
        time.sleep(GRACE)
        os._exit(128 + min(caught))

    in_background(watch)


@contextmanager
def signals_that_end() -> Iterator[None]:
    """SIGTERM cleans up as Ctrl-C does, and neither is lost.

    Python drops what is raised in a destructor, with a message; the same is raised again a moment later. SIGINT that
    is ignored on entry, as a shell does it for the background, stays ignored.
    """
    dropped: list[BaseException] = []
    plain = sys.unraisablehook

    def end(*_: object) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    def note(what: Any) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt | SystemExit):
            dropped[:] = [what.exc_value]
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            plain(what)

    def once_more(*_: object) -> None:
        if dropped:
            value = dropped.pop()
            raise type(value)(*value.args)

    if told().size > 1:
        _end_in_any_case()
    acts = {signal.SIGTERM: end, signal.SIGALRM: once_more}
    handlers = {number: signal.signal(number, act) for number, act in acts.items()}
    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = plain
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
