"""sweep: convert and evaluate the same variants of several models, task by task, into one table. See docs/sweeps.md.

An executor runs each task in its own process. A task is done if a comparison would reuse its artifact or report. So the
same command continues an earlier sweep, runs new or changed tasks, and retries failed ones. The table names failed
tasks; a failure stops only tasks that depend on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from quantkit.comparison.compare import Comparison
from quantkit.comparison.executors import LOST, UNPLACED, Executor
from quantkit.comparison.tasks import Task, plan_tasks, read_task
from quantkit.contracts.model import Model
from quantkit.conversion.check import ReadyJob
from quantkit.data.texts import Text, load_text
from quantkit.errors import LONGEST_REASON, DependencyError, OutputError, QuantkitError, RecipeError, one_line
from quantkit.records.artifact import Artifact
from quantkit.records.recipe import SweepRecipe
from quantkit.records.report import read_report
from quantkit.report.plot import draw
from quantkit.report.table import Table, join_tables, write_table
from quantkit.system.progress import Progress
from quantkit.system.untrusted import path_of

OUT = Path("quantkit-sweep")


@dataclass(frozen=True)
class Outcome:
    """Result of a sweep: the table (None if nothing was measured), and the reason for each failed task."""

    sheet: Table | None
    failed: dict[str, str]


def run_sweep(recipe: SweepRecipe, executor: Executor, progress: Progress | None = None) -> Outcome:
    """Run the tasks of a sweep that are not done, close the executor, and return the table and failures.

    Raises OutputError, RecipeError and DependencyError before any work if no task could run.
    """
    progress, out = progress or Progress(), path_of(recipe.out or OUT, OutputError)
    try:
        tasks = {task.name: task for task in plan_tasks(recipe, out)}
        _scan(tasks, load_text(recipe.evaluation.text, "evaluation"), executor.most_memory)
        with progress.step("tasks", len(tasks)) as advance:
            advance(sum(task.state != "waiting" for task in tasks.values()))
            work = _Work(tasks, executor, progress, advance)
            while work.begin():
                work.wait()
    finally:
        executor.close()
    failed = {name: task.why for name, task in tasks.items() if task.state == "failed"}
    return Outcome(_sheet(tasks, failed, out), failed)


def _scan(tasks: dict[str, Task], text: Text, most_memory: int | None) -> None:
    """Set each task's state (done, waiting, or failed if impossible) and memory, and write it to its folder."""
    models: dict[str, Comparison] = {}
    variants: dict[str, tuple[ReadyJob, Artifact | None]] = {}
    for task in tasks.values():
        try:
            if task.model not in models:
                limit = None if most_memory is None else most_memory / 1e9
                models[task.model] = Comparison(task.recipe, task.of_quality, limit)
                models[task.model].text = text
            task.state = "done" if _is_done(task, models[task.model], variants) else "waiting"
        except (RecipeError, DependencyError):
            raise
        except QuantkitError as error:
            task.state, task.reason = "failed", f"{type(error).__name__}: {error}"
    for task in tasks.values():
        task.update(**(task.earlier_run() if task.state == "done" else {}))


def _is_done(task: Task, comparison: Comparison, variants: dict[str, tuple[ReadyJob, Artifact | None]]) -> bool:
    """Return whether a task is done; set its report, or else its memory. `variants` caches checked variants."""
    model, own = comparison.original, psutil.Process().memory_info().rss  # a task's process needs about as much
    for variant in task.recipe.variants:
        key = f"{task.model} {variant.label}"
        if key not in variants:
            [ready] = comparison.check([variant])
            variants[key] = ready, comparison.reusable_artifact(ready.job)
        ready, artifact = variants[key]
        if task.kind == "convert":
            task.memory = None if ready.forecast is None else ready.forecast.memory
            return artifact is not None
        if artifact is None:
            need, limit = comparison.need_of(ready.job), comparison.max_memory_gb
            if need.phases and (limit is None or need.memory / 1e9 <= limit):  # else block by block
                task.memory = need.memory + own
            return False
        model = Model(artifact, None)
    evaluation = comparison.prepare(model)
    if comparison.reusable_report(evaluation) is not None:
        task.report = str(comparison.report_path(model))
        return True
    plans = filter(None, (evaluation.plan, evaluation.baseline_plan))
    task.memory = max((plan.need.memory + own for plan in plans if plan.need.phases), default=None)
    return False


@dataclass
class _Work:
    """The tasks of a sweep by name, and in `again` the names of restarted tasks."""

    tasks: dict[str, Task]
    executor: Executor
    progress: Progress
    advance: Callable[[], None]
    again: set[str] = field(default_factory=set)

    def begin(self) -> bool:
        """Start all tasks that can start, fail those that never can; return whether any task is running."""
        for task in self.tasks.values():
            if task.state != "waiting":
                continue
            before = [self.tasks[name] for name in task.after]
            if failed := next((one.name for one in before if one.state == "failed"), None):
                reason: str | None = f"not tried: {failed} failed"
            elif all(one.state == "done" for one in before) and self.executor.has_room(task):
                reason = self.executor.refuse(task)
            else:
                continue
            if reason is not None:
                task.update(state="failed", reason=reason)
                self.advance()
                continue
            task.log.unlink(missing_ok=True)
            self.executor.submit(task, [sys.executable, "-m", "quantkit", "sweep-task", str(task.folder)])
            task.state = "running"
            self.progress.say(f"{task.name}: begun")
        return any(task.state == "running" for task in self.tasks.values())

    def wait(self) -> None:
        """Wait until a task ends; restart it once if its machine was lost."""
        name, code = self.executor.finished()
        if code == 0:
            self.tasks[name].state = "done"
            self.progress.say(f"{name}: done")
            self.advance()
            return
        task = self.tasks[name] = read_task(self.tasks[name].folder)
        if code == LOST and name not in self.again:
            self.again.add(name)
            self.progress.say(f"{name}: {_how_ended(task, code)}; restarting it")
            task.update(state="waiting")
        else:
            task.update(state="failed", reason=task.reason or _how_ended(task, code))
            self.progress.say(f"{name}: failed: {task.why}")
            self.advance()


def _how_ended(task: Task, code: int) -> str:
    """Return how a task's process ended, with the last line of its log."""
    how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    lost = f"lost on {task.host}" if task.host else "lost"
    how = {UNPLACED: "no remaining machine can run it", LOST: lost}.get(code, how)
    lines = task.log.read_text(encoding="utf-8", errors="replace").split("\n") if task.log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("error: ")
    return f"{how}: {one_line(last, LONGEST_REASON)}" if last else how


def _sheet(tasks: dict[str, Task], failed: dict[str, str], out: Path) -> Table | None:
    """Join all reports into one table, and write it with a plot to `out`; return None without reports."""
    done = [task for task in tasks.values() if task.kind == "evaluate" and task.state == "done"]
    paths = [task.report or read_task(task.folder).report for task in done]
    # Each report is a table; join_tables merges those of one model and machine.
    tables = [(None, Table((read_report(Path(path)),))) for path in paths if path is not None]
    if not tables:
        return None
    sheet = replace(join_tables(tables), missing=tuple(f"Not measured: {name}: {why}" for name, why in failed.items()))
    write_table(sheet, out)
    draw(sheet, out)
    return sheet
