"""What a sweep is made of: a task for each conversion and each judgement, and where each tells how it went.

A task's state lies in `OUT/tasks/NAME`: `task.json` (what is to be done), `state.json` (how far it is), and `log`.
Whether a task is done is not read there: it is where its artifact or its report is one that a comparison would use
again, so where bytes, texts, settings, code, packages or the machine have changed since, it is done anew.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from filelock import FileLock

from quantkit.contracts.model import Model
from quantkit.data.texts import Text, load_text
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluation.evaluate import resolve
from quantkit.formats.source import open_source
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.recipe import CompareRecipe, Strict, SweepModel, SweepRecipe, parse
from quantkit.report.card import write_card
from quantkit.report.records import read_report
from quantkit.sweep.compare import (
    artifact_of,
    checked_jobs,
    folder_of,
    kept_artifact,
    kept_report,
    report_of,
    report_path,
)
from quantkit.system.files import replace_text, safe_name
from quantkit.system.memory import peak_of_children_bytes, peak_rss_bytes
from quantkit.untrusted import read_object

TASKS, TASK, STATE, LOG, LOCK = "tasks", "task.json", "state.json", "log", "lock"
QUALITY = {"size", "perplexity"}  # probes whose figures are the same whatever else the machine does
Kind = Literal["convert", "judge"]


class Task(Strict):
    """One conversion or one judgement; `recipe` is a comparison of one variant, or of none for the source itself.

    `after` are names of tasks that have to be done before; one that is `alone` measures the machine, which then must
    do nothing else.
    """

    name: str
    kind: Kind
    model: str
    variant: str
    recipe: CompareRecipe
    after: tuple[str, ...] = ()
    alone: bool = False


class State(Strict):
    """How far a task is: `running`, `done` or `failed` with the reason; of the process `pid` on `host`.

    `report` is the path of what a judgement left.
    """

    state: Literal["running", "done", "failed"]
    host: str
    pid: int
    began: float
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

    def state(self) -> State | None:
        """What the task last told of itself; None where it has not begun."""
        path = self.folder / STATE
        return parse(State, read_object(path, RecipeError), str(path)) if path.is_file() else None

    def tell(self, state: State) -> None:
        """Keep a state."""
        replace_text(self.folder / STATE, state.model_dump_json(indent=2) + "\n")


def place_of(out: Path, name: str) -> Place:
    """Where a task of the sweep in `out` keeps its state."""
    return Place(out / TASKS / name)


def name_of(model: SweepModel) -> str:
    """The folder of a model in a sweep."""
    return safe_name("-".join(Path(place).name for place in (model.model, *model.adapters)))


def plan(recipe: SweepRecipe, out: Path) -> list[Task]:
    """The tasks of a sweep, model by model, the source before its variants; raises RecipeError."""
    tasks: list[Task] = []
    alone = bool(set(resolve(recipe.evaluation).probes) - QUALITY)
    for model in recipe.models:
        name = name_of(model)
        shared = {key: getattr(recipe, key) for key in ("calibration", "evaluation", "seed")}
        own = {key: getattr(model, key) for key in ("model", "revision", "adapters", "pad_vocab")}
        of_none = CompareRecipe(variants=(), out=str(out / "models" / name), **own, **shared)
        source = Task(name=f"{name}.source", kind="judge", model=name, variant="source", recipe=of_none, alone=alone)
        tasks.append(source)
        for variant in recipe.variants:
            of_one = of_none.model_copy(update={"variants": (variant,)})
            words = {"model": name, "variant": variant.label, "recipe": of_one}
            convert = Task(name=f"{name}.{safe_name(variant.label)}.convert", kind="convert", **words)
            after = (source.name, convert.name)
            judge = Task(name=f"{name}.{safe_name(variant.label)}", kind="judge", after=after, alone=alone, **words)
            tasks += [convert, judge]
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"two tasks of the sweep are named {name}: leave out a model or a variant, or rename one")
    return tasks


def write(tasks: Sequence[Task], out: Path) -> None:
    """Leave every task where its process finds it."""
    for task in tasks:
        folder = place_of(out, task.name).folder
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / TASK, task.model_dump_json(indent=2) + "\n")


def read(out: Path) -> list[Task]:
    """The tasks that lie in a sweep's folder; raises RecipeError."""
    paths = sorted((out / TASKS).glob(f"*/{TASK}"))
    if not paths:
        raise RecipeError(
            f"{out} holds no tasks. Give a folder that `quantkit run` of a recipe with `models` has written."
        )
    return [parse(Task, read_object(path, RecipeError), str(path)) for path in paths]


def open_model(task: Task) -> Source:
    """The source of a task."""
    recipe = task.recipe
    return open_source(recipe.model, recipe.revision, recipe.adapters, recipe.pad_vocab)


def done_before(task: Task, source: Source, text: Text) -> Path | None:
    """What a task makes, if it is there as a comparison would use it again; raises QuantkitError where it cannot be."""
    out = Path(task.recipe.out or "")
    model = Model(None, source)
    if task.recipe.variants:
        [checked] = checked_jobs(task.recipe, source, out)
        artifact = kept_artifact(checked, folder_of(out, checked.job))
        if artifact is None or task.kind == "convert":
            return None if artifact is None else artifact.folder
        model = Model(artifact, None)
    kept = kept_report(model, source, task.recipe.evaluation, text, out)
    return None if kept is None else report_path(out, model.label)


def carry_out(out: Path, name: str, progress: Progress) -> None:
    """Do a task of the sweep in `out`, unless it is done; tell its state. Raises QuantkitError, OSError.

    A process that does the same task at the same time is waited for.
    """
    place = place_of(out, name)
    task = parse(Task, read_object(place.folder / TASK, RecipeError), str(place.folder / TASK))
    with FileLock(place.folder / LOCK):
        own = {"host": platform.node(), "pid": os.getpid(), "began": time.time()}
        place.tell(State(state="running", **own))
        began = time.monotonic()
        try:
            report = _work(task, progress)
        except (QuantkitError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            place.tell(State(state="failed", seconds=time.monotonic() - began, reason=reason, **own))
            raise
        seconds, peak = time.monotonic() - began, max(peak_rss_bytes(), peak_of_children_bytes())
        place.tell(State(state="done", seconds=seconds, peak_bytes=peak, report=report, **own))


def _work(task: Task, progress: Progress) -> str | None:
    """Convert or judge; the path of the report."""
    source, recipe, out = open_model(task), task.recipe, Path(task.recipe.out or "")
    model = Model(None, source)
    if recipe.variants:
        [checked] = checked_jobs(recipe, source, out)
        model = Model(artifact_of(checked, folder_of(out, checked.job), progress), None)
    if task.kind == "convert":
        return None
    report = report_of(model, source, recipe.evaluation, load_text(recipe.evaluation.text, "evaluation"), out, progress)
    if model.artifact is not None:
        original = read_report(report_path(out, Model(None, source).label))
        write_card(model.artifact, (original, report))
    return str(report_path(out, model.label))


def is_running(state: State) -> bool:
    """Whether the process that told a state still lives, as far as this machine can know."""
    return state.state == "running" and (state.host != platform.node() or psutil.pid_exists(state.pid))


def lines_of(out: Path) -> list[str]:
    """One line for each task: its name, how far it is, its seconds and peak memory, or why it failed."""
    lines = []
    for task in read(out):
        place = place_of(out, task.name)
        state = place.state()
        if state is None:
            lines.append(f"{task.name}: waiting")
        elif state.state == "running":
            how = f"running for {time.time() - state.began:.0f} s" if is_running(state) else "ended without a word"
            lines.append(f"{task.name}: {how} (process {state.pid} on {state.host}, log: {place.log})")
        elif state.state == "done":
            lines.append(
                f"{task.name}: done in {state.seconds:.0f} s, {state.peak_bytes / 1e9:.2f} GB, on {state.host}"
            )
        else:
            lines.append(f"{task.name}: failed: {state.reason} (log: {place.log})")
    return lines
