"""Sweeps: the same variants of several models, task by task, in one sheet.

Tasks are child processes that an executor starts; their state lies in the output folder alone, so the same command
goes on where an earlier one ended, runs what is new in the recipe, and tries again what failed. A task that fails is
told in the sheet and stops no other. See docs/sweeps.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.progress import Progress
from quantkit.recipe import SweepRecipe
from quantkit.report.records import Report, read_report
from quantkit.report.table import Table, joined
from quantkit.sweep.compare import draw_table, write_table
from quantkit.sweep.executor import UNPLACED, Executor, Needs
from quantkit.sweep.local import Local
from quantkit.sweep.looking import Looked, look, rows_of
from quantkit.sweep.state import place_of
from quantkit.sweep.tasks import Task, plan, write
from quantkit.untrusted import shown

OUT = Path("quantkit-sweep")


def executor_of(name: str, address: str, processes: int, recipe: SweepRecipe) -> Executor:
    """The executor called `local` or `ray`; raises RecipeError, DependencyError, ResourceError."""
    if name == "ray":
        from quantkit.sweep.ray import OnRay

        return OnRay(address, max([1, *recipe.evaluation.threads]))
    if name != "local":
        raise RecipeError(f"unknown executor {shown(name)}. Known: local, ray.")
    return Local(processes)


@dataclass(frozen=True)
class Outcome:
    """What came of a sweep: its sheet where anything was measured, and the reason of each task that failed."""

    sheet: Table | None
    failed: dict[str, str]


def run(recipe: SweepRecipe, executor: Executor, progress: Progress | None = None) -> Outcome:
    """Do what is left of a sweep.

    Raises OutputError, RecipeError and DependencyError before any work for what no task could do.
    """
    progress, out = progress or Progress(), Path(recipe.out or OUT)
    tasks = plan(recipe, out)
    looked = look(tasks, recipe, executor.most_memory)
    write(tasks, out)
    work = _Work(out, executor, progress, looked, [task for task in tasks if not looked.knows(task)])
    with progress.step("tasks", len(tasks)) as advance:
        advance(len(tasks) - len(work.waiting))
        try:
            while work.waiting or work.running:
                advance(work.give_up())
                work.begin()
                if work.running:
                    work.wait()
                    advance()
        finally:
            executor.close()
    return Outcome(_sheet(tasks, out, looked), looked.failed)


@dataclass
class _Work:
    """What is left of a sweep; `running` and `waiting` change, and what `looked` knows."""

    out: Path
    executor: Executor
    progress: Progress
    looked: Looked
    waiting: list[Task]
    running: dict[str, Task] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done |= self.looked.made.keys()

    def give_up(self) -> int:
        """Take out what cannot be done any more; how many."""
        before = len(self.waiting)
        failed = self.looked.failed
        refused = {needs: self.executor.refuse(needs) for needs in set(map(self.needs, self.waiting))}
        for task in list(self.waiting):
            before_it = next((name for name in task.after if name in failed), None)
            reason = refused[self.needs(task)] if before_it is None else f"not tried: {before_it} failed"
            if reason is not None:
                self.waiting.remove(task)
                failed[task.name] = reason
        return before - len(self.waiting)

    def needs(self, task: Task) -> Needs:
        """What a task asks of its machine."""
        return Needs(self.looked.memory.get(task.name), task.alone)

    def begin(self) -> None:
        """Hand over what can be begun now."""
        for task in [task for task in self.waiting if self.done.issuperset(task.after)]:
            if len(self.running) >= self.most_beside(task):
                continue
            self.waiting.remove(task)
            self.running[task.name] = task
            command = [sys.executable, "-m", "quantkit.cli", "sweep-task", str(self.out), task.name]
            self.executor.submit(task.name, command, place_of(self.out, task.name).log, self.needs(task))
            self.progress.say(f"{task.name}: begun")

    def most_beside(self, task: Task) -> int:
        """How many tasks there may be with this one."""
        alone = task.alone or any(other.alone for other in self.running.values())
        return 1 if alone and not self.executor.sets_apart else self.executor.slots

    def wait(self) -> None:
        """Until a task has ended."""
        name, code = self.executor.finished()
        del self.running[name]
        if code == 0:
            self.done.add(name)
            self.progress.say(f"{name}: done")
        else:
            reason = self.looked.failed[name] = _reason(self.out, name, code)
            self.progress.say(f"{name}: failed: {reason}")


def _reason(out: Path, name: str, code: int) -> str:
    place = place_of(out, name)
    state = place.state()
    told = state.reason if state is not None and state.state == "failed" else None
    how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    if code == UNPLACED:
        how = "no machine that is left can take it"
    return f"{told or how} (log: {place.log})"


def _sheet(tasks: Sequence[Task], out: Path, looked: Looked) -> Table | None:
    """The sheet of all that was measured; written beside the tasks, with the picture."""
    reports: dict[str, list[Report]] = {}
    for task, path in rows_of(tasks, out, looked):
        reports.setdefault(task.model, []).append(read_report(path))
    if not reports:
        return None
    tables = ((None, Table(tuple(some))) for found in reports.values() for some in _alike(found))
    missing = (f"Not measured: {name}: {reason}" for name, reason in looked.failed.items())
    sheet = replace(joined(tables), missing=tuple(missing))
    write_table(sheet, out)
    draw_table(sheet, out)
    return sheet


def _alike(reports: list[Report]) -> Iterable[list[Report]]:
    """The reports of each processor: other machines' stand in tables of their own."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(report.hardware.cpu, []).append(report)
    return found.values()
