"""A Job: one conversion that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.progress import Progress
from quantkit.recipe import ConvertRecipe

if TYPE_CHECKING:
    import numpy as np

    from quantkit.formats.source import Source


@dataclass
class Job:
    """One conversion under way. `folder` is the staging folder; `tell` adds a remark to manifest and screen.

    `drawn` are the calibration's token ids (S, T) int64 and a remark on them, once they have been drawn.
    `found` is what a method's check leaves for its work.
    `device` is torch's name of where the maths runs; activations beyond `spill_bytes` go to files of the folder.
    """

    source: Source
    recipe: ConvertRecipe
    options: Any
    progress: Progress = field(default_factory=Progress)
    folder: Path = Path()
    device: str = "cpu"
    spill_bytes: int = 2 << 30
    notes: list[str] = field(default_factory=list)
    tensor_types: dict[str, int] = field(default_factory=dict)
    resolved: dict[str, object] = field(default_factory=dict)
    calibration_digest: str = ""
    drawn: tuple[np.ndarray, str] | None = None
    disk_bytes: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def bits(self) -> str:
        """The asked bits, in the words of the method's users."""
        assert self.recipe.bits is not None
        return self.recipe.bits

    def tell(self, note: str) -> None:
        """Add a remark once."""
        if note not in self.notes:
            self.notes.append(note)

    def count(self, tensor_type: str) -> None:
        """Count one tensor stored as `tensor_type`."""
        self.tensor_types[tensor_type] = self.tensor_types.get(tensor_type, 0) + 1
