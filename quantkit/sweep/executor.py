"""What starts a sweep's tasks somewhere, and what a task asks of the machine that it gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

UNPLACED = 75  # the exit code of a task that no machine that is left can take (EX_TEMPFAIL of sysexits.h)


@dataclass(frozen=True)
class Needs:
    """What a task takes: bytes of memory at its peak where they could be forecast.

    One that is `alone` measures speed or memory: its machine does nothing else meanwhile.
    """

    memory: int | None = None
    alone: bool = False


class Executor(Protocol):
    """What starts tasks somewhere."""

    @property
    def slots(self) -> int:
        """How many tasks can run at a time."""

    @property
    def most_memory(self) -> int | None:
        """Bytes of the machine with most memory; None: this one's free memory."""

    @property
    def sets_apart(self) -> bool:
        """Whether it keeps a machine free for a task that is alone; else nothing may be submitted beside that."""

    def refuse(self, needs: Needs) -> str | None:
        """Why no machine can take such a task, however long it waits; None where one can."""

    def submit(self, name: str, command: list[str], log: Path, needs: Needs) -> None:
        """Start the command of a task; what it says goes to the end of `log`."""

    def finished(self) -> tuple[str, int]:
        """Wait for a task that has ended: its name, and its exit code or the negative number of a signal."""

    def close(self) -> None:
        """End what still runs."""
