"""A source over another that changes some of its values: whatever it does not change it passes on."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.artifact import AdapterEntry
from quantkit.models.source import Source


class ChangedSource(Source):
    """`base`, hook by hook; a subclass overrides what it changes, and sets `config` and `tensors` where they differ.

    Its values are floats that lie in no file, so its `format` is that of floats, whatever the base's is, and no program
    finds it in its folder.
    """

    def __init__(self, base: Source) -> None:
        self._base = base
        self.folder, self.model, self.revision = base.folder, base.model, base.revision
        self.config, self.tensors = base.config, base.tensors
        self.places, self.kept, self._aside, self._whole = base.places, base.kept, base._aside, base._whole

    @property
    def name(self) -> str:
        """The base's."""
        return self._base.name

    @property
    def weight_files(self) -> list[str]:
        """Names of the base's."""
        return self._base.weight_files

    @property
    def hashed_files(self) -> list[str]:
        """Names of the base's."""
        return self._base.hashed_files

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Of the base's files; a subclass adds what it changes."""
        return self._base.hashes

    @property
    def quantization(self) -> str | None:
        """The base's."""
        return self._base.quantization

    @property
    def adapters(self) -> tuple[AdapterEntry, ...]:
        """The base's."""
        return self._base.adapters

    @property
    def adapter_folders(self) -> tuple[str, ...]:
        """The base's."""
        return self._base.adapter_folders

    @property
    def notes(self) -> tuple[str, ...]:
        """The base's; a subclass adds what it changes."""
        return self._base.notes

    @property
    def own_files(self) -> bool:
        """No file holds the changed values."""
        return False

    def reading_bytes(self, name: str) -> int:
        """The base's."""
        return self._base.reading_bytes(name)

    def reads_as_stored(self, name: str) -> bool:
        """What the base says."""
        return self._base.reads_as_stored(name)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The base's bytes."""
        return self._base.read_rows(name, start, stop)

    def side_files(self) -> dict[str, Path]:
        """The base's."""
        return self._base.side_files()

    def copy_side_files(self, folder: Path) -> None:
        """Have the base copy or make its own."""
        self._base.copy_side_files(folder)

    def tokenizer(self) -> Any:
        """The base's."""
        return self._base.tokenizer()
