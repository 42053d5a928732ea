"""serve: start an engine's own server for an artifact, wait until it answers, and leave no process behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx2
import psutil

from quantkit.contracts.model import Model
from quantkit.conversion.agreement import refuse_untrue
from quantkit.errors import DependencyError, EngineError, OutputError, RecipeError, UnsupportedError, one_line
from quantkit.evaluation.engine_choice import NOT_ITS_FILES
from quantkit.formats.source import open_model
from quantkit.models.config import context_of
from quantkit.serving.servers import Command, Server, ServerAddress, server_for
from quantkit.system.interpreter import look
from quantkit.system.processor import usable_cores
from quantkit.untrusted import shown

START_LIMIT = 1800.0  # seconds until a server must answer: some compile a model for minutes
GRACE = 10.0  # seconds that a server has to end by itself
POLL = 0.2
MOST_THREADS = 4096
LONGEST_NAME = 200  # characters of the name in the API
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Plan:
    """What will be started for which model, and where it will answer."""

    model: Model
    server: Server
    address: ServerAddress
    command: Command


def plan(
    artifact: str,
    engine: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    n_ctx: int | None = None,
    threads: int | None = None,
    python: str | None = None,
    name: str | None = None,
) -> Plan:
    """Check what can be checked without starting anything; raises a QuantkitError."""
    model = open_model(artifact)
    if model.artifact is not None:
        refuse_untrue(model.artifact)
    if model.source is not None and not model.source.own_files:
        raise UnsupportedError(f"no server takes {model.name}: {NOT_ITS_FILES}.")
    server = server_for(model, engine)
    if not 1 <= port <= 65535:
        raise RecipeError(f"the port {shown(port)} is not between 1 and 65535")
    longest = context_of(model.config)
    if n_ctx is not None and not 1 <= n_ctx <= longest:
        raise RecipeError(f"a context of {shown(n_ctx)} tokens: {model.label} has at most {longest}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise RecipeError(f"{shown(threads)} threads: give from 1 to {MOST_THREADS}")
    for what, text in (("host", host), ("interpreter", python), ("name", name)):
        if text is not None and (text.startswith("-") or not text.isprintable()):
            raise RecipeError(f"the {what} {shown(text)} begins with a dash or cannot be printed; a server misreads it")
    address = ServerAddress(
        host=host,
        port=port,
        n_ctx=n_ctx or min(longest, 4096),
        threads=threads or usable_cores(),
        python=python or sys.executable,
        name=name or re.sub(r"^-+", "", one_line(model.name, LONGEST_NAME)) or "model",
    )
    return Plan(model, server, address, server.command(model, address))


def check(launch: Plan) -> None:
    """Raise a QuantkitError where the engine is missing or the port is taken."""
    server, address = launch.server, launch.address
    if not server.modules:
        raise RecipeError(f"quantkit does not start {server.summary}; `quantkit serve --print` shows how it is started")
    if missing := look(address.python, server.modules)[0]:
        raise DependencyError(f"{address.python} lacks {', '.join(missing)} for {server.summary}. {server.install}.")
    try:
        addresses = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        with socket.socket(addresses[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(addresses[0][4])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise OutputError(
            f"{address.host} port {address.port} cannot be listened on ({why}). Give another --port."
        ) from None


@contextmanager
def serving(launch: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """The running server, which answers already; what it says goes to the standard error. It is gone afterwards.

    Raises EngineError where it ends or does not answer within its limit, and what `check` raises.
    """
    check(launch)
    child = subprocess.Popen(
        launch.command.arguments,
        env={**os.environ, **launch.command.variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__,
        stderr=sys.__stderr__,
        start_new_session=True,  # so that a signal reaches it and its children once, from here
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    last = signal.SIGTERM
    try:
        _wait_until_it_answers(launch, child)
        yield child
    except KeyboardInterrupt:
        last = signal.SIGINT
        raise
    finally:
        _end(child, last)


def _end_with_parent() -> None:
    """In the child, before the server starts: SIGTERM for it when this process is killed. See prctl(2)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_it_answers(launch: Plan, child: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_LIMIT
    with httpx2.Client(timeout=5.0, trust_env=False) as client:
        while time.monotonic() < limit:
            if (code := child.poll()) is not None:
                raise EngineError(f"{launch.server.summary} {_how_ended(code)} before it answered; its log says why")
            with suppress(httpx2.HTTPError):
                if client.get(f"{launch.address.url}/models").status_code == 200:
                    return
            time.sleep(POLL)
    raise EngineError(f"{launch.server.summary} did not answer at {launch.address.url} within {START_LIMIT:.0f} s")


def wait(launch: Plan, child: subprocess.Popen[bytes]) -> int:
    """Wait for the server's end; its exit code. Raises EngineError where a signal has ended it."""
    code = child.wait()
    if code < 0:
        raise EngineError(f"{launch.server.summary} {_how_ended(code)}. The system does so where memory runs out.")
    return code


def _how_ended(code: int) -> str:
    """In words; a negative code is the number of a signal."""
    if code >= 0:
        return f"ended with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def _end(child: subprocess.Popen[bytes], last: signal.Signals) -> None:
    """Pass the signal on, wait, and kill what is left. Further signals of the impatient do not stop this."""
    signals = (signal.SIGINT, signal.SIGTERM) if _in_main_thread() else ()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(child.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, last)
        limit = time.monotonic() + GRACE
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        _, left = psutil.wait_procs(family, timeout=max(0.0, min(2.0, limit - time.monotonic())))
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
