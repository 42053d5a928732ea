"""The commands that evaluate, `eval-ppl`, `eval` and `eval-tasks`, and `cache` for their cached results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table
from rich.text import Text
from typer import Option

from quantkit.cli import options
from quantkit.cli.options import WINDOWS, Fields, ModelOptions, Values, out, print_report, save, say, say_notes
from quantkit.cli.progress import progress_bars
from quantkit.errors import LONGEST, one_line
from quantkit.records.artifact import MANIFEST, open_artifact
from quantkit.records.recipe import EvaluationSpec, MemoryLimits, parse
from quantkit.system.files import cache_folder
from quantkit.system.sizes import megabytes

if TYPE_CHECKING:
    from quantkit.records.report import Report

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options that `eval` and `eval-ppl` share."""

    artifact: options.ArtifactOrModel
    about: ModelOptions
    memory: Annotated[Values, Fields(MemoryLimits)]
    source: Annotated[str | None, Option(help="Source model of the artifact, if quantkit does not find it.")] = None
    card: Annotated[bool, Option("--card", help="Also put the result into the artifact's README.md.")] = False
    dry_run: options.DryRun = False
    json: options.Json = None

    def run(self, evaluate: Callable[..., Result], evaluation: Values) -> Result:
        if self.card and not (Path(self.artifact) / MANIFEST).is_file():
            raise typer.BadParameter(f"--card: {self.artifact} is not an artifact folder, so it has no card")
        with progress_bars() as progress:
            return evaluate(self.about.ref(self.artifact), progress=progress, **self.settings, **evaluation)

    @property
    def settings(self) -> Values:
        memory = parse(MemoryLimits, self.memory, "evaluation")
        return {"source": self.source, "engine": self.about.engine_spec, "memory": memory}

    def keep(self, report: Report, result: object = None) -> None:
        """Write `result` (default: the report) as JSON, and the report into the model card, if requested."""
        save(self.json, result or report)
        if self.card:
            from quantkit.report.card import write_card

            write_card(open_artifact(self.artifact), (report,))


def eval_ppl(
    evaluation: Annotated[Values, Fields(EvaluationSpec, (*WINDOWS, "divergence", "threads"))],
    asked: EvaluationOptions,
    *,
    cross_check: Annotated[
        bool, Option("--cross-check", help="Compare the engine with the reference reader; exit 1 if they disagree.")
    ] = False,
) -> None:
    """Measure the perplexity of an artifact or a model, and the divergence from its source."""
    perplexity = evaluation | {"probes": ("perplexity",)}
    if asked.dry_run:
        _forecast(asked, perplexity)
    elif cross_check:
        _cross_check(asked, evaluation)
    else:
        from quantkit.evaluation.evaluate import evaluate

        report = asked.run(evaluate, perplexity)
        asked.keep(report)
        for line in report.quality():
            say(line)


def evaluate_all(
    evaluation: Annotated[Values, Fields(EvaluationSpec, ("probes", *WINDOWS, "threads", "divergence"))],
    asked: EvaluationOptions,
    *,
    notes: options.Notes = False,
) -> None:
    """Run all probes on an artifact or a model: size, speed, memory, perplexity."""
    if asked.dry_run:
        _forecast(asked, evaluation)
        return
    from quantkit.evaluation.evaluate import evaluate

    report = asked.run(evaluate, evaluation)
    asked.keep(report)
    print_report(report, notes)


def _cross_check(asked: EvaluationOptions, evaluation: Values) -> None:
    from quantkit.evaluation.cross_check import cross_check

    both = asked.run(cross_check, evaluation)
    asked.keep(both.native, asdict(both) | {"agrees": both.agrees})
    for line in (*both.native.quality(), *both.reference.quality(), *both.lines()):
        say(line)
    if not both.agrees:
        raise typer.Exit(1)


def _forecast(asked: EvaluationOptions, evaluation: Values) -> None:
    from quantkit.evaluation.evaluate import forecast

    trial = forecast(asked.about.ref(asked.artifact), **asked.settings, **evaluation)
    say(f"evaluating {asked.artifact} would need, on this machine:")
    for part in trial.parts:
        size = "no forecast" if part.memory_bytes is None else megabytes(part.memory_bytes)
        how = "block by block" if part.walk else "whole"
        minutes = part.seconds / 60
        say(f"  {part.what}: {how} in {part.engine}, memory {size} at the peak, about {minutes:.1f} minutes")
    say(f"  disk: {megabytes(trial.disk_bytes)} at most")
    say_notes(trial.notes)
    save(asked.json, trial)


def eval_tasks(
    artifact: options.ArtifactOrModel,
    *,
    tasks: Annotated[str, Option(help="Tasks of lm-evaluation-harness, comma-separated.")],
    include: Annotated[Path | None, Option(help="Folder with more task definitions; quantkit runs their code.")] = None,
    num_fewshot: Annotated[int | None, Option(help="Examples before each question. Default: the task's.")] = None,
    limit: Annotated[int | None, Option(help="Samples of each task. Default: all.")] = None,
    chat_template: Annotated[bool, Option("--chat-template", help="Use the model's chat template.")] = False,
    n_ctx: Annotated[int | None, Option("--n-ctx", help="Longest text in tokens. Default: the model's.")] = None,
    about: ModelOptions,
    json: options.Json = None,
) -> None:
    """Measure the accuracy of an artifact or a model on tasks of lm-evaluation-harness."""
    from quantkit.evaluation.tasks import evaluate_tasks

    with progress_bars() as progress:
        report = evaluate_tasks(
            about.ref(artifact), tuple(filter(None, tasks.split(","))), include=include,
            num_fewshot=num_fewshot, limit=limit, chat_template=chat_template, n_ctx=n_ctx, progress=progress,
            engine=about.engine_spec,
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
    clear: Annotated[bool, Option("--clear", help="Remove all entries that no process is using.")] = False,
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
