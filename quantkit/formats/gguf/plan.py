"""The plan of a file: its tensors in order, each with type, shape and the source's tensor it is made from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.floats import FLOATS
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.hyperparameters import Shape, find_architecture, read_shape
from quantkit.formats.gguf.architectures.known import NORMS_END, Architecture
from quantkit.formats.gguf.architectures.row_orders import Rows, order_of
from quantkit.formats.gguf.architectures.tensor_map import Place, places
from quantkit.formats.gguf.file_types import EMBEDDING as EMBEDDING_IN_FILE
from quantkit.formats.gguf.file_types import Choice, Model, choose_types
from quantkit.formats.gguf.ggml.library import block_type
from quantkit.models.source import Source

ALIGNMENT = 32
# Buffers that old checkpoints store and every engine computes.
IGNORED = (
    ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"
)  # fmt: skip


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file: `shape` (columns,), (rows, columns) or (experts, rows, columns).

    `parts` are the source's tensors that it is made from, one after the other: transformers' name of each, and the
    name in the checkpoint. Rows of the file are the source's in `order` (none: as they are). None of them where
    `values` (columns,) float32 are computed.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    order: Rows | None = None
    transposed: bool = False
    shift: float = 0.0
    values: NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        """Number of rows, of all experts together."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return block_type(self.type).row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        return self.rows * self.row_bytes

    def padded(self, kind: str | None = None) -> int:
        """Bytes of the tensor in the file, or of one of type `kind` in its place, padded to the file's alignment."""
        nbytes = self.rows * block_type(kind or self.type).row_bytes(self.shape[-1])
        return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a file before a weight is read."""

    architecture: Architecture
    shape: Shape
    tensors: tuple[PlannedTensor, ...]
    choices: dict[str, Choice]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, each padded to the file's alignment."""
        return sum(tensor.padded() for tensor in self.tensors)

    @property
    def embedding_rows(self) -> int:
        """Number of tokens that the model has rows for."""
        return next(tensor.rows for tensor in self.tensors if tensor.name == EMBEDDING_IN_FILE)


def file_name(source: Source, file_type: str) -> str:
    """Name of the file, such as ``SmolLM2-135M-Q4_K_M.gguf``."""
    return f"{model_name(source)}-{file_type}.gguf"


def model_name(source: Source) -> str:
    """The last part of the model's id or folder, with letters, digits and ``._-`` only."""
    last = source.model.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
    for candidate in (last, source.folder.resolve().name):
        if name := re.sub(r"[^A-Za-z0-9._-]+", "-", candidate).strip("-."):
            return name
    return "model"


def make_plan(source: Source, file_type: str, asked: Mapping[str, str] | None = None) -> Plan:
    """Plan the file of `source` in `file_type`, from headers only; raises UnsupportedError, SourceError.

    `asked` holds types of single tensors, see `mix.choose_types`.
    """
    architecture = find_architecture(source)
    shape = read_shape(source)
    found = _find_places(source, architecture, shape)
    shapes: dict[str, tuple[int, ...]] = {name: _file_shape(source, *item, shape) for name, item in found.items()}
    shapes |= {name: values.shape for name, values in shape.factors.items()}
    model = Model(shape.blocks, shape.heads, shape.kv_heads, shape.experts, architecture.name)
    choices = choose_types(shapes.items(), file_type, model, asked)
    tensors = []
    for name, choice in choices.items():
        if name in shape.factors:
            tensors.append(PlannedTensor(name, choice.type, shapes[name], {}, values=shape.factors[name]))
            continue
        place, parts = found[name]
        order = None if place.order is None else order_of(place.order, shape.head_rows)
        tensors.append(PlannedTensor(name, choice.type, shapes[name], parts, order, place.transposed, place.shift))
    return Plan(architecture, shape, tuple(tensors), choices)


def _find_places(source: Source, architecture: Architecture, shape: Shape) -> dict[str, tuple[Place, dict[str, str]]]:
    """By name in the file: the place, and where its parts lie in the checkpoint; every tensor must have its place."""
    everything = places(architecture, shape.blocks, shape.experts, head=not shape.tied)
    alternatives = {place.group for place in everything if _stored(source, architecture, place)} - {None} or {0}
    found: dict[str, tuple[Place, dict[str, str]]] = {}
    missing: list[str] = []
    for place in everything:
        parts = _stored(source, architecture, place)
        if parts or (not place.optional and place.group in {None, *alternatives}):
            missing += [part for part in place.parts if part not in parts]
            found[place.name] = (place, parts)
    if missing:
        raise SourceError(
            f"{source.model} lacks {len(missing)} tensors that its config.json asks for, such as {missing[0]}. "
            "Fetch the checkpoint again."
        )
    used = {stored for _, parts in found.values() for stored in parts.values()}
    tied = {architecture.head} if shape.tied else set()
    extra = [name for name in source.tensors if name not in used | tied and not name.endswith(IGNORED)]
    if extra:
        raise UnsupportedError(
            f"{source.model} has {len(extra)} tensors that have no place in a GGUF file of the architecture "
            f"{architecture.name}, such as {extra[0]}"
        )
    if shape.tied and architecture.head_always:
        head = next(p for p in places(architecture, 0, 0, head=True) if p.parts == (architecture.head,))
        found[head.name] = (head, found[EMBEDDING_IN_FILE][1])
    return found


def _stored(source: Source, architecture: Architecture, place: Place) -> dict[str, str]:
    """transformers' names of a place's parts -> the checkpoint's, which may leave the base model's prefix out."""
    found = {}
    for part in place.parts:
        for name in (part, part.removeprefix(architecture.prefix)):
            if name in source.tensors:
                found[part] = name
                break
    return found


def _file_shape(source: Source, place: Place, parts: dict[str, str], shape: Shape) -> tuple[int, ...]:
    """The shape in the file, after a check of the dtypes and the shapes of the source."""
    stored = list(parts.values())
    for name in stored:
        info = source.tensors[name]
        if info.dtype not in FLOATS:
            raise UnsupportedError(
                f"{source.model}: the tensor {name} has the type {info.dtype}; weights must be floats"
            )
        dimensions = 1 if name.endswith((".bias", *NORMS_END)) else 2
        if len(info.shape) != dimensions or 0 in info.shape or info.shape != source.tensors[stored[0]].shape:
            raise UnsupportedError(
                f"{source.model}: the tensor {name} has the shape {info.shape}, which is not expected"
            )
    own = source.tensors[stored[0]].shape
    if place.order is not None and own[0] != len(order_of(place.order, shape.head_rows)):
        heads = shape.head_rows
        raise UnsupportedError(
            f"{source.model}: the tensor {stored[0]} has {own[0]} rows, which are not those of {heads.query} query and "
            f"{heads.key} key heads of {heads.size}"
        )
    own = own[::-1] if place.transposed else own
    return (len(stored), *own) if len(stored) > 1 or place.name.endswith("_exps.weight") else own
