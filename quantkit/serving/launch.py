"""`quantkit serve`: start an engine's own server for an artifact, wait until it answers, and stop all its processes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2
import psutil

from quantkit.errors import DependencyError, EngineError, OutputError, RecipeError
from quantkit.serving.servers import ServerPlan
from quantkit.system.interpreter import refuse_unmet

START_LIMIT = 1800.0  # seconds until a server must answer; some compile a model for minutes
GRACE = 10.0  # seconds for a server to end by itself
GRACE_OF_CHILDREN = 2.0  # seconds for its children after it
POLL = 0.2
PR_SET_PDEATHSIG = 1


@contextmanager
def serving(launch: ServerPlan) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, yield its process when it answers, then stop it; its output goes to standard error.

    Raises DependencyError if the engine is missing, OutputError if the port is taken, EngineError if the server exits
    or does not answer in time.
    """
    _check_startable(launch)
    child = subprocess.Popen(
        launch.arguments,
        env={**os.environ, **launch.variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__,
        stderr=sys.__stderr__,
        start_new_session=True,  # so that signals reach it and its children only from this process
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
        _end_server(child, last)


def wait(launch: ServerPlan, child: subprocess.Popen[bytes]) -> int:
    """Wait for the server to exit; return its exit code. Raises EngineError if a signal ended it."""
    code = child.wait()
    if code < 0:
        raise EngineError(f"{launch.server.summary} {_how_ended(code)}. The system does that when memory runs out.")
    return code


def _check_startable(launch: ServerPlan) -> None:
    """Raise a QuantkitError if the engine is missing or the port is taken."""
    server = launch.server
    if not server.modules:
        raise RecipeError(f"quantkit does not start {server.summary}; `quantkit serve --print` shows the command")
    if reason := server.shortfall(launch.python):
        raise DependencyError(reason)
    refuse_unmet(launch.python, launch.plugins, f"{server.summary} with these files")
    try:
        family, _, _, _, address = socket.getaddrinfo(launch.host, launch.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"{launch.host} port {launch.port} is not available ({why}). Give another --port.") from None


def _end_with_parent() -> None:
    """Run in the child before the server starts: request SIGTERM if the parent is killed, see prctl(2)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_it_answers(launch: ServerPlan, child: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_LIMIT
    with httpx2.Client(timeout=5.0, trust_env=False) as client:
        while time.monotonic() < limit:
            if (code := child.poll()) is not None:
                raise EngineError(f"{launch.server.summary} {_how_ended(code)} before it answered; see its log")
            with suppress(httpx2.HTTPError):
                if client.get(f"{launch.url}/models").status_code == 200:
                    return
            time.sleep(POLL)
    raise EngineError(f"{launch.server.summary} did not answer at {launch.url} within {START_LIMIT:.0f} s")


def _how_ended(code: int) -> str:
    """Describe an exit code; a negative code is a signal number."""
    if code >= 0:
        return f"ended with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def _end_server(child: subprocess.Popen[bytes], last: signal.Signals) -> None:
    """Send the signal `last` to the server, wait, and kill remaining processes; ignore further signals meanwhile."""
    ignored = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(child.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, last)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        for process in psutil.wait_procs(family, timeout=GRACE_OF_CHILDREN)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
