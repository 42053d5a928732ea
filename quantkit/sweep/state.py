"""Where a task of a sweep tells how far it is: `OUT/tasks/NAME` with `state.json`, a sign of life, and `log`.

A process that runs touches the file `alive` every few seconds. So a task of a machine that is gone is not taken for a
running one for ever, though no other machine can look at its processes.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from quantkit.errors import RecipeError
from quantkit.recipe import Strict, parse
from quantkit.system.files import replace_text
from quantkit.system.threads import every
from quantkit.untrusted import read_object

TASKS, TASK, STATE, LOG, LOCK, ALIVE = "tasks", "task.json", "state.json", "log", "lock", "alive"
BEAT_S = 10.0  # between two signs of life
SILENCE_S = 90.0  # after which a task is not believed to run: clocks of machines may differ, and disks be slow


class State(Strict):
    """How far a task is: `running`, `done` or `failed` with the reason; of the process `pid` on `host`.

    `task` is the digest of what was done (`Task.digest`), `report` the path of what a judgement left.
    """

    state: Literal["running", "done", "failed"]
    host: str
    pid: int
    began: float
    task: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    reason: str | None = None
    report: str | None = None


@dataclass(frozen=True)
class Place:
    """The folder of one task."""

    folder: Path

    @property
    def log(self) -> Path:
        """What the task's process said."""
        return self.folder / LOG

    @property
    def alive(self) -> Path:
        """The file that a running task touches."""
        return self.folder / ALIVE

    def state(self) -> State | None:
        """What the task last told of itself; None where it has not begun."""
        path = self.folder / STATE
        return parse(State, read_object(path, RecipeError), str(path)) if path.is_file() else None

    def tell(self, state: State) -> None:
        """Keep a state."""
        replace_text(self.folder / STATE, state.model_dump_json(indent=2) + "\n")

    @contextmanager
    def living(self) -> Iterator[None]:
        """Give signs of life meanwhile."""
        self.alive.touch()

        def beat() -> None:
            with suppress(OSError):  # a disk that is away for a while
                os.utime(self.alive)

        with every(BEAT_S, beat):
            yield

    def silence(self) -> float:
        """Seconds since the last sign of life; infinite where there was none."""
        try:
            return time.time() - self.alive.stat().st_mtime
        except OSError:
            return float("inf")


def place_of(out: Path, name: str) -> Place:
    """Where a task of the sweep in `out` keeps its state."""
    return Place(out / TASKS / name)


def life_of(place: Place, state: State) -> Literal["running", "gone", "unknown"]:
    """Whether the process that told a state still lives.

    Of this machine's processes that is known; those of others live as long as they give signs of life.
    """
    if state.host == platform.node():
        try:
            process = psutil.Process(state.pid)
            # A later process may have got the number.
            if process.status() == psutil.STATUS_ZOMBIE or process.create_time() > state.began + 1:
                return "gone"
        except psutil.NoSuchProcess:
            return "gone"
    return "running" if place.silence() < SILENCE_S else "unknown"


def line_of(name: str, digest: str, place: Place) -> str:
    """A task's name, how far it is, its seconds and peak memory, or why it failed."""
    state = place.state()
    if state is None:
        return f"{name}: waiting"
    if state.state == "running":
        return f"{name}: {_life(place, state)} (process {state.pid} on {state.host}, log: {place.log})"
    if state.task != digest:
        return f"{name}: waiting (it was {state.state} before as the recipe then was)"
    if state.state == "done":
        return f"{name}: done in {state.seconds:.0f} s, {state.peak_bytes / 1e9:.2f} GB, on {state.host}"
    return f"{name}: failed: {state.reason} (log: {place.log})"


def _life(place: Place, state: State) -> str:
    how = life_of(place, state)
    if how == "gone":
        return "ended without a word"
    if how == "running":
        return f"running for {time.time() - state.began:.0f} s"
    silence = place.silence()
    return "unknown: " + (f"no sign of life for {silence:.0f} s" if silence < float("inf") else "no sign of life")
