"""Progress of long work: steps report to a listener; the command line draws them, a child process forwards them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Step:
    """One long step: how far it is (`done` of `total` units) and a short remark such as a running value."""

    title: str
    total: float
    done: float = 0.0
    remark: str = ""
    ended: bool = False


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

    def _tell(self, step: Step) -> None:
        if self._listener is not None:
            self._listener(step)

    @contextmanager
    def step(self, title: str, total: float) -> Iterator[Callable[..., None]]:
        """Open a step of `total` units; call the yielded function with the units done since the last call."""
        step = Step(title, total)
        self._tell(step)

        def advance(units: float = 1.0, remark: str | None = None) -> None:
            step.done += units
            if remark is not None:
                step.remark = remark
            self._tell(step)

        try:
            yield advance
        finally:
            step.ended = True
            self._tell(step)

    def forward(self, step: Step) -> None:
        """Pass on a step that happened elsewhere, such as in a child process."""
        self._tell(step)


@contextmanager
def shown() -> Iterator[Progress]:
    """Draw steps on the terminal's standard error with a bar, a count and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    tasks: dict[int, TaskID] = {}

    def draw(step: Step) -> None:
        key = id(step)
        if key not in tasks:
            tasks[key] = bars.add_task(step.title, total=step.total, remark="")
        bars.update(tasks[key], completed=step.done, total=step.total, remark=step.remark)
        if step.ended:
            bars.remove_task(tasks.pop(key))

    def speak(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with bars:
        yield Progress(draw, speak)
