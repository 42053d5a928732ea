"""A fork server: a process that has imported torch and transformers, and forks for each task that needs them.

The import takes 10 CPU seconds (transformers 5.12), a fork a few milliseconds; `make demo` needs twelve such
processes. The server has no threads that a fork would lose, and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

IMPORTED = ("torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "gguf")
# Variables that libraries read at import.
LIBRARIES = ("ATEN_", "BNB_", "DNNL_", "HF_", "LD_", "MKL_", "ONEDNN_", "PYTHON", "TORCH", "TRANSFORMERS_")
MOST = 1 << 20  # bytes of a message
LOOK = 0.05  # seconds between two checks of a fork and of the owner


class Forked:
    """A forked process with the interface of subprocess.Popen."""

    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid, self._server = pid, server
        self._code: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._server.settimeout(timeout)
            try:
                self._code = int(self._server.recv(MOST) or -signal.SIGKILL)  # it dies with its server
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0) from None
            finally:
                self._server.settimeout(None)
        return self._code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Server:
    """Handle of the fork server in the owner's process; it runs one fork at a time."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.key = key_of(variables)
        self._forked: Forked | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *IMPORTED],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),), env=variables,
            )  # fmt: skip
        atexit.register(self.close)

    def serves(self, variables: dict[str, str]) -> bool:
        """Return whether the server runs, belongs to this process, and has these environment variables."""
        return self.key == key_of(variables) and self._process.poll() is None

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> Forked | None:
        """Fork for a request; return None if another fork is running or the server has ended."""
        if self._forked is not None and self._forked.poll() is None:
            return None
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            pid = self._socket.recv(MOST)
        except OSError:
            return None
        except BaseException:  # interrupted: the next request would read this answer
            self.close()
            raise
        self._forked = Forked(int(pid), self._socket) if pid else None
        return self._forked

    def close(self) -> None:
        atexit.unregister(self.close)
        self._socket.close()
        if self.key[0] != os.getpid():
            return
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:  # it is still importing
            self._process.kill()
            self._process.wait()


_lock = Lock()
_server: Server | None = None


def key_of(variables: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Return (process id, environment variables that libraries read), which decide whether a server is reusable."""
    fixed = {name: value for name, value in variables.items() if name.startswith(LIBRARIES)}
    return os.getpid(), {name: value for name, value in fixed.items() if not name.endswith("_NUM_THREADS")}


def start(variables: dict[str, str]) -> None:
    """Start a fork server, which imports in the background."""
    if sys.platform == "linux":
        with _lock:
            _running_server(variables)


def fork(module: str, arguments: list[str], events: int, log: int, variables: dict[str, str]) -> Forked | None:
    """Fork a process for `python -m module ARGUMENTS EVENTS`; EVENTS and `log` (its output) are file descriptors.

    Returns None if no process can be forked.
    """
    if sys.platform != "linux":
        return None
    request = {"module": module, "arguments": arguments, "variables": variables, "folder": str(Path.cwd())}
    with _lock:
        return _running_server(variables).fork(request, [events, log])


def _running_server(variables: dict[str, str]) -> Server:
    global _server
    if _server is not None and not _server.serves(variables):
        _server.close()
        _server = None
    _server = _server or Server(variables)
    return _server


def _do(request: dict[str, Any], events: int, log: int) -> None:
    """Run in the forked process: call the module's `main`."""
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has already read its variable
    sys.argv = [request["module"], *request["arguments"], str(events)]
    import_module(request["module"]).main()


def main() -> None:
    """Server process: import, then fork for each message until the connection closes."""
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when it ends
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        with suppress(ImportError):
            import_module(name)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST, 2)
        if not message:
            return
        pid = os.fork()
        if not pid:
            connection.close()
            signal.signal(signal.SIGINT, interrupted)
            try:
                _do(json.loads(message), *descriptors)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if select.select([connection], [], [], LOOK)[0]:  # no messages come while a fork runs: the owner has ended
                os.kill(pid, signal.SIGKILL)
                os._exit(1)
        connection.send(str(os.waitstatus_to_exitcode(ended[1])).encode())


if __name__ == "__main__":
    main()
