"""Show the progress of long work on standard error, and silence libraries.

Steps are shown as bars on a terminal, and as plain lines otherwise.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from typer import Option

from quantkit.errors import LONGEST, one_line
from quantkit.system.progress import Progress, Step, Timed
from quantkit.system.threads import call_every

if TYPE_CHECKING:
    from quantkit.report.table import Table

EVERY = 30.0  # seconds between two lines of a long step
LONG = 10.0  # seconds after which a step counts as long
REFRESH = 0.1  # seconds between two updates of the bars
is_quiet = False  # whether progress is hidden


def configure_verbosity(
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but the result.")] = False,
    verbose: Annotated[bool, Option("--verbose", help="Also print messages of libraries.")] = False,
) -> None:
    """Apply --quiet and --verbose before libraries are imported; raises BadParameter if both are given."""
    global is_quiet
    if quiet and verbose:
        raise typer.BadParameter("--quiet and --verbose exclude each other")
    is_quiet = quiet
    if not verbose:
        silence_libraries()


def silence_libraries() -> None:
    """Turn off the progress bars and warnings of libraries."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("bitsandbytes", "accelerate", "ctranslate2"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # quantkit checks results itself, and reports what concerns the user.
    warnings.simplefilter("ignore")


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a listener that shows steps: bars on a terminal, else lines; nothing with --quiet."""
    with progress_with_table() as (progress, _):
        yield progress


@contextmanager
def progress_with_table(transpose: bool | None = None) -> Iterator[tuple[Progress, Callable[[Table], None]]]:
    """Yield a listener as `progress_bars` does, and a function that shows a table (in a log: its last row)."""
    if is_quiet:
        yield Progress(), lambda _: None
        return
    console = Console(stderr=True)

    def speak(line: str) -> None:
        console.print(one_line(line, LONGEST), markup=False, highlight=False, soft_wrap=True)

    if console.is_terminal:
        with _bars(console, transpose) as (draw, row):
            yield Progress(draw, speak), row
    else:
        lines = Lines(speak)
        with call_every(EVERY, lines.tick):
            yield Progress(lines.draw, speak), lambda table: speak(table.line())


@contextmanager
def _bars(console: Console, transpose: bool | None) -> Iterator[tuple[Callable[[Step], None], Callable[[Table], None]]]:
    from rich.live import Live  # 20 ms that `--help` need not wait
    from rich.progress import BarColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[remark]}", markup=False),
        console=console,
    )
    tasks: dict[int, TaskID] = {}
    open_steps = OpenSteps()
    above: list[RenderableType] = []
    live = Live(get_renderable=lambda: Group(*above, bars), console=console, auto_refresh=False, transient=True)

    def draw(step: Step) -> None:
        key = id(step)
        open_steps.update(step)
        if key not in tasks:
            tasks[key] = bars.add_task(one_line(step.name, LONGEST), total=step.total, remark="", left="")
            live.refresh()
        bars.update(tasks[key], completed=step.done, total=step.total, remark=one_line(step.remark, LONGEST))
        if step.ended:
            bars.remove_task(tasks.pop(key))

    def refresh() -> None:
        for timed in open_steps.all:
            if id(timed.step) in tasks:
                bars.update(tasks[id(timed.step)], left=open_steps.words_left(timed))
        live.refresh()

    def row(table: Table) -> None:
        above[:] = [table.drawn(console.width, transpose)]

    with live, call_every(REFRESH, refresh):
        yield draw, row


class OpenSteps:
    """The steps in progress, the innermost last, with estimates of the time left for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, Timed] = {}

    @property
    def all(self) -> list[Timed]:
        return list(self._open.values())

    def update(self, step: Step) -> Timed:
        """Record a step's change, and return the step with its timing."""
        now = self._clock()
        timed = self._open.setdefault(id(step), Timed(step, now, now))
        timed.update(now)
        if step.ended:
            del self._open[id(step)]
        return timed

    def passed(self, timed: Timed) -> float:
        """Return the seconds since a step started."""
        return self._clock() - timed.began

    def words_left(self, timed: Timed) -> str:
        """Return text such as ``about 3:20 min left``, or ``just begun`` without an estimate."""
        seconds = timed.left(self._clock(), self.all[-1].step)
        return "just begun" if seconds is None else f"about {duration(seconds)} left"


class Lines:
    """Progress as log lines: one when a step ends, and from time to time one for a long step."""

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._print, self._steps = print_line, OpenSteps(clock)

    def draw(self, step: Step) -> None:
        """Record a step's change, and print a line if the step has ended."""
        timed = self._steps.update(step)
        if step.ended:
            how = "done" if step.share >= 1 else f"ended at {step.share:.0%}"
            self._print(f"{step.name}: {how}, {duration(self._steps.passed(timed))}")

    def tick(self) -> None:
        """Print the progress of the innermost long step, and the outermost step's time left if it is estimated."""
        long = [timed for timed in self._steps.all if self._steps.passed(timed) >= LONG]
        if not long:
            return
        inner, outer = long[-1], long[0]
        line = f"{inner.step.name}: {inner.step.share:.0%} after {duration(self._steps.passed(inner))}"
        line += f", {self._steps.words_left(inner)}"
        if outer is not inner and outer.step.expected is not None:
            line += f"; {outer.step.name}: {self._steps.words_left(outer)}"
        self._print(line)


def duration(seconds: float) -> str:
    """Format seconds as ``45 s``, ``3:20 min`` or ``1:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes}:{whole % 60:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"
