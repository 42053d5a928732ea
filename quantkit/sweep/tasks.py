"""What a sweep is made of: a task for each conversion and each judgement.

A task's folder is `OUT/tasks/NAME`: `task.json` says what is to be done, and state.py what else lies there. Whether a
task is done is not read there: it is where its artifact or its report is one that a comparison would use again
(looking.py), so where bytes, texts, settings, code or packages have changed since, it is done anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from quantkit.errors import RecipeError
from quantkit.evaluation.probes import find_probe
from quantkit.formats.source import open_source
from quantkit.models.source import Source
from quantkit.recipe import CompareRecipe, ModelRef, Strict, SweepRecipe, parse
from quantkit.sweep.state import TASK, TASKS, line_of, place_of
from quantkit.system.files import replace_text, safe_name
from quantkit.untrusted import read_object

QUALITY = ("size", "perplexity")  # probes whose figures are the same on any machine, whatever else it does
Kind = Literal["convert", "judge"]


class Task(Strict):
    """One conversion or one judgement; `recipe` compares one variant, or none: the source itself.

    `after` are names of tasks that have to be done before.
    """

    name: str
    kind: Kind
    model: str
    variant: str
    recipe: CompareRecipe
    after: tuple[str, ...] = ()

    @property
    def out(self) -> Path:
        """The folder of the model's artifacts and reports."""
        return Path(self.recipe.out or "")

    @property
    def of_quality(self) -> bool:
        """Whether no figure of the judgement depends on the machine."""
        probes = self.recipe.evaluation.probes
        return bool(probes) and set(probes) <= set(QUALITY)

    @property
    def alone(self) -> bool:
        """Whether it measures the machine, which then must do nothing else."""
        return self.kind == "judge" and not self.of_quality

    @property
    def digest(self) -> str:
        """Of all in it that decides its result."""
        values = self.model_dump(mode="json", exclude={"name", "after"})
        del values["recipe"]["out"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def name_of(model: ModelRef) -> str:
    """The folder of a model in a sweep."""
    return safe_name("-".join(Path(place).name for place in (model.model, *model.adapters)))


def plan(recipe: SweepRecipe, out: Path) -> list[Task]:
    """The tasks of a sweep, model by model, the source before its variants; raises RecipeError."""
    for name in recipe.evaluation.probes:
        find_probe(name)
    tasks: list[Task] = []
    for model in recipe.models:
        shared = {key: getattr(recipe, key) for key in ("calibration", "evaluation", "seed", "device")}
        own = {key: getattr(model, key) for key in ("model", "revision", "adapters")}
        name = name_of(model)
        of_none = CompareRecipe(variants=(), out=str(out / "models" / name), **own, **shared)
        source = Task(name=f"{name}.source", kind="judge", model=name, variant="source", recipe=of_none)
        tasks.append(source)
        for variant in recipe.variants:
            words: dict[str, Any] = {
                "model": name,
                "variant": variant.label,
                "recipe": of_none.model_copy(update={"variants": (variant,)}),
            }
            judge = f"{name}.{safe_name(variant.label)}"
            convert = Task(name=f"{judge}.convert", kind="convert", **words)
            # Its divergence is measured from the baseline that the source's judgement leaves.
            tasks += [convert, Task(name=judge, kind="judge", after=(source.name, convert.name), **words)]
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
    return [line_of(task.name, task.digest, place_of(out, task.name)) for task in read(out)]
