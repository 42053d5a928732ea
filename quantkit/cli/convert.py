"""`quantkit convert`: its options, those of the method that is asked for, and what it prints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import progress
from quantkit.cli.options import (
    AdapterOption,
    CalibrationFields,
    Command,
    Fields,
    ForceOption,
    JsonOption,
    ModelArgument,
    Values,
    options_of,
    print_artifact,
    save,
    say,
)
from quantkit.recipe import ConvertRecipe, ResourceSpec
from quantkit.system.ranks import device_of, joined, refuse_ranks

if TYPE_CHECKING:
    from quantkit.conversion.dry_run import DryRun

METHOD = "quantkit.method"  # where a command's context holds the method that is asked for, and click's options of it
OPTIONS = "quantkit.options"  # where it holds the values of those that are given


class ConvertCommand(Command):
    """Has the options of the method that is asked for, too; methods are loaded only then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Find the method first: then its options are known."""
        from quantkit.contracts.registry import find_method

        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        lenient: Values = {"resilient_parsing": True, "ignore_unknown_options": True, "allow_extra_args": True}
        if name := self.make_context(ctx.info_name, list(args), **lenient).params["method"]:
            method = find_method(name)
            ctx.meta[METHOD] = method, options_of(method.Options)
        rest = super().parse_args(ctx, args)
        values = {option.name: ctx.params.pop(option.name) for option in ctx.meta.get(METHOD, (None, ()))[1]}
        ctx.meta[OPTIONS] = {name: value for name, value in values.items() if value is not None}
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's own, and those of the method."""
        return [*super().get_params(ctx), *ctx.meta.get(METHOD, (None, ()))[1]]

    def known_options(self, ctx: Any) -> str:
        """The method's."""
        names = [option.opts[0] for option in ctx.meta.get(METHOD, (None, ()))[1]]
        return f" The method's options: {', '.join(names) or 'none'}" if METHOD in ctx.meta else ""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with the options of every method at its end."""
        self.epilog = _options_help()
        super().format_help(ctx, formatter)


def _options_help() -> str:
    from quantkit.contracts.registry import methods

    parts = []
    for method in methods().values():
        parts.append(f"[bold]{method.name}[/bold]: bits {', '.join(method.bits)} (default {method.default_bits})")
        for name, field in method.Options.model_fields.items():
            flag = "--" + name.replace("_", "-")
            parts.append(f"  {flag} ({field.get_default(call_default_factory=True)}): {field.description}")
    return "[bold]Options of each method[/bold]\n\n" + "\n\n".join(parts)


def convert(
    ctx: typer.Context,
    model: ModelArgument,
    *,
    recipe: Annotated[Values, Fields(ConvertRecipe, ("method", "bits", "format", "seed", "revision"))],
    adapter: AdapterOption = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Output folder. Default: MODEL-METHOD-BITS.")] = None,
    force: ForceOption = False,
    calibration: CalibrationFields,
    resources: Annotated[Values, Fields(ResourceSpec)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Forecast memory, disk and time; write nothing.")] = False,
    json: JsonOption = None,
) -> None:
    """Quantize MODEL into one artifact folder. Options of the method itself stand below."""
    from quantkit.conversion.check import prepare_job
    from quantkit.conversion.convert import follow
    from quantkit.conversion.convert import run as run_conversion
    from quantkit.conversion.dry_run import dry_run as forecast_job
    from quantkit.models.config import leave_torch_out
    from quantkit.recipe import parse

    limits = parse(ResourceSpec, resources, "convert")
    if dry_run:
        refuse_ranks("a forecast is made by one; each of several takes about the memory that it tells")
    with joined(limits.device) as here:
        job = prepare_job(
            model,
            **recipe,
            adapters=adapter or (),
            calibration=calibration,
            device=device_of(limits.device, here),
            offload_gb=limits.offload_gb,
            **ctx.meta[OPTIONS],
        )
        if not job.method.needs_torch(job.options):
            leave_torch_out()
        memory = None if limits.max_memory_gb is None else int(limits.max_memory_gb * 1e9)
        if dry_run:
            _print_forecast(forecast_job(job, folder, force=force, max_memory=memory), json)
            return
        if here.rank:
            follow(job, folder, max_memory=memory)
            return
        with progress.shown() as steps:
            artifact = run_conversion(job, folder, force=force, max_memory=memory, progress=steps)
    save(json, artifact.manifest.model_dump_json(indent=2))
    print_artifact(artifact)
    if folder is None and not progress.quiet:
        _say_next(artifact.folder, model, adapter or [])


def _say_next(folder: Path, model: str, adapters: list[str]) -> None:
    """What a user types next who was not asked where the artifact goes."""
    source = ["--source", model] if Path(model).expanduser().exists() else []
    merged = [word for adapter in adapters for word in ("--adapter", adapter)]
    say(f"Judge it: {shlex.join(['quantkit', 'eval-ppl', str(folder), *source, *merged])}")


def _print_forecast(trial: DryRun, path: Path | None) -> None:
    import json

    from quantkit.report.table import megabytes
    from quantkit.system.device import memory_of

    forecast = trial.forecast
    say(f"{trial.out} would take, on this machine:")
    if forecast is None:
        say("  memory: no forecast for this method here")
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
    say(f"  time: about {minutes:.1f} minutes and what reading and writing take")
    save(path, json.dumps(trial.to_values(), indent=2))
