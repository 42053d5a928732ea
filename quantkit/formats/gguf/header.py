"""The header of a GGUF file: its keys, and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Nothing of a file is
believed before it is held against the file's size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import ArtifactError
from quantkit.formats.gguf.ggml.library import block_type

VERSIONS = (2, 3)
ALIGNMENT = 32
# Value types by number: struct's letter, and the two that have none.
LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its shape has the columns last; `start` is its first byte."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def weights(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of rows, of all matrices together."""
        return prod(self.shape[:-1])


@dataclass(frozen=True)
class Header:
    """Keys with their values, and tensors, in the order of the file."""

    path: Path
    keys: dict[str, Any]
    tensors: tuple[Stored, ...]


def read_header(path: Path) -> Header:
    """Read the header of `path`; raises ArtifactError for what is no GGUF file, or one that is cut short."""
    from gguf import GGMLQuantizationType

    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if file.read(4) != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            version, tensors, keys = _unpack(file, "<IQQ")
            if version not in VERSIONS:
                raise ValueError(f"version {version}, known: 2 and 3")
            _refuse_count(tensors + keys, size)
            values = {_string(file, size): _value(file, _unpack(file, "<I")[0], size) for _ in range(keys)}
            infos = []
            for _ in range(tensors):
                name = _string(file, size)
                (dimensions,) = _unpack(file, "<I")
                if not 0 < dimensions <= MAX_DIMENSIONS:
                    raise ValueError(f"{name} has {dimensions} dimensions")
                shape = _unpack(file, f"<{dimensions}Q")[::-1]
                number, offset = _unpack(file, "<IQ")
                infos.append((name, GGMLQuantizationType(number).name, shape, offset))
            alignment = int(values.get("general.alignment", ALIGNMENT))
            start = -(-file.tell() // alignment) * alignment
    except (OSError, ValueError, struct.error, UnicodeDecodeError, KeyError, ZeroDivisionError) as error:
        raise ArtifactError(f"{path} is no GGUF file that can be read: {error}. Convert or fetch it again.") from None
    return Header(path, values, tuple(_stored(path, info, start, size) for info in infos))


def _stored(path: Path, info: tuple[str, str, tuple[int, ...], int], start: int, size: int) -> Stored:
    name, kind, shape, offset = info
    try:
        nbytes = prod(shape[:-1]) * block_type(kind).row_bytes(shape[-1])
    except (ValueError, KeyError):
        raise ArtifactError(f"{path}: the tensor {name} has rows of {shape[-1]}, which {kind} cannot hold") from None
    if start + offset + nbytes > size:
        raise ArtifactError(f"{path} ends inside the tensor {name}. Convert or fetch it again.")
    return Stored(name, kind, shape, start + offset, nbytes)


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _refuse_count(count: int, size: int) -> None:
    if count > size:
        raise ValueError(f"{count} entries in {size} bytes")


def _string(file: BinaryIO, size: int) -> str:
    (length,) = _unpack(file, "<Q")
    _refuse_count(length, size)
    return file.read(length).decode("utf-8")


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    if kind == STRING:
        return _string(file, size)
    if kind == ARRAY:
        inner, count = _unpack(file, "<IQ")
        _refuse_count(count, size)
        if inner in LETTERS:
            return list(_unpack(file, f"<{count}{LETTERS[inner]}"))
        return [_value(file, inner, size) for _ in range(count)]
    if kind not in LETTERS:
        raise ValueError(f"the value type {kind}")
    return _unpack(file, f"<{LETTERS[kind]}")[0]
