"""The application `quantkit` with all its commands, signal handling, and printing of errors.

Signals end a command cleanly, even if Python or a library swallows the exception that the handler raises.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from quantkit.cli import compare, convert, evaluate, inspect, push, serving
from quantkit.cli.options import Command, say, with_options
from quantkit.errors import DISTRIBUTION, LONGEST, QuantkitError, ResourceError, one_line, shortage_of
from quantkit.system.ranks import prints_error, refuse_ranks, shards_of_environment
from quantkit.system.threads import in_background

AGAIN = 0.02  # seconds
SWALLOWED = 10.0  # seconds; a command that still runs after a signal has swallowed its exception
GRACE = 4.0  # seconds in which a rank cleans up


def _end_in_any_case() -> None:
    """Exit soon after SIGTERM or SIGINT, even while waiting for other ranks, when Python runs no handlers."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        ending = {signal.SIGTERM, signal.SIGINT}
        while not (caught := ending & set(os.read(read_end, 64))):
            pass
        time.sleep(GRACE)
        os._exit(128 + min(caught))

    in_background(watch)


@contextmanager
def signals_that_end() -> Iterator[None]:
    """Make SIGTERM clean up as Ctrl-C does, and make sure that neither signal is lost.

    Python swallows exceptions raised in a destructor, so the exception is raised again a moment later. A library may
    catch it, too; a command that still runs some seconds later gets it again. If SIGINT is ignored on entry (a shell's
    background job), it stays ignored.
    """
    dropped: list[BaseException] = []
    plain = sys.unraisablehook

    def again(value: BaseException, seconds: float) -> None:
        dropped[:] = [value]
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def end(number: int, _: object) -> NoReturn:
        value = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        again(value, SWALLOWED)
        raise value

    def note(what: Any) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt | SystemExit):
            again(what.exc_value, AGAIN)
        else:
            plain(what)

    def once_more(*_: object) -> None:
        if dropped:
            value = type(dropped[0])(*dropped[0].args)
            again(value, SWALLOWED)
            raise value

    if shards_of_environment().size > 1:
        _end_in_any_case()
    acts: dict[int, Callable[[int, Any], Any]] = {signal.SIGTERM: end, signal.SIGALRM: once_more}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        acts[signal.SIGINT] = end
    handlers = {number: signal.signal(number, act) for number, act in acts.items()}
    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = plain
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


COMMANDS: dict[str, Callable[..., None]] = {
    "convert": convert.convert,
    "eval-ppl": evaluate.eval_ppl,
    "eval": evaluate.evaluate_all,
    "eval-tasks": evaluate.eval_tasks,
    "compare": compare.compare,
    "run": compare.run,
    "status": compare.status,
    "sweep-task": compare.sweep_task,
    "table": compare.table,
    "report": compare.report,
    "bench": serving.bench,
    "serve": serving.serve,
    "push": push.push,
    "inspect": inspect.inspect,
    "verify": inspect.verify,
    "methods": inspect.methods,
    "cache": evaluate.cache,
    "imatrix": inspect.imatrix,
    "import": inspect.import_file,
}

BEGIN = """\
quantkit convert demo --method gptq       quantize a model: a hub id, a folder, or demo
quantkit eval-ppl demo-gptq-4             measure its perplexity, and its divergence from the model
quantkit compare demo                     quantize with every method, and print one table
quantkit methods                          list the methods, and the engines that load their formats
quantkit --help                           list all commands; quantkit COMMAND --help: its options"""


def begin(
    context: typer.Context, version: Annotated[bool, Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version, or the first steps if no command is given."""
    if context.invoked_subcommand not in (None, "convert"):
        refuse_ranks("only the command convert runs in several")
    if version:
        say(f"quantkit {metadata.version(DISTRIBUTION)}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        for line in BEGIN.splitlines():
            say(line)


def make_app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the typer application; if `words` call convert, it has the options of the method that they name."""
    app = typer.Typer(
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        help="Quantize Hugging Face language models to GPTQ, AWQ, NF4, CTranslate2 and GGUF, and measure the result.",
    )
    app.callback()(begin)
    own = {"of_method": convert.method_options(words)} if "convert" in words[:1] else {}
    for name, function in COMMANDS.items():
        command = with_options(function, **own) if name == "convert" else with_options(function)
        app.command(name, cls=Command, hidden=name == "sweep-task")(command)
    return app


err = Console(stderr=True)
NO_ROOM = b"error: ResourceError: this process ran out of memory\n"


def main() -> None:
    """Run `quantkit`. Exit codes: 0 success, 1 an error, 2 wrong usage, 130 interrupted."""
    try:
        with signals_that_end(), leader_alone_heard():
            make_app(sys.argv[1:])()
    except Exception as error:
        if prints_error(error):
            line = _explained(error)
            if line is None:
                raise
            _print_error(line)
        sys.exit(1)


@contextmanager
def leader_alone_heard() -> Iterator[None]:
    """Silence all torchrun processes but the first; errors are printed after this context."""
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0" and shards_of_environment().size > 1:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def _explained(error: Exception) -> str | None:
    """Return the message for an error that the user can act on; None for a bug in quantkit."""
    if isinstance(error, QuantkitError):
        return f"{type(error).__name__}: {error}"
    if short := shortage_of(error):
        return f"{ResourceError.__name__}: {short}"
    if not isinstance(error, OSError):
        return None
    where = f" ({one_line(str(error.filename), LONGEST)})" if error.filename else ""
    return f"{one_line(error.strerror or str(error), LONGEST)}{where}"


def _print_error(line: str) -> None:
    try:
        err.print(Text.assemble(("error:", "red"), f" {line}"), soft_wrap=True)
    except MemoryError:
        os.write(2, NO_ROOM)
