"""Results of a check (Checked), and one execution of a job (Run) with its findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic

from typing_extensions import TypeVar

from quantkit.system.progress import Progress

Plan = TypeVar("Plan", covariant=True, default=object)


@dataclass(frozen=True)
class Checked(Generic[Plan]):
    """Result of a check before long work.

    `plan`: the method's or format's plan of the work; `nbytes`: estimated size of the artifact; `options`: resolved
    values of options such as ``auto``; `notes`: for the user.
    """

    plan: Plan
    nbytes: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Findings:
    """What a run records apart from tensors: notes by topic, tensor counts by type, resolved options, numbers."""

    notes: dict[str, str] = field(default_factory=dict)
    tensor_types: dict[str, int] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def note(self, text: str, topic: str | None = None) -> None:
        """Add a note; it replaces an earlier note on the same topic."""
        self.notes[topic or text] = text

    def count(self, tensor_type: str) -> None:
        """Count one more tensor stored as `tensor_type`."""
        self.tensor_types[tensor_type] = self.tensor_types.get(tensor_type, 0) + 1

    def to_values(self) -> dict[str, object]:
        """Return the findings as JSON values, for the journal of unfinished work."""
        return asdict(self)


@dataclass
class Run:
    """One execution of a job: the folder to write, the progress listener, and the findings."""

    folder: Path
    progress: Progress = field(default_factory=Progress)
    findings: Findings = field(default_factory=Findings)
