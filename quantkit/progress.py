"""Progress of long work: steps report to a listener; the command line draws them, a child process forwards them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Step:
    """One long step: how far it is (`done` of `total` units) and a short remark such as a running value.

    `work`: the step is the work itself, and its first units say how long the whole takes. `within`: what it is a part
    of, such as a variant of a comparison. `piece`: units of the piece that is in progress, where they differ: the parts
    of a comparison, whose costs are known relative to each other.
    """

    title: str
    total: float
    done: float = 0.0
    remark: str = ""
    ended: bool = False
    work: bool = False
    within: str = ""
    piece: float = 0.0

    @property
    def share(self) -> float:
        """How much of it is done, 0 to 1."""
        return self.done / self.total if self.total else 1.0

    @property
    def name(self) -> str:
        """The title, behind what the step is a part of."""
        return f"{self.within}: {self.title}" if self.within else self.title


@dataclass
class Timed:
    """An open step with the times, in seconds, at which it began and at which its piece in progress began."""

    step: Step
    began: float
    piece_began: float
    done: float = 0.0

    def update(self, now: float) -> None:
        """Take a change of the step."""
        if self.step.done != self.done:
            self.done, self.piece_began = self.step.done, now

    def left(self, now: float, inner: Step | None = None) -> float | None:
        """Estimate the seconds that are left; None while nothing says how long a unit takes.

        Finished units take as long as those to come. `inner` is the innermost step within the piece in progress; where
        it is the work itself, its own pace is believed, else the cost of the piece.
        """
        step, within_piece = self.step, now - self.piece_began
        share = inner.share if inner is not None and inner is not step else 0.0
        rest = within_piece * (1 / share - 1) if share else None
        if step.done:
            rate = (self.piece_began - self.began) / step.done
        elif rest is not None and step.piece:
            rate = (within_piece + rest) / step.piece
        else:
            return None
        if not step.piece:
            return (now - self.began) * (1 / step.share - 1)
        if rest is None or inner is None or not inner.work:
            expected = rate * step.piece
            rest = max(expected - within_piece, expected / 10)
        return rest + rate * (step.total - step.done - step.piece)


class Progress:
    """Hands every change of a step to `listener`, and remarks to `speaker`; without them it is silent."""

    def __init__(
        self,
        listener: Callable[[Step], None] | None = None,
        speaker: Callable[[str], None] | None = None,
        within: str = "",
    ) -> None:
        self._listener, self._speaker, self._within = listener, speaker, within

    def within(self, name: str) -> Progress:
        """The same, for steps that are parts of what has this name."""
        return Progress(self._listener, self._speaker, name)

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
        step = Step(title, total, work=work, within=self._within)
        self._notify(step)

        def advance(units: float = 1.0, remark: str | None = None, piece: float = 0.0) -> None:
            step.done += units
            step.piece = piece or step.piece
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
        step.within = self._within
        self._notify(step)
