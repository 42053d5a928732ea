"""What of a sweep is done, what cannot be done, and what memory the rest takes; before anything is begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.contracts.windows import chunk_of
from quantkit.conversion.check import CheckedJob
from quantkit.data.texts import Text, load_text
from quantkit.errors import DependencyError, QuantkitError, RecipeError, ReportError
from quantkit.evaluation.chunks.records import difference, kept_chunk
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import Judgement
from quantkit.evaluation.evaluate import prepare as prepare_judgement
from quantkit.evaluation.forecast.memory import ends_of, holding_of, need_of_copy
from quantkit.models.source import Source
from quantkit.recipe import EngineSpec, SweepRecipe, WalkSpec
from quantkit.report.records import read_report
from quantkit.sweep.chunked import chunk_spec, chunks_of
from quantkit.sweep.compare import checked_jobs, folder_of, kept_artifact, kept_report, report_path
from quantkit.sweep.state import State, place_of
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


def look(
    tasks: Sequence[Task], recipe: SweepRecipe, out: Path, machines: frozenset[str], most_memory: int | None
) -> Looked:
    """Look at `tasks`, for an executor that reaches `machines` and has a machine with `most_memory` bytes.

    Raises RecipeError and DependencyError for what no task could do.
    """
    looked = Looked()
    text = load_text(recipe.evaluation.text, "evaluation")
    models: dict[str, _OfModel] = {}
    for task in tasks:
        place = place_of(out, task.name)
        if task.machine is not None and task.machine not in machines:
            # Whether it is done can be known there alone: a report's hash has the hardware.
            if (path := told_report(task, place.state())) is not None:
                looked.made[task.name] = path
            continue
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


def told_report(task: Task, state: State | None) -> Path | None:
    """The report that a task says it has left, where it is that of this task and can be read."""
    if state is None or state.state != "done" or state.report is None or state.task != task.digest:
        return None
    path = Path(state.report)
    try:
        read_report(path)
    except ReportError:
        return None
    return path


@dataclass
class _OfModel:
    """What the tasks of one model share: its source, and the checked conversion and the artifact of each variant."""

    source: Source
    text: Text
    most_memory: int | None
    variants: dict[str, tuple[CheckedJob, Artifact | None]] = field(default_factory=dict)
    judgements: dict[tuple[str, str | None, bool], Judgement] = field(default_factory=dict)
    reports: dict[tuple[str, str | None], Path | None] = field(default_factory=dict)

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
        if (report := self._report(task, model)) is not None:
            return report, None
        judgement = self._judgement(task, model)
        chunk = task.part
        if chunk is not None:
            there = kept_chunk(chunks_of(task.out, model.label, task.chunks), chunk)
            if there is not None and difference(there.decides, judgement.decides(None)) is None:
                return chunks_of(task.out, model.label, task.chunks), None
        settled = judgement.settled
        needs = [settled.model.memory]
        if judgement.baseline is not None and judgement.kept_baseline() is None:
            needs.append(settled.baseline.memory)
        return None, _beside_us(needs)

    def _variant(self, task: Task) -> tuple[CheckedJob, Artifact | None]:
        if task.variant not in self.variants:
            [checked] = checked_jobs(task.recipe, self.source, task.out, self.most_memory)
            self.variants[task.variant] = checked, kept_artifact(checked, folder_of(task.out, checked.job))
        return self.variants[task.variant]

    def _report(self, task: Task, model: Model) -> Path | None:
        key = task.variant, task.machine
        if key not in self.reports:
            spec, anywhere = task.recipe.evaluation, task.of_quality
            kept = kept_report(model, self.source, spec, self.text, task.reports, anywhere=anywhere)
            self.reports[key] = None if kept is None else report_path(task.reports, model.label)
        return self.reports[key]

    def _judgement(self, task: Task, model: Model) -> Judgement:
        key = task.variant, task.machine, task.chunk is None
        if key not in self.judgements:
            self.judgements[key] = self._prepared(task, model)
        return self.judgements[key]

    def _prepared(self, task: Task, model: Model) -> Judgement:
        spec = task.recipe.evaluation if task.chunk is None else chunk_spec(task.recipe.evaluation)
        limit = WalkSpec(max_memory_gb=None if self.most_memory is None else self.most_memory / 1e9)
        judgement = prepare_judgement(model, spec, self.text, choose(model, EngineSpec()), self.source, limit)
        if task.chunk is not None:
            windows = judgement.judged.windows
            parts = [chunk_of(windows, i, task.chunks) for i in range(task.chunks)]
            if any(first == stop for first, stop in parts):
                batches = sum(first != stop for first, stop in parts)
                raise RecipeError(
                    f"chunks = {task.chunks}: the text's {len(windows)} windows are computed in {batches} batches, "
                    f"which are not divided. Give at most {batches}."
                )
        return judgement

    def _memory_of_copy(self, task: Task, checked: CheckedJob) -> int | None:
        """Of judging what is still to be made; None where it is not forecast, or will be judged block by block."""
        judgement = self._judgement(task, Model(None, self.source))
        job = checked.job
        bits = job.recipe.bits or job.method.default_bits
        holding = holding_of(Model(None, self.source))
        holding = replace(holding, format=job.format.name, weight_bytes=job.checked.nbytes, bits=bits)
        windows, ends = judgement.judged.windows, ends_of(self.source.config)
        need = need_of_copy(job.format.engines[0], holding, ends, windows, self.source)
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
        path = looked.made.get(task.name) or told_report(task, place_of(out, task.name).state())
        if path is not None:
            rows.append((task, path))
    return rows
