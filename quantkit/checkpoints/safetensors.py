"""Lazy reader of safetensors files: the header, and the bytes of some rows of a tensor.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import ArtifactError, SourceError
from quantkit.system.untrusted import reraise_as

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "U32": "uint32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
ONLY_TORCH = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1}  # missing in numpy
ITEM_BYTES = {name: ONLY_TORCH.get(kind) or np.dtype(kind).itemsize for name, kind in DTYPES.items()}
AGAIN = "Fetch the file again."
SLAB_BYTES = 4 << 20
# Parts of names that torch.compile, FSDP, DistributedDataParallel and peft add.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
PARALLEL, PEFT = "module.", "base_model.model."
Value = TypeVar("Value")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's file, safetensors dtype, shape, byte offset in the file and length in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Return the number of rows; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    def slabs(self, nbytes: int = SLAB_BYTES) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows (start, stop) of about `nbytes` bytes each."""
        step = max(1, self.rows * nbytes // max(self.nbytes, 1))
        return ((start, min(start + step, self.rows)) for start in range(0, self.rows, step))


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file by name; raises SourceError if the file is damaged."""
    from safetensors import safe_open

    what = f"{path} is truncated, damaged, or not a safetensors file ({path.stat().st_size} bytes)"
    with reraise_as(what, SourceError, AGAIN), safe_open(path, "np"), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        if (dtype := entry["dtype"]) not in ITEM_BYTES:
            raise SourceError(
                f"{path}: tensor {name} has the type {dtype}, which is not supported. "
                "Give a checkpoint that stores its weights as floats."
            )
        start, end = entry["data_offsets"]
        tensors[name] = TensorInfo(path.name, dtype, tuple(entry["shape"]), 8 + length + start, end - start)
    return tensors


def read_rows(folder: Path, info: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
    """Return the bytes of rows `start:stop` of a tensor, (n,) uint8; raises SourceError for a truncated file."""
    # The file is not mapped: pages of a mapped file would count as this process's memory.
    row = info.nbytes // max(info.rows, 1)
    count = (stop - start) * row
    data = np.fromfile(folder / info.file, np.uint8, count, offset=info.start + start * row)
    if len(data) < count:
        raise SourceError(f"{folder / info.file} is truncated. {AGAIN}")
    return data


def to_torch(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return bytes as a tensor of a safetensors dtype and a shape, without copying."""
    import torch

    return torch.from_numpy(data).view(getattr(torch, DTYPES[dtype])).reshape(shape)


def unwrapped(tensors: Mapping[str, Value], first: tuple[str, ...] = (PARALLEL, PEFT)) -> dict[str, Value]:
    """Remove the name parts that wrappers such as FSDP add; return `tensors` unchanged if two names would be equal."""
    names = {name: WRAPPERS.sub("", name) for name in tensors}
    # Cut a prefix only if every name has it.
    while names and (cut := [prefix for prefix in first if all(name.startswith(prefix) for name in names.values())]):
        names = {name: short.removeprefix(cut[0]) for name, short in names.items()}
    if len(set(names.values())) < len(names):
        return dict(tensors)
    return {names[name]: value for name, value in tensors.items()}


class StoredTensors:
    """The tensors in an artifact's safetensors files, by name; raises ArtifactError for a damaged file."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._infos: dict[str, TensorInfo] = {}
        for file in files:
            try:
                self._infos |= read_header(folder / file)
            except (OSError, SourceError) as error:
                raise ArtifactError(f"{folder / file} cannot be read: {error} Convert again.") from None

    def names(self) -> list[str]:
        return sorted(self._infos)

    def dtype(self, name: str) -> str:
        """Return the stored dtype by its torch name; raises ArtifactError for an unknown tensor."""
        return DTYPES[self._find(name).dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows `start:stop`, (n,) uint8; raises ArtifactError."""
        info = self._find(name)
        try:
            return read_rows(self._folder, info, start, stop)
        except (OSError, SourceError) as error:
            raise ArtifactError(f"{self._folder / info.file} cannot be read: {error} Convert again.") from None

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in its stored dtype and shape; raises ArtifactError."""
        info = self._find(name)
        return to_torch(self.read_rows(name, 0, info.rows), info.dtype, info.shape)

    def _find(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise ArtifactError(f"{self._folder} lacks the tensor {name}. Convert again with --force.")
        return self._infos[name]
