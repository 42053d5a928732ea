"""Sweeps: the same variants of several models, task by task, in one sheet.

Tasks are child processes that an executor starts; their state lies in the output folder alone, so the same command
goes on where an earlier one ended, runs what is new in the recipe, and tries again what failed. A task that fails is
told in the sheet and stops no other. See docs/sweeps.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from quantkit.data.texts import load_text
from quantkit.errors import DependencyError, QuantkitError, RecipeError
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.recipe import SweepRecipe
from quantkit.report.records import Report, read_report
from quantkit.report.sheet import Sheet, joined
from quantkit.report.table import Table
from quantkit.report.written import refuse_other_table
from quantkit.sweep.compare import draw_table, write_table
from quantkit.sweep.local import Local
from quantkit.sweep.tasks import Task, done_before, open_model, place_of, plan, write
from quantkit.untrusted import shown

OUT = Path("quantkit-sweep")


class Executor(Protocol):
    """What starts tasks somewhere: `slots` at a time."""

    slots: int

    def submit(self, name: str, command: list[str], log: Path) -> None:
        """Start the command of a task; what it says goes to the end of `log`."""

    def finished(self) -> tuple[str, int]:
        """Wait for a task that has ended: its name and its exit code."""

    def close(self) -> None:
        """End what still runs."""


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

    sheet: Sheet | None
    failed: dict[str, str]
    elsewhere: tuple[str, ...] = ()


def run(
    recipe: SweepRecipe, executor: Executor, shard: tuple[int, int] | None = None, progress: Progress | None = None
) -> Outcome:
    """Do what is left of a sweep, of the share `shard` = (number, of how many) alone where one is given.

    Raises OutputError, RecipeError and DependencyError before any work for what no task could do.
    """
    progress, out = progress or Progress(), Path(recipe.out or OUT)
    refuse_other_table(out)
    tasks = plan(recipe, out)
    mine = _share(tasks, shard)
    failed, found = _looked_at(mine, recipe)
    done = set(found)
    write(tasks, out)
    waiting = [task for task in mine if task.name not in done and task.name not in failed]
    running: dict[str, Task] = {}
    with progress.step("tasks", len(mine)) as advance:
        advance(len(mine) - len(waiting))
        try:
            while waiting or running:
                for task in [task for task in waiting if any(name in failed for name in task.after)]:
                    waiting.remove(task)
                    failed[task.name] = "not tried: " + next(name for name in task.after if name in failed) + " failed"
                    advance()
                for task in [task for task in waiting if done.issuperset(task.after)]:
                    if len(running) < (1 if task.alone or _alone(running) else executor.slots):
                        waiting.remove(task)
                        running[task.name] = task
                        command = [sys.executable, "-m", "quantkit.cli", "sweep-task", str(out), task.name]
                        executor.submit(task.name, command, place_of(out, task.name).log)
                        progress.say(f"{task.name}: begun")
                if running:
                    name, code = executor.finished()
                    del running[name]
                    (done.add(name) if code == 0 else failed.update({name: _reason(out, name, code)}))
                    progress.say(f"{name}: done" if code == 0 else f"{name}: failed: {failed[name]}")
                    advance()
        finally:
            executor.close()
    return Outcome(_sheet(tasks, out, found, failed), failed, tuple(task.name for task in tasks if task not in mine))


def _alone(running: dict[str, Task]) -> bool:
    return any(task.alone for task in running.values())


def _share(tasks: Sequence[Task], shard: tuple[int, int] | None) -> list[Task]:
    """The tasks of a share: every n-th variant, and the sources, which the others need."""
    if shard is None:
        return list(tasks)
    number, of = shard
    variants = list(dict.fromkeys((task.model, task.variant) for task in tasks if task.recipe.variants))
    own = set(variants[number::of])
    return [task for task in tasks if not task.recipe.variants or (task.model, task.variant) in own]


def _looked_at(tasks: Sequence[Task], recipe: SweepRecipe) -> tuple[dict[str, str], dict[str, Path]]:
    """(what cannot be done, by task, with the reason; what is done, with what it made), before anything is begun."""
    failed: dict[str, str] = {}
    done: dict[str, Path] = {}
    text = load_text(recipe.evaluation.text, "evaluation")
    sources: dict[str, Source] = {}
    for task in tasks:
        try:
            if task.model not in sources:
                sources[task.model] = open_model(task)
            if (made := done_before(task, sources[task.model], text)) is not None:
                done[task.name] = made
        except (RecipeError, DependencyError):
            raise
        except QuantkitError as error:
            failed[task.name] = f"{type(error).__name__}: {error}"
    return failed, done


def _reason(out: Path, name: str, code: int) -> str:
    place = place_of(out, name)
    state = place.state()
    told = state.reason if state is not None and state.state == "failed" else None
    how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return f"{told or how} (log: {place.log})"


def _sheet(tasks: Sequence[Task], out: Path, found: dict[str, Path], failed: dict[str, str]) -> Sheet | None:
    """The sheet of all that was measured; written beside the tasks, with the picture."""
    reports: dict[str, list[Report]] = {}
    for task in tasks:
        state = place_of(out, task.name).state()
        path = found.get(task.name) or (Path(state.report) if state is not None and state.report else None)
        if task.kind == "judge" and task.name not in failed and path is not None:
            reports.setdefault(task.model, []).append(read_report(path))
    if not reports:
        return None
    missing = tuple(f"Not measured: {name}: {reason}" for name, reason in failed.items())
    sheet = replace(joined((None, Table(tuple(of_model))) for of_model in reports.values()), missing=missing)
    write_table(sheet, out)
    draw_table(sheet, out)
    return sheet
