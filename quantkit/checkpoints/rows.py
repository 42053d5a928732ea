"""Conversion of stored floats with numpy alone, and tensors that are read some rows at a time.

numpy has no bfloat16, so its bits are read as uint16. Dtype names follow safetensors, such as BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
FLOATS = tuple(STORED)
# The bits of the exponent, and its first refused value: NaN, infinity, and values above 2^64, whose squares overflow.
EXPONENT = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
UNUSABLE = {"F64": (1023 + 64) << 52, "F32": (127 + 64) << 23, "F16": 0x1F << 10, "BF16": (127 + 64) << 7}


def to_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Convert stored values of any shape to float32; F64 is rounded, all other types are exact."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(np.float32, copy=False)
    bits = values.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def count_unusable(values: NDArray[Any], dtype: str) -> int:
    """Return the number of stored values that are NaN, infinite or above 2^64."""
    bits = values.view(f"<u{values.itemsize}")
    exponent, least = (bits.dtype.type(limits[dtype]) for limits in (EXPONENT, UNUSABLE))
    return int(np.count_nonzero((bits & exponent) >= least))


@dataclass(frozen=True)
class Rows:
    """A lazily read tensor of this shape; `read(start, stop)` returns rows in float32. A scalar is one row."""

    shape: tuple[int, ...]
    read: Callable[[int, int], NDArray[np.float32]]

    @property
    def count(self) -> int:
        return self.shape[0] if self.shape else 1

    def pieces(self, elements: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (first row, rows) in order, about `elements` values at a time."""
        step = max(1, elements // max(1, math.prod(self.shape[1:])))
        return ((start, self.read(start, min(start + step, self.count))) for start in range(0, self.count, step))

    def whole(self) -> NDArray[np.float32]:
        return self.read(0, self.count).reshape(self.shape)


def rows_of_array(values: NDArray[np.float32]) -> Rows:
    """Wrap an array as Rows."""
    plain = values if values.ndim else values[None]
    return Rows(values.shape, lambda start, stop: plain[start:stop])


def rows_in_memory(tensor: torch.Tensor) -> Rows:
    """Wrap a torch tensor in CPU memory as Rows."""
    plain = tensor if tensor.ndim else tensor[None]
    return Rows(tuple(tensor.shape), lambda start, stop: plain[start:stop].float().numpy())
