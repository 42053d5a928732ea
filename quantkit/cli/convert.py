"""`quantkit convert`: its options, those of the method that is asked for, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel
from typer.core import TyperCommand

from quantkit.cli.options import (
    CalibrationText,
    JsonOption,
    Length,
    ModelArgument,
    RevisionOption,
    SeedOption,
    Sequences,
    out,
    print_artifact,
    save,
)
from quantkit.errors import near_miss

ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}


def _options_help() -> str:
    from quantkit.contracts.registry import methods

    parts = []
    for method in methods().values():
        parts.append(f"[bold]{method.name}[/bold]: bits {', '.join(method.bits)} (default {method.default_bits})")
        for name, field in method.Options.model_fields.items():
            flag = "--" + name.replace("_", "-")
            parts.append(f"  {flag} ({field.get_default(call_default_factory=True)}): {field.description}")
    return "[bold]Options of each method[/bold]\n\n" + "\n\n".join(parts)


class ConvertCommand(TyperCommand):
    """Adds the methods' own options to the help; methods are loaded only then."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with the options of every method at its end."""
        self.epilog = _options_help()
        super().format_help(ctx, formatter)


def method_options(arguments: list[str], model: type[BaseModel]) -> dict[str, Any]:
    """Read `--group-size 64 --desc-act` against a method's options; raises typer.BadParameter."""
    values: dict[str, Any] = {}
    flags = {"--" + name.replace("_", "-"): name for name in model.model_fields}
    i = 0
    while i < len(arguments):
        flag, equals, value = arguments[i].partition("=")
        negated = flag.startswith("--no-") and "--" + flag[5:] in flags
        name = flags.get("--" + flag[5:] if negated else flag)
        if name is None:
            known = ", ".join(flags) or "none"
            raise typer.BadParameter(f"no such option {flag}.{near_miss(flag, flags)} The method's options: {known}")
        i += 1
        is_flag = model.model_fields[name].annotation is bool
        if negated:
            values[name] = False
        elif equals:
            values[name] = yaml.safe_load(value)
        elif i < len(arguments) and not arguments[i].startswith("--"):
            values[name] = yaml.safe_load(arguments[i])
            i += 1
        elif is_flag:
            values[name] = True
        else:
            raise typer.BadParameter(f"the option {flag} needs a value")
    return values


def convert(
    ctx: typer.Context,
    model: ModelArgument,
    method: Annotated[str, typer.Option(help="gptq, awq, nf4, ctranslate2, gguf or rtn; see `quantkit methods`.")],
    bits: Annotated[str | None, typer.Option(help="4, int8, Q4_K_M, ... as the method says it.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Output folder. Default: MODEL-METHOD-BITS.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing artifact.")] = False,
    calibration_text: CalibrationText = None,
    calibration_sequences: Sequences = 64,
    calibration_length: Length = 512,
    seed: SeedOption = 0,
    revision: RevisionOption = None,
    device: Annotated[str, typer.Option(help="Where gptq and awq compute: cpu, cuda, cuda:1.")] = "cpu",
    spill_gb: Annotated[
        float | None,
        typer.Option(
            min=0, help="Activations of more than this go to a file. Default: 0.02; on cuda a quarter of its memory."
        ),
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option("--memory-limit", min=0, help="Most GB of memory to take. Default: what is free.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Forecast memory, disk and time; write nothing.")] = False,
    json: JsonOption = None,
) -> None:
    """Quantize MODEL into one artifact folder. Options of the method itself stand below."""
    from quantkit.contracts.registry import find_method
    from quantkit.conversion.check import prepare_job
    from quantkit.conversion.convert import run as run_conversion
    from quantkit.conversion.dry_run import dry_run as forecast_job
    from quantkit.models.config import leave_torch_out
    from quantkit.progress import shown

    options = method_options(ctx.args, find_method(method).Options)
    calibration = {"text": calibration_text, "sequences": calibration_sequences, "length": calibration_length}
    job = prepare_job(
        model, method, bits, calibration=calibration, revision=revision, seed=seed, device=device, spill_gb=spill_gb,
        **options,
    )  # fmt: skip
    if find_method(method).light(job.options):
        leave_torch_out()
    memory = None if memory_gb is None else int(memory_gb * 1e9)
    if dry_run:
        _forecast(forecast_job(job, folder, force=force, memory=memory), json)
        return
    with shown() as progress:
        artifact = run_conversion(job, folder, force=force, memory=memory, progress=progress)
    save(json, artifact.manifest.model_dump_json(indent=2))
    print_artifact(artifact)


def _forecast(found: Any, path: Path | None) -> None:
    import json

    from quantkit.report.table import megabytes

    f = found.forecast
    out.print(f"{found.out} would take, on this machine:", highlight=False)
    if f is None:
        out.print("  memory: no forecast for this method here", highlight=False)
    else:
        parts = f"{megabytes(f.process)} for the process, {megabytes(f.phases[f.peak_phase])} for {f.peak_phase}"
        out.print(f"  memory: {megabytes(f.memory)} at the peak ({parts})", highlight=False, soft_wrap=True)
        if f.spilled:
            out.print(f"  {megabytes(f.spilled)} of activations go to a file", highlight=False)
    out.print(f"  disk: {megabytes(found.disk)} at most", highlight=False)
    minutes = (found.before_seconds + found.work_seconds) / 60
    out.print(f"  time: about {minutes:.1f} minutes and what reading and writing take", highlight=False)
    save(path, json.dumps(found.to_values(), indent=2))
