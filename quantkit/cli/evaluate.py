"""The commands that judge: `quantkit eval-ppl`, `eval`, `eval-tasks`, and `cache` for what judging keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.options import (
    CardOption,
    ContextOption,
    DeviceOption,
    DivergenceOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    LimitOption,
    ProtocolOption,
    PythonOption,
    RevisionOption,
    SourceOption,
    SubjectArgument,
    TextOption,
    ThreadsOption,
    out,
    save,
    thread_counts,
)

if TYPE_CHECKING:
    from quantkit.report.records import Report


def _refuse_cardless(subject: str) -> None:
    from quantkit.artifact import MANIFEST

    if not (Path(subject) / MANIFEST).is_file():
        raise typer.BadParameter(f"--card: {subject} is no artifact folder, so it has no card")


def _write_card(subject: str, report: Report) -> None:
    from quantkit.artifact import open_artifact
    from quantkit.report.card import write_card

    write_card(open_artifact(subject), (report,))


def _judge(subject: str, probes: tuple[str, ...], json: Path | None, card: bool, **settings: Any) -> Report:
    from quantkit.evaluation.evaluate import evaluate
    from quantkit.progress import shown

    if card:
        _refuse_cardless(subject)
    with shown() as progress:
        report = evaluate(subject, probes, progress=progress, **settings)
    save(json, report.model_dump_json(indent=2))
    if card:
        _write_card(subject, report)
    return report


def _cross_check(subject: str, json: Path | None, card: bool, **settings: Any) -> None:
    import json as json_module
    from dataclasses import asdict

    from quantkit.evaluation.cross_check import cross_check
    from quantkit.progress import shown

    if card:
        _refuse_cardless(subject)
    with shown() as progress:
        found = cross_check(subject, progress=progress, **settings)
    values = asdict(found) | {"native": found.native.model_dump(), "reference": found.reference.model_dump()}
    save(json, json_module.dumps(values | {"agrees": found.agrees}, indent=2))
    if card:
        _write_card(subject, found.native)
    for line in (*found.native.quality(), *found.reference.quality(), *found.lines()):
        out.print(line, highlight=False, soft_wrap=True)
    if not found.agrees:
        raise typer.Exit(1)


def eval_ppl(
    subject: SubjectArgument,
    text: TextOption = None,
    protocol: ProtocolOption = "llama.cpp",
    n_ctx: ContextOption = None,
    limit: LimitOption = None,
    engine: EngineOption = None,
    dtype: DtypeOption = None,
    python: PythonOption = None,
    device: DeviceOption = "cpu",
    revision: RevisionOption = None,
    card: CardOption = False,
    divergence: DivergenceOption = True,
    source: SourceOption = None,
    cross_check: Annotated[
        bool, typer.Option("--cross-check", help="Also judge with our own reader; exit code 1 where the two disagree.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Measure the perplexity of an artifact or a model, and the divergence from its source."""
    if cross_check:
        from quantkit.evaluation.engine_choice import EngineSpec

        _cross_check(
            subject, json, card, text=text, protocol=protocol, n_ctx=n_ctx, limit=limit,
            engine=EngineSpec(engine, dtype, python, device), revision=revision, source=source,
            divergence=divergence,
        )  # fmt: skip
        return
    report = _judge(
        subject, ("perplexity",), json, card, text=text, protocol=protocol, n_ctx=n_ctx, limit=limit, engine=engine,
        dtype=dtype, python=python, device=device, revision=revision, divergence=divergence, source=source,
    )  # fmt: skip
    for line in report.quality():
        out.print(line, highlight=False, soft_wrap=True)


def evaluate_all(
    subject: SubjectArgument,
    probes: Annotated[
        str | None, typer.Option(help="Probes, such as size,speed. Default: size,memory,speed,perplexity.")
    ] = None,
    text: TextOption = None,
    protocol: ProtocolOption = "llama.cpp",
    n_ctx: ContextOption = None,
    limit: LimitOption = None,
    threads: ThreadsOption = None,
    engine: EngineOption = None,
    dtype: DtypeOption = None,
    python: PythonOption = None,
    device: DeviceOption = "cpu",
    revision: RevisionOption = None,
    card: CardOption = False,
    divergence: DivergenceOption = True,
    source: SourceOption = None,
    json: JsonOption = None,
) -> None:
    """Run all probes on an artifact or a model: size, speed, memory, perplexity."""
    from quantkit.report.table import Table

    chosen = tuple(probes.split(",")) if probes else ()
    report = _judge(
        subject, chosen, json, card, text=text, protocol=protocol, n_ctx=n_ctx, limit=limit,
        threads=thread_counts(threads), engine=engine, dtype=dtype, python=python, device=device, revision=revision,
        divergence=divergence, source=source,
    )  # fmt: skip
    Table((report,)).show(out)


def eval_tasks(
    subject: SubjectArgument,
    tasks: Annotated[str, typer.Option(help="Tasks of lm-evaluation-harness, comma-separated.")],
    include: Annotated[
        Path | None, typer.Option(help="Folder with further task definitions; the functions they name are run.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question. Default: the task's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Samples of each task. Default: all.")] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Ask in the model's chat template.")] = False,
    n_ctx: Annotated[int | None, typer.Option("--n-ctx", help="Longest text in tokens. Default: the model's.")] = None,
    engine: EngineOption = None,
    dtype: DtypeOption = None,
    python: PythonOption = None,
    device: DeviceOption = "cpu",
    revision: RevisionOption = None,
    json: JsonOption = None,
) -> None:
    """Measure the accuracy of an artifact or a model on tasks of lm-evaluation-harness."""
    from rich.table import Table

    from quantkit.evaluation.tasks import evaluate_tasks
    from quantkit.progress import shown

    with shown() as progress:
        report = evaluate_tasks(
            subject, tuple(filter(None, tasks.split(","))), include=include, num_fewshot=num_fewshot, limit=limit,
            chat_template=chat_template, n_ctx=n_ctx, engine=engine, dtype=dtype, python=python, device=device,
            revision=revision, progress=progress,
        )  # fmt: skip
    save(json, report.model_dump_json(indent=2))
    grid = Table("task", "shots", "samples", "measure", "value", title=report.subject.label)
    for task, figures in report.results.items():
        for name, value in figures.items():
            measure, _, kind = name.partition(",")
            if measure.endswith("_stderr"):
                continue
            error = figures.get(f"{measure}_stderr,{kind}")
            shown_value = f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
            shots, samples = str(report.num_fewshot.get(task, "")), str(report.samples.get(task, ""))
            grid.add_row(task, shots, samples, f"{measure} ({kind})" if kind != "none" else measure, shown_value)
    out.print(grid)
    engine = f"lm-eval {report.lm_eval}, engine {report.engine.name} {report.engine.version} in {report.engine.dtype}"
    out.print(engine, highlight=False, soft_wrap=True)


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything that no process uses now.")] = False,
    json: JsonOption = None,
) -> None:
    """List what judging keeps: baselines of source models, and evaluations that were interrupted."""
    import json as json_module

    from quantkit.evaluation.baseline import clear_cache, list_cache
    from quantkit.report.table import megabytes
    from quantkit.system.cache import cache_folder

    entries = clear_cache() if clear else list_cache()
    save(json, json_module.dumps([vars(entry) for entry in entries], indent=2))
    for entry in entries:
        out.print(f"{megabytes(entry.bytes):>10}  {entry.what}", highlight=False, soft_wrap=True)
    total = megabytes(sum(entry.bytes for entry in entries))
    where = f"{total} removed from" if clear else f"{total} in"
    out.print(f"{where} {cache_folder()}", highlight=False, soft_wrap=True)
