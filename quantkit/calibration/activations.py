"""The hidden states between two blocks for all tokens that go through them, in memory or in a file."""

from __future__ import annotations

import ctypes
from io import FileIO
from pathlib import Path
from typing import Literal

import torch

DTYPE = torch.bfloat16


class Activations:
    """Hidden states (S, T, D) of S sequences of T tokens; with `path` they lie in that file, not in memory."""

    def __init__(
        self, sequences: int, length: int, hidden: int, path: Path | None = None, dtype: torch.dtype = DTYPE
    ) -> None:
        self.shape = (sequences, length, hidden)
        self.dtype = dtype
        self._row_bytes = length * hidden * dtype.itemsize
        self._file = None
        self.values = torch.empty(0)
        if path is None:
            self.values = torch.empty(self.shape, dtype=dtype)
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
        return self.shape[0]

    def batches(self, tokens: int) -> list[tuple[int, int]]:
        """Bounds of whole sequences that hold `tokens` or fewer together, or of single ones."""
        step = max(1, tokens // self.shape[1])
        return [(start, min(start + step, len(self))) for start in range(0, len(self), step)]

    @property
    def nbytes(self) -> int:
        """Bytes of all hidden states."""
        return self.shape[0] * self._row_bytes

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the hidden states of sequences `start:stop`, (stop - start, T, D)."""
        stop = len(self) if stop is None else min(stop, len(self))
        if self._file is None:
            return self.values[start:stop]
        hidden = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        transfer(self._file, "readinto", start * self._row_bytes, hidden)
        return hidden

    def select(self, sequences: list[int]) -> torch.Tensor:
        """Return the hidden states of some sequences, (len(sequences), T, D)."""
        return torch.cat([self.read(i, i + 1) for i in sequences])

    def write(self, start: int, hidden: torch.Tensor) -> None:
        """Replace the hidden states of the sequences from `start` on by (n, T, D)."""
        hidden = hidden.detach().to("cpu", self.dtype).contiguous()
        if self._file is None:
            self.values[start : start + len(hidden)] = hidden
            return
        transfer(self._file, "write", start * self._row_bytes, hidden)


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
