"""Signals that end a command cleanly, even where Python drops the exceptions that they raise."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

AGAIN = 0.02  # seconds


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
