"""The executor of several machines: Ray places tasks, each of which is one child process of the node that it gets.

https://docs.ray.io. Nothing but names and exit codes goes through Ray: models, artifacts and the sweep's folder lie on
a disk that every node sees under the same path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit.errors import DependencyError, ResourceError, missing_package

RETRIES = 1  # of a task whose node is lost; what it had finished is gone on with
USAGE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_task_oom_retries": "1"}


def _carry_out(command: list[str], log: str, threads: int, wanted: str) -> int:
    """Runs on a node: its own interpreter does the task, with as many threads as were asked for."""
    if (found := version("quantkit")) != wanted:
        raise RuntimeError(f"this node has quantkit {found}, the sweep was begun with {wanted}")
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with Path(log).open("ab") as file:
        own = [sys.executable, *command[1:]]
        return subprocess.run(
            own, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
        ).returncode


@dataclass
class OnRay:
    """See `Executor` in run.py. `threads` are the cores that a task asks for; `address` as Ray's own, or ``auto``.

    Raises DependencyError without Ray, ResourceError where no cluster answers.
    """

    address: str
    threads: int
    slots: int = 1
    _running: dict[Any, str] = field(default_factory=dict)
    _task: Any = None
    _ray: Any = None

    def __post_init__(self) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in USAGE.items()})
        try:
            import ray
        except ImportError as error:
            raise missing_package("ray", "ray", error) from None
        try:
            ray.init(self.address, log_to_driver=False, include_dashboard=None, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ResourceError(
                f"no Ray cluster answers at {self.address}: {error}. Begin one with `ray start --head`."
            ) from None
        self._ray = ray
        self.slots = max(1, int(ray.cluster_resources().get("CPU", 1)) // self.threads)
        self._task = ray.remote(num_cpus=self.threads, max_retries=RETRIES)(_carry_out)

    def submit(self, name: str, command: list[str], log: Path) -> None:
        """Hand a task to Ray."""
        self._running[self._task.remote(command, str(log.absolute()), self.threads, version("quantkit"))] = name

    def finished(self) -> tuple[str, int]:
        """Wait for a task that has ended; one whose node was lost has the exit code -9."""
        [one], _ = self._ray.wait(list(self._running))
        name = self._running.pop(one)
        try:
            return name, int(self._ray.get(one))
        except self._ray.exceptions.RayTaskError as error:
            raise DependencyError(f"{name}: {error.cause}") from None
        except self._ray.exceptions.RayError:
            return name, -9

    def close(self) -> None:
        """End what still runs, and leave the cluster."""
        for one in self._running:
            self._ray.cancel(one, force=True)
        self._ray.shutdown()
