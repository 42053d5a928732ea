"""What the process of one task does, and tells of itself."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from filelock import FileLock

from quantkit.contracts.model import Model
from quantkit.data.texts import load_text
from quantkit.errors import QuantkitError
from quantkit.progress import Progress
from quantkit.report.card import write_card
from quantkit.report.records import read_report
from quantkit.sweep.compare import artifact_of, checked_jobs, engine_for, folder_of, report_of, report_path
from quantkit.sweep.state import LOCK, TASK, State, place_of
from quantkit.sweep.tasks import Task, open_model, read_task
from quantkit.system.memory import peak_of_children_bytes, peak_rss_bytes


def carry_out(out: Path, name: str, progress: Progress) -> None:
    """Do a task of the sweep in `out`, unless it is done; tell its state. Raises QuantkitError, OSError.

    A process that does the same task at the same time is waited for.
    """
    place = place_of(out, name)
    task = read_task(place.folder / TASK)
    with FileLock(place.folder / LOCK), place.living():
        own = {"host": platform.node(), "pid": os.getpid(), "began": time.time(), "task": task.digest}
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
    source, recipe, out = open_model(task), task.recipe, task.out
    model = Model(None, source)
    if recipe.variants:
        [checked] = checked_jobs(recipe, source, out)
        model = Model(artifact_of(checked, folder_of(out, checked.job), progress), None)
    if task.kind == "convert":
        return None
    spec, text = recipe.evaluation, load_text(recipe.evaluation.text, "evaluation")
    engine = engine_for(model, recipe.device)
    report = report_of(model, source, spec, text, engine, out, progress, anywhere=task.of_quality)
    if model.artifact is not None:
        original = read_report(report_path(out, Model(None, source).label))
        write_card(model.artifact, (original, report))
    return str(report_path(out, model.label))
