"""One forked child for each case: its own folders, limits of memory and time, and what became of it.

The parent has imported everything and computed nothing, so that a child starts within milliseconds. Workers that
quantkit starts as fresh interpreters are forked as well.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

MEMORY = 2 << 30  # bytes, beyond what the parent has mapped; and the most that may be resident
SECONDS = 60  # of the processor's time; three times as long on the clock
RESULT = "result.json"
WORKER_TRACE = "worker-traceback.txt"


@dataclass
class Ended:
    """How a child ended. `result` is what it wrote itself: see `Child.note`."""

    status: int
    peak_bytes: int
    seconds: float
    cpu_seconds: float
    timed_out: bool
    result: dict[str, Any] = field(default_factory=dict)


class Forked:
    """Stands for `subprocess.Popen` where the command is a module of quantkit: a fork of this process runs its main."""

    def __init__(self, command: list[str], **settings: Any) -> None:
        self.args, self.returncode = command, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(command, settings)

    def _run(self, command: list[str], settings: dict[str, Any]) -> None:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, name in ((1, "stdout"), (2, "stderr")):
                if settings.get(name) is not None and settings[name] != subprocess.PIPE:
                    os.dup2(settings[name] if isinstance(settings[name], int) else settings[name].fileno(), number)
            os.environ.update(settings.get("env") or {})
            sys.argv = command[3:]
            import_module(command[3]).main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # noqa: BLE001 - it is told to the parent of all
            text = traceback.format_exc()
            sys.stderr.write(text)
            with contextlib.suppress(OSError):
                Path(os.environ["FUZZ_CASE"], WORKER_TRACE).write_text(text, "utf-8", "backslashreplace")
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """The code, None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            code = self._wait(0 if end is None else os.WNOHANG)
            if code is not None:
                return code
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """End it."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def fork_own_modules() -> None:
    """Let commands ``python -P -m quantkit.X ...`` be forks of this process from here on, and of no other."""
    from quantkit.system import forking

    forking.start = lambda _variables: None
    forking.fork = lambda *_: None
    plain = subprocess.Popen

    def start(command: Any, *arguments: Any, **settings: Any) -> Any:
        own = isinstance(command, list) and command[1:3] == ["-P", "-m"] and str(command[3]).startswith("quantkit.")
        if own and "input" not in settings and settings.get("stdout") != subprocess.PIPE:
            return Forked([str(part) for part in command], **settings)
        return plain(command, *arguments, **settings)

    subprocess.Popen = start  # type: ignore[assignment, misc]


class Child:
    """The inside of a child: writes what it finds out for the parent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, {}  # type: ignore[var-annotated]

    def note(self, **values: Any) -> None:
        """Keep values for the parent, also if this process dies in the next moment."""
        self.known.update(values)
        text = json.dumps(self.known)
        new = self.folder / f"{RESULT}.new"
        new.write_text(text, encoding="utf-8", errors="backslashreplace")
        new.replace(self.folder / RESULT)


def run_in(child: Child, arguments: list[str], call: Callable[[], object] | None = None) -> None:
    """Call the command line with output into files; note its code, what it wrote, and an exception that left it.

    `call` is called instead of it, where given: an error of ours is written as the command line writes it.
    """
    from quantkit.cli.app import main
    from quantkit.errors import QuantkitError

    streams = {1: child.folder / "out.txt", 2: child.folder / "err.txt"}
    kept = {number: os.dup(number) for number in streams}
    plain = sys.stdout, sys.stderr
    for number, path in streams.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = ["quantkit", *arguments[:1], "--quiet", *arguments[1:]]
    code: Any = 0
    trace, short = "", False
    try:
        (call or main)()
    except SystemExit as stop:
        code = stop.code or 0
        short = _short_of_memory(stop)
    except QuantkitError as error:
        assert call is not None
        code, short = 1, _short_of_memory(error)
        sys.stderr.write(f"error: {type(error).__name__}: {error}")
    except BaseException as error:  # noqa: BLE001 - this is what the fuzz looks for
        code, trace, short = 1, traceback.format_exc(), _short_of_memory(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    sys.stdout, sys.stderr = plain
    for number, copy in kept.items():
        os.dup2(copy, number)
        os.close(copy)
    texts = {
        name: path.read_bytes()[:1_000_000].decode("utf-8", "backslashreplace")
        for name, path in zip(("out", "err"), streams.values(), strict=True)
    }
    child.note(code=code if isinstance(code, int) else 1, trace=trace, memory_error=short, **texts)


def _short_of_memory(error: BaseException | None) -> bool:
    """Whether a MemoryError, also one of torch's, led to this error."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error)[:2000]:
            return True
        error = error.__cause__ or error.__context__
    return False


def start(folder: Path, work: Callable[[Child], None], limited: bool = True) -> int:
    """Fork a child that does `work`, below limits if `limited`; return its process id."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        gc.disable()
        child = Child(folder)
        here, temporary, home = folder / "here", folder / "tmp", folder / "home"
        for path in (here, temporary, home):
            path.mkdir(exist_ok=True)
        os.chdir(here)
        cache = os.environ.get("FUZZ_CACHE") or str(folder / "cache")
        os.environ.update(TMPDIR=str(temporary), HOME=str(home), QUANTKIT_CACHE=cache, FUZZ_CASE=str(folder))
        import tempfile

        tempfile.tempdir = None
        if limited:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        work(child)
        code = 0
    except BaseException:  # noqa: BLE001 - a fault of the fuzz itself
        with contextlib.suppress(Exception):
            child.note(fault=traceback.format_exc())
    finally:
        os._exit(code)


def run_all(
    tasks: Iterator[tuple[Any, Path, Callable[[Child], None]]], jobs: int, limited: bool = True
) -> Iterator[tuple[Any, Path, Ended]]:
    """Run tasks (name, folder, work), `jobs` at a time; yield each when it has ended."""
    running: dict[int, tuple[Any, Path, float]] = {}
    late: set[int] = set()
    tasks = iter(tasks)
    more = True
    while more or running:
        while more and len(running) < jobs:
            try:
                name, folder, work = next(tasks)
            except StopIteration:
                more = False
                break
            running[start(folder, work, limited)] = (name, folder, time.monotonic())
        if not running:
            break
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid in running:
            name, folder, began = running.pop(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it may have left running
            path = folder / RESULT
            result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            seconds, cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
            yield name, folder, Ended(status, usage.ru_maxrss * 1024, seconds, cpu, pid in late, result)
            continue
        for other, (_, _, began) in running.items():
            if time.monotonic() - began > 3 * SECONDS and limited and other not in late:
                late.add(other)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(other, signal.SIGKILL)
        time.sleep(0.003)


def clear(folder: Path) -> None:
    """Remove everything in a folder, also what lies in a cache beside it."""
    for path in (folder, folder.parent / "cache"):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)


def remove(folder: Path) -> None:
    """Remove a case's folder, whatever was done to its permissions."""
    shutil.rmtree(folder, ignore_errors=True)
