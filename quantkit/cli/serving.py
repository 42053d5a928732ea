"""The commands `serve`, and `bench`, which measures the speed of a model in this process or of a server."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from quantkit.cli import options
from quantkit.cli.options import Fields, ModelOptions, Values, out, print_report, save, say, say_notes
from quantkit.cli.progress import progress_bars
from quantkit.errors import LONGEST, one_line
from quantkit.records.recipe import EngineSpec, EvaluationSpec, LoadTestSpec, MemoryLimits, ModelRef, ServeSpec, parse

if TYPE_CHECKING:
    from quantkit.serving.load_test import LoadReport

PROBES = ("size", "memory", "speed", "throughput", "answers")
REPEATS = 5  # llama-bench's default
SHARED = ("max_tokens", "price_per_hour")  # fields of LoadTestSpec that also apply to measuring in process
# Options that need --endpoint, and options that exclude it.
OF_A_SERVER = ("model", "api", "api_key_env", "prompts", *(n for n in LoadTestSpec.model_fields if n not in SHARED))
IN_PROCESS = ("threads", "revision", "adapter", *EngineSpec.model_fields)


def bench(
    ctx: typer.Context,
    artifact: Annotated[
        str | None, Argument(metavar="MODEL", help="Artifact folder or model, without --endpoint.")
    ] = None,
    *,
    evaluation: Annotated[Values, Fields(EvaluationSpec, ("threads",))],
    about: ModelOptions,
    endpoint: Annotated[str | None, Option(help="Server with OpenAI's API, such as http://127.0.0.1:8000/v1.")] = None,
    model: Annotated[str | None, Option(help="The model's name at the endpoint.")] = None,
    api: Annotated[Literal["completions", "chat"], Option(help="chat uses the chat template.")] = "completions",
    api_key_env: Annotated[str | None, Option(help="Environment variable with the endpoint's key.")] = None,
    prompts: Annotated[Path | None, Option(help="UTF-8 file, one prompt per line. Default: nine of ours.")] = None,
    settings: Annotated[Values, Fields(LoadTestSpec)],
    notes: options.Notes = False,
    json: options.Json = None,
) -> None:
    """Measure how fast an artifact generates, in process or behind a server (--endpoint)."""
    if (artifact is None) == (endpoint is None):
        raise typer.BadParameter("give an artifact or a model to measure in process, or --endpoint URL for a server")
    for name in OF_A_SERVER if endpoint is None else IN_PROCESS:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            where = "servers: add --endpoint" if endpoint is None else "measuring in process: leave --endpoint out"
            raise typer.BadParameter(f"--{name.replace('_', '-')} is for {where}")
    if endpoint is None:
        evaluation |= {name: settings[name] for name in SHARED if name in settings}
        _in_process(about.ref(str(artifact)), about.engine_spec, evaluation, notes, json)
        return
    from quantkit.serving.client import Endpoint
    from quantkit.serving.load_test import prompts_of, run_load_test

    if model is None:
        raise typer.BadParameter("--endpoint needs the model's name on the server: --model NAME")
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise typer.BadParameter(f"--api-key-env: the environment variable {api_key_env} is not set")
    key = os.environ[api_key_env] if api_key_env else None
    spec = parse(LoadTestSpec, settings, "bench")
    texts = None if prompts is None else prompts_of(prompts)
    with progress_bars() as progress:
        report = run_load_test(Endpoint(endpoint, model, api, key), spec, texts, progress)
    save(json, report)
    _print_load(report)
    if not report.completed:
        raise typer.Exit(1)


def _in_process(model: ModelRef, engine: EngineSpec, settings: Values, notes: bool, json: Path | None) -> None:
    from quantkit.evaluation.evaluate import evaluate

    with progress_bars() as progress:
        report = evaluate(
            model, PROBES, limit=1, repeats=REPEATS, memory=MemoryLimits(walk=False), progress=progress,
            engine=engine, **settings,
        )  # fmt: skip
    save(json, report)
    print_report(report, notes)


def _print_load(report: LoadReport) -> None:
    from quantkit.serving.client import KINDS, OK

    grid = Table("", "median", "p90", "p99", title=Text(one_line(f"{report.model} at {report.endpoint}", LONGEST)))
    for name, title in (
        ("ttft_ms", "time to first token, ms"),
        ("tpot_ms", "time per output token, ms"),
        ("itl_ms", "between two chunks of text, ms"),
        ("latency_ms", "whole answer, ms"),
    ):
        if (m := report.find(name)) is not None:
            grid.add_row(title, *(f"{float(m.details[at]):.1f}" for at in ("p50", "p90", "p99")))
    out.print(grid)
    for name, title, digits in (
        ("requests_per_second", "requests/s", 3),
        ("output_tokens_per_second", "output tokens/s", 2),
        ("total_tokens_per_second", "tokens/s including prompts", 2),
        ("tokens_per_answer", "tokens per answer", 1),
        ("cost_per_1000_tokens", "cost per 1,000 tokens", 6),
        ("cost_per_million_requests", "cost per million requests", 2),
    ):
        if (m := report.find(name)) is not None:
            say(f"{title}: {m.value:.{digits}f}")
    if (m := report.find("max_in_flight")) is not None:
        say(f"{report.completed} answers in {report.seconds:.1f} s, at most {m.value:.0f} requests at once")
    for kind, count in report.counts.items():
        if kind != OK:
            example = f": {report.examples[kind]}" if kind in report.examples else ""
            meaning = f" ({KINDS[kind]})" if kind in KINDS else ""
            say(f"  {count} {kind}{meaning}{example}")
    say_notes(report.notes)


def serve(
    artifact: options.ArtifactOrModel,
    *,
    settings: Annotated[Values, Fields(ServeSpec)],
    print_only: Annotated[bool, Option("--print", help="Only show the command.")] = False,
) -> None:
    """Serve an artifact with its engine's own OpenAI-compatible server, until interrupted."""
    from quantkit.serving.launch import serving, wait
    from quantkit.serving.servers import plan_server

    start = plan_server(artifact, **settings)
    if print_only:
        variables = [f"{key}={shlex.quote(value)}" for key, value in start.variables.items()]
        say(" ".join([*variables, shlex.join(start.arguments)]))
        return
    with serving(start) as child:
        say(f"{start.url} serves {start.name}")
        code = wait(start, child)
    raise typer.Exit(code)
