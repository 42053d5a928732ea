"""Progress reporting: steps report to a listener, which the command line draws and child processes forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise


@dataclass
class Step:
    """The state of a long step: `done` of `total` units, and a remark such as a running value.

    `work`: the step is the main work, so its pace predicts the whole. `within`: the enclosing work, such as a variant
    of a comparison. For unequal pieces, `expected` and `after` are the estimated seconds of the current piece and of
    all later pieces; None while unknown.
    """

    title: str
    total: float
    done: float = 0.0
    remark: str = ""
    ended: bool = False
    work: bool = False
    within: str = ""
    expected: float | None = None
    after: float | None = None

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0

    @property
    def name(self) -> str:
        return f"{self.within}: {self.title}" if self.within else self.title


@dataclass
class Timed:
    """An open step with the start times, in seconds, of the step and of its current piece."""

    step: Step
    began: float
    piece_began: float
    done: float = 0.0

    def update(self, now: float) -> None:
        if self.step.done != self.done:
            self.done, self.piece_began = self.step.done, now

    def left(self, now: float, inner: Step | None = None) -> float | None:
        """Estimate the remaining seconds; None while there is no basis for an estimate.

        Units are assumed equally long unless the step has estimates of its pieces. Within a piece, the pace of the
        innermost step `inner` is used if that is the main work.
        """
        step = self.step
        if step.expected is None or step.after is None:
            return (now - self.began) * (1 / step.share - 1) if step.done else None
        within = now - self.piece_began
        if inner is not None and inner is not step and inner.work and inner.share:
            return within * (1 / inner.share - 1) + step.after
        return max(step.expected - within, step.expected / 10) + step.after


class Pieces:
    """Pieces of long work, each (kind, cost); finished pieces predict the remaining time.

    The time per cost is the average of finished pieces of the same kind, or of all finished pieces if there are none.
    """

    def __init__(self, pieces: Sequence[tuple[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        self._pieces, self._clock = pieces, clock
        self._ends: list[float] = []  # the start of the first piece, and the end of each finished one

    def next(self) -> tuple[float | None, float | None]:
        """Begin the next piece; return the expected seconds of this piece and of all later pieces."""
        self._ends.append(self._clock())
        number = len(self._ends) - 1
        if not number:
            return None, None
        expected = [self._seconds(kind) * cost for kind, cost in self._pieces[number:]]
        return expected[0], sum(expected[1:])

    def _seconds(self, kind: str) -> float:
        """Return the expected seconds per unit of cost for this kind."""
        took = [end - begin for begin, end in pairwise(self._ends)]
        finished = list(zip(took, self._pieces, strict=False))
        same = [(seconds, piece) for seconds, piece in finished if piece[0] == kind] or finished
        return sum(seconds for seconds, _ in same) / sum(cost for _, (_, cost) in same)


class Progress:
    """Sends step changes to `listener` and messages to `speaker`; silent without them."""

    def __init__(
        self,
        listener: Callable[[Step], None] | None = None,
        speaker: Callable[[str], None] | None = None,
        within: str = "",
    ) -> None:
        self._listener, self._speaker, self._within = listener, speaker, within

    def within(self, name: str) -> Progress:
        """Return a Progress whose steps belong to a part of the work called `name`."""
        return Progress(self._listener, self._speaker, name)

    def say(self, line: str) -> None:
        """Send the user a message that is not part of the result, such as where work resumes."""
        if self._speaker is not None:
            self._speaker(line)

    def _notify(self, step: Step) -> None:
        if self._listener is not None:
            self._listener(step)

    @contextmanager
    def step(self, title: str, total: float, work: bool = False) -> Iterator[Callable[..., None]]:
        """Open a step of `total` units; the yielded function reports the units done since the last call.

        Passing it `pieces` begins the next piece.
        """
        step = Step(title, total, work=work, within=self._within)
        self._notify(step)

        def advance(units: float = 1.0, remark: str | None = None, pieces: Pieces | None = None) -> None:
            step.done += units
            if pieces is not None:
                step.expected, step.after = pieces.next()
            if remark is not None:
                step.remark = remark
            self._notify(step)

        try:
            yield advance
        finally:
            step.ended = True
            self._notify(step)

    def forward(self, step: Step) -> None:
        """Pass on a step from another process."""
        step.within = self._within
        self._notify(step)
