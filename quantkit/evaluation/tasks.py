"""Task accuracy: lm-evaluation-harness runs its tasks on any model that an engine opens; see harness.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from quantkit.artifact import Artifact
from quantkit.conversion.agreement import refuse_untrue
from quantkit.errors import RecipeError, missing_package
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.process import run_child
from quantkit.evaluation.request import TaskSpec, TasksRequest
from quantkit.formats.source import open_model
from quantkit.models.config import note_beyond_context
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.recipe import EngineSpec, Strict, parse
from quantkit.report.records import EngineEntry, Hardware, ModelEntry, this_machine
from quantkit.system.device import described
from quantkit.system.interpreter import look
from quantkit.system.processor import usable_cores
from quantkit.system.temporary import temporary_folder
from quantkit.untrusted import path_of

MOST_FILES = 50_000  # below the folder of further tasks; lm-eval brings some 15,000


class TaskReport(Strict):
    """Accuracy on tasks: `results` by task and figure as the harness names them, with its own version."""

    model: ModelEntry
    engine: EngineEntry
    hardware: Hardware
    settings: TaskSpec
    results: dict[str, dict[str, float]]
    versions: dict[str, str]
    num_fewshot: dict[str, int]
    samples: dict[str, int]
    lm_eval: str


def _files_below(folder: str) -> Iterator[int]:
    """How many files were seen so far, folder by folder; what cannot be read counts as empty."""
    return accumulate(len(files) for _, _, files in os.walk(folder))


def evaluate_tasks(
    artifact: str | Path | Artifact | Source,
    tasks: tuple[str, ...] | list[str],
    *,
    include: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat_template: bool = False,
    n_ctx: int | None = None,
    engine: str | None = None,
    dtype: str | None = None,
    python: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> TaskReport:
    """Run tasks of lm-evaluation-harness on an artifact or a source model, in a process of its own.

    `include` is a folder with task definitions besides the harness's own; functions that they name are run.
    `limit` is a number of samples of each task, `n_ctx` the longest text in tokens (default: the model's context).
    `adapters` are folders of LoRA adapters that are merged into a source model. Raises a QuantkitError.
    """
    values = {
        "tasks": tuple(tasks),
        "include": None if include is None else str(path_of(include, RecipeError).absolute()),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "chat_template": chat_template,
        "n_ctx": n_ctx,
    }
    spec = parse(TaskSpec, values, "tasks")
    if not spec.tasks:
        raise RecipeError("no task is asked for. Give some with --tasks, such as wikitext.")
    if spec.include is not None and not Path(spec.include).is_dir():
        raise RecipeError(f"the folder {include} of further tasks does not exist")
    if spec.include is not None and any(total > MOST_FILES for total in _files_below(spec.include)):
        raise RecipeError(
            f"the folder {include} of further tasks holds more than {MOST_FILES:,} files, and lm-eval reads them all. "
            "Give the folder that holds only the tasks."
        )
    model = open_model(artifact, revision, adapters)
    chosen = choose(
        model, parse(EngineSpec, {"engine": engine, "dtype": dtype, "python": python, "device": device}, "engine")
    )
    if look(chosen.python, ("lm_eval",))[0]:
        raise missing_package("lm-eval", "tasks", ImportError(f"{chosen.python} has none"))
    if n_ctx is not None:
        note_beyond_context(model.config, n_ctx, "texts")  # refuses
    if model.artifact is not None:
        refuse_untrue(model.artifact)
    request = TasksRequest(load=chosen.load_request(model, usable_cores()), tasks=spec)
    progress = progress or Progress()
    progress.say(f"device: {described(chosen.device)}")
    with temporary_folder() as temp:
        result = run_child(request, temp, progress)
    return TaskReport(
        model=model.entry(),
        engine=chosen.entry(result.loaded),
        hardware=this_machine(),
        settings=spec,
        **result.tasks,
    )
