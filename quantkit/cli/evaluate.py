"""The commands that evaluate: `quantkit eval-ppl`, `eval`, `eval-tasks`, and `cache` for what they store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table
from rich.text import Text
from typer import Option

import quantkit
from quantkit.artifact import MANIFEST, open_artifact
from quantkit.cli import options
from quantkit.cli.options import WINDOWS, Fields, Values, out, print_report, save, say, say_notes
from quantkit.cli.progress import progress_bars
from quantkit.errors import LONGEST, one_line
from quantkit.recipe import EngineSpec, EvaluationSpec, MemoryLimits, ModelRef, parse
from quantkit.system.cache import cache_folder
from quantkit.system.sizes import megabytes

if TYPE_CHECKING:
    from quantkit.report.records import Report

Result = TypeVar("Result")
WriteCard = Annotated[bool, Option("--card", help="Also put the result into the artifact's README.md.")]
SourceModel = Annotated[str | None, Option("--source", help="Model that the artifact was made from, if not found.")]
Memory = Annotated[Values, Fields(MemoryLimits)]
PERPLEXITY = ("perplexity",)


def eval_ppl(
    artifact: options.ArtifactOrModel,
    *,
    evaluation: Annotated[Values, Fields(EvaluationSpec, (*WINDOWS, "divergence", "threads"))],
    engine: options.Engine,
    memory: Memory,
    revision: options.Revision = None,
    adapter: options.Adapters = None,
    card: WriteCard = False,
    source: SourceModel = None,
    cross_check: Annotated[
        bool, Option("--cross-check", help="Compare with our own reader; exit 1 if they disagree.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.Json = None,
) -> None:
    """Measure the perplexity of an artifact or a model, and the divergence from its source."""
    model = model_ref(artifact, revision, adapter)
    settings = {**evaluation, "source": source, **_records(engine, memory)}
    if dry_run:
        _forecast(model, json, settings | {"probes": PERPLEXITY})
    elif cross_check:
        _cross_check(model, json, card, settings)
    else:
        report = _run(quantkit.evaluate, model, card, settings | {"probes": PERPLEXITY})
        save(json, report)
        _write_card(model, card, report)
        for line in report.quality():
            say(line)


def evaluate_all(
    artifact: options.ArtifactOrModel,
    *,
    evaluation: Annotated[Values, Fields(EvaluationSpec, ("probes", *WINDOWS, "threads", "divergence"))],
    engine: options.Engine,
    memory: Memory,
    revision: options.Revision = None,
    adapter: options.Adapters = None,
    card: WriteCard = False,
    source: SourceModel = None,
    notes: options.Notes = False,
    dry_run: options.DryRun = False,
    json: options.Json = None,
) -> None:
    """Run all probes on an artifact or a model: size, speed, memory, perplexity."""
    model = model_ref(artifact, revision, adapter)
    settings = {**evaluation, "source": source, **_records(engine, memory)}
    if dry_run:
        _forecast(model, json, settings)
        return
    report = _run(quantkit.evaluate, model, card, settings)
    save(json, report)
    _write_card(model, card, report)
    print_report(report, notes)


def model_ref(model: str, revision: str | None, adapters: list[str] | None) -> ModelRef:
    """Return the model that a command names; raises RecipeError."""
    return parse(ModelRef, {"model": model, "revision": revision, "adapters": tuple(adapters or ())}, "model")


def _records(engine: Values, memory: Values) -> Values:
    return {"engine": parse(EngineSpec, engine, "engine"), "memory": parse(MemoryLimits, memory, "evaluation")}


def _run(evaluate: Callable[..., Result], model: ModelRef, card: bool, settings: Values) -> Result:
    if card and not (Path(model.model) / MANIFEST).is_file():
        raise typer.BadParameter(f"--card: {model.model} is no artifact folder, so it has no card")
    with progress_bars() as progress:
        return evaluate(model, progress=progress, **settings)


def _write_card(model: ModelRef, card: bool, report: Report) -> None:
    from quantkit.report.card import write_card

    if card:
        write_card(open_artifact(model.model), (report,))


def _cross_check(model: ModelRef, json: Path | None, card: bool, settings: Values) -> None:
    from quantkit.evaluation.cross_check import cross_check

    both = _run(cross_check, model, card, settings)
    save(json, asdict(both) | {"agrees": both.agrees})
    _write_card(model, card, both.native)
    for line in (*both.native.quality(), *both.reference.quality(), *both.lines()):
        say(line)
    if not both.agrees:
        raise typer.Exit(1)


def _forecast(model: ModelRef, json: Path | None, settings: Values) -> None:
    from quantkit.evaluation.evaluate import forecast

    trial = forecast(model, **settings)
    say(f"evaluating {model.model} would take, on this machine:")
    for part in trial.parts:
        size = "no forecast" if part.memory_bytes is None else megabytes(part.memory_bytes)
        how = "block by block" if part.walk else "whole"
        minutes = part.seconds / 60
        say(f"  {part.what}: {how} in {part.engine}, memory {size} at the peak, about {minutes:.1f} minutes")
    say(f"  disk: {megabytes(trial.disk_bytes)} at most")
    say_notes(trial.notes)
    save(json, trial)


def eval_tasks(
    artifact: options.ArtifactOrModel,
    *,
    tasks: Annotated[str, Option(help="Tasks of lm-evaluation-harness, comma-separated.")],
    include: Annotated[Path | None, Option(help="Folder with more task definitions; their functions are run.")] = None,
    num_fewshot: Annotated[int | None, Option(help="Examples before each question. Default: the task's.")] = None,
    limit: Annotated[int | None, Option(help="Samples of each task. Default: all.")] = None,
    chat_template: Annotated[bool, Option("--chat-template", help="Ask in the model's chat template.")] = False,
    n_ctx: Annotated[int | None, Option("--n-ctx", help="Longest text in tokens. Default: the model's.")] = None,
    engine: options.Engine,
    revision: options.Revision = None,
    adapter: options.Adapters = None,
    json: options.Json = None,
) -> None:
    """Measure the accuracy of an artifact or a model on tasks of lm-evaluation-harness."""
    with progress_bars() as progress:
        report = quantkit.evaluate_tasks(
            model_ref(artifact, revision, adapter), tuple(filter(None, tasks.split(","))), include=include,
            num_fewshot=num_fewshot, limit=limit, chat_template=chat_template, n_ctx=n_ctx, progress=progress,
            engine=parse(EngineSpec, engine, "engine"),
        )  # fmt: skip
    save(json, report)
    grid = Table("task", "shots", "samples", "measure", "value", title=Text(one_line(report.model.label, LONGEST)))
    for task, figures in report.results.items():
        shots, samples = str(report.num_fewshot.get(task, "")), str(report.samples.get(task, ""))
        for name, value in figures.items():
            measure, _, kind = name.partition(",")
            if measure.endswith("_stderr"):
                continue
            error = figures.get(f"{measure}_stderr,{kind}")
            shown_value = f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
            measure = f"{measure} ({kind})" if kind != "none" else measure
            grid.add_row(Text(task), shots, samples, Text(measure), shown_value)
    out.print(grid)
    engine_used = report.engine
    say(f"lm-eval {report.lm_eval}, engine {engine_used.name} {engine_used.version} in {engine_used.dtype}")


def cache(
    *,
    clear: Annotated[bool, Option("--clear", help="Remove everything that no process uses now.")] = False,
    json: options.Json = None,
) -> None:
    """List cached baselines of source models and interrupted evaluations."""
    from quantkit.evaluation.baseline import clear_cache, list_cache

    entries = clear_cache() if clear else list_cache()
    save(json, [vars(entry) for entry in entries])
    for entry in entries:
        say(f"{megabytes(entry.bytes):>10}  {entry.what}")
    total = megabytes(sum(entry.bytes for entry in entries))
    say(f"{total} {'removed from' if clear else 'in'} {cache_folder()}")
