"""The command line: parse, call, print. No logic of its own."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable

import typer
from rich.console import Console
from rich.text import Text

from quantkit.cli.bench import bench
from quantkit.cli.compare import compare, run
from quantkit.cli.convert import ConvertCommand, convert
from quantkit.cli.evaluate import cache, eval_ppl, eval_tasks, evaluate_all
from quantkit.cli.inspect import imatrix, import_file, inspect, methods, verify
from quantkit.cli.options import Command, with_options
from quantkit.cli.serve import serve
from quantkit.cli.signals import signals_that_end
from quantkit.errors import LONGEST, QuantkitError, ResourceError, one_line, shortage_of

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
    # Arithmetic that overflows is looked at where its result is used.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"quantkit\.")


def main() -> None:
    """Entry of the command `quantkit`: 0 done, 1 a QuantkitError, 2 usage, 130 interrupted."""
    _quiet()
    try:
        with signals_that_end():
            app()
    except QuantkitError as error:
        _tell(f"{type(error).__name__}: {error}")
        sys.exit(1)
    except Exception as error:
        short = shortage_of(error)
        if short is None and not isinstance(error, OSError):
            raise
        name = getattr(error, "filename", None)
        where = f" ({one_line(str(name), LONGEST)})" if name else ""
        reason = one_line(str(getattr(error, "strerror", None) or error), LONGEST)
        _tell(f"{reason}{where}" if short is None else f"{ResourceError.__name__}: {short}")
        sys.exit(1)


NO_ROOM = b"error: ResourceError: the memory that this process may take ran out\n"


def _tell(line: str) -> None:
    try:
        err.print(Text.assemble(("error:", "red"), f" {line}"), soft_wrap=True)
    except MemoryError:
        os.write(2, NO_ROOM)
