"""The Spool: tensors on disk in the order in which they come, and a journal that says which of them are final.

`tensors.spool` holds the bytes. `tensors.journal` gets one line of JSON for each finished decoder block: where its
tensors lie, their checksum, and the state of the work so far. A process that is killed leaves at most a
torn line and bytes beyond the last line; both are cut off when the spool is opened again.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.journal import CHUNK, JOURNAL, SPOOL, cut_to_journal, line_of
from quantkit.checkpoints.safetensors import DTYPES, ITEM_BYTES, TensorInfo
from quantkit.system.files import sync_folder

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, kind): name for name, kind in DTYPES.items()}


class Spool:
    """Takes tensors by name; `finish_block` makes what was added so far survive the end of the process.

    `finished` is the number of decoder blocks that are finished, from the first on.
    """

    def __init__(self, folder: Path) -> None:
        self._spool_path, self._journal_path = folder / SPOOL, folder / JOURNAL
        lines = cut_to_journal(folder)
        self._entries = {
            name: TensorInfo(SPOOL, dtype, tuple(shape), start, math.prod(shape) * ITEM_BYTES[dtype])
            for line in lines
            for name, dtype, shape, start in line["tensors"]
        }
        self._final = set(self._entries)
        self._fresh: dict[str, TensorInfo] = {}
        self._crc = 0
        self.finished = len(lines)
        self._file = self._spool_path.open("r+b" if self._spool_path.exists() else "w+b")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; its bytes go to disk at once. What a finished block holds already is not taken again."""
        self.add_pieces(name, tensor.dtype, tuple(tensor.shape), (tensor,))

    def add_pieces(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[torch.Tensor]) -> None:
        """Take one tensor as `add` does, some of its elements at a time."""
        if name in self._final:
            return
        if name in self._entries:
            raise ValueError(f"the tensor {name} was added twice; each tensor of a checkpoint has one name")
        self._entries[name] = self._fresh[name] = self._append(name, dtype, shape, pieces)

    def _append(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[torch.Tensor]
    ) -> TensorInfo:
        start, nbytes = self._file.seek(0, os.SEEK_END), math.prod(shape) * dtype.itemsize
        for piece in pieces:
            data = piece.detach().to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
            self._file.write(data)
            self._crc = zlib.crc32(data, self._crc)
        written = self._file.tell() - start
        if written != nbytes:
            raise ValueError(f"the tensor {name} has {written} bytes, and its shape {shape} needs {nbytes}")
        return TensorInfo(SPOOL, DTYPE_NAMES[dtype], shape, start, nbytes)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Take another value of a tensor; should the process end before the artifact is done, the old one is back."""
        old, dtype = self._entries[name], DTYPE_NAMES[tensor.dtype]
        if (dtype, tuple(tensor.shape)) != (old.dtype, old.shape):
            raise ValueError(f"the tensor {name} is {old.dtype} {old.shape}; it cannot become {dtype}")
        self._entries[name] = self._append(name, tensor.dtype, old.shape, (tensor,))

    def names(self) -> set[str]:
        """Names of all tensors in the spool."""
        return set(self._entries)

    def get(self, name: str) -> torch.Tensor:
        """Read a tensor back as it was added; raises KeyError for a name that is not there."""
        entry = self._entries[name]
        dtype = getattr(torch, DTYPES[entry.dtype])
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        self._file.seek(entry.start)
        return torch.frombuffer(bytearray(self._file.read(entry.nbytes)), dtype=dtype).reshape(entry.shape)

    def copy(self, entry: TensorInfo, file: Any) -> None:
        """Copy the bytes of one tensor into the open `file`."""
        self._file.seek(entry.start)
        left = entry.nbytes
        while left:
            left -= file.write(self._file.read(min(left, CHUNK)))

    def finish_block(self, index: int, state: Mapping[str, Any]) -> None:
        """Note on disk that decoder block `index` is finished, with all tensors so far and the `state` (JSON values).

        Blocks are finished in order. Of two processes' work on one block, only the whole counts.
        """
        if index != self.finished:
            raise ValueError(f"block {index} cannot be finished: block {self.finished} is next")
        self._file.flush()
        os.fsync(self._file.fileno())
        line = {
            "block": index,
            "end": self._file.seek(0, os.SEEK_END),
            "crc32": self._crc,
            "tensors": [(name, entry.dtype, entry.shape, entry.start) for name, entry in self._fresh.items()],
            "state": dict(state),
        }
        with self._journal_path.open("a", encoding="utf-8") as file:
            file.write(line_of(line))
            file.flush()
            os.fsync(file.fileno())
        if index == 0:
            sync_folder(self._journal_path.parent)  # where both files are new
        self._final.update(self._fresh)
        self._fresh, self._crc = {}, 0
        self.finished += 1

    def close(self) -> None:
        """Close the file; what is on disk stays."""
        self._file.close()

    def remove(self) -> None:
        """Close and delete spool and journal."""
        self.close()
        self._journal_path.unlink(missing_ok=True)
        self._spool_path.unlink(missing_ok=True)
