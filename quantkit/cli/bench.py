"""The command `quantkit bench`: how fast an artifact generates in process, or a server answers over the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.options import (
    DeviceOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    PriceOption,
    PythonOption,
    RevisionOption,
    ThreadsOption,
    out,
    save,
    thread_counts,
)

if TYPE_CHECKING:
    from quantkit.serving.load_test import LoadReport

PROBES = ("size", "memory", "speed", "throughput", "answers")
REPEATS = 5  # as many as llama-bench does


# Options that say something of one of the two only.
OF_A_SERVER = (
    *("model", "api", "api_key_env", "prompts", "concurrency", "rate", "seconds", "requests", "first_token_limit"),
    "answer_limit",
)
IN_PROCESS = ("threads", "engine", "dtype", "python", "device", "revision")


def bench(
    ctx: typer.Context,
    subject: Annotated[
        str | None, typer.Argument(help="Artifact folder or a model, measured in process. Or give --endpoint.")
    ] = None,
    threads: ThreadsOption = None,
    engine: EngineOption = None,
    dtype: DtypeOption = None,
    python: PythonOption = None,
    device: DeviceOption = "cpu",
    revision: RevisionOption = None,
    endpoint: Annotated[
        str | None, typer.Option(help="A server of OpenAI's API instead, such as http://127.0.0.1:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.")] = None,
    api: Annotated[str, typer.Option(help="completions, or chat with the server's chat template.")] = "completions",
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the endpoint's key.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="UTF-8 file, a prompt a line. Default: nine of ours.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 200,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests at once. Default: 1; at a rate 256.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random times. Default: as they are answered.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long requests are sent.")] = 30.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Most requests.")] = None,
    first_token_limit: Annotated[float, typer.Option(help="Seconds until a request without a token fails.")] = 60.0,
    answer_limit: Annotated[float, typer.Option(help="Seconds until an unfinished answer fails.")] = 300.0,
    price_per_hour: PriceOption = None,
    json: JsonOption = None,
) -> None:
    """Measure how fast an artifact generates, in process or behind a server (--endpoint)."""
    if (subject is None) == (endpoint is None):
        raise typer.BadParameter("give an artifact or a model to measure in process, or --endpoint URL for a server")
    for name in OF_A_SERVER if endpoint is None else IN_PROCESS:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            where = "a server: add --endpoint" if endpoint is None else "what is measured in process: no --endpoint"
            raise typer.BadParameter(f"--{name.replace('_', '-')} is for {where}")
    if endpoint is None:
        _in_process(
            str(subject), json, threads=thread_counts(threads), engine=engine, dtype=dtype, python=python,
            device=device, revision=revision, answer_tokens=new_tokens, price_per_hour=price_per_hour,
        )  # fmt: skip
        return
    from quantkit.data.prompts import PROMPTS
    from quantkit.progress import shown
    from quantkit.recipe import parse
    from quantkit.serving.client import Endpoint
    from quantkit.serving.load_test import LoadSpec, load, prompts_of

    if model is None:
        raise typer.BadParameter("--endpoint needs the model's name there: --model NAME")
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise typer.BadParameter(f"--api-key-env: the environment variable {api_key_env} is not set")
    key = os.environ[api_key_env] if api_key_env else None
    values = {
        "concurrency": concurrency,
        "rate": rate,
        "seconds": seconds,
        "requests": requests,
        "new_tokens": new_tokens,
        "first_token_limit": first_token_limit,
        "answer_limit": answer_limit,
        "price_per_hour": price_per_hour,
    }
    spec = parse(LoadSpec, values, "bench")
    asked = PROMPTS if prompts is None else prompts_of(prompts)
    with shown() as progress:
        report = load(Endpoint(endpoint, model, api, key), spec, asked, progress)
    save(json, report.model_dump_json(indent=2))
    _show(report)
    if not report.completed:
        raise typer.Exit(1)


def _in_process(subject: str, json: Path | None, **settings: Any) -> None:
    from quantkit.evaluation.evaluate import evaluate
    from quantkit.progress import shown
    from quantkit.report.table import Table

    with shown() as progress:
        report = evaluate(subject, PROBES, limit=1, repeats=REPEATS, progress=progress, **settings)
    save(json, report.model_dump_json(indent=2))
    Table((report,)).show(out)


def _show(report: LoadReport) -> None:
    """Print what a server did under load."""
    from rich.table import Table
    from rich.text import Text

    from quantkit.serving.client import KINDS, OK

    grid = Table("", "median", "p90", "p99", title=Text(f"{report.model} at {report.endpoint}"))
    for name, title in (
        ("ttft_ms", "time to first token, ms"),
        ("tpot_ms", "time per output token, ms"),
        ("itl_ms", "between two pieces of text, ms"),
        ("latency_ms", "whole answer, ms"),
    ):
        if (m := report.find(name)) is not None:
            grid.add_row(title, *(f"{float(m.details[at]):.1f}" for at in ("p50", "p90", "p99")))
    out.print(grid)
    for name, title, digits in (
        ("requests_per_second", "requests/s", 3),
        ("output_tokens_per_second", "output tokens/s", 2),
        ("total_tokens_per_second", "total tokens/s, with those of the prompts", 2),
        ("tokens_per_answer", "tokens an answer", 1),
        ("cost_per_1000_tokens", "cost per 1,000 tokens", 6),
        ("cost_per_million_requests", "cost per million requests", 2),
    ):
        if (m := report.find(name)) is not None:
            out.print(f"{title}: {m.value:.{digits}f}", highlight=False)
    at_once = report.find("most_open")
    assert at_once is not None
    out.print(
        f"{report.completed} answers in {report.seconds:.1f} s, at most {at_once.value:.0f} requests at once",
        highlight=False,
    )
    for kind, count in report.counts.items():
        if kind != OK:
            said = f": {report.examples[kind]}" if kind in report.examples else ""
            meaning = f" ({KINDS[kind]})" if kind in KINDS else ""
            out.print(f"  {count} {kind}{meaning}{said}", highlight=False, markup=False, soft_wrap=True)
    for note in report.notes:
        out.print(f"  note: {note}", highlight=False, soft_wrap=True)
