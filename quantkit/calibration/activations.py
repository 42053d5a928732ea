"""The hidden states between two blocks for all tokens that go through them, in memory or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from quantkit.calibration.flow.shared import Shared
from quantkit.calibration.flow.store import Store

DTYPE = torch.bfloat16


class Activations(Store):
    """Hidden states (S, T, D) of S sequences of T tokens; with `path` they lie in that file, not in memory.

    Where a token has `states` of them side by side, those of n sequences are (states, n, T, D). `shared` is what blocks
    hand to later ones beside them, `numbers` says which of the recorded sequences these are; what was recorded of each
    sequence's text goes with `owned`.
    """

    def __init__(
        self,
        sequences: int,
        length: int,
        hidden: int,
        path: Path | None = None,
        dtype: torch.dtype = DTYPE,
        states: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.shape = (sequences, length, hidden)
        self.states = states
        super().__init__(sequences, (*([states] if states else []), length, hidden), dtype, path, 1 if states else 0)
        self.shared = Shared(sequences, path)
        self.numbers = range(sequences) if numbers is None else numbers
        self.owned: list[Store] = []

    def close(self) -> None:
        """Let go of the files, which are gone then."""
        for store in self.owned:
            store.close()
        self.shared.close()
        super().close()

    def like(self, path: Path | None = None, sequences: int | None = None) -> Activations:
        """New ones of the same shape, for the same sequences or for the first ones."""
        count, length, hidden = self.shape
        count = count if sequences is None else sequences
        return Activations(count, length, hidden, path, self.dtype, self.states, self.numbers[:count])

    def chosen(self, sequences: Sequence[int]) -> Activations:
        """A copy of some sequences, in memory, before any block has run on it."""
        _, length, hidden = self.shape
        numbers = [self.numbers[sequence] for sequence in sequences]
        copy = Activations(len(sequences), length, hidden, None, self.dtype, self.states, numbers)
        copy.write(0, self.select(sequences))
        return copy

    def batches(self, tokens: int, edge: int = 0) -> list[tuple[int, int]]:
        """Return (start, stop) of batches of whole sequences: at most `tokens` or one sequence, none across `edge`."""
        step = max(1, tokens // self.shape[1])
        return list(pairwise([*range(0, edge, step), *range(edge, len(self), step), len(self)]))
