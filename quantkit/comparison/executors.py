"""Executors start the tasks of a sweep: `Local` on this machine, `OnRay` on the machines of a Ray cluster.

Only commands and exit codes go through Ray (https://docs.ray.io). Models, artifacts and the sweep's folder must be on a
disk that every machine sees under the same path.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quantkit.errors import DISTRIBUTION, DependencyError, ResourceError, missing_package, reason_of
from quantkit.system.sizes import in_one_unit

if TYPE_CHECKING:
    from quantkit.comparison.tasks import Task  # a node imports this file, and tasks.py has many imports

UNPLACED, LOST = 75, 76  # exit codes: no remaining machine can run the task; the task's machine was lost
POLL_S = 0.1
NODES_S = 5.0  # between two queries of Ray's nodes


@dataclass
class Local:
    """Executor with child processes: at most `slots` at a time, and only one while a task measures the machine."""

    slots: int = 1
    most_memory: int | None = None  # bytes of the largest machine; None: what is free on this one
    _running: dict[str, tuple[Task, subprocess.Popen[bytes]]] = field(default_factory=dict)

    def refuse(self, task: Task) -> str | None:
        """Return None: the sweep itself has already refused tasks that are too large for this machine."""
        return None

    def has_room(self, task: Task) -> bool:
        tasks = [task, *(running for running, _ in self._running.values())]
        return len(tasks) <= (1 if any(each.alone for each in tasks) else self.slots)

    def submit(self, task: Task, command: list[str]) -> None:
        with task.log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running[task.name] = task, process

    def finished(self) -> tuple[str, int]:
        """Wait until a task ends; return its name and exit code (a signal's negative number, UNPLACED, or LOST)."""
        while True:
            for name, (_, process) in self._running.items():
                if (code := process.poll()) is not None:
                    del self._running[name]
                    return name, code
            time.sleep(POLL_S)

    def close(self) -> None:
        for _, process in self._running.values():
            process.terminate()
        for _, process in self._running.values():
            process.wait()


def _run_on_node(command: list[str], log: str, folder: str, threads: int, wanted: str) -> int:
    """Run a command with the node's Python interpreter, in the driver's `folder` if the node has it."""
    if (found := version(DISTRIBUTION)) != wanted:
        raise RuntimeError(f"this node has quantkit {found}, but the sweep was started with {wanted}")
    with Path(log).open("ab") as file:
        return subprocess.run(
            [sys.executable, *command[1:]], env=os.environ | {"OMP_NUM_THREADS": str(threads)}, check=False,
            cwd=folder if Path(folder).is_dir() else None, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        ).returncode  # fmt: skip


class OnRay:
    """Executor on the Ray cluster at `address` (in Ray's notation, or ``auto``), with the methods of `Local`.

    A task reserves `threads` cores and its memory; a task that measures its machine reserves all cores of a node.
    Raises DependencyError without Ray, ResourceError if no cluster answers.
    """

    def __init__(self, address: str, threads: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise missing_package("ray", "ray", error) from None
        try:
            ray.init(address, log_to_driver=False, include_dashboard=None, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ResourceError(
                f"no Ray cluster answers at {address}: {error}. Start one with `ray start --head`."
            ) from None
        self._ray, self._threads = ray, threads
        self._command = ray.remote(max_retries=0)(_run_on_node)  # the sweep itself restarts lost tasks and reports it
        self._running: dict[Any, Task] = {}
        # Until shutdown, a thread of Ray prints a lost node's log to sys.stdout, even with log_to_driver off.
        self._silence = ExitStack()
        self._silence.enter_context(redirect_stdout(io.StringIO()))

    @property
    def most_memory(self) -> int | None:
        """Return the memory for tasks on the largest node, in bytes."""
        return max((memory for _, memory in self._nodes()), default=0) or None

    def refuse(self, task: Task) -> str | None:
        cores = max((cores for cores, _ in self._nodes()), default=0)
        if cores < self._threads:
            return f"it needs {self._threads} cores, but the largest node has {cores}. Give fewer evaluation.threads"
        if not self._fitting(task):
            needed, most = in_one_unit(task.memory or 0, self.most_memory or 0)
            return f"it needs {needed} of memory, but the largest node has {most} for tasks (ray start --memory)"
        return None

    def has_room(self, task: Task) -> bool:
        """Return whether enough cores are free for one more task; Ray itself picks the node."""
        return len(self._running) < max(1, sum(cores // self._threads for cores, _ in self._nodes()))

    def submit(self, task: Task, command: list[str]) -> None:
        cores = max(self._fitting(task)) if task.alone else self._threads
        remote = self._command.options(num_cpus=cores, memory=task.memory)
        key = remote.remote(command, str(task.log), str(Path.cwd()), self._threads, version(DISTRIBUTION))
        self._running[key] = task

    def finished(self) -> tuple[str, int]:
        """Wait until a task ends or no node can run it; return its name and exit code."""
        while True:
            ended, _ = self._ray.wait(list(self._running), timeout=NODES_S)
            if ended:
                return self._result(ended[0])
            for key, task in self._running.items():
                if self.refuse(task) is not None:
                    self._ray.cancel(key, force=True)
                    del self._running[key]
                    return task.name, UNPLACED

    def close(self) -> None:
        for key in self._running:
            self._ray.cancel(key, force=True)
        self._ray.shutdown()
        self._silence.close()

    def _result(self, key: Any) -> tuple[str, int]:
        task = self._running.pop(key)
        try:
            return task.name, int(self._ray.get(key))
        except self._ray.exceptions.RayTaskError as error:
            raise DependencyError(f"{task.name}: {error.cause}") from None
        except self._ray.exceptions.RayError as error:
            with task.log.open("a", encoding="utf-8") as log:
                log.write(f"Ray: {reason_of(error).split('. ')[0]}\n")
            return task.name, LOST

    def _nodes(self) -> list[tuple[int, int]]:
        """Return (cores, bytes of memory for tasks) of each live node."""
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [(int(node.get("CPU", 0)), int(node.get("memory", 0))) for node in resources]

    def _fitting(self, task: Task) -> list[int]:
        """Return the number of cores of each node that could run a task."""
        return [cores for cores, memory in self._nodes() if cores >= self._threads and memory >= (task.memory or 0)]


Executor: TypeAlias = Local | OnRay
