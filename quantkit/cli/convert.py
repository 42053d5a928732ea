"""The command `quantkit convert`, with the options of the method that is given."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from quantkit.cli import options, progress
from quantkit.cli.options import Fields, Values, print_artifact, save, say
from quantkit.records.recipe import ConvertRecipe, ResourceSpec, Strict
from quantkit.system.device import memory_of
from quantkit.system.ranks import device_of, joined, refuse_ranks
from quantkit.system.sizes import megabytes

if TYPE_CHECKING:
    from quantkit.conversion.dry_run import DryRun

NO_OPTIONS = Fields(Strict)


def method_options(words: Sequence[str]) -> Fields:
    """Return the options of the method named after `--method`; raises RecipeError if it is unknown."""
    from quantkit.contracts.registry import find_method

    after = (following for word, following in pairwise(words) if word == "--method")
    name = next((word.partition("=")[2] for word in words if word.startswith("--method=")), None) or next(after, None)
    if name is None:
        return NO_OPTIONS
    method = find_method(name)
    return Fields(method.Options, unset=True, panel=f"Options of {name}")


def convert(
    model: options.Model,
    *,
    recipe: Annotated[Values, Fields(ConvertRecipe, ("method", "bits", "format", "seed", "revision"))],
    adapter: options.Adapters = None,
    folder: Annotated[Path | None, Option("--out", help="Output folder. Default: MODEL-METHOD-BITS.")] = None,
    force: options.Force = False,
    calibration: options.Calibration,
    resources: Annotated[Values, Fields(ResourceSpec)],
    of_method: Annotated[Values, NO_OPTIONS],
    dry_run: options.DryRun = False,
    json: options.Json = None,
) -> None:
    """Quantize MODEL into one artifact folder.

    `quantkit convert --method METHOD --help` also shows the options of a method; `quantkit methods` lists the methods.
    """
    from quantkit.conversion.check import check, prepare
    from quantkit.conversion.convert import follow, recipe_of
    from quantkit.conversion.convert import run as run_conversion
    from quantkit.conversion.dry_run import dry_run as forecast_job
    from quantkit.system.modules import leave_torch_out

    if dry_run:
        refuse_ranks("run --dry-run in one process; each of several needs about the same memory")
    named = {"method": recipe.pop("method"), "bits": recipe.pop("bits", None)}
    settings = {**recipe, **of_method, **resources, "adapters": adapter or ()}
    asked, limits = recipe_of(model, calibration=calibration, settings=settings, **named)
    with joined(limits.device) as here:
        job = prepare(asked, resources=limits.model_copy(update={"device": device_of(limits.device, here)}))
        if not job.method.needs_torch(job.options):
            leave_torch_out()
        ready = check(job, folder, force)
        if dry_run:
            _print_forecast(forecast_job(ready), json)
            return
        if here.rank:
            follow(ready)
            return
        with progress.progress_bars() as steps:
            artifact = run_conversion(ready, steps)
    save(json, artifact.manifest)
    print_artifact(artifact)
    if folder is None and not progress.is_quiet:
        source = ["--source", model] if Path(model).expanduser().exists() else []
        merged = [word for one in adapter or () for word in ("--adapter", one)]
        say(f"Evaluate it: {shlex.join(['quantkit', 'eval-ppl', str(artifact.folder), *source, *merged])}")


def _print_forecast(trial: DryRun, path: Path | None) -> None:
    forecast = trial.forecast
    say(f"{trial.out} would need, on this machine:")
    if forecast is None:
        say("  memory: no forecast for this method")
    else:
        peak = forecast.peak_phase
        parts = f"{megabytes(forecast.process)} for the process, {megabytes(forecast.phases[peak])} for {peak}"
        say(f"  memory: {megabytes(forecast.memory)} at the peak ({parts})")
        if forecast.on_device:
            say(f"  {memory_of(trial.device)}: {megabytes(forecast.on_device)} at the peak")
        if forecast.offloaded:
            say(f"  {megabytes(forecast.offloaded)} of activations go to a file")
    say(f"  disk: {megabytes(trial.disk)} at most")
    minutes = (trial.before_seconds + trial.work_seconds) / 60
    say(f"  time: about {minutes:.1f} minutes, plus reading and writing")
    save(path, trial.to_values())
