"""A tensor that is read in rows, so that a large one needs little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """A tensor of this shape; `read(start, stop)` gives rows of it. A scalar is one row."""

    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]

    def pieces(self, elements: int) -> Iterator[tuple[int, torch.Tensor]]:
        """All rows in order, about so many `elements` at a time, each piece with the number of its first row."""
        count = self.shape[0] if self.shape else 1
        step = max(1, elements // max(1, math.prod(self.shape[1:])))
        return ((start, self.read(start, min(start + step, count))) for start in range(0, count, step))


def rows_in_memory(tensor: torch.Tensor) -> Rows:
    """The rows of a tensor that is there."""
    return Rows(tuple(tensor.shape), lambda start, stop: tensor[start:stop] if tensor.ndim else tensor[None])
