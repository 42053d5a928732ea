"""Progress of long work: steps report to a listener; the command line draws them, a child process forwards them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Step:
    """One long step: how far it is (`done` of `total` units) and a short remark such as a running value.

    `work`: the step is the work itself, and its first units say how long the whole takes.
    """

    title: str
    total: float
    done: float = 0.0
    remark: str = ""
    ended: bool = False
    work: bool = False


class Progress:
    """Hands every change of a step to `listener`, and remarks to `speaker`; without them it is silent."""

    def __init__(
        self, listener: Callable[[Step], None] | None = None, speaker: Callable[[str], None] | None = None
    ) -> None:
        self._listener, self._speaker = listener, speaker

    def say(self, line: str) -> None:
        """Tell the user something that is no part of the result, such as where work goes on."""
        if self._speaker is not None:
            self._speaker(line)

    def _notify(self, step: Step) -> None:
        if self._listener is not None:
            self._listener(step)

    @contextmanager
    def step(self, title: str, total: float, work: bool = False) -> Iterator[Callable[..., None]]:
        """Open a step of `total` units; call the yielded function with the units done since the last call."""
        step = Step(title, total, work=work)
        self._notify(step)

        def advance(units: float = 1.0, remark: str | None = None) -> None:
            step.done += units
            if remark is not None:
                step.remark = remark
            self._notify(step)

        try:
            yield advance
        finally:
            step.ended = True
            self._notify(step)

    def forward(self, step: Step) -> None:
        """Pass on a step that happened elsewhere, such as in a child process."""
        self._notify(step)
