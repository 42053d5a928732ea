"""Measure a model's importance matrix for llama.cpp."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from quantkit.calibration.importance import measure_importance
from quantkit.calibration.tokens import tokens_of
from quantkit.contracts.run import Run
from quantkit.conversion.check import prepare
from quantkit.errors import RecipeError
from quantkit.formats.gguf.imatrix import write_imatrix
from quantkit.formats.gguf.plan import make_plan
from quantkit.progress import Progress
from quantkit.recipe import CalibrationSpec, ConvertRecipe


def make_imatrix(
    model: str,
    out: Path,
    *,
    calibration: CalibrationSpec | None = None,
    revision: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Measure a model's importance on a calibration text and write it to the new file `out`; the number of weights.

    Raises a QuantkitError for a model or a text that cannot be used, or a file that is there already.
    """
    if out.exists() or not out.absolute().parent.is_dir():
        why = "is there already" if out.exists() else "lies in a folder that does not exist"
        raise RecipeError(f"{out} {why}. Give another --out.")
    recipe = ConvertRecipe(
        model=model, revision=revision, method="gguf", calibration=calibration or CalibrationSpec(), seed=seed
    )
    job = prepare(recipe)
    plan = make_plan(job.source, job.bits)
    job = replace(job, calibration=tokens_of(job))
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.absolute().parent) as folder:
        importance = measure_importance(job, Run(Path(folder), progress or Progress()))
        write_imatrix(Path(folder) / "made", importance, plan, tokens_of(job))
        (Path(folder) / "made").replace(out)
    return len(importance)
