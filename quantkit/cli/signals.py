"""Signals that end a command cleanly, even where Python drops the exceptions that they raise."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from quantkit.system.ranks import told
from quantkit.system.threads import in_background

AGAIN = 0.02  # seconds
SWALLOWED = 10.0  # seconds after which a command that still runs has lost what was raised in it
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

    Python drops what is raised in a destructor, with a message; the same is raised again a moment later. A library that
    catches everything drops it, too: what still runs some seconds later gets it again. SIGINT that is ignored on entry,
    as a shell does it for the background, stays ignored.
    """
    dropped: list[BaseException] = []
    plain = sys.unraisablehook

    def again(value: BaseException, seconds: float) -> None:
        dropped[:] = [value]
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def end(number: int, _: object) -> NoReturn:
        value = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        again(value, SWALLOWED)
        raise value

    def note(what: Any) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt | SystemExit):
            again(what.exc_value, AGAIN)
        else:
            plain(what)

    def once_more(*_: object) -> None:
        if dropped:
            value = type(dropped[0])(*dropped[0].args)
            again(value, SWALLOWED)
            raise value

    if told().size > 1:
        _end_in_any_case()
    acts: dict[int, Callable[[int, Any], Any]] = {signal.SIGTERM: end, signal.SIGALRM: once_more}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        acts[signal.SIGINT] = end
    handlers = {number: signal.signal(number, act) for number, act in acts.items()}
    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = plain
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
