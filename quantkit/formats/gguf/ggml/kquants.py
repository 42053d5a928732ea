"""Read and write the codes and scales of ggml's K-quant blocks, and of the similar IQ4_XS.

A block holds 256 consecutive weights of a row. Each 16 or 32 share a scale of 4 to 8 bits and, in some types, a
minimum: weight = scale * code - minimum. IQ4_XS codes index 16 non-uniform levels. Layouts: block_q2_K .. block_q6_K,
block_iq4_xs in ggml-common.h, dequantize_row_* in ggml-quants.c of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 256

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Unpack = Callable[[Bytes], tuple[Bytes, Bytes]]
Pack = Callable[[Bytes, Bytes, Bytes], None]


@dataclass
class Scales:
    """The scales of n blocks: value = factor * scales * code - offset * minima.

    `factor` and `offset` are float32 (n, 1), exact in float16; `scales` and `minima` are integers as float32
    (n, 256 / group). Types without minima use value = factor * scales * (code - zero), with `minima` all zero.
    """

    factor: Floats
    offset: Floats
    scales: Floats
    minima: Floats


class Field(NamedTuple):
    """Where a block stores some bits of each number: `width` bits, from bit `shift` up, in bytes `start` to `stop`.

    Each `run` of bytes packs several numbers per byte: number `run * j + l` is in byte l, from bit `width * j` on.
    """

    start: int
    stop: int
    width: int
    run: int
    shift: int = 0


@dataclass(frozen=True)
class KQuant:
    """The block layout of one K-quant type."""

    name: str
    bits: int  # of a code
    group: int  # weights that share a scale
    nbytes: int  # of a block
    least: int  # smallest scale, a whole number
    largest: int
    largest_minimum: int  # 0: the type has none
    zero: int  # subtracted from codes without minima
    factor_at: int  # byte offset of the float16 factor; the minima's factor follows
    unpack: Unpack  # blocks -> (scales - `least`, minima)
    pack: Pack  # puts these into blocks
    fields: tuple[Field, ...]  # of the codes
    steps: tuple[int, ...] = ()  # values of the codes, if not consecutive


def _take(blocks: Bytes, fields: Iterable[Field]) -> Bytes:
    numbers = []
    for field in fields:
        raw = blocks[:, field.start : field.stop].reshape(len(blocks), -1, 1, field.run)
        positions = np.arange(0, 8, field.width, dtype=np.uint8)[:, None]
        bits = (raw >> positions) & np.uint8((1 << field.width) - 1)
        numbers.append((bits << np.uint8(field.shift)).reshape(len(blocks), -1))
    return reduce(np.bitwise_or, numbers)


def _give(blocks: Bytes, fields: Iterable[Field], numbers: Bytes) -> None:
    for field in fields:
        bits = (numbers >> np.uint8(field.shift)) & np.uint8((1 << field.width) - 1)
        positions = np.arange(0, 8, field.width, dtype=np.uint8)[:, None]
        wide = bits.reshape(len(blocks), -1, len(positions), field.run) << positions
        blocks[:, field.start : field.stop] = np.bitwise_or.reduce(wide, axis=2).reshape(len(blocks), -1)


def _unpack_2(blocks: Bytes) -> tuple[Bytes, Bytes]:
    return blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4)


def _pack_2(blocks: Bytes, scales: Bytes, minima: Bytes) -> None:
    blocks[:, :16] = scales | (minima << 4)


def _unpack_45(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Return the eight 6-bit scales and eight 6-bit minima that Q4_K and Q5_K store in 12 bytes."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1)
    return scales, minima


def _pack_45(blocks: Bytes, scales: Bytes, minima: Bytes) -> None:
    blocks[:, 4:8] = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    blocks[:, 8:12] = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)


def _unpack_6(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Return Q6_K's int8 scales plus 128 as uint8, and minima of zero."""
    return blocks[:, 192:208] ^ np.uint8(128), np.zeros_like(blocks[:, 192:208])


def _pack_6(blocks: Bytes, scales: Bytes, _minima: Bytes) -> None:
    blocks[:, 192:208] = scales ^ 128


def _without_minima(*fields: Field) -> tuple[Unpack, Pack]:
    def unpack(blocks: Bytes) -> tuple[Bytes, Bytes]:
        scales = _take(blocks, fields)
        return scales, np.zeros_like(scales)

    return unpack, lambda blocks, scales, _minima: _give(blocks, fields, scales)


STEPS_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SCALES_3 = _without_minima(Field(96, 104, 4, 8), Field(104, 108, 2, 4, shift=4))
_SCALES_IQ4 = _without_minima(Field(4, 8, 4, 1), Field(2, 4, 2, 1, shift=4))
_CODES_3 = (Field(32, 96, 2, 32), Field(0, 32, 1, 32, shift=2))
_CODES_5 = (Field(48, 176, 4, 32), Field(16, 48, 1, 32, shift=4))
_CODES_6 = (Field(0, 128, 4, 64), Field(128, 192, 2, 32, shift=4))
KQUANTS = {
    kind.name: kind
    for kind in (
        KQuant("Q2_K", 2, 16, 84, 0, 15, 15, 0, 80, _unpack_2, _pack_2, (Field(16, 80, 2, 32),)),
        KQuant("Q3_K", 3, 16, 110, -32, 31, 0, 4, 108, *_SCALES_3, _CODES_3),
        KQuant("Q4_K", 4, 32, 144, 0, 63, 63, 0, 0, _unpack_45, _pack_45, (Field(16, 144, 4, 32),)),
        KQuant("Q5_K", 5, 32, 176, 0, 63, 63, 0, 0, _unpack_45, _pack_45, _CODES_5),
        KQuant("Q6_K", 6, 16, 210, -128, 127, 0, 32, 208, _unpack_6, _pack_6, _CODES_6),
        KQuant("IQ4_XS", 4, 32, 136, -32, 31, 0, 0, 0, *_SCALES_IQ4, (Field(8, 136, 4, 16),), STEPS_IQ4),
    )
}


def read_scales(name: str, packed: Bytes) -> Scales:
    """Return the scales of all blocks in packed rows, uint8 (rows, bytes)."""
    kind = KQUANTS[name]
    blocks = packed.reshape(-1, kind.nbytes)
    scales, minima = (part.astype(np.float32) for part in kind.unpack(blocks))
    halves = np.ascontiguousarray(blocks[:, kind.factor_at : kind.factor_at + 4]).view(np.float16).astype(np.float32)
    offset = halves[:, 1:] if kind.largest_minimum else np.zeros_like(halves[:, :1])
    return Scales(halves[:, :1], offset, scales + np.float32(kind.least), minima)


def read_grid(name: str, packed: Bytes) -> tuple[Floats, Floats]:
    """Return each group's scale and minimum, float32 (rows, columns / group): value = scale * code - minimum."""
    kind, stored = KQUANTS[name], read_scales(name, packed)
    scales = stored.factor * stored.scales
    minima = stored.offset * stored.minima if kind.largest_minimum else scales * np.float32(kind.zero)
    return scales.reshape(len(packed), -1), minima.reshape(len(packed), -1)


def with_scales(name: str, packed: Bytes, scales: Scales) -> Bytes:
    """Return a copy of packed rows, uint8 (rows, bytes), with new scales."""
    kind = KQUANTS[name]
    blocks = packed.reshape(-1, kind.nbytes).copy()
    kind.pack(blocks, (scales.scales - np.float32(kind.least)).astype(np.uint8), scales.minima.astype(np.uint8))
    halves = [scales.factor, scales.offset] if kind.largest_minimum else [scales.factor]
    stored = np.concatenate(halves, axis=1).astype(np.float16).view(np.uint8)
    blocks[:, kind.factor_at : kind.factor_at + stored.shape[1]] = stored
    return blocks.reshape(packed.shape)


def read_codes(name: str, packed: Bytes) -> Bytes:
    """Return the codes, uint8 (rows, columns), of packed rows, uint8 (rows, bytes)."""
    kind = KQUANTS[name]
    return _take(packed.reshape(-1, kind.nbytes), kind.fields).reshape(len(packed), -1)


def with_codes(name: str, packed: Bytes, codes: Bytes) -> Bytes:
    """Return a copy of packed rows, uint8 (rows, bytes), with new codes, uint8 (rows, columns)."""
    kind = KQUANTS[name]
    blocks = packed.reshape(-1, kind.nbytes).copy()
    _give(blocks, kind.fields, codes.reshape(-1, BLOCK))
    return blocks.reshape(packed.shape)
