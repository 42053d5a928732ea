"""Searches for the scales of small blocks of weights, in C (search.c): ggml's arithmetic, many blocks side by side.

Values and weights are float32 (blocks, n) with n up to 32, codes uint8 of that shape. ctypes releases the interpreter
lock during a call. The library is compiled when quantkit is installed; without a compiler there is none, `available`
says so, and ggml's own quantizer does the work.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.formats.gguf.ggml.kquants import Bytes, Floats

_ARRAY, _FLOAT, _INT, _LONG = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_long
_ARGUMENTS = {
    "error_weights": [_ARRAY, _ARRAY, _LONG, _LONG, _INT, _FLOAT, _ARRAY],
    "search_affine": [_ARRAY, _ARRAY, _LONG, _INT, _INT, _FLOAT, _FLOAT, _INT, _INT, *[_ARRAY] * 4],
    "search_symmetric": [_ARRAY, _ARRAY, _LONG, _INT, _INT, _ARRAY, _ARRAY, _ARRAY],
    "search_positive": [_ARRAY, _ARRAY, _LONG, _INT, _INT, _ARRAY, _ARRAY],
    "round_codes": [_ARRAY, _ARRAY, _ARRAY, _LONG, _INT, _INT, _INT, _ARRAY],
}


def load(path: Path) -> Any:
    """The library at `path`, its functions typed; raises OSError where this machine cannot take it."""
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
    except OSError:  # made for another machine
        return None


def available() -> bool:
    """Whether the library was compiled for this machine."""
    return _library() is not None


def _at(array: NDArray[Any], dtype: type, shape: tuple[int, ...]) -> int:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"expected C-contiguous {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape}")
    return array.ctypes.data


def error_weights(rows: Floats, importance: Floats | None, run: int, times: int = 1) -> Floats:
    """Weights of squared errors, of the shape of `rows` (n, columns); m is the mean square of a run of columns.

    importance (columns,) * sqrt(times * m + square), or without it sqrt(m) + magnitude. `run` divides the columns.
    """
    weights = np.empty_like(rows)
    given = (
        _at(rows, np.float32, rows.shape),
        None if importance is None else _at(importance, np.float32, rows.shape[1:]),
    )
    _library().error_weights(*given, *rows.shape, run, times, weights.ctypes.data)
    return weights


@dataclass(frozen=True)
class Fitted:
    """Of each block: its scale and offset (blocks,), the sum of its weights (blocks,), codes uint8 (blocks, n)."""

    scales: Floats
    offsets: Floats
    sums: Floats
    codes: Bytes


def affine(
    values: Floats, weights: Floats, top: int, first: float, step: float, steps: int, absolute: bool = False
) -> Fitted:
    """value = scale * code - offset, codes 0..`top`, offsets not negative.

    Candidates for 1 / scale are (first + step * k + top) / range for k = 0..steps; the least weighted error wins, of
    squares, or of magnitudes where `absolute`.
    """
    settings = (top, first, step, steps, absolute)
    return _searched("search_affine", values, weights, settings, ("scales", "offsets", "sums", "codes"))


def symmetric(values: Floats, weights: Floats, top: int) -> Fitted:
    """value = scale * (code - top), codes 0..2 * `top` - 1, scales of either sign."""
    return _searched("search_symmetric", values, weights, (top,), ("scales", "sums", "codes"))


def positive(values: Floats, weights: Floats, top: int) -> Fitted:
    """value = scale * code, codes 0..`top`, of values that are not negative; sums are not given."""
    return _searched("search_positive", values, weights, (top,), ("scales", "codes"))


def _searched(
    name: str, values: Floats, weights: Floats, settings: tuple[float, ...], results: tuple[str, ...]
) -> Fitted:
    blocks, n = values.shape
    scales, offsets, sums = (np.zeros(blocks, np.float32) for _ in range(3))
    fitted = Fitted(scales, offsets, sums, np.empty((blocks, n), np.uint8))
    given = _at(values, np.float32, (blocks, n)), _at(weights, np.float32, (blocks, n)), blocks, n
    getattr(_library(), name)(*given, *settings, *(getattr(fitted, result).ctypes.data for result in results))
    return fitted


def round_codes(values: Floats, scales: Floats, offsets: Floats, zero: int, top: int, codes: Bytes) -> None:
    """Write the codes nearest to (value + offset) / scale + zero, in 0..`top`; where a scale is 0 they stay."""
    blocks, n = values.shape
    given = (
        _at(values, np.float32, (blocks, n)),
        _at(scales, np.float32, (blocks,)),
        _at(offsets, np.float32, (blocks,)),
    )
    _library().round_codes(*given, blocks, n, zero, top, _at(codes, np.uint8, (blocks, n)))
