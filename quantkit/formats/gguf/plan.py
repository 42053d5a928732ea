"""The plan of a file: its tensors in order, each with type, shape and the source's tensor it is made from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import FLOATS
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.expected_shapes import (
    KEY_HEADS,
    QUERY_HEADS,
    expected_shape,
    is_flat,
    root_factor,
)
from quantkit.formats.gguf.architectures.hyperparameters import Shape, find_architecture, of_config, read_shape
from quantkit.formats.gguf.architectures.record import Architecture
from quantkit.formats.gguf.architectures.row_orders import RowOrder, order_of
from quantkit.formats.gguf.architectures.stacks import unstacked
from quantkit.formats.gguf.architectures.tensor_map import TensorSlot, is_taken, tensor_slots
from quantkit.formats.gguf.file_types import EMBEDDING, Choice, ModelCounts, choose_types
from quantkit.formats.gguf.ggml.library import IMPORTANCE_ONLY, block_type
from quantkit.formats.gguf.header import ALIGNMENT
from quantkit.models.overrides import OverriddenSource
from quantkit.models.source import Source
from quantkit.untrusted import told

# Buffers that old checkpoints store and every engine computes.
IGNORED = (
    ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"
)  # fmt: skip
ZEROS = "Q2_K"  # the type of tensors of zeros, which have no importance
GUESSES = ("mtp.", "model.mtp.")  # blocks that guess further tokens; others stand behind the model's own


Filled = tuple[TensorSlot, dict[str, str]]  # and transformers' names of its parts -> the checkpoint's


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file: `shape` (columns,), (rows, columns) or (experts, rows, columns).

    `parts` are the source's tensors that it is made from, one after the other: transformers' name of each, and the
    name in the checkpoint. Rows of the file are the source's in `order` (none: as they are), columns those in
    `columns`. None of them where `values` (columns,) float32 are computed, or where all are zero. `function` is a key
    of `tensor_map.FUNCTIONS`; of a vector times `factor`, and with `shift` added.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    order: RowOrder | None = None
    transposed: bool = False
    shift: float = 0.0
    values: NDArray[np.float32] | None = None
    columns: RowOrder | None = None
    function: str | None = None
    factor: float = 1.0

    @property
    def rows(self) -> int:
        """Number of rows, of all experts together."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        return self.rows * block_type(self.type).row_bytes(self.shape[-1])

    def padded(self, kind: str | None = None) -> int:
        """Bytes of the tensor in the file, or of one of type `kind` in its place, padded to the file's alignment."""
        nbytes = self.rows * block_type(kind or self.type).row_bytes(self.shape[-1])
        return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a file before a weight is read.

    `source` has the tensors that it is made from by themselves (`stacks.py`); `scalars` are those whose values a key
    lists.
    """

    source: Source
    architecture: Architecture
    shape: Shape
    tensors: tuple[PlannedTensor, ...]
    choices: dict[str, Choice]
    scalars: Mapping[str, tuple[str, ...]]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, each padded to the file's alignment."""
        return sum(tensor.padded() for tensor in self.tensors)

    def is_of_heads(self, tensor: PlannedTensor) -> bool:
        """Whether a tensor has a matrix for each head, cut out of one of the source's, so that no layer is like it."""
        return tensor.name.split(".", 2)[-1] in self.architecture.heads.values()

    def is_measured(self, tensor: PlannedTensor) -> bool:
        """Whether calibration can try changes of a tensor: no layer is like a single head's matrix, and an indexer only
        chooses tokens, through which no gradient comes.
        """
        return bool(tensor.parts) and not self.is_of_heads(tensor) and ".indexer." not in tensor.name

    def is_weighted(self, tensor: PlannedTensor) -> bool:
        """Whether a calibration or an importance file has the importance of a tensor's columns."""
        return bool(tensor.parts) and tensor.name.startswith("blk.") and not self.is_of_heads(tensor)

    def with_same_inputs(self, importance: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """`importance` by the source's weight names, and that of layers that are not measured, from their like."""
        found = dict(importance)
        for part in (part for tensor in self.tensors for part in tensor.parts if part not in importance):
            for own, other in self.architecture.same_inputs.items():
                measured = part.removesuffix(own) + other
                if part.endswith(f".{own}") and measured in importance:
                    found[part] = importance[measured]
        return found

    @property
    def embedding_rows(self) -> int:
        """Number of tokens that the model has rows for."""
        return next(tensor.rows for tensor in self.tensors if tensor.name == EMBEDDING)


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


def make_plan(source: Source, file_type: str, types: Mapping[str, str] | None = None, weighted: bool = False) -> Plan:
    """Plan the file of `source` in `file_type`, from headers only; raises UnsupportedError, SourceError.

    `types` are those of single tensors, see `file_types.choose_types`; `weighted`: there will be an importance.
    """
    source, architecture, shape, scalars, slots, extra = _place(source)
    if extra:
        raise UnsupportedError(
            f"{source.model} has {len(extra)} tensors that have no place in a GGUF file of the architecture "
            f"{architecture.name} with the {shape.blocks} blocks and settings of its config.json, such as {extra[0]}"
        )
    shapes: dict[str, tuple[int, ...]] = {
        name: _file_shape(source, architecture, *slot, shape) for name, slot in slots.items()
    }
    shapes |= {name: values.shape for name, values in shape.factors.items()}
    heads, kv_heads = (
        int(listed[0]) if isinstance(listed := shape.keys.get(key), list) else number
        for key, number in ((QUERY_HEADS, shape.heads), (KEY_HEADS, shape.kv_heads))
    )
    counts = ModelCounts(shape.blocks, heads, kv_heads, shape.experts, architecture.name, weighted=weighted)
    choices = choose_types(shapes, file_type, counts, types)
    tensors = []
    for name, choice in choices.items():
        if name in shape.factors:
            tensors.append(PlannedTensor(name, choice.type, shapes[name], {}, values=shape.factors[name]))
            continue
        slot, parts = slots[name]
        if not parts:
            kind = ZEROS if choice.type in IMPORTANCE_ONLY else choice.type
            tensors.append(PlannedTensor(name, kind, shapes[name], {}))
            continue
        order = _order(source, name, slot.order, shape, shapes[name][0])
        columns = _order(source, name, slot.columns, shape, shapes[name][-1])
        tensors.append(
            PlannedTensor(
                name,
                choice.type,
                shapes[name],
                parts,
                order,
                slot.transposed,
                slot.shift,
                None,
                columns,
                slot.function,
                root_factor(name, shape.sizes, slot.root),
            )
        )
    return Plan(source, architecture, shape, tuple(tensors), choices, scalars)


def without_zero_biases(source: Source) -> Source:
    """The source without biases of zeros that a file has no place for: AutoGPTQ stored one for each layer."""
    stored = source.tensors.items()
    biases = {name for name, info in stored if name.endswith(".bias") and len(info.shape) == 1 and info.dtype in FLOATS}
    extra: list[str] = []
    with suppress(SourceError, UnsupportedError):  # which the plan of the file raises again
        extra = _place(source)[-1] if biases else []
    idle = [name for name in extra if name in biases and not source.floats(name).any()]
    if not idle:
        return source
    note = "biases of zeros are left out, since a GGUF file has no place for them"
    note = f"{note}: {len(idle)}, such as {source.published(idle[0])}"
    return OverriddenSource(source, dropped=idle, notes=(note,))


def _place(
    source: Source,
) -> tuple[Source, Architecture, Shape, dict[str, tuple[str, ...]], dict[str, Filled], list[str]]:
    """What `_fill_slots` returns, and before it what it is asked with."""
    architecture = find_architecture(source)
    source = unstacked(source, architecture)
    shape = read_shape(source)
    scalars = _scalars(source, architecture, shape.blocks)
    names = {name for names in scalars.values() for name in names}
    return source, architecture, shape, scalars, *_fill_slots(source, architecture, shape, names)


def _order(source: Source, name: str, order: str | None, shape: Shape, count: int) -> RowOrder | None:
    if order is None:
        return None
    with told(f"{source.model}: the rows of {name} cannot be put in order", UnsupportedError):
        return order_of(order, shape.head_rows, shape.sizes.linear_heads, shape.sizes.index_heads, count)


def _scalars(source: Source, architecture: Architecture, blocks: int) -> dict[str, tuple[str, ...]]:
    """By key, the tensors of the source whose one value each block has there; raises SourceError for other shapes."""
    keys: dict[str, tuple[str, ...]] = {}
    for part, (key, shape) in architecture.scalars.items():
        names = (f"{architecture.blocks}.{block}.{part}" for block in range(blocks))
        keys[key] = tuple(
            next((n for n in (name, name.removeprefix(architecture.prefix)) if n in source.tensors), name)
            for name in names
        )
        for name in keys[key]:
            if source.info(name).shape != shape:
                raise SourceError(f"{source.model}: the tensor {name} has the shape {source.info(name).shape}")
    return keys


def _fill_slots(
    source: Source, architecture: Architecture, shape: Shape, scalars: set[str]
) -> tuple[dict[str, Filled], list[str]]:
    """The slots of the file by name, with what the checkpoint has for each; and the tensors that have no slot."""
    heads = [shape.sizes.of_block(block).heads.query for block in range(shape.blocks)]
    slots = tensor_slots(architecture, shape.blocks, shape.experts, heads, head=True)
    stored = [_stored_parts(source, architecture, slot) for slot in slots]  # alternatives share names
    tied = {architecture.head} if shape.tied else set()
    own_blocks = shape.blocks - shape.shared
    alternatives = {slot.group for slot, parts in zip(slots, stored, strict=True) if parts} - {None} or {0}
    filled: dict[str, Filled] = {}
    missing: list[str] = []
    for slot, parts in zip(slots, stored, strict=True):
        if tied.intersection(slot.parts):
            if architecture.head_always:
                filled[slot.name] = (slot, filled[EMBEDDING][1])
        elif slot.setting is None or of_config(source.settings, slot.setting):
            if not parts and slot.group not in {None, *alternatives}:
                continue
            if architecture.zero_keys and is_taken(slot.parts[0], architecture, own_blocks):
                parts = {}
            else:
                missing += [part for part in slot.parts if part not in parts]
            filled[slot.name] = (slot, parts)
    if missing:
        raise SourceError(
            f"{source.model} lacks {len(missing)} tensors that its config.json asks for, such as {missing[0]}. "
            "Fetch the checkpoint again, or give the config.json that belongs to these weights."
        )
    used = tied.union(scalars, *(parts.values() for _, parts in filled.values()))
    return filled, [
        name
        for name in source.tensors
        if not (name in used or name.endswith(IGNORED) or guesses_further(name, source, shape.blocks))
    ]


def guesses_further(name: str, source: Source, blocks: int) -> bool:
    """Whether a tensor is of what guesses further tokens, behind a model of so many blocks."""
    if name.startswith(GUESSES):
        return True
    block = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return block is not None and int(block[1]) >= blocks and f"{block.group()}eh_proj.weight" in source.tensors


def _stored_parts(source: Source, architecture: Architecture, slot: TensorSlot) -> dict[str, str]:
    """transformers' names of a slot's parts -> the checkpoint's, which may leave the base model's prefix out."""
    names = ((part, name) for part in slot.parts for name in (part.removeprefix(architecture.prefix), part))
    return {part: name for part, name in names if name in source.tensors}


def _file_shape(
    source: Source, architecture: Architecture, slot: TensorSlot, parts: dict[str, str], shape: Shape
) -> tuple[int, ...]:
    """The shape in the file, after a check of the dtypes and the shapes of the source against its config.json."""
    whole = expected_shape(slot.name, shape.sizes, architecture.shapes)
    own = whole[1:] if slot.stacked else whole
    own = own[::-1] if slot.transposed else own
    for name in parts.values():
        info = source.tensors[name]
        if slot.split:  # among several tensors, whose rows are counted together
            own = (info.shape[0], *whole[1:])
        if is_flat(slot.name):
            own = tuple(math.prod(own) if length < 0 else length for length in slot.form)
        if len(info.shape) == 3 and info.shape[1] == 1 and len(own) == 2:  # of a convolution
            own = (own[0], 1, own[1])
        if info.dtype not in FLOATS:
            raise UnsupportedError(
                f"{source.model}: the tensor {name} has the type {info.dtype}; weights must be floats"
            )
        if info.shape != own:
            raise UnsupportedError(
                f"{source.model}: the tensor {name} has the shape {info.shape}, but config.json asks for {own}. "
                "Give the config.json that belongs to these weights."
            )
    return whole
