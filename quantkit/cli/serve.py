"""The command `quantkit serve`."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from quantkit.cli.options import ArtifactArgument, say


def serve(
    artifact: ArtifactArgument,
    *,
    engine: Annotated[
        str | None, typer.Option(help="llamacpp or vllm; to --print also llama-server, sglang, tgi, tabbyapi.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. It has no password: keep it inside.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    n_ctx: Annotated[
        int | None, typer.Option("--n-ctx", help="Context in tokens. Default: the model's, at most 4096.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter of the environment that has the engine.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in the API. Default: the source's.")] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Only show the command.")] = False,
) -> None:
    """Start an engine's own OpenAI-compatible server for an artifact, and wait."""
    from quantkit.serving.launch import plan, serving, wait

    start = plan(artifact, engine, host=host, port=port, n_ctx=n_ctx, threads=threads, python=python, name=name)
    if print_only:
        words = [f"{key}={shlex.quote(value)}" for key, value in start.command.variables.items()]
        line = " ".join([*words, shlex.join(start.command.arguments)])
        say(line)
        return
    with serving(start) as child:
        say(f"{start.address.url} serves {start.address.name}")
        code = wait(start, child)
    raise typer.Exit(code)
