"""Write a `model.bin` (model_file.py has the format) from a specification of CTranslate2, one tensor at a time.

CTranslate2's own `ModelSpec.save` holds all tensors, as they were and quantized. Here each is made when its turn comes
(recorded.py), and its own code quantizes some rows of it at a time, so that the bytes are the same.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from quantkit.errors import UnsupportedError
from quantkit.formats.ctranslate2.model_file import TYPES, VERSION
from quantkit.formats.ctranslate2.recorded import Recorded, Recorder

SLAB = 1 << 22  # values that are quantized at a time
MOST_BYTES = (1 << 32) - 1  # of a variable: its size is stored in 32 bits


def write_model_file(path: Path, spec: Any, kind: str, recorder: Recorder, advance: Callable[[int], None]) -> None:
    """Write the validated `spec` of the engine, quantized to `kind`; `advance` is told of every value.

    Variables with the same values are stored once, as in the engine's own code. Raises UnsupportedError for a variable
    that is too large for the format.
    """
    with path.open("wb") as file:
        file.write(struct.pack("<I", VERSION) + _text(spec.name) + struct.pack("<I", spec.revision))
        counted, count = file.tell(), 0
        file.write(struct.pack("<I", 0))
        seen: dict[Any, str] = {}
        aliases: list[tuple[str, str]] = []
        scales: dict[str, np.ndarray] = {}
        for name, variable in [*spec.variables(ordered=True), ("", None)]:
            for ready in sorted(other for other in scales if not name or other < name):
                _write_array(file, ready, scales.pop(ready))
                count += 1
            if not name:
                break
            value, size = _made(variable, recorder), math.prod(variable.shape)
            if variable.shape and not _keeps_its_own(name):
                same = (type(variable), variable.dtype, tuple(variable.shape), _digest(value))
                if seen.setdefault(same, name) != name:
                    aliases.append((name, seen[same]))
                    advance(size)
                    continue
            scale = _write_variable(path, file, spec, name, value, kind)
            if scale is not None:
                scales[f"{name}_scale"] = scale
            count += 1
            advance(size)
        file.write(struct.pack("<I", len(aliases)))
        for alias, holder in aliases:
            file.write(_text(alias) + _text(holder))
        file.seek(counted)
        file.write(struct.pack("<I", count))


def _keeps_its_own(name: str) -> bool:
    from ctranslate2.specs.model_spec import SKIP_CREATING_ALIAS

    return name.rpartition("/")[2] in SKIP_CREATING_ALIAS


def _made(variable: Any, recorder: Recorder) -> torch.Tensor | np.ndarray:
    """The values of a variable of the engine's."""
    held = getattr(variable, "tensor", None)
    if held is None:
        array: np.ndarray = variable.numpy()
        return array
    return (recorder.value(held) if isinstance(held, Recorded) else held).contiguous()


def _slabs(value: torch.Tensor | np.ndarray, rows: int) -> Iterator[Any]:
    for start in range(0, len(value), rows):
        yield value[start : start + rows]


def _rows(value: torch.Tensor | np.ndarray) -> int:
    """How many rows make a slab."""
    return max(1, SLAB // max(1, math.prod(value.shape[1:])))


def _digest(value: torch.Tensor | np.ndarray) -> bytes:
    """The same for values that are equal: 0 and -0 are."""
    digest = hashlib.sha256()
    for slab in _slabs(value, _rows(value)):
        plain = slab + 0
        digest.update(plain.view(torch.uint8).numpy().data if isinstance(plain, torch.Tensor) else plain.tobytes())
    return digest.digest()


def _write_variable(
    path: Path, file: BinaryIO, spec: Any, name: str, value: torch.Tensor | np.ndarray, kind: str
) -> np.ndarray | None:
    """Write one variable as the engine's code quantizes it; return the scales of its codes, where it gives some."""
    from ctranslate2.specs.model_spec import index_spec

    scope, _, leaf = name.rpartition("/")
    quantized = hasattr(index_spec(spec, scope), f"{leaf}_scale")
    if not value.shape:
        _write_array(file, name, np.asarray(value))
        return None
    # The scale of int16 is that of a whole tensor, all else of rows or of single values.
    rows = len(value) if quantized and kind == "int16" else _rows(value)
    scales: list[np.ndarray] = []
    for number, slab in enumerate(_slabs(value, rows)):
        codes, scale = _converted(slab, kind, quantized)
        if not number:
            nbytes = codes.num_bytes() // len(slab) * len(value)
            if nbytes > MOST_BYTES:
                raise UnsupportedError(
                    f"{path}: the variable {name} would have {nbytes:,} bytes as {codes.dtype}, and CTranslate2's "
                    f"format has room for {MOST_BYTES:,}. Take a smaller type, such as int8."
                )
            file.write(_head(name, tuple(value.shape), codes.dtype, nbytes))
        file.write(codes.to_bytes())
        if scale is not None:
            scales.append(scale)
    if not scales:
        return None
    return scales[0] if not scales[0].shape else np.concatenate(scales)


def _converted(slab: torch.Tensor | np.ndarray, kind: str, quantized: bool) -> tuple[Any, np.ndarray | None]:
    """The engine's variable that its own code makes of some rows, and their scale where they become codes."""
    from ctranslate2.specs.model_spec import OPTIONAL, NumpyVariable, PyTorchVariable

    one = _kinds()[quantized]()
    one.value = PyTorchVariable(slab) if isinstance(slab, torch.Tensor) else NumpyVariable(slab)
    one.optimize(quantization=kind)
    scale = getattr(one, "value_scale", OPTIONAL)
    return one.value, None if isinstance(scale, str) else np.asarray(scale.numpy())


@cache
def _kinds() -> tuple[Any, Any]:
    """Specifications of one variable; the engine quantizes what has a scale beside it."""
    from ctranslate2.specs.model_spec import OPTIONAL, LayerSpec

    class Plain(LayerSpec):
        def __init__(self) -> None:
            self.value = None

    class Quantized(LayerSpec):
        def __init__(self) -> None:
            self.value = None
            self.value_scale = OPTIONAL

    return Plain, Quantized


def _write_array(file: BinaryIO, name: str, array: np.ndarray) -> None:
    file.write(_head(name, array.shape, array.dtype.name, array.nbytes) + array.tobytes())


def _head(name: str, shape: tuple[int, ...], dtype: str, nbytes: int) -> bytes:
    return _text(name) + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, TYPES.index(dtype), nbytes)


def _text(value: str) -> bytes:
    # The engine's own code counts characters; its names are ASCII.
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"
