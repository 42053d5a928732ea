"""Safetensors files, read lazily: the header, and the bytes of one tensor or of some of its rows.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import ArtifactError, SourceError
from quantkit.untrusted import shown, told

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
ONLY_TORCH = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1}  # numpy does not know them
ITEM_BYTES = {name: ONLY_TORCH.get(kind) or np.dtype(kind).itemsize for name, kind in DTYPES.items()}

AGAIN = "Fetch the file again."
MOST_HEADER = 100_000_000  # bytes, as in the format's own reader
MOST_DIMENSIONS = 16
MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: file, safetensors dtype name, shape, first byte and length in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def parameters(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file; raises SourceError.

    As the format asks, the tensors lie side by side from the header's end to the file's, without holes and overlaps.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, MOST_HEADER):
            raise SourceError(f"{path} is not a safetensors file, or is truncated ({size} bytes). {AGAIN}")
        text = file.read(length)
    with told(f"{path} has a broken safetensors header", SourceError, AGAIN):
        entries = json.loads(
            text, object_pairs_hook=partial(_without_repeats, path), parse_float=_refuse, parse_constant=_refuse
        )
    remarks = entries.get("__metadata__", {}) if isinstance(entries, dict) else None
    if not isinstance(remarks, dict) or not all(isinstance(remark, str) for remark in remarks.values()):
        raise SourceError(f"{path} has a broken safetensors header. {AGAIN}")
    tensors = {
        name: _tensor_info(path, name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"
    }
    end, before = 8 + length, "its header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != end:
            how = "overlaps" if info.start < end else "leaves a hole after"
            raise SourceError(f"{path} is damaged: the tensor {name} {how} {before}. {AGAIN}")
        end, before = info.start + info.nbytes, name
    if end != size:
        raise SourceError(f"{path} is truncated: {size} bytes where its header promises {end}. {AGAIN}")
    return tensors


def _without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values, names = dict(pairs), [name for name, _ in pairs]
    if len(values) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise SourceError(f"{path} holds the tensor {repeated} twice. {AGAIN}")
    return values


def _refuse(number: str) -> None:
    raise ValueError(f"it holds the number {number[:20]}")


def _tensor_info(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    """One entry of a header whose tensors begin at byte `data`."""
    fields = [entry.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else [None] * 3
    dtype, shape, offsets = fields
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise SourceError(f"{path} has a broken header entry for {name}: {shown(entry)}. {AGAIN}")
    if dtype not in ITEM_BYTES:
        raise SourceError(f"{path}: tensor {name} has the type {dtype}, which is not read. Use a float checkpoint.")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise SourceError(
            f"{path}: tensor {name} has {end - start} bytes, which do not match its shape {shown(shape)}. {AGAIN}"
        )
    return TensorInfo(path.name, dtype, tuple(shape), data + start, end - start)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    """Whether this is a list of few whole numbers from 0 on."""
    return (
        isinstance(values, list)
        and len(values) <= MOST_DIMENSIONS
        and all(type(n) is int and 0 <= n < MOST_BYTES for n in values)
    )


def read_bytes(path: Path, info: TensorInfo, offset: int, count: int) -> NDArray[np.uint8]:
    """Read `count` bytes from byte `offset` of a tensor on; raises SourceError for a truncated file.

    A mapped file would count as this process's memory once it is read.
    """
    data = np.fromfile(path, np.uint8, count, offset=info.start + offset)
    if len(data) < count:
        raise SourceError(f"{path} is truncated. Fetch the file again.")
    return data


class StoredTensors:
    """All tensors of an artifact's safetensors files, by name; opening a broken file raises ArtifactError."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._infos: dict[str, tuple[Path, TensorInfo]] = {}
        for file in files:
            path = folder / file
            try:
                self._infos.update({name: (path, info) for name, info in read_header(path).items()})
            except (OSError, SourceError) as error:
                raise ArtifactError(f"{path} cannot be read: {error} Convert again.") from None

    def names(self) -> list[str]:
        """The names of all of them, sorted."""
        return sorted(self._infos)

    def dtype(self, name: str) -> str:
        """What one of them is stored as, in torch's words; raises ArtifactError for a name that is not there."""
        return DTYPES[self._find(name)[1].dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one of them; raises ArtifactError for a name that is not there."""
        return self._find(name)[1].shape

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows `start:stop` of one of them; raises ArtifactError."""
        path, info = self._find(name)
        row = info.nbytes // max(info.shape[0] if info.shape else 1, 1)
        try:
            return read_bytes(path, info, start * row, (stop - start) * row)
        except (OSError, SourceError) as error:
            raise ArtifactError(f"{path} cannot be read: {error} Convert again.") from None

    def _find(self, name: str) -> tuple[Path, TensorInfo]:
        if name not in self._infos:
            raise ArtifactError(f"{self._folder} lacks the tensor {name}. Convert again with --force.")
        return self._infos[name]

    def read(self, name: str) -> torch.Tensor:
        """One of them in its stored dtype and shape; raises ArtifactError for a name that is not there."""
        import torch

        path, info = self._find(name)
        values = torch.from_numpy(read_bytes(path, info, 0, info.nbytes)).view(getattr(torch, DTYPES[info.dtype]))
        return values.reshape(info.shape)
