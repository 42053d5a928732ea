"""Safetensors files, read lazily: the header, and the bytes of one tensor or of some of its rows.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import ArtifactError, SourceError

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
}
ITEM_BYTES = {name: 2 if kind == "bfloat16" else np.dtype(kind).itemsize for name, kind in DTYPES.items()}


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
    """Read the header of a safetensors file and check that its size is right; raises SourceError."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values, names = dict(pairs), [name for name, _ in pairs]
        if len(values) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise SourceError(f"{path} holds the tensor {repeated} twice. Fetch the file again.")
        return values

    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise SourceError(f"{path} is not a safetensors file, or is truncated ({size} bytes). Fetch it again.")
        try:
            entries = json.loads(file.read(length), object_pairs_hook=without_repeats)
        except ValueError:
            entries = None
    if not isinstance(entries, dict):
        raise SourceError(f"{path} has a broken safetensors header. Fetch the file again.")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise SourceError(f"{path} has a broken header entry for {name}. Fetch the file again.") from None
        if dtype not in ITEM_BYTES:
            raise SourceError(f"{path}: tensor {name} has the type {dtype}, which is not read. Use a float checkpoint.")
        if end - start != math.prod(shape) * ITEM_BYTES[dtype] or start < 0:
            raise SourceError(f"{path}: tensor {name} has {end - start} bytes, which do not match its shape {shape}")
        tensors[name] = TensorInfo(path.name, dtype, shape, 8 + length + start, end - start)
    need = max((t.start + t.nbytes for t in tensors.values()), default=8 + length)
    if need != size:
        raise SourceError(f"{path} is truncated: {size} bytes where its header promises {need}. Fetch it again.")
    return tensors


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

    def read(self, name: str) -> torch.Tensor:
        """One of them in its stored dtype and shape; raises ArtifactError for a name that is not there."""
        import torch

        if name not in self._infos:
            raise ArtifactError(f"{self._folder} lacks the tensor {name}. Convert again with --force.")
        path, info = self._infos[name]
        values = torch.from_numpy(read_bytes(path, info, 0, info.nbytes)).view(getattr(torch, DTYPES[info.dtype]))
        return values.reshape(info.shape)
