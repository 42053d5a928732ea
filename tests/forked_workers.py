"""Judging processes that are forked from one that has everything imported: tests start hundreds of them.

They run the same code, get the same request, variables and file descriptors. What a new interpreter alone shows (its
memory, its thread pools, another `--python`) is tested with the real start: `real_workers`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from killed import forkserver

from quantkit.evaluation import process, worker

REAL_START = process.start


@contextmanager
def new_interpreters() -> Iterator[None]:
    """Judging processes are started as users have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start", REAL_START)
        yield


class Forked:
    """What process.py uses of a Popen."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.terminate, self.kill = process.terminate, process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0)
        return int(self._process.exitcode)


def start(
    python: str, request: Path, write_end: int, log: IO[bytes], variables: dict[str, str]
) -> Forked | subprocess.Popen[bytes]:
    """In place of `quantkit.evaluation.process.start`."""
    if python != sys.executable:
        return REAL_START(python, request, write_end, log, variables)
    ends = [Connection(os.dup(number)) for number in (write_end, log.fileno())]
    child = forkserver().Process(target=partial(_work, str(request), *ends, variables, str(Path.cwd())))
    child.start()
    for end in ends:
        end.close()
    return Forked(child)


def _work(request: str, events: Connection, log: Connection, variables: dict[str, str], folder: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - until the process ends
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # which a new interpreter reads by itself
    sys.argv = ["worker", request, str(os.dup(events.fileno()))]
    worker.main()
