"""Read a GGUF file's header: metadata keys and the location of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Numbers are checked
against the file size and generous limits. As in ggml (ggml/src/gguf.cpp), duplicate names, nested lists and gaps
between tensors are errors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import ArtifactError
from quantkit.formats.gguf.ggml.library import block_type, type_numbers
from quantkit.system.sizes import bits_per_weight
from quantkit.system.untrusted import reraise_as, shown

VERSIONS = (2, 3)
ALIGNMENT = 32
# Value types by number: struct's letter, and the two types without one.
LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9
MAX_DIMENSIONS = 4
MOST_KEYS = 1 << 16
MOST_TENSORS = 1 << 17
MOST_ITEMS = 1 << 22  # in all lists together; a tokenizer of 262,144 tokens has 1.4 million
LONGEST_STRING = 1 << 24  # bytes
LONGEST_NAME = 1 << 12  # bytes of a key or a tensor's name
LARGEST = 1 << 28  # bytes of a header
FIX = "Convert or fetch it again."
SHOWN_ITEMS = 3  # of a list that are printed


@dataclass(frozen=True)
class Stored:
    """Location of a tensor in the file: `start` is the offset in bytes; `shape` is in numpy order, columns last."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def weights(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Return the number of rows, over all leading dimensions."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Share:
    """Totals over all tensors of one type: number of tensors, weights and bytes."""

    tensors: int
    weights: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Metadata keys and tensors of a GGUF file, in file order."""

    path: Path
    keys: dict[str, Any]
    tensors: tuple[Stored, ...]
    kinds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # a key's value type; a list's items' type, too

    @property
    def unusual(self) -> tuple[str, ...]:
        """Return the integer-valued keys that are not stored as uint32."""
        return tuple(key for key, value in self.keys.items() if type(value) is int and self.kinds[key] != (UINT32,))

    @property
    def weights(self) -> int:
        return sum(t.weights for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Return the file size in bits per weight, as recorded in an artifact's manifest."""
        return bits_per_weight(self.path.stat().st_size, self.weights)

    @property
    def tensor_bits_per_weight(self) -> float:
        """Return the tensors' bits per weight, without metadata and tokenizer; llama.cpp calls it BPW."""
        return bits_per_weight(sum(t.nbytes for t in self.tensors), self.weights)

    def shares(self) -> dict[str, Share]:
        """Return totals per tensor type, sorted by number of weights, largest first."""
        shares: dict[str, Share] = {}
        for t in self.tensors:
            before = shares.get(t.type, Share(0, 0, 0))
            shares[t.type] = Share(before.tensors + 1, before.weights + t.weights, before.nbytes + t.nbytes)
        return dict(sorted(shares.items(), key=lambda item: -item[1].weights))

    def to_values(self) -> dict[str, Any]:
        return {
            "keys": self.keys,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "tensor_bits_per_weight": round(self.tensor_bits_per_weight, 4),
            "types": {name: vars(share) for name, share in self.shares().items()},
            "tensors": [{name: value for name, value in vars(t).items() if name != "start"} for t in self.tensors],
        }

    def count(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """Return the integer at `key`; raise ArtifactError if it is missing, not an integer, or outside least..most."""
        value = self.keys.get(key, default)
        if value is None:
            raise ArtifactError(f"{self.path} lacks the key {key}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ArtifactError(
                f"{self.path}: the key {key} is {shown(value)}, not a whole number from {least:,} to {most:,}"
            )
        return value

    def text(self, key: str) -> str:
        """Return the string at `key`; raise ArtifactError if it is missing or not a string."""
        value = self.keys.get(key)
        if value is None:
            raise ArtifactError(f"{self.path} lacks the key {key}")
        if not isinstance(value, str):
            raise ArtifactError(f"{self.path}: the key {key} is {shown(value)}, not a text")
        return value


def read_header(path: Path) -> Header:
    """Read the header of the file `path`; raise ArtifactError if it is truncated or not GGUF."""
    with reraise_as(f"{path} is not a readable GGUF file", ArtifactError, FIX), path.open("rb") as file:
        return _Parser(file, path).header()


class _Parser:
    """Parses a GGUF header within size limits; raises ValueError or struct.error for malformed input."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = path.stat().st_size
        self._at = self._items = 0

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, keys = self._unpack("<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, known: 2 and 3")
        self._refuse_count(tensors, MOST_TENSORS)
        self._refuse_count(keys, MOST_KEYS)
        values: dict[str, Any] = {}
        kinds: dict[str, tuple[int, ...]] = {}
        for _ in range(keys):
            key = self._name()
            if key in values:
                raise ValueError(f"the key {key} comes twice")
            (kind,) = self._unpack("<I")
            kinds[key], values[key] = self._value(kind)
        infos = [self._info() for _ in range(tensors)]
        if len({name for name, *_ in infos}) < len(infos):
            raise ValueError("two tensors have the same name")
        alignment = values.get("general.alignment", ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment.bit_count() != 1:
            raise ValueError(f"the alignment {shown(alignment)}, which is not a power of two")
        start = end = _padded(self._at, alignment)
        stored = []
        for name, kind, shape, offset in infos:
            nbytes = self._bytes_of(name, kind, shape)
            if start + offset != end:
                raise ValueError(f"the tensor {name} is at {offset:,}, but the previous one ends at {end - start:,}")
            if end + nbytes > self._size:
                raise ArtifactError(f"{self._path} ends inside the tensor {name}. {FIX}")
            stored.append(Stored(name, kind, shape, end, nbytes))
            end = _padded(end + nbytes, alignment)
        return Header(self._path, values, tuple(stored), kinds)

    def _info(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._name()
        (dimensions,) = self._unpack("<I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = self._unpack(f"<{dimensions}Q")[::-1]
        number, offset = self._unpack("<IQ")
        kind = next((kind for kind, known in type_numbers().items() if known == number), None)
        if kind is None:
            raise ValueError(f"{name} has the tensor type {number}, which quantkit does not know")
        return name, kind, shape, offset

    def _bytes_of(self, name: str, kind: str, shape: tuple[int, ...]) -> int:
        if 0 in shape:
            raise ValueError(f"the tensor {name} has the shape {shape}")
        try:
            return math.prod(shape[:-1]) * block_type(kind).row_bytes(shape[-1])
        except (ValueError, KeyError):
            raise ArtifactError(
                f"{self._path}: the tensor {name} has rows of {shape[-1]}, which {kind} cannot hold"
            ) from None

    def _value(self, kind: int) -> tuple[tuple[int, ...], Any]:
        if kind == STRING:
            return (kind,), self._string(LONGEST_STRING)
        if kind == ARRAY:
            inner, count = self._unpack("<IQ")
            self._items += count
            self._refuse_count(self._items, MOST_ITEMS)
            if inner in LETTERS:
                return (kind, inner), list(self._unpack(f"<{count}{LETTERS[inner]}"))
            if inner == STRING:
                return (kind, inner), [self._string(LONGEST_STRING) for _ in range(count)]
            raise ValueError(f"a list of the value type {inner}")
        if kind not in LETTERS:
            raise ValueError(f"the value type {kind}")
        return (kind,), self._unpack(f"<{LETTERS[kind]}")[0]

    def _name(self) -> str:
        name = self._string(LONGEST_NAME)
        if not name or not name.isprintable():
            raise ValueError(f"the name {shown(name)} is empty or unprintable")
        return name

    def _string(self, most: int) -> str:
        (length,) = self._unpack("<Q")
        if length > most:
            raise ValueError(f"a text of {length:,} bytes; at most {most:,} are read")
        return self._take(length).decode("utf-8")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        self._at += count
        if self._at > LARGEST:
            raise ValueError(f"a header of more than {LARGEST:,} bytes")
        if len(data) < count:
            raise ValueError(f"its {self._size:,} bytes end inside its header")
        return data

    def _refuse_count(self, count: int, most: int) -> None:
        if count > min(self._size, most):
            raise ValueError(f"{count:,} entries in a file of {self._size:,} bytes; at most {most:,} are read")


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def contents_of(path: Path) -> Header:
    """Read the header of a GGUF file, or of a folder's only one, with long lists cut; raise ArtifactError."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) != 1:
        raise ArtifactError(f"{path} holds {len(files)} GGUF files. Give one file.")
    header = read_header(files[0])
    return replace(header, keys={name: _shown(value) for name, value in header.keys.items()})


def _shown(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list) and len(value) <= SHOWN_ITEMS:
        return [_shown(item) for item in value]
    if not isinstance(value, list):
        return value
    return f"{', '.join(map(str, value[:SHOWN_ITEMS]))}, ... ({len(value)} in all)"
