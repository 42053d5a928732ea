"""Plan a GGUF file before any weights are read: tensors in order, their types, shapes and source tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import FLOATS
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.record import Architecture
from quantkit.formats.gguf.file_types import EMBEDDING, Choice, ModelCounts, choose_types
from quantkit.formats.gguf.ggml.library import IMPORTANCE_ONLY, block_type
from quantkit.formats.gguf.header import ALIGNMENT
from quantkit.formats.gguf.hyperparameters import find_architecture, read_shape
from quantkit.formats.gguf.shapes import KEY_HEADS, QUERY_HEADS, ModelShape, RowOrder
from quantkit.formats.gguf.slots import Slot, is_taken, slots_of, unstacked
from quantkit.models.source import Source
from quantkit.system.untrusted import reraise_as

# Buffers in old checkpoints that every engine computes itself.
IGNORED = (
    ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"
)  # fmt: skip
ZEROS = "Q2_K"  # the type of tensors of zeros, which have no importance
GUESSES = ("mtp.", "model.mtp.")  # blocks for multi-token prediction; other models have them after their own blocks


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the planned file; `shape` is (columns,), (rows, columns) or (experts, rows, columns)."""

    name: str
    type: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]  # transformers' names -> the checkpoint's; empty for zeros and `values`
    slot: Slot | None = None
    values: NDArray[np.float32] | None = None  # (columns,), computed

    @property
    def rows(self) -> int:
        """Return the number of rows, over all experts."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * block_type(self.type).row_bytes(self.shape[-1])

    @property
    def columns(self) -> RowOrder | None:
        """Return, for each column in the file, the index of the source column; None if unchanged."""
        return None if self.slot is None else self.slot.columns

    @property
    def is_of_heads(self) -> bool:
        """Return whether the tensor holds one matrix per head, cut out of a larger source tensor (MLA)."""
        return self.slot is not None and self.slot.counted == "head"

    @property
    def is_measured(self) -> bool:
        """Return whether its sensitivity can be measured; an indexer only selects tokens, so no gradient reaches it."""
        return bool(self.parts) and not self.is_of_heads and ".indexer." not in self.name

    @property
    def is_weighted(self) -> bool:
        """Return whether calibration or an imatrix file provides importance for its columns."""
        return bool(self.parts) and self.name.startswith("blk.") and not self.is_of_heads

    def padded(self, kind: str | None = None) -> int:
        """Return the tensor's size in bytes, including alignment padding, as its own type or as type `kind`."""
        nbytes = self.rows * block_type(kind or self.type).row_bytes(self.shape[-1])
        return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """The complete plan of a GGUF file."""

    source: Source  # with stacked tensors split (`slots.py`)
    architecture: Architecture
    shape: ModelShape
    tensors: tuple[PlannedTensor, ...]
    choices: dict[str, Choice]
    scalars: Mapping[str, tuple[str, ...]]  # key -> tensors whose values it lists

    @property
    def tensor_bytes(self) -> int:
        """Return the total size of all tensors in bytes, including alignment padding."""
        return sum(tensor.padded() for tensor in self.tensors)

    def with_same_inputs(self, importance: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """Return `importance` (by source name), copied to unmeasured layers that read a measured layer's inputs."""
        found = dict(importance)
        for part in (part for tensor in self.tensors for part in tensor.parts if part not in importance):
            for own, other in self.architecture.same_inputs.items():
                measured = part.removesuffix(own) + other
                if part.endswith(f".{own}") and measured in importance:
                    found[part] = importance[measured]
        return found

    @property
    def embedding_rows(self) -> int:
        return next(tensor.rows for tensor in self.tensors if tensor.name == EMBEDDING)


def model_name(source: Source) -> str:
    """Return the last part of the model's id or path, reduced to letters, digits and ``._-``."""
    last = source.model.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
    for candidate in (last, source.folder.resolve().name):
        if name := re.sub(r"[^A-Za-z0-9._-]+", "-", candidate).strip("-."):
            return name
    return "model"


@dataclass(frozen=True)
class Filled:
    """Each slot of the file, by tensor name, with the checkpoint's names of its parts."""

    source: Source
    architecture: Architecture
    shape: ModelShape
    scalars: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, tuple[Slot, dict[str, str]]]
    unplaced: list[str]


def make_plan(source: Source, file_type: str, types: Mapping[str, str] | None = None, weighted: bool = False) -> Plan:
    """Plan a GGUF file from headers alone; `types` are user-chosen types, `weighted`: an imatrix will be used."""
    filled = fill_slots(source)
    source, row, shape = filled.source, filled.architecture, filled.shape
    if extra := filled.unplaced:
        raise UnsupportedError(
            f"{source.model} has {len(extra)} tensors that do not belong in a GGUF file of the architecture "
            f"{row.name} with {shape.blocks} blocks and the settings of its config.json, such as {extra[0]}"
        )
    for slot, parts in filled.slots.values():
        _refuse_shapes(source, slot, parts)
    shapes = {name: slot.shape for name, (slot, _) in filled.slots.items()}
    shapes |= {name: values.shape for name, values in shape.factors.items()}
    heads, kv_heads = (
        value[0] if isinstance(value := shape.keys[key], list) else shape.number(key)
        for key in (QUERY_HEADS, KEY_HEADS)
    )
    counts = ModelCounts(shape.blocks, heads, kv_heads, shape.experts, row.name, weighted=weighted)
    choices = choose_types(shapes, file_type, counts, types)
    tensors = []
    for name, choice in choices.items():
        if name in shape.factors:
            tensors.append(PlannedTensor(name, choice.type, shapes[name], {}, values=shape.factors[name]))
            continue
        slot, parts = filled.slots[name]
        kind = ZEROS if not parts and choice.type in IMPORTANCE_ONLY else choice.type
        tensors.append(PlannedTensor(name, kind, shapes[name], parts, slot))
        if parts:
            with reraise_as(f"{source.model}: the rows of {name} cannot be reordered", UnsupportedError):
                _ = slot.rows, slot.columns
    return Plan(source, row, shape, tuple(tensors), choices, filled.scalars)


def fill_slots(source: Source) -> Filled:
    """Match the checkpoint's tensors to the file's slots; raise SourceError if any is missing, or UnsupportedError."""
    row = find_architecture(source)
    source = unstacked(source, row)
    shape = read_shape(source)
    scalars = _scalars(source, row, shape.blocks)
    slots: dict[str, tuple[Slot, dict[str, str]]] = {}
    missing: list[str] = []
    for slot in slots_of(row, shape):
        parts = {part: name for part in slot.parts for name in _names(part, row) if name in source.tensors}
        if shape.tied and row.head in slot.parts:
            if row.head_always:
                slots[slot.name] = (slot, slots[EMBEDDING][1])
        elif slot.condition is None or slot.condition(source.settings):
            if row.zero_keys and is_taken(slot.parts[0], row, shape.own_blocks):
                parts = {}
            else:
                missing += [part for part in slot.parts if part not in parts]
            slots[slot.name] = (slot, parts)
    if missing:
        raise SourceError(
            f"{source.model} lacks {len(missing)} tensors that its config.json requires, such as {missing[0]}. "
            "Fetch the checkpoint again, or give the config.json that belongs to these weights."
        )
    used = {name for _, parts in slots.values() for name in parts.values()}.union(*scalars.values())
    used |= {row.head} if shape.tied else set()
    extra = [name for name in source.tensors if name not in used and not name.endswith(IGNORED)]
    extra = [name for name in extra if not guesses_further(name, source, shape.blocks)]
    return Filled(source, row, shape, scalars, slots, extra)


def _names(part: str, row: Architecture) -> Iterator[str]:
    """Yield the names under which checkpoints may store a part: without and with the base model's prefix."""
    yield from (part.removeprefix(row.prefix), part)


def _scalars(source: Source, row: Architecture, blocks: int) -> dict[str, tuple[str, ...]]:
    """Return, by GGUF key, the names of the one-value tensors of all blocks; raise SourceError for other shapes."""
    keys: dict[str, tuple[str, ...]] = {}
    for part, (key, shape) in row.scalars.items():
        wanted = (f"{row.blocks}.{block}.{part}" for block in range(blocks))
        keys[key] = tuple(next((n for n in _names(name, row) if n in source.tensors), name) for name in wanted)
        for name in keys[key]:
            if source.info(name).shape != shape:
                raise SourceError(f"{source.model}: the tensor {name} has the shape {source.info(name).shape}")
    return keys


def guesses_further(name: str, source: Source, blocks: int) -> bool:
    """Return whether a tensor belongs to multi-token prediction (MTP), in a model of `blocks` blocks."""
    if name.startswith(GUESSES):
        return True
    block = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return block is not None and int(block[1]) >= blocks and f"{block.group()}eh_proj.weight" in source.tensors


def _refuse_shapes(source: Source, slot: Slot, parts: Mapping[str, str]) -> None:
    """Raise UnsupportedError for source tensors that are not floats or whose shapes contradict config.json."""
    for name in parts.values():
        info = source.tensors[name]
        own = slot.source_shape(info.shape[0] if info.shape else 1)
        if info.dtype not in FLOATS:
            raise UnsupportedError(
                f"{source.model}: the tensor {name} has the type {info.dtype}; weights must be floats"
            )
        if info.shape != own:
            raise UnsupportedError(
                f"{source.model}: the tensor {name} has the shape {info.shape}, but config.json requires {own}. "
                "Give the config.json that belongs to these weights."
            )
