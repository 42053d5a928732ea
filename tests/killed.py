"""Conversions in processes that can be killed."""

import copyreg
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import without_progress

from quantkit.cli.app import main

LIMIT = 600
"""Seconds that a process may take."""

copyreg.pickle(ModuleType, lambda module: (importlib.import_module, (module.__name__,)))


@dataclass
class Child:
    """A process forked from one that has everything imported, so that it starts at once."""

    process: Any
    log: Path

    @property
    def code(self):
        """Exit code, the negative number of the signal that ended it, or None."""
        return self.process.exitcode

    def wait(self, code=None):
        """Wait for its end, by this exit code if one is given; return what it told, but for progress."""
        self.process.join(LIMIT)
        if self.code is None:
            self.process.kill()
            raise AssertionError(f"no end after {LIMIT} s:\n{self.log.read_text()}")
        told = without_progress(self.log.read_text())
        assert code in (None, self.code), (self.code, told)
        return told


def until(condition):
    """Wait for it, but not without end."""
    for _ in range(50 * LIMIT):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come about")


def when_stopped(child):
    """Wait until the process has been stopped by SIGSTOP."""
    status = Path(f"/proc/{child.process.pid}/stat")
    until(lambda: child.code is not None or status.read_text().rpartition(")")[2].split()[0] == "T")
    assert child.code is None, child.wait()
    return child


def forked(action, log):
    """Start `action`, which can be pickled, in a process of its own that can be interrupted as at a terminal.

    It is no fork of this process: once a library has computed on several threads here, a fork that does so waits
    for threads that it does not have.
    """
    target = partial(_run, action, log, dict(os.environ))
    child = Child(forkserver().Process(target=target), log)
    child.process.start()
    return child


def told(action, *arguments, folder):
    """What `action(*arguments, path)` writes to a file in a process of its own."""
    forked(partial(action, *arguments, folder / "told.json"), folder / "log").wait(0)
    return json.loads((folder / "told.json").read_text())


@cache
def forkserver():
    """Processes come from one that has imported `ready`, which lies beside this file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ready"])
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # Python 3.11 gives it no sys.path
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")  # as the command has it before it imports
        ensure_running()
    return context


def _run(action, log, environment):
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(target, 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - until the process ends
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT - 10, file=2)
    action()


def nothing():
    """Prepare nothing."""


def started(arguments, log, prepare=nothing):
    """Start the command line; `prepare`, which can be pickled, runs in the process first."""
    return forked(partial(_command, prepare, arguments), log)


def _command(prepare, arguments):
    prepare()
    sys.argv = ["quantkit", *arguments]
    main()


@dataclass(frozen=True)
class Ends:
    """Ends the process by `number` at a call of `owner.name`: before or after it, when it was called `calls` times."""

    owner: Any
    name: str
    calls: int = 0
    after: bool = False
    number: int = signal.SIGKILL

    def __call__(self):
        plain, count = getattr(self.owner, self.name), 0

        def fatal(*args, **kwargs):
            nonlocal count
            count += 1
            value = plain(*args, **kwargs) if self.after else None
            if count > self.calls:
                os.kill(os.getpid(), self.number)
            return value if self.after else plain(*args, **kwargs)

        setattr(self.owner, self.name, fatal)
