"""Tasks of a sweep: one per conversion and one per evaluation, each with a folder `OUT/tasks/NAME`.

`task.json` holds the task and its state. Its modification time is the heartbeat of the task's process, which may be on
another machine. `log` has the output of the last process; `lock` prevents two processes from running it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
from filelock import FileLock

from quantkit.comparison.compare import Comparison, name_of
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_method
from quantkit.data.texts import NAMES
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluation.probes import find_probe
from quantkit.records.recipe import CompareRecipe, Strict, SweepRecipe, parse
from quantkit.system.files import replace_text, safe_name
from quantkit.system.memory import peak_of_children_bytes, peak_rss_bytes
from quantkit.system.modules import leave_torch_out
from quantkit.system.progress import Progress
from quantkit.system.threads import call_every
from quantkit.system.untrusted import path_of, read_object

QUALITY = {"size", "perplexity"}  # probes whose figures are the same on any machine under any load
BEAT_S = 10.0  # between two signs of life
SILENCE_S = 90.0  # after which a task may be dead: machines' clocks differ, and disks may be slow


class Task(Strict, frozen=False):
    """A conversion or an evaluation, and its state.

    `recipe`: has one variant, or none for the source. `after`: tasks that must finish first. `memory`: bytes that the
    task needs, if known. `host`, `pid`: the process that runs it. `report`: path of the resulting report.
    """

    out: str
    name: str
    kind: Literal["convert", "evaluate"]
    model: str
    recipe: CompareRecipe
    after: tuple[str, ...] = ()
    memory: int | None = None
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    host: str = ""
    pid: int = 0
    began: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0
    reason: str = ""
    report: str | None = None

    @property
    def of_quality(self) -> bool:
        """Return whether all figures of the evaluation are the same on every machine."""
        probes = set(self.recipe.evaluation.probes)
        return bool(probes) and probes <= QUALITY

    @property
    def alone(self) -> bool:
        """Return whether the task measures its machine, so that no other task may run there."""
        return self.kind == "evaluate" and not self.of_quality

    @property
    def folder(self) -> Path:
        return Path(self.out) / "tasks" / self.name

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def why(self) -> str:
        return f"{self.reason} (log: {self.log})" if self.log.is_file() else self.reason

    def update(self, **values: Any) -> None:
        """Set fields, and write the task into its folder."""
        for name, value in values.items():
            setattr(self, name, value)
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.folder / "task.json", self.model_dump_json(indent=2) + "\n")

    def status(self) -> str:
        """Return one line: name and state, with run time and peak memory, or why the task failed."""
        if self.state == "waiting":
            return f"{self.name}: waiting"
        if self.state == "done":
            cost = f"in {self.seconds:.0f} s, {self.peak_bytes / 1e9:.2f} GB, on {self.host}" if self.host else "before"
            return f"{self.name}: done {cost}"
        if self.state == "failed":
            return f"{self.name}: failed: {self.why}"
        return f"{self.name}: {self._liveness()} (process {self.pid} on {self.host}, log: {self.log})"

    def _liveness(self) -> str:
        """Return whether the process is alive: checked on this machine, inferred from the heartbeat on others."""
        try:
            process = psutil.Process(self.pid) if self.host == platform.node() else None
            # A later process may have the same number.
            gone = process and (process.status() == psutil.STATUS_ZOMBIE or process.create_time() > self.began + 1)
        except psutil.NoSuchProcess:
            gone = True
        silence = time.time() - (self.folder / "task.json").stat().st_mtime
        if gone:
            return "ended without a result"
        if silence < SILENCE_S:
            return f"running for {time.time() - self.began:.0f} s"
        return f"unknown: no sign of life for {silence:.0f} s"

    def earlier_run(self) -> dict[str, Any]:
        """Return the recorded facts about an earlier run that finished this task; empty if there is none."""
        with suppress(RecipeError):
            former = read_task(self.folder)
            if former.state == "done":
                return former.model_dump(include={"host", "pid", "memory", "began", "seconds", "peak_bytes"})
        return {}


def read_task(folder: Path) -> Task:
    """Return the task in a folder; raises RecipeError."""
    path = folder / "task.json"
    return parse(Task, read_object(path, RecipeError), str(path))


def read_tasks(out: Path) -> list[Task]:
    """Return the tasks of the sweep in `out`; raises RecipeError if there are none."""
    tasks = [read_task(path.parent) for path in sorted((out / "tasks").glob("*/task.json"))]
    if not tasks:
        raise RecipeError(f"{out} has no tasks. Give the output folder of a sweep.")
    return tasks


def plan_tasks(recipe: SweepRecipe, out: Path) -> list[Task]:
    """Return a sweep's tasks, model by model, each source before its variants; raises RecipeError.

    Paths become absolute, since a task may run on another machine and in another folder.
    """
    for probe in recipe.evaluation.probes:
        find_probe(probe)
    out = out.absolute()
    shared = {key: getattr(recipe, key) for key in ("calibration", "evaluation", "seed", "device")}
    for key in ("calibration", "evaluation"):
        shared[key] = shared[key].model_copy(update={"text": _absolute(shared[key].text, NAMES)})
    tasks: list[Task] = []
    for model in recipe.models:
        name = name_of(model)
        original = CompareRecipe(
            model=_absolute(model.model, ("demo",)), revision=model.revision, variants=(),
            adapters=[_absolute(adapter) for adapter in model.adapters], out=str(out / "models" / name), **shared,
        )  # fmt: skip
        source = Task(out=str(out), name=f"{name}.source", kind="evaluate", model=name, recipe=original)
        tasks.append(source)
        for variant in recipe.variants:
            label = f"{name}.{safe_name(variant.label)}"
            own = {"out": str(out), "model": name, "recipe": original.model_copy(update={"variants": (variant,)})}
            convert = Task(name=f"{label}.convert", kind="convert", **own)
            # Its divergence needs the baseline that the source's evaluation stores.
            tasks += [convert, Task(name=label, kind="evaluate", after=(source.name, convert.name), **own)]
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"two tasks of the sweep are named {name}: leave out a model or a variant, or rename one")
    return tasks


def _absolute(name: str | None, reserved: Collection[str] = ()) -> str | None:
    """Return the absolute path of an existing file or folder; any other or `reserved` name stays unchanged."""
    if name is None or name in reserved or not (path := path_of(name, RecipeError)).exists():
        return name
    return str(path.absolute())


def run_task(folder: Path, progress: Progress) -> None:
    """Run the task in a folder and record how it ends; raises QuantkitError or OSError.

    If another process runs the same task, wait for that process first.
    """

    def beat() -> None:
        with suppress(OSError):  # a shared disk may be unreachable for a while
            os.utime(folder / "task.json")

    with FileLock(folder / "lock"), call_every(BEAT_S, beat):
        task, began = read_task(folder), time.time()
        task.update(state="running", host=platform.node(), pid=os.getpid(), began=began)
        try:
            report = _run(task, progress)
        except (QuantkitError, OSError) as error:
            task.update(state="failed", seconds=time.time() - began, reason=f"{type(error).__name__}: {error}")
            raise
        peak = max(peak_rss_bytes(), peak_of_children_bytes())
        task.update(state="done", seconds=time.time() - began, peak_bytes=peak, report=report)


def _run(task: Task, progress: Progress) -> str | None:
    """Run a task; return the path of the report, or None after a conversion."""
    for variant in task.recipe.variants if task.kind == "convert" else ():
        method = find_method(variant.method)
        if not method.needs_torch(method.parse_options(variant.options)):
            leave_torch_out()  # this process only converts
    comparison = Comparison(task.recipe, any_machine=task.of_quality)
    model = comparison.original
    for ready in comparison.check(task.recipe.variants):
        model = Model(comparison.artifact(ready, progress), None)
    if task.kind == "convert":
        return None
    comparison.report(model, progress)
    return str(comparison.report_path(model))
