"""Measure an importance matrix (imatrix) for llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantkit.calibration.tokens import draw_tokens
from quantkit.calibration.walk import measure_importance
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.run import Checked, Run
from quantkit.conversion.check import prepare
from quantkit.errors import RecipeError
from quantkit.formats.gguf.imatrix import write_imatrix
from quantkit.formats.gguf.plan import make_plan
from quantkit.records.recipe import CalibrationSpec, ConvertRecipe, ModelRef, parse
from quantkit.system.device import AUTO, device_label, find_device
from quantkit.system.files import temporary_folder
from quantkit.system.progress import Progress
from quantkit.system.untrusted import path_of


def make_imatrix(
    model: str | Path | ModelRef,
    out: Path,
    *,
    calibration: CalibrationSpec | None = None,
    seed: int = 0,
    device: str = AUTO,
    progress: Progress | None = None,
) -> int:
    """Measure the mean squared inputs on a calibration text, write them to the new file `out`, return their number.

    Raises a QuantkitError for an unusable model or text, or if `out` exists.
    """
    out = path_of(out, RecipeError)
    if out.exists() or out.is_symlink() or not out.absolute().parent.is_dir():
        why = "is in a folder that does not exist"
        if out.exists() or out.is_symlink():
            why = "already exists"
        raise RecipeError(f"{out} {why}. Give another --out.")
    ref = model if isinstance(model, ModelRef) else parse(ModelRef, {"model": model}, "imatrix")
    values = {"method": "gguf", "seed": seed, "calibration": calibration or CalibrationSpec()}
    recipe = parse(ConvertRecipe, dict(ref) | values, "imatrix")
    progress, device = progress or Progress(), find_device(device)
    asked = replace(prepare(recipe), device=device)
    source = asked.source
    plan = make_plan(source, asked.bits)
    tokens = draw_tokens(source.tokenizer(), recipe.calibration, recipe.seed, source.config)
    job = CheckedJob.of(asked, Checked(plan), tokens)
    progress.say(f"device: {device_label(device)}")
    with temporary_folder(out.absolute().parent) as folder:
        importance = plan.with_same_inputs(measure_importance(job, Run(folder, progress)))
        write_imatrix(folder / "made", importance, plan, tokens)
        (folder / "made").replace(out)
    return len(importance)
