"""The command line: parse, call, print. No logic of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable

import typer
from rich.console import Console

from quantkit.cli.bench import bench
from quantkit.cli.compare import compare, run
from quantkit.cli.convert import ConvertCommand, convert
from quantkit.cli.evaluate import cache, eval_ppl, eval_tasks, evaluate_all
from quantkit.cli.inspect import imatrix, import_file, inspect, methods, verify
from quantkit.cli.options import Command, with_options
from quantkit.cli.serve import serve
from quantkit.errors import QuantkitError

COMMANDS: dict[str, Callable[..., None]] = {
    "convert": convert,
    "eval-ppl": eval_ppl,
    "eval": evaluate_all,
    "eval-tasks": eval_tasks,
    "compare": compare,
    "run": run,
    "bench": bench,
    "serve": serve,
    "inspect": inspect,
    "verify": verify,
    "methods": methods,
    "cache": cache,
    "imatrix": imatrix,
    "import": import_file,
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Quantize Hugging Face language models to GPTQ, AWQ, NF4, CTranslate2 and GGUF, and measure the result.",
)
for name, function in COMMANDS.items():
    app.command(name, cls=ConvertCommand if name == "convert" else Command)(with_options(function))
err = Console(stderr=True)


def _quiet() -> None:
    """Keep libraries' own bars and advice off the screen; the process is ours here."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def main() -> None:
    """Entry of the command `quantkit`: 0 done, 1 a QuantkitError, 2 usage, 130 interrupted."""
    _quiet()
    # A polite kill cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except QuantkitError as error:
        err.print(f"[red]error:[/red] {type(error).__name__}: ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        err.print(f"error: {error.strerror or error}{where}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
