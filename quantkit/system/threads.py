"""Thread helpers that cannot block another thread forever.

Python waits for a new thread to start, and for a pool's thread to finish its task. Neither happens if the thread cannot
allocate memory to start (https://github.com/python/cpython/issues/140746).
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Event, Lock
from typing import Any, TypeVar

LOOK = 1.0  # seconds between two checks for ended threads
Result = TypeVar("Result")


def in_background(action: Callable[..., object], *arguments: Any) -> None:
    """Call `action` in a daemon thread; the process may exit before it finishes.

    Raises RuntimeError if no thread can be created; a thread that cannot allocate memory to start does nothing.
    """
    _thread.start_new_thread(action, arguments)


@contextmanager
def call_every(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in the background every `seconds` seconds while the context is open."""
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
        with running:  # wait for its last call
            pass


def result_of(future: Future[Result], prefix: str) -> Result:
    """Return the future's result; raise MemoryError if all threads of its pool (named `prefix`...) have ended."""
    while not wait((future,), LOOK).done:
        if not any(thread.name.startswith(prefix) for thread in threading.enumerate()) and not future.done():
            raise MemoryError
    return future.result()


def end_with_parent() -> None:
    """End this process soon after its parent does, even if the parent is killed."""
    in_background(_end_without, os.getppid())


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)
