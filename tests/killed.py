"""Conversions in processes that can be killed."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.cli.app import main


@dataclass
class Child:
    """A process forked from this one, so that it starts at once."""

    process: Any
    log: Path

    @property
    def code(self) -> int | None:
        """Exit code, the negative number of the signal that ended it, or None."""
        return self.process.exitcode

    def wait(self) -> str:
        """Wait for its end; return what it told on standard error."""
        self.process.join(300)
        assert self.code is not None
        return self.log.read_text()


def forked(action: Callable[[], object], log: Path) -> Child:
    """Start `action` in a process of its own that can be interrupted as at a terminal."""

    def run() -> None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(target, 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - until the process ends
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()

    child = Child(multiprocessing.get_context("fork").Process(target=run), log)
    child.process.start()
    return child


def started(arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> Child:
    """Start the command line; `prepare` runs in the process first."""

    def action() -> None:
        prepare()
        sys.argv = ["quantkit", *arguments]
        main()

    return forked(action, log)


@dataclass(frozen=True)
class Ends:
    """Ends the process by `number` at a call of `owner.name`: before or after it, when it was called `calls` times."""

    owner: Any
    name: str
    calls: int = 0
    after: bool = False
    number: int = signal.SIGKILL

    def __call__(self) -> None:
        plain, count = getattr(self.owner, self.name), 0

        def fatal(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            value = plain(*args, **kwargs) if self.after else None
            if count > self.calls:
                os.kill(os.getpid(), self.number)
            return value if self.after else plain(*args, **kwargs)

        setattr(self.owner, self.name, fatal)
