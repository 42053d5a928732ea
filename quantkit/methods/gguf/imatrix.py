"""Measure a model's importance matrix for llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.calibration.importance import measure_importance
from quantkit.calibration.tokens import tokens_of
from quantkit.contracts.run import Run
from quantkit.conversion.check import prepare
from quantkit.errors import RecipeError
from quantkit.formats.gguf.imatrix import write_imatrix
from quantkit.formats.gguf.plan import make_plan
from quantkit.progress import Progress
from quantkit.recipe import AUTO, CalibrationSpec, ConvertRecipe, parse
from quantkit.system.device import device_label, find_device
from quantkit.system.temporary import temporary_folder
from quantkit.untrusted import path_of


def make_imatrix(
    model: str,
    out: Path,
    *,
    calibration: CalibrationSpec | None = None,
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    seed: int = 0,
    device: str = AUTO,
    progress: Progress | None = None,
) -> int:
    """Measure a model's importance on a calibration text and write it to the new file `out`; the number of weights.

    Raises a QuantkitError for a model or a text that cannot be used, or a file that is there already.
    """
    out = path_of(out, RecipeError)
    if out.exists() or out.is_symlink() or not out.absolute().parent.is_dir():
        why = "lies in a folder that does not exist"
        if out.exists() or out.is_symlink():
            why = "is there already"
        raise RecipeError(f"{out} {why}. Give another --out.")
    values = {
        "model": model,
        "revision": revision,
        "adapters": tuple(map(str, adapters)),
        "method": "gguf",
        "seed": seed,
    }
    recipe = parse(ConvertRecipe, values | {"calibration": calibration or CalibrationSpec()}, "imatrix")
    progress, device = progress or Progress(), find_device(device)
    job = prepare(recipe).changed(device=device)
    plan = make_plan(job.source, job.bits)
    job = job.changed(calibration=tokens_of(job))
    progress.say(f"device: {device_label(device)}")
    with temporary_folder(out.absolute().parent) as folder:
        importance = plan.with_same_inputs(measure_importance(job, Run(folder, progress)))
        write_imatrix(folder / "made", importance, plan, tokens_of(job))
        (folder / "made").replace(out)
    return len(importance)
