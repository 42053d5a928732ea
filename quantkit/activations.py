"""The hidden states between two blocks for all calibration tokens, in memory or in a file."""

from __future__ import annotations

from pathlib import Path

import torch

DTYPE = torch.bfloat16


class Activations:
    """Hidden states (S, T, D) bfloat16 of S sequences of T tokens; with `path` they lie in that file, not in memory."""

    def __init__(self, sequences: int, length: int, hidden: int, path: Path | None = None) -> None:
        self.shape = (sequences, length, hidden)
        self._row_bytes = length * hidden * DTYPE.itemsize
        self._file = None
        self._kept = torch.empty(0)
        if path is None:
            self._kept = torch.empty(self.shape, dtype=DTYPE)
        else:
            self._file = path.open("w+b", buffering=0)
            path.unlink()  # the open file lives on until it is closed, and nothing is left behind by a kill

    def close(self) -> None:
        """Let go of the file, which is gone then."""
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all hidden states."""
        return self.shape[0] * self._row_bytes

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the hidden states of sequences `start:stop`, (stop - start, T, D) bfloat16."""
        stop = len(self) if stop is None else min(stop, len(self))
        if self._file is None:
            return self._kept[start:stop]
        found = torch.empty(stop - start, *self.shape[1:], dtype=DTYPE)
        view = found.view(torch.uint8).numpy().reshape(-1).data
        self._file.seek(start * self._row_bytes)
        done = 0
        while done < len(view):
            done += self._file.readinto(view[done:]) or _torn()
        return found

    def write(self, start: int, hidden: torch.Tensor) -> None:
        """Replace the hidden states of the sequences from `start` on by (n, T, D)."""
        hidden = hidden.detach().to("cpu", DTYPE).contiguous()
        if self._file is None:
            self._kept[start : start + len(hidden)] = hidden
            return
        view = hidden.view(torch.uint8).numpy().reshape(-1).data
        self._file.seek(start * self._row_bytes)
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])


def _torn() -> int:
    raise OSError("the spilled activations could not be read back")
