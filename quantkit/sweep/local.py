"""The executor of one machine: child processes of this one, `processes` at a time."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.sweep.executor import Needs

POLL_S = 0.1


@dataclass
class Local:
    """See `Executor`."""

    slots: int = 1
    most_memory: int | None = None
    sets_apart: bool = False
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def refuse(self, needs: Needs) -> str | None:
        """Nothing: what does not fit this machine was refused when it was looked at."""
        return None

    def submit(self, name: str, command: list[str], log: Path, needs: Needs) -> None:
        """Start a task's process; what it says goes to the end of its log."""
        with log.open("ab") as file:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def finished(self) -> tuple[str, int]:
        """Wait for a task that has ended: its name, and its exit code or the negative number of a signal."""
        while True:
            for name, process in self._running.items():
                if (code := process.poll()) is not None:
                    del self._running[name]
                    return name, code
            time.sleep(POLL_S)

    def close(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()
