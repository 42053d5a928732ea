"""The codes and scales inside ggml's K-quant blocks: taken out, and put in.

A block holds 256 neighbouring weights of a row; each run of 16 or 32 of them has a scale of 4 or 6 bits, and in some
types a minimum: weight = scale * code - minimum. Layouts: ggml's block_q2_K .. block_q6_K (ggml-common.h and
dequantize_row_* in ggml-quants.c of https://github.com/ggml-org/ggml).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 256

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class KQuant:
    """One type: codes of `bits` bits, a scale for each `group` weights, `nbytes` a block.

    grid(blocks (n, nbytes)) gives scales and minima (n, 256 / group) float32; codes(blocks) gives (n, 256) uint8;
    put(blocks, codes) writes them into the blocks, in place.
    """

    name: str
    bits: int
    group: int
    nbytes: int
    grid: Callable[[Bytes], tuple[Floats, Floats]]
    codes: Callable[[Bytes], Bytes]
    put: Callable[[Bytes, Bytes], None]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, (n, 1) float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _take(blocks: Bytes, part: slice, width: int, run: int) -> Bytes:
    """Codes of `width` bits: weight `run * j + l` of a chunk lies in byte l of its `run` bytes, at bit width * j."""
    per = 8 // width
    raw = blocks[:, part].reshape(len(blocks), -1, 1, run)
    shifts = np.arange(per, dtype=np.uint8)[:, None] * np.uint8(width)
    return ((raw >> shifts) & np.uint8((1 << width) - 1)).reshape(len(blocks), -1)


def _give(blocks: Bytes, part: slice, width: int, run: int, codes: Bytes) -> None:
    per = 8 // width
    wide = codes.reshape(len(blocks), -1, per, run)
    shifts = np.arange(per, dtype=np.uint8)[:, None] * np.uint8(width)
    blocks[:, part] = np.bitwise_or.reduce(wide << shifts, axis=2).astype(np.uint8).reshape(len(blocks), -1)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and minima of 6 bits in the 12 bytes of Q4_K and Q5_K."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _grid_2(blocks: Bytes) -> tuple[Floats, Floats]:
    packed = blocks[:, :16]
    scales, minima = (packed & 15).astype(np.float32), (packed >> 4).astype(np.float32)
    return _half(blocks, 80) * scales, _half(blocks, 82) * minima


def _grid_3(blocks: Bytes) -> tuple[Floats, Floats]:
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = _take(packed, slice(8, 12), 2, 4)
    scales = _half(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    return scales, scales * np.float32(4)


def _grid_45(blocks: Bytes) -> tuple[Floats, Floats]:
    scales, minima = _six_bits(blocks[:, 4:16])
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _grid_6(blocks: Bytes) -> tuple[Floats, Floats]:
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return scales, scales * np.float32(32)


def _codes_3(blocks: Bytes) -> Bytes:
    return _take(blocks, slice(32, 96), 2, 32) | (_take(blocks, slice(0, 32), 1, 32) << np.uint8(2))


def _put_3(blocks: Bytes, codes: Bytes) -> None:
    _give(blocks, slice(32, 96), 2, 32, codes & np.uint8(3))
    _give(blocks, slice(0, 32), 1, 32, codes >> np.uint8(2))


def _codes_5(blocks: Bytes) -> Bytes:
    return _take(blocks, slice(48, 176), 4, 32) | (_take(blocks, slice(16, 48), 1, 32) << np.uint8(4))


def _put_5(blocks: Bytes, codes: Bytes) -> None:
    _give(blocks, slice(48, 176), 4, 32, codes & np.uint8(15))
    _give(blocks, slice(16, 48), 1, 32, codes >> np.uint8(4))


def _codes_6(blocks: Bytes) -> Bytes:
    return _take(blocks, slice(0, 128), 4, 64) | (_take(blocks, slice(128, 192), 2, 32) << np.uint8(4))


def _put_6(blocks: Bytes, codes: Bytes) -> None:
    _give(blocks, slice(0, 128), 4, 64, codes & np.uint8(15))
    _give(blocks, slice(128, 192), 2, 32, codes >> np.uint8(4))


KQUANTS = {
    kind.name: kind
    for kind in (
        KQuant(
            *("Q2_K", 2, 16, 84, _grid_2),
            lambda b: _take(b, slice(16, 80), 2, 32),
            lambda b, c: _give(b, slice(16, 80), 2, 32, c),
        ),
        KQuant("Q3_K", 3, 16, 110, _grid_3, _codes_3, _put_3),
        KQuant(
            *("Q4_K", 4, 32, 144, _grid_45),
            lambda b: _take(b, slice(16, 144), 4, 32),
            lambda b, c: _give(b, slice(16, 144), 4, 32, c),
        ),
        KQuant("Q5_K", 5, 32, 176, _grid_45, _codes_5, _put_5),
        KQuant("Q6_K", 6, 16, 210, _grid_6, _codes_6, _put_6),
    )
}


def read_grid(name: str, packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima (rows, columns / group) float32 of packed rows (rows, bytes)."""
    kind = KQUANTS[name]
    scales, minima = kind.grid(packed.reshape(-1, kind.nbytes))
    return scales.reshape(len(packed), -1), minima.reshape(len(packed), -1)


def read_codes(name: str, packed: Bytes) -> Bytes:
    """Codes (rows, columns) uint8 of packed rows (rows, bytes)."""
    kind = KQUANTS[name]
    return kind.codes(packed.reshape(-1, kind.nbytes)).reshape(len(packed), -1)


def with_codes(name: str, packed: Bytes, codes: Bytes) -> Bytes:
    """A copy of packed rows (rows, bytes) with other codes (rows, columns) on the same scales."""
    kind = KQUANTS[name]
    blocks = packed.reshape(-1, kind.nbytes).copy()
    kind.put(blocks, codes.reshape(-1, BLOCK))
    return blocks.reshape(packed.shape)
