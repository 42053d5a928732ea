"""ggml's block types packed by our own search (search.py): the bytes of ggml's quantizers in a fraction of the time.

Each function follows one of ggml's step by step (quantize_row_*_ref without importance, quantize_row_*_impl with it, in
ggml-quants.c of https://github.com/ggml-org/ggml): weights of the errors, scales of the blocks, scales of the
super-blocks of 256, codes on the stored scales. What is not here is fast enough in ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.formats.gguf.ggml import search
from quantkit.formats.gguf.ggml.kquants import BLOCK, KQUANTS, Bytes, Floats, Scales, with_codes, with_scales

NOTHING = np.float32(1e-15)
SLAB = 1 << 18  # weights packed at a time, for which a few arrays of float32 are held


class Candidates(NamedTuple):
    """The inverse scales that ggml tries for a block, see `search.affine`."""

    first: float
    step: float
    steps: int
    absolute: bool = False


PLAIN = {
    "Q2_K": Candidates(-0.5, 0.1, 15, absolute=True),
    "Q4_K": Candidates(-1.0, 0.1, 20),
    "Q5_K": Candidates(-0.5, 0.1, 15),
}
WEIGHTED = Candidates(-0.9, 0.05, 36)


def _nearest(values: Floats) -> NDArray[np.int32]:
    """ggml's rounding: the nearest whole number, ties to even, for magnitudes below 2^22."""
    return ((values + np.float32(12582912.0)).view(np.int32) & 0x007FFFFF) - 0x00400000


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _super_block(values: Floats, weights: Floats | None, top: int) -> tuple[Floats, Floats]:
    """Scales (n, 1) and codes (n, blocks) up to `top`: searched with weights, else they span each row's largest."""
    if weights is not None:
        fitted = search.positive(values, weights, top)
        return fitted.scales[:, None], fitted.codes.astype(np.float32)
    largest = np.fmax.reduce(values, axis=1, keepdims=True, initial=np.float32(0)) + np.float32(0)  # no -0
    inverse = np.where(largest > 0, np.float32(top) / largest, np.float32(0))
    return largest / np.float32(top), np.minimum(_nearest(inverse * values), top).astype(np.float32)


def _affine(name: str, rows: Floats, importance: Floats | None) -> Bytes:
    """Q2_K, Q4_K, Q5_K: a scale and a minimum for each block, codes of both in the super-block."""
    kind, tried = KQUANTS[name], PLAIN[name] if importance is None else WEIGHTED
    blocks = rows.reshape(-1, kind.group)
    if importance is not None:
        weights = search.error_weights(rows, importance, BLOCK, 1 if name == "Q2_K" else 2)
    else:
        weights = np.abs(rows) if tried.absolute else search.error_weights(rows, None, kind.group)
    fitted = search.affine(blocks, weights.reshape(blocks.shape), (1 << kind.bits) - 1, *tried)
    scales, minima, sums = (p.reshape(-1, BLOCK // kind.group) for p in (fitted.scales, fitted.offsets, fitted.sums))
    of_blocks = None if importance is None else sums
    factor, whole_scales = _super_block(scales, of_blocks, kind.largest)
    offset, whole_minima = _super_block(minima, of_blocks, kind.largest_minimum)
    return _written(name, rows, fitted.codes, Scales(_half(factor), _half(offset), whole_scales, whole_minima))


def _symmetric(name: str, rows: Floats, importance: Floats | None) -> Bytes:
    """Q3_K with importance and Q6_K: a signed scale for each block."""
    kind = KQUANTS[name]
    blocks = rows.reshape(-1, kind.group)
    if importance is None:
        weights = blocks * blocks
    elif name == "Q6_K":
        weights = np.tile(importance, len(rows)).reshape(blocks.shape)
    else:
        weights = search.error_weights(rows, importance, BLOCK, 2).reshape(blocks.shape)
    fitted = search.symmetric(blocks, weights, kind.zero)
    scales, sums = (part.reshape(-1, BLOCK // kind.group) for part in (fitted.scales, fitted.sums))
    if name == "Q6_K":
        factor, whole = _extreme(scales)
        fitted.codes[np.repeat(factor[:, 0] == 0, BLOCK // kind.group)] = 0
    else:
        of_scales = search.symmetric(scales, sums, -kind.least)
        factor, whole = of_scales.scales[:, None], of_scales.codes.astype(np.float32) + np.float32(kind.least)
    return _written(name, rows, fitted.codes, Scales(_half(factor), np.zeros_like(factor), whole, np.zeros_like(whole)))


def _extreme(scales: Floats) -> tuple[Floats, Floats]:
    """Factors (n, 1) that put the scale of largest magnitude at -128, and the whole scales; zeros for nothing."""
    sizes = np.where(np.isnan(scales), np.float32(0), np.abs(scales))
    extreme = np.take_along_axis(scales, sizes.argmax(axis=1)[:, None], axis=1)
    nothing = sizes.max(axis=1, keepdims=True) < NOTHING
    inverse = np.where(nothing, np.float32(0), np.float32(-128) / extreme)
    whole = np.minimum(_nearest(inverse * scales), 127).astype(np.float32)
    return np.where(nothing, np.float32(0), np.float32(1) / inverse), whole


def _written(name: str, rows: Floats, codes: Bytes, stored: Scales) -> Bytes:
    """Codes rounded anew on the scales as they are stored, all put into blocks."""
    kind = KQUANTS[name]
    scales = np.ascontiguousarray((stored.factor * stored.scales).reshape(-1))
    offsets = np.ascontiguousarray((stored.offset * stored.minima).reshape(-1))
    search.round_codes(rows.reshape(-1, kind.group), scales, offsets, kind.zero, (1 << kind.bits) - 1, codes)
    packed = np.zeros((len(rows), rows.shape[1] // BLOCK * kind.nbytes), np.uint8)
    return with_scales(name, with_codes(name, packed, codes), stored)


def _small(bits: int, minimum: bool, rows: Floats, importance: Floats | None) -> Bytes:
    """Q4_0, Q4_1, Q5_0, Q5_1 with importance: blocks of 32 with float16 scales."""
    blocks = rows.reshape(-1, 32)
    weights = search.error_weights(rows, importance, rows.shape[1]).reshape(blocks.shape)
    if minimum:
        fitted = search.affine(blocks, weights, (1 << bits) - 1, *WEIGHTED)
        parts = [fitted.scales, -fitted.offsets]
    else:
        fitted = search.symmetric(blocks, weights, 1 << (bits - 1))
        parts = [fitted.scales]
    codes = fitted.codes
    packed: list[Bytes] = [part.astype(np.float16)[:, None].view(np.uint8) for part in parts]
    if bits == 5:
        packed.append(np.packbits(codes >> np.uint8(4), axis=1, bitorder="little"))
    packed.append((codes[:, :16] & np.uint8(15)) | (codes[:, 16:] << np.uint8(4)))
    return np.concatenate(packed, axis=1).reshape(len(rows), -1)


Packer = Callable[[Floats, Floats | None], Bytes]
# By type and whether there is an importance.
PACKERS: dict[tuple[str, bool], Packer] = {
    **{(name, weighted): partial(_affine, name) for name in PLAIN for weighted in (False, True)},
    **{key: partial(_symmetric, key[0]) for key in (("Q3_K", True), ("Q6_K", False), ("Q6_K", True))},
    **{(f"Q{bits}_{minimum}", True): partial(_small, bits, bool(minimum)) for bits in (4, 5) for minimum in (0, 1)},
}


def pack(name: str, rows: Floats, importance: Floats | None = None) -> Bytes:
    """Pack float32 `rows` (n > 0, columns), with `importance` (columns,) or none, as ggml would: (n, row bytes) uint8.

    Raises KeyError for what PACKERS does not have. Values and importance are as `ggml.quantize` has checked them.
    """
    packer = PACKERS[name, importance is not None]
    step = max(1, SLAB // rows.shape[1])
    with np.errstate(all="ignore"):  # flat blocks divide by zero, and are told apart afterwards, as in ggml
        packed = [packer(rows[first : first + step], importance) for first in range(0, len(rows), step)]
    return packed[0] if len(packed) == 1 else np.concatenate(packed)
