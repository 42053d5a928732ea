"""Steps of long work, drawn with rich on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quantkit.errors import LONGEST, one_line
from quantkit.progress import Progress, Step


@contextmanager
def shown() -> Iterator[Progress]:
    """Draw steps on the terminal's standard error with a bar, a count and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    tasks: dict[int, TaskID] = {}

    def draw(step: Step) -> None:
        key = id(step)
        if key not in tasks:
            tasks[key] = bars.add_task(one_line(step.title, LONGEST), total=step.total, remark="")
        bars.update(tasks[key], completed=step.done, total=step.total, remark=one_line(step.remark, LONGEST))
        if step.ended:
            bars.remove_task(tasks.pop(key))

    def speak(line: str) -> None:
        console.print(one_line(line, LONGEST), markup=False, highlight=False, soft_wrap=True)

    with bars:
        yield Progress(draw, speak)
