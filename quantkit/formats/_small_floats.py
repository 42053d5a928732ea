"""Floats of 8 and 4 bits as tables: E4M3 without infinities, E2M1, and the powers of two of E8M0.

Source: OCP Microscaling Formats (MX) Specification, version 1.0, section 5.3; OCP 8-bit Floating Point, version 1.0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.scaled_weight import E2M1_CODES, E8M0_BIAS


def _e4m3() -> NDArray[np.float32]:
    """The value of each byte: sign, 4 bits of exponent (bias 7), 3 of mantissa; all ones are NaN."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, (bits & 7) / 8
    values = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    values[-1] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3()
E2M1 = np.array(E2M1_CODES, np.float32)
E8M0 = np.array([*(2.0 ** (exponent - E8M0_BIAS) for exponent in range(255)), np.nan], np.float32)


def exponents(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The powers of two of E8M0 bytes, NaN for 255."""
    powers: NDArray[np.float32] = E8M0[stored]
    return powers
