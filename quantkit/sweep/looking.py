"""What of a sweep is done, what cannot be done, and what memory the rest takes; before anything is begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.conversion.check import CheckedJob
from quantkit.data.texts import Text, load_text
from quantkit.errors import DependencyError, QuantkitError, RecipeError
from quantkit.evaluation.evaluate import Evaluation, prepare
from quantkit.evaluation.memory import need_of_copy
from quantkit.models.source import Source
from quantkit.recipe import MemoryLimits, SweepRecipe
from quantkit.sweep.compare import checked_jobs, engine_for, folder_of, kept_artifact, kept_report, report_path
from quantkit.sweep.state import place_of
from quantkit.sweep.tasks import Task, open_model


@dataclass
class Looked:
    """By the names of tasks: what was `made`, why one has `failed`, and bytes of `memory` that one takes, if known."""

    made: dict[str, Path] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def knows(self, task: Task) -> bool:
        """Whether nothing is left to do of it."""
        return task.name in self.made or task.name in self.failed


def look(tasks: Sequence[Task], recipe: SweepRecipe, most_memory: int | None) -> Looked:
    """Look at `tasks`, for an executor that has a machine with `most_memory` bytes.

    Raises RecipeError and DependencyError for what no task could do.
    """
    looked = Looked()
    text = load_text(recipe.evaluation.text, "evaluation")
    models: dict[str, _OfModel] = {}
    for task in tasks:
        try:
            if task.model not in models:
                models[task.model] = _OfModel(open_model(task), text, most_memory)
            made, memory = models[task.model].look(task)
        except (RecipeError, DependencyError):
            raise
        except QuantkitError as error:
            looked.failed[task.name] = f"{type(error).__name__}: {error}"
        else:
            if made is not None:
                looked.made[task.name] = made
            if memory is not None:
                looked.memory[task.name] = memory
    return looked


@dataclass
class _OfModel:
    """What the tasks of one model share: its source, and the checked conversion and the artifact of each variant."""

    source: Source
    text: Text
    most_memory: int | None
    variants: dict[str, tuple[CheckedJob, Artifact | None]] = field(default_factory=dict)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)

    def look(self, task: Task) -> tuple[Path | None, int | None]:
        """What the task has made, or about what memory it takes."""
        model = Model(None, self.source)
        if task.recipe.variants:
            checked, artifact = self._variant(task)
            if task.kind == "convert":
                forecast = None if checked.forecast is None else checked.forecast.memory
                return (None, forecast) if artifact is None else (artifact.folder, None)
            if artifact is None:
                return None, self._memory_of_copy(task, checked)
            model = Model(artifact, None)
        spec, engine = task.recipe.evaluation, engine_for(model, task.recipe.device)
        if kept_report(model, self.source, spec, self.text, engine, task.out, anywhere=task.of_quality) is not None:
            return report_path(task.out, model.label), None
        evaluation = self._evaluation(task, model)
        plans = (evaluation.plan, evaluation.baseline_plan)
        return None, _beside_us([plan.need.memory for plan in plans if plan is not None])

    def _variant(self, task: Task) -> tuple[CheckedJob, Artifact | None]:
        if task.variant not in self.variants:
            [checked] = checked_jobs(task.recipe, self.source, task.out, self.most_memory)
            self.variants[task.variant] = checked, kept_artifact(checked, folder_of(task.out, checked.job))
        return self.variants[task.variant]

    def _evaluation(self, task: Task, model: Model) -> Evaluation:
        if task.variant not in self.evaluations:
            spec, engine = task.recipe.evaluation, engine_for(model, task.recipe.device)
            limit = MemoryLimits(max_memory_gb=None if self.most_memory is None else self.most_memory / 1e9)
            self.evaluations[task.variant] = prepare(model, spec, self.text, engine, self.source, limit)
        return self.evaluations[task.variant]

    def _memory_of_copy(self, task: Task, checked: CheckedJob) -> int | None:
        """Of judging what is still to be made; None where it is not forecast, or will be judged block by block."""
        evaluation = self._evaluation(task, Model(None, self.source))
        job = checked.job
        bits = job.recipe.bits or job.method.default_bits
        need = need_of_copy(self.source, job.format, job.checked.nbytes, bits, evaluation.cut.windows)
        if need.memory is not None and self.most_memory is not None and need.memory > self.most_memory:
            return None
        return _beside_us([need.memory])


def _beside_us(needs: Sequence[int | None]) -> int | None:
    """The largest of the forecasts of a task's child, with what the task's own process holds: about as much as ours."""
    known = [need for need in needs if need is not None]
    return max(known) + psutil.Process().memory_info().rss if known else None


def rows_of(tasks: Sequence[Task], out: Path, looked: Looked) -> list[tuple[Task, Path]]:
    """The judgements that are there, each with its report."""
    rows = []
    for task in tasks:
        if task.kind != "judge" or task.name in looked.failed:
            continue
        path, state = looked.made.get(task.name), place_of(out, task.name).state()
        if path is None and state is not None and state.report is not None:
            path = Path(state.report)
        if path is not None:
            rows.append((task, path))
    return rows
