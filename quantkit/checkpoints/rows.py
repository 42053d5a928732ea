"""A tensor that is read in rows, so that a large one needs little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rows:
    """A tensor of this shape; `read(start, stop)` gives rows of it in float32. A scalar is one row."""

    shape: tuple[int, ...]
    read: Callable[[int, int], NDArray[np.float32]]

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.shape[0] if self.shape else 1

    def pieces(self, elements: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """All rows in order, about so many `elements` at a time, each piece with the number of its first row."""
        step = max(1, elements // max(1, math.prod(self.shape[1:])))
        return ((start, self.read(start, min(start + step, self.count))) for start in range(0, self.count, step))

    def whole(self) -> NDArray[np.float32]:
        """All of it."""
        return self.read(0, self.count).reshape(self.shape)


def rows_of_array(values: NDArray[np.float32]) -> Rows:
    """The rows of an array."""
    plain = values if values.ndim else values[None]
    return Rows(values.shape, lambda start, stop: plain[start:stop])


def rows_in_memory(tensor: torch.Tensor) -> Rows:
    """The rows of a tensor that is there."""
    plain = tensor if tensor.ndim else tensor[None]
    return Rows(tuple(tensor.shape), lambda start, stop: plain[start:stop].float().numpy())
