"""Stored floats with numpy alone, which does not know bfloat16: its 16 bits come as uint16.

dtypes are named as safetensors names them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# The bits of the exponent, and from which of its values on a weight is none: NaN, infinity, and what is beyond 2^64,
# whose square is no float32.
EXPONENT = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
UNUSABLE = {"F64": (1023 + 64) << 52, "F32": (127 + 64) << 23, "F16": 0x1F << 10, "BF16": (127 + 64) << 7}
FLOATS = tuple(STORED)


def to_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Values as they are stored, of any shape, in float32: exact but for F64, which is rounded."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(np.float32, copy=False)
    bits = values.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def count_unusable(values: NDArray[Any], dtype: str) -> int:
    """How many of the values, as they are stored, are NaN, infinite or beyond 2^64."""
    bits = values.view(f"<u{values.itemsize}")
    exponent, least = (bits.dtype.type(limits[dtype]) for limits in (EXPONENT, UNUSABLE))
    return int(np.count_nonzero((bits & exponent) >= least))
