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


@dataclass
class Scales:
    """What a block (n of them) says beside its codes: value = factor * scales * code - offset * minima.

    factor and offset are (n, 1) float32 that a float16 holds; scales and minima (n, 256 / group) are whole numbers in
    float32. In types without minima, value = factor * scales * (code - zero), and minima are zeros.
    """

    factor: Floats
    offset: Floats
    scales: Floats
    minima: Floats


@dataclass(frozen=True)
class KQuant:
    """One type: codes of `bits` bits, a scale for each `group` weights, `nbytes` a block.

    Scales are whole numbers from `least` to `most`, minima from 0 to `most_minimum` (0: the type has none, and `zero`
    is taken from its codes). scales(blocks (n, nbytes)) and codes(blocks) -> (n, 256) uint8 read; put(blocks, codes)
    and put_scales(blocks, scales) write in place.
    """

    name: str
    bits: int
    group: int
    nbytes: int
    least: int
    most: int
    most_minimum: int
    zero: int
    scales: Callable[[Bytes], Scales]
    put_scales: Callable[[Bytes, Scales], None]
    codes: Callable[[Bytes], Bytes]
    put: Callable[[Bytes, Bytes], None]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, (n, 1) float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _put_half(blocks: Bytes, at: int, values: Floats) -> None:
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8)


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


def _scales_2(blocks: Bytes) -> Scales:
    packed = blocks[:, :16]
    scales, minima = (packed & 15).astype(np.float32), (packed >> 4).astype(np.float32)
    return Scales(_half(blocks, 80), _half(blocks, 82), scales, minima)


def _put_scales_2(blocks: Bytes, s: Scales) -> None:
    blocks[:, :16] = s.scales.astype(np.uint8) | (s.minima.astype(np.uint8) << 4)
    _put_half(blocks, 80, s.factor)
    _put_half(blocks, 82, s.offset)


def _scales_3(blocks: Bytes) -> Scales:
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    scales = (low | (_take(packed, slice(8, 12), 2, 4) << 4)).astype(np.float32) - 32
    return Scales(_half(blocks, 108), np.zeros((len(blocks), 1), np.float32), scales, np.zeros_like(scales))


def _put_scales_3(blocks: Bytes, s: Scales) -> None:
    stored = (s.scales + 32).astype(np.uint8)
    low = stored & 15
    blocks[:, 96:104] = low[:, :8] | (low[:, 8:] << 4)
    _give(blocks, slice(104, 108), 2, 4, stored >> np.uint8(4))
    _put_half(blocks, 108, s.factor)


def _scales_45(blocks: Bytes) -> Scales:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1).astype(np.float32)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1).astype(np.float32)
    return Scales(_half(blocks, 0), _half(blocks, 2), scales, minima)


def _put_scales_45(blocks: Bytes, s: Scales) -> None:
    scales, minima = s.scales.astype(np.uint8), s.minima.astype(np.uint8)
    blocks[:, 4:8] = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    blocks[:, 8:12] = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    _put_half(blocks, 0, s.factor)
    _put_half(blocks, 2, s.offset)


def _scales_6(blocks: Bytes) -> Scales:
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Scales(_half(blocks, 208), np.zeros((len(blocks), 1), np.float32), scales, np.zeros_like(scales))


def _put_scales_6(blocks: Bytes, s: Scales) -> None:
    blocks[:, 192:208] = s.scales.astype(np.int8).view(np.uint8)
    _put_half(blocks, 208, s.factor)


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
            *("Q2_K", 2, 16, 84, 0, 15, 15, 0, _scales_2, _put_scales_2),
            lambda b: _take(b, slice(16, 80), 2, 32),
            lambda b, c: _give(b, slice(16, 80), 2, 32, c),
        ),
        KQuant("Q3_K", 3, 16, 110, -32, 31, 0, 4, _scales_3, _put_scales_3, _codes_3, _put_3),
        KQuant(
            *("Q4_K", 4, 32, 144, 0, 63, 63, 0, _scales_45, _put_scales_45),
            lambda b: _take(b, slice(16, 144), 4, 32),
            lambda b, c: _give(b, slice(16, 144), 4, 32, c),
        ),
        KQuant("Q5_K", 5, 32, 176, 0, 63, 63, 0, _scales_45, _put_scales_45, _codes_5, _put_5),
        KQuant("Q6_K", 6, 16, 210, -128, 127, 0, 32, _scales_6, _put_scales_6, _codes_6, _put_6),
    )
}


def read_scales(name: str, packed: Bytes) -> Scales:
    """The scales of packed rows (rows, bytes), one block after the other."""
    kind = KQUANTS[name]
    return kind.scales(packed.reshape(-1, kind.nbytes))


def read_grid(name: str, packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima (rows, columns / group) float32 of packed rows (rows, bytes): scale * code - minimum."""
    kind, found = KQUANTS[name], read_scales(name, packed)
    scales = found.factor * found.scales
    minima = found.offset * found.minima if kind.most_minimum else scales * np.float32(kind.zero)
    return scales.reshape(len(packed), -1), minima.reshape(len(packed), -1)


def with_scales(name: str, packed: Bytes, scales: Scales) -> Bytes:
    """A copy of packed rows (rows, bytes) with the same codes on other scales."""
    kind = KQUANTS[name]
    blocks = packed.reshape(-1, kind.nbytes).copy()
    kind.put_scales(blocks, scales)
    return blocks.reshape(packed.shape)


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
