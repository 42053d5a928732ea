"""A source with adapters: each tensor that they change is merged in float32 as it is read, one at a time.

The adapters are merged in their order, each into what those before it left, as PEFT's `merge_and_unload` does; the
values agree with its in float32 to the last bit. PEFT itself is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.artifact import AdapterEntry
from quantkit.checkpoints.adapter import Adapter
from quantkit.checkpoints.side_files import (
    TOKENIZER_FILES,
    VOCABULARIES,
    copy_files,
    find_side_files,
    matches,
    refuse_side_files,
)
from quantkit.formats._changed.adapter_places import Places
from quantkit.formats._changed.changed import ChangedSource
from quantkit.models.config import load_tokenizer
from quantkit.models.source import Source
from quantkit.models.text_half import with_text
from quantkit.system.temporary import temporary_folder


class AdaptedSource(ChangedSource):
    """`base` with `adapters`. Raises SourceError where a tensor of theirs does not find its place in it."""

    def __init__(self, base: Source, adapters: Iterable[Adapter]) -> None:
        super().__init__(base)
        self._adapters = tuple(adapters)
        places = Places(base, self._adapters)
        self.config, self.tensors = places.config, places.tensors
        if base.places is not None:
            own = {key: value for key, value in self.config.items() if base.config.get(key) != value}
            self._whole = with_text(base.whole_config, own)
        self._changes, self._copies = dict(places.changes), places.copies
        self._unties = self.config.get("tie_word_embeddings") != base.config.get("tie_word_embeddings")
        self._latest: tuple[str, NDArray[np.float32]] | None = None

    @property
    def adapters(self) -> tuple[AdapterEntry, ...]:
        """What a manifest says of the adapters, in their order."""
        return tuple(adapter.entry for adapter in self._adapters)

    @property
    def adapter_folders(self) -> tuple[str, ...]:
        """Where they lie."""
        return tuple(str(adapter.folder) for adapter in self._adapters)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the merge."""
        names = ", ".join(f"{entry.name} ({entry.kind})" for entry in self.adapters)
        notes = [f"{names} merged in float32 into {len(self._changes)} of {len(self.tensors)} tensors"]
        if self._unties:
            notes.append("the head has weights of its own now: the adapter changes only one of embedding and head")
        if any(adapter.unwrapped for adapter in self._adapters):
            notes.append("a module wrapper's prefix was cut from the names of an adapter's tensors")
        if (folder := self._tokenizer_folder) is not None:
            notes.append(f"the tokenizer is the one that lies beside the adapter {folder.resolve().name}")
        return (*self._base.notes, *notes, *self._notes)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Of the base model's files, and of each adapter's under its number."""
        return self._base.hashes | {
            f"adapter {number}: {name}": digest
            for number, entry in enumerate(self.adapters, 1)
            for name, digest in entry.hashes.items()
        }

    def reading_bytes(self, name: str) -> int:
        """Of a merged tensor, the values before and after, the update and, for the lengths of DoRA, one copy more."""
        own = self._copies.get(name, name)
        before = self._base.reading_bytes(own)
        if not (changes := self._changes.get(name)):
            return before
        copies = 4 if any(change.add is not None and change.add.magnitude is not None for change in changes) else 3
        return max(before + 8 * self.info(name).parameters, 4 * copies * self.info(name).parameters)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor; of one that is merged all values are in memory until another is read."""
        self.info(name)
        if name not in self._changes:
            return self._base.read_rows(name, start, stop)
        if self._latest is None or self._latest[0] != name:
            self._latest = None
            self._latest = name, self._merged(name)
        return np.ascontiguousarray(self._latest[1][start:stop]).reshape(-1).view(np.uint8)

    def _merged(self, name: str) -> NDArray[np.float32]:
        changes, value = self._changes[name], None
        if not changes or changes[0].put is None:
            value = torch.from_numpy(np.array(self._base.floats(self._copies.get(name, name))))
        for change in changes:
            value = change.apply(value)
        assert value is not None
        merged: NDArray[np.float32] = value.numpy()
        return merged

    def side_files(self) -> dict[str, Path]:
        """The base model's, but for the tokenizer's where an adapter has its own: the last one's."""
        files = self._base.side_files()
        if (folder := self._tokenizer_folder) is None:
            return files
        own = find_side_files(folder, TOKENIZER_FILES)
        return {name: path for name, path in files.items() if not matches(name, TOKENIZER_FILES)} | own

    @cached_property
    def _tokenizer_folder(self) -> Path | None:
        """The last adapter's that has a tokenizer, unless that is the base model's, file by file."""
        for adapter in reversed(self._adapters):
            if find_side_files(adapter.folder, VOCABULARIES):
                refuse_side_files(adapter.folder)
                files = find_side_files(adapter.folder, TOKENIZER_FILES)
                base = self._base.side_files()
                same = all(
                    name in base and base[name].read_bytes() == path.read_bytes() for name, path in files.items()
                )
                return None if same else adapter.folder
        return None

    def copy_side_files(self, folder: Path) -> None:
        """Copy the files, or have the base model make its own."""
        self._base.copy_side_files(folder)
        if self._tokenizer_folder is not None:
            for path in find_side_files(folder, TOKENIZER_FILES).values():
                path.unlink()
            copy_files(self.side_files(), folder)

    def tokenizer(self) -> Any:
        """The tokenizer of those files."""
        return self._base.tokenizer() if self._tokenizer_folder is None else self._own_tokenizer

    @cached_property
    def _own_tokenizer(self) -> Any:
        # As it is loaded from an artifact: transformers asks config.json for its class.
        with temporary_folder() as folder:
            (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
            self.copy_side_files(folder)
            return load_tokenizer(folder)
