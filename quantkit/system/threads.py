"""Threads that cannot leave the thread that starts them waiting for ever.

Python's own wait for the new thread's first step, which never comes where that step gets no memory
(https://github.com/python/cpython/issues/140746).
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Semaphore
from typing import Any, TypeVar

T = TypeVar("T")
LOOK = 1.0  # seconds between two looks at the parent
BEGIN = 60.0  # seconds within which a thread begins


def in_background(action: Callable[..., object], *arguments: Any) -> None:
    """Call `action` in a thread that nobody waits for; the process may end before it.

    Raises RuntimeError where no thread can be made; one that gets no memory for its first step does nothing.
    """
    _thread.start_new_thread(action, arguments)


@contextmanager
def every(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in the background, until the context ends."""
    running, ended = Lock(), Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            with running:
                if not ended.is_set():
                    action()

    in_background(repeat)
    try:
        yield
    finally:
        ended.set()
        with running:  # its last call is over
            pass


def end_with_parent() -> None:
    """End this process a moment after the one that started it: a killed parent cannot end its child itself."""
    in_background(_end_without, os.getppid())


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


class Workers:
    """Threads that do what is submitted, in order; made by `workers`."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._begun, self._ended, self._count = Semaphore(0), Semaphore(0), 0

    def submit(self, action: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have `action` called; the future has its value or its exception."""
        future: Future[T] = Future()
        self._tasks.put(partial(_settle, future, action, arguments))
        return future

    def _begin(self, threads: int) -> None:
        for _ in range(threads):
            in_background(self._work)
            if not self._begun.acquire(timeout=BEGIN):
                raise MemoryError("a thread got no memory to begin with")
            self._count += 1

    def _end(self) -> None:
        for _ in range(self._count):
            self._tasks.put(None)
        for _ in range(self._count):
            self._ended.acquire()

    def _work(self) -> None:
        self._begun.release()
        try:
            while (task := self._tasks.get()) is not None:
                task()
        finally:
            self._ended.release()


def _settle(future: Future[T], action: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action(*arguments))
    except BaseException as error:  # noqa: BLE001 - the one who waits gets it
        future.set_exception(error)


@contextmanager
def workers(threads: int) -> Iterator[Workers]:
    """`threads` (at least 1) workers that have begun; the end of the context waits for all that was submitted.

    Raises MemoryError or RuntimeError where one cannot begin.
    """
    made = Workers()
    try:
        made._begin(threads)
        yield made
    finally:
        made._end()
