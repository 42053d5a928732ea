"""Quantize to ggml's block types faster than ggml, with identical bytes.

Each function mirrors one of ggml's (quantize_row_*_ref without importance, quantize_row_*_impl with it, in
ggml-quants.c of https://github.com/ggml-org/ggml): error weights, block scales, super-block scales (256 weights), then
codes for the stored scales. The other types use ggml, which is fast enough for them.

The search for block scales is in C (search.c): ggml's arithmetic, vectorized over many blocks, without the GIL.
If no compiler was found at installation, `available` returns False and ggml is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.ctypeslib import ndpointer
from numpy.typing import NDArray

from quantkit.formats.gguf.ggml.kquants import BLOCK, KQUANTS, Bytes, Floats, Scales, with_codes, with_scales

_FLOATS, _BYTES = (ndpointer(dtype, flags="C_CONTIGUOUS") for dtype in (np.float32, np.uint8))
_FLOAT, _INT, _LONG = ctypes.c_float, ctypes.c_int, ctypes.c_long
# Arguments of search.c: values and weights are float32 (blocks, n) with n up to 32, codes uint8 of that shape.
_ARGUMENTS = {
    "error_weights": [_FLOATS, ctypes.c_void_p, _LONG, _LONG, _INT, _FLOAT, _FLOATS],
    "search_affine": [_FLOATS, _FLOATS, _LONG, _INT, _INT, _FLOAT, _FLOAT, _INT, _INT, *[_FLOATS] * 3, _BYTES],
    "search_symmetric": [_FLOATS, _FLOATS, _LONG, _INT, _INT, _FLOATS, _FLOATS, _BYTES],
    "search_positive": [_FLOATS, _FLOATS, _LONG, _INT, _INT, _FLOATS, _BYTES],
    "round_codes": [_FLOATS, _FLOATS, _FLOATS, _LONG, _INT, _INT, _INT, _BYTES],
}
NOTHING = np.float32(1e-15)
SLAB = 1 << 18  # weights packed at a time; memory is a few float32 arrays of this size


def load(path: Path) -> Any:
    """Load the compiled search library at `path`; raise OSError if it does not run on this machine."""
    library = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


@cache
def _library() -> Any:
    here = Path(__file__).parent
    path = next((place for end in EXTENSION_SUFFIXES if (place := here / f"_search{end}").is_file()), None)
    try:
        return load(path) if path is not None else None
    except OSError:  # built for another machine
        return None


def available() -> bool:
    """Return whether the compiled search library exists and runs on this machine."""
    return _library() is not None


@dataclass(frozen=True)
class Fitted:
    """Results of a scale search: per block scale, offset and sum of weights (blocks,), and codes uint8 (blocks, n)."""

    scales: Floats
    offsets: Floats
    sums: Floats
    codes: Bytes


class Candidates(NamedTuple):
    """The inverse scales that ggml tries, (first + step * k + top) / range for k = 0..steps; the least error wins."""

    first: float
    step: float
    steps: int
    absolute: bool = False  # the error is one of magnitudes, not of squares


def _searched(function: str, values: Floats, weights: Floats, results: tuple[str, ...], *settings: float) -> Fitted:
    blocks, n = values.shape
    scales, offsets, sums = (np.zeros(blocks, np.float32) for _ in range(3))
    fitted = Fitted(scales, offsets, sums, np.empty((blocks, n), np.uint8))
    found = (getattr(fitted, result) for result in results)
    getattr(_library(), function)(values, weights, blocks, n, *settings, *found)
    return fitted


def _search_affine(values: Floats, weights: Floats, top: int, tried: Candidates) -> Fitted:
    """Fit value = scale * code - offset for each block, with codes 0..`top` and offset >= 0."""
    return _searched("search_affine", values, weights, ("scales", "offsets", "sums", "codes"), top, *tried)


def _search_symmetric(values: Floats, weights: Floats, top: int) -> Fitted:
    """Fit value = scale * (code - top) for each block, with codes 0..2 * `top` - 1 and a scale of either sign."""
    return _searched("search_symmetric", values, weights, ("scales", "sums", "codes"), top)


def _error_weights(rows: Floats, importance: Floats | None, run: int, times: int = 1) -> Floats:
    """Return ggml's weight of each value's squared error, float32 of the shape of `rows` (n, columns).

    With m the mean square of a run: importance * sqrt(times * m + value^2), or sqrt(m) + |value| without importance.
    """
    weights = np.empty_like(rows)
    given = None if importance is None else importance.ctypes.data
    _library().error_weights(rows, given, *rows.shape, run, times, weights)
    return weights


PLAIN = {
    "Q2_K": Candidates(-0.5, 0.1, 15, absolute=True),
    "Q4_K": Candidates(-1.0, 0.1, 20),
    "Q5_K": Candidates(-0.5, 0.1, 15),
}
WEIGHTED = Candidates(-0.9, 0.05, 36)


def _nearest(values: Floats) -> NDArray[np.int32]:
    """Round to the nearest integer as ggml does: ties to even, for magnitudes below 2^22."""
    return ((values + np.float32(12582912.0)).view(np.int32) & 0x007FFFFF) - 0x00400000


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _super_block(values: Floats, weights: Floats | None, top: int) -> tuple[Floats, Floats]:
    """Quantize block scales to (super-block scales (n, 1), codes (n, blocks)): by weighted search, or max to `top`."""
    if weights is not None:
        fitted = _searched("search_positive", values, weights, ("scales", "codes"), top)
        return fitted.scales[:, None], fitted.codes.astype(np.float32)
    largest = np.fmax.reduce(values, axis=1, keepdims=True, initial=np.float32(0)) + np.float32(0)  # no -0
    inverse = np.where(largest > 0, np.float32(top) / largest, np.float32(0))
    return largest / np.float32(top), np.minimum(_nearest(inverse * values), top).astype(np.float32)


def _affine(name: str, rows: Floats, importance: Floats | None) -> Bytes:
    """Quantize to Q2_K, Q4_K or Q5_K: each block has a quantized scale and a quantized minimum."""
    kind, tried = KQUANTS[name], PLAIN[name] if importance is None else WEIGHTED
    blocks = rows.reshape(-1, kind.group)
    if importance is not None:
        weights = _error_weights(rows, importance, BLOCK, 1 if name == "Q2_K" else 2)
    else:
        weights = np.abs(rows) if tried.absolute else _error_weights(rows, None, kind.group)
    fitted = _search_affine(blocks, weights.reshape(blocks.shape), (1 << kind.bits) - 1, tried)
    scales, minima, sums = (p.reshape(-1, BLOCK // kind.group) for p in (fitted.scales, fitted.offsets, fitted.sums))
    of_blocks = None if importance is None else sums
    factor, whole_scales = _super_block(scales, of_blocks, kind.largest)
    offset, whole_minima = _super_block(minima, of_blocks, kind.largest_minimum)
    return _written(name, rows, fitted.codes, Scales(_half(factor), _half(offset), whole_scales, whole_minima))


def _symmetric(name: str, rows: Floats, importance: Floats | None) -> Bytes:
    """Quantize to Q3_K (with importance) or Q6_K: each block has a quantized signed scale and no minimum."""
    kind = KQUANTS[name]
    blocks = rows.reshape(-1, kind.group)
    if importance is None:
        weights = blocks * blocks
    elif name == "Q6_K":
        weights = np.tile(importance, len(rows)).reshape(blocks.shape)
    else:
        weights = _error_weights(rows, importance, BLOCK, 2).reshape(blocks.shape)
    fitted = _search_symmetric(blocks, weights, kind.zero)
    scales, sums = (part.reshape(-1, BLOCK // kind.group) for part in (fitted.scales, fitted.sums))
    if name == "Q6_K":
        factor, whole = _extreme(scales)
        fitted.codes[np.repeat(factor[:, 0] == 0, BLOCK // kind.group)] = 0
    else:
        of_scales = _search_symmetric(scales, sums, -kind.least)
        factor, whole = of_scales.scales[:, None], of_scales.codes.astype(np.float32) + np.float32(kind.least)
    return _written(name, rows, fitted.codes, Scales(_half(factor), np.zeros_like(factor), whole, np.zeros_like(whole)))


def _extreme(scales: Floats) -> tuple[Floats, Floats]:
    """Quantize each row's scales to int8; return factors (n, 1), with the largest magnitude at -128, and integers."""
    sizes = np.where(np.isnan(scales), np.float32(0), np.abs(scales))
    extreme = np.take_along_axis(scales, sizes.argmax(axis=1)[:, None], axis=1)
    nothing = sizes.max(axis=1, keepdims=True) < NOTHING
    inverse = np.where(nothing, np.float32(0), np.float32(-128) / extreme)
    whole = np.minimum(_nearest(inverse * scales), 127).astype(np.float32)
    return np.where(nothing, np.float32(0), np.float32(1) / inverse), whole


def _written(name: str, rows: Floats, codes: Bytes, stored: Scales) -> Bytes:
    """Round `rows` to codes with the stored scales, and return the packed blocks."""
    kind = KQUANTS[name]
    scales = np.ascontiguousarray((stored.factor * stored.scales).reshape(-1))
    offsets = np.ascontiguousarray((stored.offset * stored.minima).reshape(-1))
    blocks, top = rows.reshape(-1, kind.group), (1 << kind.bits) - 1
    _library().round_codes(
        blocks, scales, offsets, *blocks.shape, kind.zero, top, codes
    )  # codes of a zero scale are unchanged
    packed = np.zeros((len(rows), rows.shape[1] // BLOCK * kind.nbytes), np.uint8)
    return with_scales(name, with_codes(name, packed, codes), stored)


def _small(bits: int, minimum: bool, rows: Floats, importance: Floats | None) -> Bytes:
    """Quantize to Q4_0, Q4_1, Q5_0 or Q5_1 with importance: blocks of 32 values with float16 scales."""
    blocks = rows.reshape(-1, 32)
    weights = _error_weights(rows, importance, rows.shape[1]).reshape(blocks.shape)
    if minimum:
        fitted = _search_affine(blocks, weights, (1 << bits) - 1, WEIGHTED)
        parts = [fitted.scales, -fitted.offsets]
    else:
        fitted = _search_symmetric(blocks, weights, 1 << (bits - 1))
        parts = [fitted.scales]
    codes = fitted.codes
    packed: list[Bytes] = [part.astype(np.float16)[:, None].view(np.uint8) for part in parts]
    if bits == 5:
        packed.append(np.packbits(codes >> np.uint8(4), axis=1, bitorder="little"))
    packed.append((codes[:, :16] & np.uint8(15)) | (codes[:, 16:] << np.uint8(4)))
    return np.concatenate(packed, axis=1).reshape(len(rows), -1)


Packer = Callable[[Floats, Floats | None], Bytes]
# By (type, whether there is an importance).
PACKERS: dict[tuple[str, bool], Packer] = {
    **{(name, weighted): partial(_affine, name) for name in PLAIN for weighted in (False, True)},
    **{key: partial(_symmetric, key[0]) for key in (("Q3_K", True), ("Q6_K", False), ("Q6_K", True))},
    **{(f"Q{bits}_{minimum}", True): partial(_small, bits, bool(minimum)) for bits in (4, 5) for minimum in (0, 1)},
}


def pack(name: str, rows: Floats, importance: Floats | None = None) -> Bytes:
    """Quantize float32 `rows` (n > 0, columns) that `library.quantize` has checked; raise KeyError for other types."""
    packer = PACKERS[name, importance is not None]
    step = max(1, SLAB // rows.shape[1])
    with np.errstate(all="ignore"):  # blocks of equal values divide by zero, and are handled afterwards, as in ggml
        packed = [packer(rows[first : first + step], importance) for first in range(0, len(rows), step)]
    return packed[0] if len(packed) == 1 else np.concatenate(packed)
