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
from quantkit.sweep.executor import UNPLACED, Needs
from quantkit.system.sizes import told_apart

LOOK_S = 5.0  # between two looks at the nodes
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
    """See `Executor`. `threads` are the cores that a task asks for; `address` as Ray's own, or ``auto``.

    A task that is alone asks for all cores of its node, where each node is a machine of its own. Raises DependencyError
    without Ray, ResourceError where no cluster answers.
    """

    address: str
    threads: int
    _running: dict[Any, tuple[str, Needs]] = field(default_factory=dict)
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
        self._task = ray.remote(max_retries=RETRIES)(_carry_out)

    @property
    def slots(self) -> int:
        """As many tasks as the nodes have cores for; a node may have joined or been lost since."""
        return max(1, sum(int(node.get("CPU", 0)) // self.threads for node in self._nodes()))

    @property
    def most_memory(self) -> int | None:
        """Of the node with most memory for tasks."""
        return max((int(node.get("memory", 0)) for node in self._nodes()), default=0) or None

    @property
    def sets_apart(self) -> bool:
        """Whether each node is a machine of its own: tasks of two nodes of one machine would disturb each other."""
        places = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        return len(set(places)) == len(places)

    def refuse(self, needs: Needs) -> str | None:
        """Why no node takes such a task; None where one does once it is free."""
        nodes = self._nodes()
        if all(node.get("CPU", 0) < self.threads for node in nodes):
            cores = max((int(node.get("CPU", 0)) for node in nodes), default=0)
            return f"it needs {self.threads} cores, and the largest node has {cores}. Give fewer evaluation.threads"
        if not any(self._fits(node, needs) for node in nodes):
            needed, most = told_apart(needs.memory or 0, self.most_memory or 0)
            return f"it needs {needed} of memory, and the largest node gives tasks {most} (ray start --memory)"
        return None

    def submit(self, name: str, command: list[str], log: Path, needs: Needs) -> None:
        """Hand a task to Ray, which takes a node's memory and cores for it."""
        nodes = [node for node in self._nodes() if self._fits(node, needs)]
        cores = self.threads
        if needs.alone and self.sets_apart:
            cores = max(self.threads, *(int(node.get("CPU", 0)) for node in nodes))
        task = self._task.options(num_cpus=cores, memory=needs.memory)
        self._running[task.remote(command, str(log.absolute()), self.threads, version("quantkit"))] = name, needs

    def finished(self) -> tuple[str, int]:
        """Wait for a task that has ended; -9: its node was lost, UNPLACED: all nodes that could take it are."""
        while True:
            ended, _ = self._ray.wait(list(self._running), timeout=LOOK_S)
            if ended:
                return self._result(ended[0])
            for one, (name, needs) in self._running.items():
                if self.refuse(needs) is not None:
                    self._ray.cancel(one, force=True)
                    del self._running[one]
                    return name, UNPLACED

    def close(self) -> None:
        """End what still runs, and leave the cluster."""
        for one in self._running:
            self._ray.cancel(one, force=True)
        self._ray.shutdown()

    def _result(self, one: Any) -> tuple[str, int]:
        name, _ = self._running.pop(one)
        try:
            return name, int(self._ray.get(one))
        except self._ray.exceptions.RayTaskError as error:
            raise DependencyError(f"{name}: {error.cause}") from None
        except self._ray.exceptions.RayError:
            return name, -9

    def _fits(self, node: dict[str, float], needs: Needs) -> bool:
        """Whether a node with nothing else to do takes such a task."""
        return node.get("CPU", 0) >= self.threads and node.get("memory", 0) >= (needs.memory or 0)

    def _nodes(self) -> list[dict[str, float]]:
        """The resources of each node that is there."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
