"""The commands that evaluate: `quantkit eval-ppl`, `eval`, `eval-tasks`, and `cache` for what they store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import (
    WINDOWS,
    AdapterOption,
    ArtifactArgument,
    EngineFields,
    Fields,
    JsonOption,
    NotesOption,
    RevisionOption,
    Values,
    out,
    print_table,
    save,
    say,
)
from quantkit.errors import LONGEST, one_line
from quantkit.recipe import EngineSpec, EvaluationSpec, MemoryLimits, ModelRef, parse

if TYPE_CHECKING:
    from quantkit.report.records import Report

CardOption = Annotated[bool, typer.Option("--card", help="Also put the result into the artifact's README.md.")]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="The model that the artifact was made from, where it is not found.")
]


DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Forecast memory, disk and time; nothing that is written stays.")
]


def _refuse_cardless(artifact: str) -> None:
    from quantkit.artifact import MANIFEST

    if not (Path(artifact) / MANIFEST).is_file():
        raise typer.BadParameter(f"--card: {artifact} is no artifact folder, so it has no card")


def _write_card(artifact: str, report: Report) -> None:
    from quantkit.artifact import open_artifact
    from quantkit.report.card import write_card

    write_card(open_artifact(artifact), (report,))


def _model_of(model: str, revision: str | None, adapter: list[str] | None) -> ModelRef:
    return parse(ModelRef, {"model": model, "revision": revision, "adapters": tuple(adapter or ())}, "model")


def _records(engine: Values, memory: Values) -> Values:
    return {"engine": parse(EngineSpec, engine, "engine"), "memory": parse(MemoryLimits, memory, "evaluation")}


def _evaluate(model: ModelRef, json: Path | None, card: bool, settings: Values) -> Report:
    from quantkit.cli.progress import shown
    from quantkit.evaluation.evaluate import evaluate

    if card:
        _refuse_cardless(model.model)
    with shown() as progress:
        report = evaluate(model, progress=progress, **settings)
    save(json, report.model_dump_json(indent=2))
    if card:
        _write_card(model.model, report)
    return report


def _cross_check(model: ModelRef, json: Path | None, card: bool, settings: Values) -> None:
    import json as json_module
    from dataclasses import asdict

    from quantkit.cli.progress import shown
    from quantkit.evaluation.cross_check import cross_check

    if card:
        _refuse_cardless(model.model)
    with shown() as progress:
        both = cross_check(model, progress=progress, **settings)
    values = asdict(both) | {"native": both.native.model_dump(), "reference": both.reference.model_dump()}
    save(json, json_module.dumps(values | {"agrees": both.agrees}, indent=2))
    if card:
        _write_card(model.model, both.native)
    for line in (*both.native.quality(), *both.reference.quality(), *both.lines()):
        say(line)
    if not both.agrees:
        raise typer.Exit(1)


def eval_ppl(
    artifact: ArtifactArgument,
    *,
    evaluation: Annotated[Values, Fields(EvaluationSpec, (*WINDOWS, "divergence", "threads"))],
    engine: EngineFields,
    memory: Annotated[Values, Fields(MemoryLimits)],
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    card: CardOption = False,
    source: SourceOption = None,
    cross_check: Annotated[
        bool, typer.Option("--cross-check", help="Also evaluate with our own reader; exit code 1 if the two disagree.")
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Measure the perplexity of an artifact or a model, and the divergence from its source."""
    model = _model_of(artifact, revision, adapter)
    settings = {**evaluation, "source": source, **_records(engine, memory)}
    if dry_run:
        _forecast(model, json, settings | {"probes": ("perplexity",)})
        return
    if cross_check:
        _cross_check(model, json, card, settings)
        return
    report = _evaluate(model, json, card, settings | {"probes": ("perplexity",)})
    for line in report.quality():
        say(line)


def _forecast(model: ModelRef, path: Path | None, settings: Values) -> None:
    from quantkit.evaluation.evaluate import forecast
    from quantkit.report.table import megabytes

    trial = forecast(model, **settings)
    say(f"evaluating {model.model} would take, on this machine:")
    for part in trial.parts:
        size = "no forecast" if part.memory_bytes is None else megabytes(part.memory_bytes)
        how = "block by block" if part.walk else "whole"
        minutes = part.seconds / 60
        say(f"  {part.what}: {how} in {part.engine}, memory {size} at the peak, about {minutes:.1f} minutes")
    say(f"  disk: {megabytes(trial.disk_bytes)} at most")
    for note in trial.notes:
        say(f"  note: {note}")
    save(path, trial.model_dump_json(indent=2))


def evaluate_all(
    artifact: ArtifactArgument,
    *,
    evaluation: Annotated[Values, Fields(EvaluationSpec, ("probes", *WINDOWS, "threads", "divergence"))],
    engine: EngineFields,
    memory: Annotated[Values, Fields(MemoryLimits)],
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    card: CardOption = False,
    source: SourceOption = None,
    notes: NotesOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Run all probes on an artifact or a model: size, speed, memory, perplexity."""
    from quantkit.report.table import Table

    model = _model_of(artifact, revision, adapter)
    settings = {**evaluation, "source": source, **_records(engine, memory)}
    if dry_run:
        _forecast(model, json, settings)
        return
    report = _evaluate(model, json, card, settings)
    print_table(Table((report,)), notes=notes)


def eval_tasks(
    artifact: ArtifactArgument,
    *,
    tasks: Annotated[str, typer.Option(help="Tasks of lm-evaluation-harness, comma-separated.")],
    include: Annotated[
        Path | None, typer.Option(help="Folder with further task definitions; the functions they name are run.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question. Default: the task's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Samples of each task. Default: all.")] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Ask in the model's chat template.")] = False,
    n_ctx: Annotated[int | None, typer.Option("--n-ctx", help="Longest text in tokens. Default: the model's.")] = None,
    engine: EngineFields,
    revision: RevisionOption = None,
    adapter: AdapterOption = None,
    json: JsonOption = None,
) -> None:
    """Measure the accuracy of an artifact or a model on tasks of lm-evaluation-harness."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from quantkit.cli.progress import shown
    from quantkit.evaluation.tasks import evaluate_tasks

    with shown() as progress:
        report = evaluate_tasks(
            _model_of(artifact, revision, adapter), tuple(filter(None, tasks.split(","))), include=include,
            num_fewshot=num_fewshot, limit=limit, chat_template=chat_template, n_ctx=n_ctx, progress=progress,
            engine=parse(EngineSpec, engine, "engine"),
        )  # fmt: skip
    save(json, report.model_dump_json(indent=2))
    grid = Table("task", "shots", "samples", "measure", "value", title=Text(one_line(report.model.label, LONGEST)))
    for task, figures in report.results.items():
        for name, value in figures.items():
            measure, _, kind = name.partition(",")
            if measure.endswith("_stderr"):
                continue
            error = figures.get(f"{measure}_stderr,{kind}")
            shown_value = f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
            shots, samples = str(report.num_fewshot.get(task, "")), str(report.samples.get(task, ""))
            measure = f"{measure} ({kind})" if kind != "none" else measure
            grid.add_row(escape(task), shots, samples, escape(measure), shown_value)
    out.print(grid)
    by = f"lm-eval {report.lm_eval}, engine {report.engine.name} {report.engine.version} in {report.engine.dtype}"
    say(by)


def cache(
    *,
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything that no process uses now.")] = False,
    json: JsonOption = None,
) -> None:
    """List cached baselines of source models and interrupted evaluations."""
    import json as json_module

    from quantkit.evaluation.baseline import clear_cache, list_cache
    from quantkit.report.table import megabytes
    from quantkit.system.cache import cache_folder

    entries = clear_cache() if clear else list_cache()
    save(json, json_module.dumps([vars(entry) for entry in entries], indent=2))
    for entry in entries:
        say(f"{megabytes(entry.bytes):>10}  {entry.what}")
    total = megabytes(sum(entry.bytes for entry in entries))
    where = f"{total} removed from" if clear else f"{total} in"
    say(f"{where} {cache_folder()}")
