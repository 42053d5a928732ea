"""Call ggml's own quantizers through ctypes: float32 rows to quantized blocks and back.

packing.py produces the same bytes faster for some types. The library is `libggml-base` in the package libggml-python
(include/ggml.h: `ggml_quantize_chunk`, `ggml_get_type_traits`). ctypes releases the GIL, so threads use several
cores. The first use of an IQ1, IQ2 or IQ3 type builds ggml's tables, which takes seconds for IQ2_S and IQ1_M.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import DependencyError, ResourceError, shortage_of
from quantkit.formats.gguf.ggml.kquants import Bytes, Floats
from quantkit.formats.gguf.ggml.packing import PACKERS, available, pack

NAMES = ("libggml-base.so", "libggml-base.so.0", "libggml-base.dylib", "ggml-base.dll", "libggml-base.dll")
# The limit of F16, and of the float16 scales in other types' blocks.
LARGEST = 65504.0
WIDE = ("F32", "BF16")
# Sums of importance times squared weight are float32 and would vanish or overflow beyond these importances.
FAINTEST, LOUDEST = 1e-20, 1e20
# Types that llama.cpp makes only with an importance matrix; without one, ggml aborts for most of them.
IMPORTANCE_ONLY = frozenset(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"))
# Types whose rounding uses importance.
WEIGHTED = frozenset(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1"))
WEIGHTED |= {"IQ3_S", "IQ4_XS", "IQ4_NL"} | IMPORTANCE_ONLY


class _Traits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class BlockType:
    """A ggml tensor type: each block packs `block` values into `block_bytes` bytes; `number` identifies it in files."""

    name: str
    number: int
    block: int
    block_bytes: int
    to_float: Callable[[int, int, int], None] | None

    def row_bytes(self, columns: int) -> int:
        """Return the packed bytes of a row; raise ValueError if `columns` is not a multiple of the block size."""
        if columns <= 0 or columns % self.block:
            raise ValueError(f"{self.name} stores rows of a multiple of {self.block} values, not {columns}")
        return columns // self.block * self.block_bytes


def _find(package: str) -> Path | None:
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    paths = (Path(folder, part, name) for folder in folders for part in ("lib64", "lib", "bin", ".") for name in NAMES)
    return next((path for path in paths if path.is_file()), None)


@cache
def _library() -> Any:
    path = _find("libggml")
    if path is None:
        raise DependencyError("the package libggml-python is missing. Install it with: pip install libggml-python")
    # llama.cpp's own libggml-base has the same internal name, often in another version. The system's loader would give
    # llama.cpp the one that was loaded first, and it needs its own.
    if other := _find("llama_cpp"):
        ctypes.CDLL(str(other))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        if short := shortage_of(error):
            raise ResourceError(short) from None
        raise DependencyError(f"{path} cannot be loaded ({error}). Install libggml-python again.") from None
    library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    array, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, array, array, count, count, count, array]
    return library


@cache
def type_numbers() -> dict[str, int]:
    """Return the numbers of ggml's tensor types by name."""
    from gguf import GGMLQuantizationType

    return {"Q2_0": 42, **GGMLQuantizationType.__members__}  # gguf 0.19 lacks Q2_0


@cache
def block_type(name: str) -> BlockType:
    """Look up a ggml type by name, such as ``Q4_K`` or ``F16``; raise ValueError for an unknown name."""
    from gguf import GGML_QUANT_SIZES

    if name not in type_numbers():
        raise ValueError(f"ggml has no tensor type {name!r}")
    number = int(type_numbers()[name])
    traits = _library().ggml_get_type_traits(number).contents
    if (int(traits.block), int(traits.block_bytes)) != {42: (64, 18), **GGML_QUANT_SIZES}[number]:
        raise DependencyError(f"libggml-python and gguf disagree on {name}. Reinstall quantkit's required versions.")
    return BlockType(name, number, int(traits.block), int(traits.block_bytes), traits.to_float or None)


def _refuse_layout(array: np.ndarray, dtype: Any, what: str) -> None:
    if array.ndim != 2 or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"{what} must be a C-contiguous {np.dtype(dtype).name} matrix, got {array.dtype} {array.shape}"
        )


def quantize(name: str, rows: Floats, importance: Floats | None = None) -> Bytes:
    """Quantize float32 `rows` (n, columns) to type `name`; return uint8 (n, row_bytes).

    `importance`, float32 (columns,), weights each column's squared error; types in `WEIGHTED` use it, those in
    `IMPORTANCE_ONLY` need it. Raises ValueError for input that ggml would corrupt: partial blocks, NaN, infinity,
    magnitudes above 65504 (except F32, BF16), or importance that is missing, negative, not finite, above `LOUDEST`,
    or below `FAINTEST` in a whole run of 16 columns (ggml would zero those weights).
    """
    kind = block_type(name)
    _refuse_layout(rows, np.float32, "rows")
    n, columns = rows.shape
    kind.row_bytes(columns)  # raises ValueError for a wrong row length
    largest = max(float(rows.max()), -float(rows.min())) if n else 0.0
    limit = float(np.finfo(np.float32).max) if name in WIDE else LARGEST
    if not largest <= limit:  # the negation also catches NaN
        raise ValueError(f"{name} supports finite values up to {limit:.5g}, got {largest:.3g}")
    if name == "F32":
        return rows.view(np.uint8)
    if importance is None and name in IMPORTANCE_ONLY:
        raise ValueError(f"{name} needs an importance matrix")
    if name not in WEIGHTED:
        importance = None
    elif importance is not None:
        _check_importance(name, importance, columns)
    return (pack if n and _same(name, importance is not None) else chunk)(name, rows, importance)


def chunk(name: str, rows: Floats, importance: Floats | None = None) -> Bytes:
    """Quantize with ggml itself, without the input checks of `quantize`."""
    kind, (n, columns) = block_type(name), rows.shape
    packed = np.empty((n, kind.row_bytes(columns)), dtype=np.uint8)
    pointer = None if importance is None else importance.ctypes.data
    done = _library().ggml_quantize_chunk(kind.number, rows.ctypes.data, packed.ctypes.data, 0, n, columns, pointer)
    if done != packed.nbytes:
        raise ValueError(f"ggml wrote {done} bytes of {name} where {packed.nbytes} were expected")
    return packed


@cache
def _same(name: str, weighted: bool) -> bool:
    """Return whether packing.py and this ggml library produce identical bytes; tested once per process."""
    if (name, weighted) not in PACKERS or not available():
        return False
    random = np.random.default_rng(0)
    rows = random.standard_normal((32, 512), dtype=np.float32) * np.float32(0.02)
    importance = np.exp(random.uniform(-14, 14, 512)).astype(np.float32) if weighted else None
    return np.array_equal(pack(name, rows, importance), chunk(name, rows, importance))


def _check_importance(name: str, importance: Floats, columns: int) -> None:
    if importance.shape != (columns,) or importance.dtype != np.float32 or not importance.flags.c_contiguous:
        raise ValueError(f"importance must be float32 of shape ({columns},), got {importance.dtype} {importance.shape}")
    if not np.isfinite(importance).all() or bool((importance < 0).any()):
        raise ValueError("importance must be finite and not negative")
    if (largest := float(importance.max(initial=0))) > LOUDEST:
        raise ValueError(f"importance is up to {largest:.3g}, but {name} is correct only up to {LOUDEST:g}")
    # 16 columns is the shortest run with its own scale in the types that use importance.
    if bool((importance.reshape(-1, 16).max(axis=1) < FAINTEST).any()):
        raise ValueError(f"importance is zero over 16 neighbouring columns, which {name} would turn to zero weights")


def dequantize(name: str, packed: Bytes, columns: int) -> Floats:
    """Unpack uint8 (n, row_bytes) to float32 (n, columns); raise ValueError for a wrong shape."""
    kind = block_type(name)
    _refuse_layout(packed, np.uint8, "packed rows")
    if packed.shape[1] != kind.row_bytes(columns):
        raise ValueError(f"{columns} values of {name} take {kind.row_bytes(columns)} bytes, not {packed.shape[1]}")
    if name == "F32":
        return packed.view(np.float32)
    if kind.to_float is None:
        raise ValueError(f"ggml cannot turn {name} back to floats")
    rows = np.empty((packed.shape[0], columns), dtype=np.float32)
    kind.to_float(packed.ctypes.data, rows.ctypes.data, rows.size)
    return rows
