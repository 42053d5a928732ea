"""What a check gives, and a Run: one time that a job is carried out, and what it finds out."""

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
    """What a check found out before any long work.

    `plan` is what the method's or the format's own work goes by; `nbytes` what the artifact needs; `options` those that
    were resolved, such as ``auto``; `notes` are for the user.
    """

    plan: Plan
    nbytes: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Findings:
    """What a run finds out: remarks by topic, tensors by stored type, resolved options, numbers by name."""

    notes: dict[str, str] = field(default_factory=dict)
    tensor_types: dict[str, int] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def note(self, text: str, topic: str | None = None) -> None:
        """Add a remark; one with a topic takes the place of the earlier one."""
        self.notes[topic or text] = text

    def count(self, tensor_type: str) -> None:
        """Count one tensor stored as `tensor_type`."""
        self.tensor_types[tensor_type] = self.tensor_types.get(tensor_type, 0) + 1

    def to_values(self) -> dict[str, object]:
        """As JSON values, for the journal of unfinished work."""
        return asdict(self)


@dataclass
class Run:
    """One time that a job is carried out: the staging folder, whom it tells its progress, what it finds out."""

    folder: Path
    progress: Progress = field(default_factory=Progress)
    findings: Findings = field(default_factory=Findings)
