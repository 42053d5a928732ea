"""Read CTranslate2's `model.bin`: named variables and aliases, read on demand, with numpy only.

Format (little endian), as `ModelSpec._serialize` of CTranslate2 4.8 writes it
(https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/model_spec.py):

    uint32 binary version (6); string name of the specification; uint32 its revision
    uint32 count of variables, each:
        string name; uint8 rank; uint32 dims[rank]; uint8 type; uint32 count of bytes; the bytes
    uint32 count of aliases, each: string alias; string name of the variable
    string: uint16 length with the final NUL; UTF-8 bytes; NUL

Quantized variables have a second one, `NAME_scale`, float32 per row (int8) or tensor (int16): value = code / scale.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quantkit.checkpoints.rows import to_float32
from quantkit.errors import ArtifactError
from quantkit.system.untrusted import read_json, read_object, reraise_as, shown

VERSION = 6
SPEC, REVISION = "TransformerDecoderSpec", 8
# Position = the number in the file (DataType in include/ctranslate2/types.h); bfloat16 is read as its bits.
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
BITS_OF = {"bfloat16": "uint16"}
LARGEST_RANK = 8
AGAIN = "Convert again with --force."
TOKENS = ("bos_token", "eos_token", "unk_token")  # required settings
# Allowed values of some settings.
SETTINGS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(TOKENS, (str,)),
    "layer_norm_epsilon": (int, float, type(None)),
    "multi_query_attention": (bool,),
}


@dataclass(frozen=True)
class Variable:
    """Location, dtype and shape of a variable in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Ct2Model:
    """An open `model.bin`; `aliases` maps a name to the variable that holds its values."""

    path: Path
    variables: dict[str, Variable]
    aliases: dict[str, str]

    def types(self) -> Mapping[str, int]:
        """Return the number of variables by type, not counting settings and scales."""
        return Counter(v.dtype for name, v in self.variables.items() if v.shape and not name.endswith("_scale"))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.variables[self.aliases.get(name, name)].shape

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read a variable or alias as stored, or rows of it (bfloat16 as uint16); raise ArtifactError."""
        variable = self.variables.get(self.aliases.get(name, name))
        if variable is None:
            raise ArtifactError(f"{self.path} has no variable {name}. {AGAIN}")
        kind = np.dtype(BITS_OF.get(variable.dtype, variable.dtype)).newbyteorder("<")
        shape, first, nbytes = variable.shape, variable.start, variable.nbytes
        if shape and (start, stop) != (0, None):
            row = nbytes // shape[0]
            shape = (min(shape[0] if stop is None else stop, shape[0]) - start, *shape[1:])
            first, nbytes = first + start * row, shape[0] * row
        # Not mapped, since mapped bytes count against a limit of the process's address space.
        part = np.fromfile(self.path, np.uint8, nbytes, offset=first)
        if len(part) < nbytes:
            raise ArtifactError(f"{self.path} is truncated inside the variable {name}. {AGAIN}")
        return part.view(kind).reshape(shape)

    def values(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read a variable or alias, or rows of it, dequantized to float32; raise ArtifactError."""
        holder = self.aliases.get(name, name)
        stored = self.raw(holder, start, stop)
        kind = self.variables[holder].dtype
        if kind not in ("int8", "int16"):
            return to_float32(stored, "BF16" if kind == "bfloat16" else kind)
        known = self.variables.get(f"{holder}_scale")
        by_rows = known is not None and known.shape == self.variables[holder].shape[:1]
        scale = self.raw(f"{holder}_scale", start, stop) if by_rows else self.raw(f"{holder}_scale")
        usable = scale.dtype == np.float32 and bool(np.all((scale > 0) & np.isfinite(scale)))
        if (scale.shape and not by_rows) or not usable:
            raise ArtifactError(
                f"{self.path}: the scale of {holder} has the shape {scale.shape} and the type {scale.dtype}, or values "
                f"that are not above 0. {AGAIN}"
            )
        values = stored.astype(np.float32)
        values /= scale.reshape(-1, *(1 for _ in values.shape[1:])) if scale.shape else scale
        return values


def read_vocabulary(path: Path) -> list[str]:
    """Return the tokens of a vocabulary.json in order of their ids; raise ArtifactError."""
    tokens = read_json(path, ArtifactError, AGAIN)
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ArtifactError(f"{path} is not a list of tokens. {AGAIN}")
    return tokens


def refuse_settings(path: Path) -> None:
    """Raise ArtifactError if the engine cannot read this config.json."""
    settings = read_object(path, ArtifactError, AGAIN)
    for name, value in (dict.fromkeys(TOKENS) | settings).items():
        known = SETTINGS.get(name, (str, bool, int, float, type(None)))
        if not isinstance(value, known) or (isinstance(value, bool) and bool not in known):
            raise ArtifactError(f"{path}: {name} is {shown(value)}, which the engine cannot read. {AGAIN}")
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            raise ArtifactError(f"{path}: {name} is {shown(value)}, which is too large for the engine. {AGAIN}")


class _Cursor:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.at, self.size = path, file, 0, path.stat().st_size

    def skip(self, count: int, what: str) -> int:
        start, self.at = self.at, self.at + count
        if self.at > self.size:
            where = f"{what} ends at byte {self.at}, the file at {self.size}"
            raise ArtifactError(f"{self.path} is truncated: {where}. {AGAIN}")
        return start

    def take(self, count: int, what: str) -> bytes:
        self.file.seek(self.skip(count, what))
        return self.file.read(count)

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0])

    def string(self, what: str) -> str:
        length = self.number("H", what)
        start, raw = self.at, self.take(length, what)
        try:
            if not raw.endswith(b"\0"):
                raise ValueError
            return raw[:-1].decode("utf-8")
        except ValueError:
            raise ArtifactError(f"{self.path} is corrupted: {what} at byte {start} is no string") from None


def open_ct2_model(path: str | Path) -> Ct2Model:
    """Open a `model.bin` by reading its table of variables; raise ArtifactError for a damaged file."""
    path = Path(path)
    if not path.is_file() or path.stat().st_size < 4:
        raise ArtifactError(f"{path} is missing or empty. {AGAIN}")
    with reraise_as(f"{path} cannot be read", ArtifactError, AGAIN), path.open("rb") as file:
        return _read(_Cursor(path, file))


def _read(cursor: _Cursor) -> Ct2Model:
    path = cursor.path
    version = cursor.number("I", "the version")
    if version != VERSION:
        raise ArtifactError(f"{path} has binary version {version}, expected {VERSION}. {AGAIN}")
    spec = cursor.string("the specification's name")
    revision = cursor.number("I", "the revision")
    if spec != SPEC or revision != REVISION:
        raise ArtifactError(
            f"{path} holds a {shown(spec)} of revision {revision}, expected {SPEC} of revision {REVISION}. {AGAIN}"
        )
    variables: dict[str, Variable] = {}
    for _ in range(cursor.number("I", "the number of variables")):
        name = cursor.string("a variable's name")
        if name in variables:
            raise ArtifactError(f"{path} is corrupted: it holds the variable {name} twice")
        variables[name] = _variable(cursor, name)
    aliases: dict[str, str] = {}
    for _ in range(cursor.number("I", "the number of aliases")):
        alias, holder = cursor.string("an alias"), cursor.string("an alias")
        if holder not in variables or alias in variables or alias in aliases:
            raise ArtifactError(
                f"{path} is corrupted: the alias {alias} is used twice, or points to {holder}, which is missing"
            )
        aliases[alias] = holder
    if cursor.at != cursor.size:
        raise ArtifactError(f"{path} is corrupted: {cursor.size - cursor.at} bytes after its end")
    return Ct2Model(path, variables, aliases)


def _variable(cursor: _Cursor, name: str) -> Variable:
    rank = cursor.number("B", f"the rank of {name}")
    if rank > LARGEST_RANK:
        raise ArtifactError(f"{cursor.path} is corrupted: the variable {name} has {rank} dimensions")
    shape = tuple(cursor.number("I", f"the shape of {name}") for _ in range(rank))
    if 0 in shape:
        raise ArtifactError(f"{cursor.path} is corrupted: the variable {name} has the shape {shape}")
    kind = cursor.number("B", f"the type of {name}")
    if kind >= len(TYPES):
        raise ArtifactError(f"{cursor.path} is corrupted: the variable {name} has the type number {kind}")
    dtype = TYPES[kind]
    nbytes = cursor.number("I", f"the size of {name}")
    if nbytes != math.prod(shape) * np.dtype(BITS_OF.get(dtype, dtype)).itemsize:
        raise ArtifactError(
            f"{cursor.path} is corrupted: the variable {name} has {nbytes} bytes, which do not match {dtype} {shape}"
        )
    return Variable(dtype, shape, cursor.skip(nbytes, f"the variable {name}"), nbytes)
