"""Tensors of many sequences, in memory or in a file that has no name."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Literal

import torch


class Store:
    """A tensor of the shape `each` for every one of S sequences; with `path` they lie in that file, not in memory.

    Those of several sequences are one tensor, in which the sequences are the axis `axis`.
    """

    def __init__(
        self, sequences: int, each: tuple[int, ...], dtype: torch.dtype, path: Path | None = None, axis: int = 0
    ) -> None:
        self.dtype, self.path = dtype, path
        self._count, self._each, self._axis = sequences, each, axis
        self._item_bytes = math.prod(each) * dtype.itemsize
        self._file = None
        self.values = torch.empty(0)
        if path is None:
            self.values = torch.empty(sequences, *each, dtype=dtype)
        else:
            self._file = unlinked(path)

    def close(self) -> None:
        """Let go of the file, which is gone then."""
        if self._file is not None:
            self._file.close()

    @property
    def in_memory(self) -> bool:
        """Whether they are in memory, in `values`."""
        return self._file is None

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._count * self._item_bytes

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Those of the sequences `start:stop`."""
        stop = self._count if stop is None else min(stop, self._count)
        if self._file is None:
            return self._turned(self.values[start:stop])
        values = torch.empty(stop - start, *self._each, dtype=self.dtype)
        transfer(self._file, "readinto", start * self._item_bytes, values)
        return self._turned(values)

    def select(self, sequences: Sequence[int]) -> torch.Tensor:
        """Those of some sequences, in their order."""
        if isinstance(sequences, range) and sequences.step == 1:
            return self.read(sequences.start, sequences.stop)
        return torch.cat([self.read(number, number + 1) for number in sequences], self._axis)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace those of the sequences from `start` on."""
        values = values.detach().movedim(self._axis, 0).to("cpu", self.dtype).contiguous()
        if self._file is None:
            self.values[start : start + len(values)] = values
            return
        transfer(self._file, "write", start * self._item_bytes, values)

    def put(self, sequences: Sequence[int], values: torch.Tensor) -> None:
        """Replace those of some sequences."""
        if isinstance(sequences, range) and sequences.step == 1:
            self.write(sequences.start, values)
            return
        for number, value in zip(sequences, values.split(1, self._axis), strict=True):
            self.write(number, value)

    def _turned(self, values: torch.Tensor) -> torch.Tensor:
        return values.movedim(0, self._axis).contiguous() if self._axis else values


def unlinked(path: Path) -> FileIO:
    """Open a new file without a name: it lives until it is closed, and a kill leaves nothing behind."""
    file = FileIO(path, "w+")
    path.unlink()
    return file


def transfer(file: FileIO, action: Literal["readinto", "write"], place: int, data: torch.Tensor) -> None:
    """Read a contiguous tensor of the processor's memory from `place` of the file, or write it there."""
    # Not through numpy, which would fix the size of the tensor's storage for good.
    view = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")
    file.seek(place)
    done = 0
    while done < len(view):
        moved = getattr(file, action)(view[done:])
        if not moved:
            raise OSError("activations that were put into a file could not be read back")
        done += moved
