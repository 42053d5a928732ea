"""What a sweep is made of: a task for each conversion and each judgement.

Where the recipe names machines, what is measured of each of them is a task of its own. A task's folder is
`OUT/tasks/NAME`: `task.json` says what is to be done, and state.py what else lies there. Whether a task is done is not
read there: it is where its artifact or its report is one that a comparison would use again (looking.py), so where
bytes, texts, settings, code or packages have changed since, it is done anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from quantkit.contracts.registry import find_probe, probes
from quantkit.errors import RecipeError
from quantkit.formats.source import open_source
from quantkit.models.source import Source
from quantkit.recipe import CompareRecipe, Strict, SweepModel, SweepRecipe, parse
from quantkit.sweep.state import TASK, TASKS, line_of, place_of
from quantkit.system.files import replace_text, safe_name
from quantkit.untrusted import read_object

QUALITY = ("size", "perplexity")  # probes whose figures are the same on any machine, whatever else it does
Kind = Literal["convert", "judge"]


class Task(Strict):
    """One conversion or one judgement; `recipe` compares one variant, or none: the source itself.

    `after` are names of tasks that have to be done before; one that is `alone` measures the machine, which then must
    do nothing else: the one called `machine`, where there is such a name.
    """

    name: str
    kind: Kind
    model: str
    variant: str
    recipe: CompareRecipe
    after: tuple[str, ...] = ()
    alone: bool = False
    machine: str | None = None

    @property
    def out(self) -> Path:
        """The folder of the model's artifacts, and of its reports where they are not of a named machine."""
        return Path(self.recipe.out or "")

    @property
    def reports(self) -> Path:
        """The folder in which the report lies as it does in a comparison's."""
        return self.out if self.machine is None else self.out / "machines" / safe_name(self.machine)

    @property
    def of_quality(self) -> bool:
        """Whether no figure of the judgement depends on the machine."""
        probes = self.recipe.evaluation.probes
        return bool(probes) and set(probes) <= set(QUALITY)

    @property
    def digest(self) -> str:
        """Of all in it that decides its result."""
        rest = {"name", "after", "alone"}
        values = self.model_dump(mode="json", exclude=rest)
        del values["recipe"]["out"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def name_of(model: SweepModel) -> str:
    """The folder of a model in a sweep."""
    return safe_name("-".join(Path(place).name for place in (model.model, *model.adapters)))


def plan(recipe: SweepRecipe, out: Path) -> list[Task]:
    """The tasks of a sweep, model by model, the source before its variants; raises RecipeError."""
    named = {find_probe(name).name for name in recipe.evaluation.probes}
    asked = [name for name, probe in probes().items() if name in named or (not named and probe.usual)]
    _refuse_idle(recipe, asked)
    tasks: list[Task] = []
    for model in recipe.models:
        shared = {key: getattr(recipe, key) for key in ("calibration", "evaluation", "seed")}
        own = {key: getattr(model, key) for key in ("model", "revision", "adapters")}
        name = name_of(model)
        of_none = CompareRecipe(variants=(), out=str(out / "models" / name), **own, **shared)
        source = f"{name}.source"
        tasks += _judging(source, (), source, {"model": name, "variant": "source", "recipe": of_none}, recipe, asked)
        for variant in recipe.variants:
            words: dict[str, Any] = {
                "model": name,
                "variant": variant.label,
                "recipe": of_none.model_copy(update={"variants": (variant,)}),
            }
            judge = f"{name}.{safe_name(variant.label)}"
            convert = Task(name=f"{judge}.convert", kind="convert", **words)
            tasks += [convert, *_judging(judge, (convert.name,), source, words, recipe, asked)]
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"two tasks of the sweep are named {name}: leave out a model or a variant, or rename one")
    return tasks


def _refuse_idle(recipe: SweepRecipe, asked: list[str]) -> None:
    """Raise RecipeError for machines without anything to measure on them."""
    of_machines = [name for name in asked if name not in QUALITY]
    if recipe.machines and not of_machines:
        raise RecipeError(
            f"machines = {', '.join(recipe.machines)}: the probes {', '.join(asked)} measure no machine. Leave "
            "`machines` out, or add a probe such as speed to evaluation.probes."
        )
    if len({safe_name(label).casefold() for label in recipe.machines}) < len(recipe.machines):
        raise RecipeError(f"machines = {', '.join(recipe.machines)}: two have the same name. Leave one out.")


def _judging(
    name: str, own: tuple[str, ...], source: str, words: dict[str, Any], recipe: SweepRecipe, asked: list[str]
) -> list[Task]:
    """The tasks that judge what is there after the tasks `own`: what is of no machine, and what is of each."""
    compared: CompareRecipe = words["recipe"]
    quality = [probe for probe in asked if probe in QUALITY or not recipe.machines]
    speed = [probe for probe in asked if probe not in quality]
    # A variant's divergence is measured from the baseline that the source's judgement leaves.
    after = own if name == source else (source, *own)

    def of(probes: list[str]) -> CompareRecipe:
        if not recipe.machines:
            return compared
        spec = compared.evaluation.model_copy(update={"probes": tuple(probes)})
        return compared.model_copy(update={"evaluation": spec})

    tasks: list[Task] = []
    if quality:
        about = words | {"recipe": of(quality)}
        alone = not set(quality) <= set(QUALITY)
        tasks.append(Task(name=name, kind="judge", after=after, alone=alone, **about))
    for label in recipe.machines:
        about = words | {"recipe": of(speed), "machine": label}
        tasks.append(Task(name=f"{name}@{safe_name(label)}", kind="judge", after=own, alone=True, **about))
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
    return [read_task(path) for path in paths]


def read_task(path: Path) -> Task:
    """A task by the path of its file; raises RecipeError."""
    return parse(Task, read_object(path, RecipeError), str(path))


def open_model(task: Task) -> Source:
    """The source of a task."""
    recipe = task.recipe
    return open_source(recipe.model, recipe.revision, recipe.adapters)


def lines_of(out: Path) -> list[str]:
    """One line for each task: its name, how far it is, its seconds and peak memory, or why it failed."""
    lines = []
    for task in read(out):
        line = line_of(task.name, task.digest, place_of(out, task.name))
        waits = task.machine is not None and line.startswith(f"{task.name}: waiting")
        lines.append(f"{line} (for the machine {task.machine})" if waits else line)
    return lines
