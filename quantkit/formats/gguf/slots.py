"""Slots: each tensor of a GGUF file, the source tensors it is made from, and the conversion in both directions.

An architecture row of `known.KNOWN` and the model's dimensions give its slots, for planning, writing, reading and
checking. Some checkpoints stack experts (gpt-oss, Llama 4, Granite) or heads (DeepSeek) in another way than GGUF:
`unstacked` splits such tensors for writing, and `restacked` joins them after reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows, rows_of_array, to_float32
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.architectures.record import (
    ENDINGS,
    OWN_KEYS,
    TRANSFORMS,
    Architecture,
    Condition,
    Parts,
    Stack,
    Transform,
    of_config,
)
from quantkit.formats.gguf.shapes import ModelShape, RowOrder, RowReader, expected_shape, in_order
from quantkit.models.source import OverriddenSource, Override, Source

# What a part's name may count, and the length with the number of such parts.
COUNTED = {"expert": "experts", "head": "heads", "state": "other states"}
# Source vectors that are matrices in some files, and convolutions, which have one channel each.
FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")
CONVOLUTIONS = (".conv.weight", "conv1d.weight")


@dataclass(frozen=True)
class Slot:
    """A GGUF tensor of shape (..., columns) and the source tensors `parts` from which it is made."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    model: ModelShape
    transform: Transform
    counted: str = ""  # the kind of parts along the extra dimension
    factor: float = 1.0  # factor of a vector
    condition: Callable[[Any], Any] | None = None  # whether a model of a configuration has the tensor
    group: tuple[int, int] = (0, 0)  # tensors of a block that exist together; selects between slots with one name

    @cached_property
    def rows(self) -> RowOrder | None:
        """Return, for each row in the file, the index of the source row; None if unchanged. Raises ValueError."""
        order = self.transform.rows
        return None if order is None else order.of(self.model, self.shape[0])

    @cached_property
    def columns(self) -> RowOrder | None:
        """Return, for each column in the file, the index of the source column; None if unchanged. Raises ValueError."""
        order = self.transform.columns
        return None if order is None else order.of(self.model, self.shape[-1])

    @property
    def is_vector(self) -> bool:
        """Return whether the source stores this tensor as a vector, even if the file's tensor is 2-D."""
        return len(self.shape) == 1 or (self.name.startswith("blk.") and self.name.split(".", 2)[2] in FLAT)

    def source_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of one source part; a part that is split over several GGUF tensors has `rows` rows."""
        shape = self.shape[1:] if self.counted else self.shape
        shape = shape[::-1] if self.transform.transposed else shape
        if self.transform.split:
            return (rows, *shape[1:])
        if self.is_vector:
            return tuple(math.prod(shape) if length < 0 else length for length in self.transform.source_shape)
        return (shape[0], 1, shape[1]) if self.parts[0].endswith(CONVOLUTIONS) and len(shape) == 2 else shape

    def to_file(self, source: Source, name: str) -> RowReader:
        """Return a reader that converts the source tensor `name` to float32 rows in the file's layout."""
        transform = self.transform
        if len(source.info(name).shape) == 1 or self.is_vector:
            values = source.floats(name).reshape(-1) * np.float32(self.factor) + np.float32(transform.shift)
            values = values if transform.function is None else transform.function.to_file(values)
            ordered = values if self.rows is None else values[self.rows]
            return lambda _start, _stop: ordered.reshape(1, -1)
        if transform.transposed:
            whole, dtype = source.stored(name), source.tensors[name].dtype
            return lambda start, stop: to_float32(whole[:, start:stop].T, dtype)
        read = in_order(partial(source.floats, name), self.rows)
        columns = slice(None) if self.columns is None else self.columns
        return lambda start, stop: read(start, stop).reshape(stop - start, -1)[:, columns]

    def from_file(self, read: RowReader) -> Iterator[tuple[str, Rows]]:
        """Yield (name, rows) of each source tensor in this slot, converted back from the file's rows `read`.

        Raises ValueError if an inverse transform cannot be computed.
        """
        transform, total = self.transform, math.prod(self.shape[:-1])
        if self.is_vector:
            with np.errstate(invalid="ignore", divide="ignore"):  # the reader refuses values that are not finite
                values = (read(0, total).reshape(-1) - np.float32(transform.shift)) / np.float32(self.factor)
                values = values if transform.function is None else transform.function.from_file(values)
            values = values if self.rows is None else values[np.argsort(self.rows)]
            yield self.parts[0], rows_of_array(values.reshape(transform.source_shape))
            return
        count = total // len(self.parts)
        for number, part in enumerate(self.parts):
            if len(self.source_shape(count)) == 1:  # the bias of an expert
                yield part, rows_of_array(read(number, number + 1)[0])
            else:
                yield part, self._part_from_file(read, number * count, count)

    def _part_from_file(self, read: RowReader, first: int, count: int) -> Rows:
        shape = self.source_shape(count)
        back = None if self.rows is None else np.argsort(self.rows)
        own = in_order(lambda start, stop: read(first + start, first + stop), back)
        if self.transform.transposed:
            whole = cache(partial(own, 0, count))
            return Rows(shape, lambda start, stop: np.ascontiguousarray(whole().T[start:stop]).reshape(-1, *shape[1:]))
        columns = slice(None) if self.columns is None else np.argsort(self.columns)
        return Rows(shape, lambda start, stop: own(start, stop)[:, columns].reshape(-1, *shape[1:]))


def slots_of(row: Architecture, model: ModelShape) -> list[Slot]:
    """Return all tensors that a GGUF file of this model may have; raise KeyError for a part without name or shape."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[row.names_like or row.name], model.blocks)
    slots: list[Slot] = []

    def mapped(origin: str) -> str | None:
        known = (origin, origin.removeprefix(row.prefix))  # some names are known only without the prefix
        return next(filter(None, (table.get_name(name, try_suffixes=(".weight", ".bias")) for name in known)), None)

    def add(parts: Parts, block: int | None = None, condition: Condition | None = None, group: int = 0) -> None:
        own, stem = ("", "") if block is None else (f"blk.{block}.", f"{row.blocks}.{block}.")
        lengths = (model if block is None else model.of_block(block)).lengths
        asked = None if condition is None else partial(_asked, condition, block or 0)
        names = {**row.gguf_names, **(parts if isinstance(parts, Mapping) else {})}
        for part in parts:
            counted = next((word for word in COUNTED if f"{{{word}}}" in part), "")
            count = lengths[COUNTED[counted]] if counted else 1
            pieces = tuple(stem + part.format(**{counted: i}) if counted else stem + part for i in range(count))
            key = part.removesuffix(".weight").removesuffix(".bias")
            kind, named = part[len(key) :], names.get(part)
            plain = Transform(shift=row.norm_shift if part.endswith("norm.weight") else 0.0)
            how = next((how for end, how in TRANSFORMS.items() if key.endswith(end)), plain)
            how = row.transforms.get(key, how)
            known = mapped(stem + part) if kind and not counted else None  # gguf's other names lack an ending
            known = known or next((own + found + kind for end, found in ENDINGS.items() if key.endswith(end)), None)
            name = own + named if named else known or mapped(stem + part)
            placed = {own + name: replace(how, rows=rows) for name, rows in how.split.items()}
            if name is None and not placed:
                raise KeyError(f"gguf has no name for {stem}{part} in the architecture {row.name}")
            over, under = how.sqrt_factors or ("one", "one")
            factor = math.sqrt(lengths[over] / max(lengths[under], 1))
            for called, made in (placed or {str(name): how}).items() if pieces else ():
                shape = expected_shape(called, lengths, row.shapes)
                slots.append(Slot(called, pieces, shape, model, made, counted, factor, asked, (block or 0, group)))

    add(row.outside)
    for condition, outside in row.outside_if:
        add(outside, condition=condition)
    if mapped(row.head) is not None:  # llama.cpp always ties some heads
        add((row.head,))
    for block in range(model.blocks):
        add(row.parts, block)
        for group, (condition, parts) in enumerate(row.per_block, 1):
            add(parts, block, condition, group)
    return slots


def _asked(condition: Condition, block: int, config: Any) -> Any:
    return of_config(config, condition) if isinstance(condition, str) else condition(config, block)


def is_taken(name: str, row: Architecture, own_blocks: int) -> bool:
    """Return whether the transformers tensor `name` is an unused key or value weight of a block that shares keys."""
    block, part = row.block_and_part(name)
    return row.shares_keys and block >= own_blocks and part.startswith(tuple(f"{own}." for own in OWN_KEYS))


@dataclass(frozen=True)
class Piece:
    """One matrix (or bias) of a stacked tensor: `rows` (start, stop, step) of matrix `index` with `height` rows."""

    name: str
    stack: Stack
    index: int
    height: int
    rows: tuple[int, int, int]


def _info(stored: TensorInfo, piece: Piece) -> TensorInfo:
    inner = stored.shape if piece.stack.rows is not None else stored.shape[1:]
    shape = (len(range(*piece.rows)), *(inner[:-1] if piece.stack.transposed else inner[1:]))
    return replace(stored, shape=shape, nbytes=stored.nbytes // max(1, stored.parameters) * math.prod(shape))


def unstacked(source: Source, row: Architecture) -> Source:
    """Split the source's stacked tensors into one per expert or head; raise UnsupportedError for unexpected shapes."""
    pieces: dict[str, Piece] = {}
    behind = {stack.part: stack for stack in row.stacks}
    for name in source.tensors if behind else ():
        block, part = row.block_and_part(name)
        if block >= 0 and part in behind:
            pieces |= _pieces_of(source, name, row.blocks, block, behind[part])
    if not pieces:
        return source

    @lru_cache(maxsize=1)  # pieces of a matrix are read consecutively, in slabs
    def matrix(name: str, stack: Stack, index: int, height: int) -> NDArray[Any]:
        if stack.rows is not None:
            return source.stored(name, index * height, (index + 1) * height)
        values = source.stored(name, index, index + 1)[0]
        return values.T if stack.transposed else values

    def rows(piece: Piece, start: int, stop: int) -> NDArray[Any]:
        values = matrix(piece.name, piece.stack, piece.index, piece.height)[slice(*piece.rows)]
        return values[start:stop] if values.ndim > 1 else values

    overrides = {
        name: Override(_info(source.tensors[piece.name], piece), partial(rows, piece)) for name, piece in pieces.items()
    }
    return OverriddenSource(source, overrides, dropped={piece.name for piece in pieces.values()} - overrides.keys())


def _pieces_of(source: Source, name: str, blocks: str, block: int, stack: Stack) -> dict[str, Piece]:
    shape, each = source.tensors[name].shape, len(stack.pieces)
    if stack.rows is not None:
        heights = tuple(int(rows) for rows in stack.rows(source.settings, block))
        count, left = divmod(shape[0], max(1, sum(heights)))
        wrong = len(shape) != 2 or left != 0 or min(heights) < 1
    else:
        wrong = len(shape) not in (2, 3) or not shape[0]
        height = 0 if wrong else shape[-1] if stack.transposed and len(shape) == 3 else shape[1]
        count, heights = shape[0], (height // each,) * each
        wrong = wrong or not heights[0] or height % each != 0
    if wrong:
        raise UnsupportedError(
            f"{source.model}: the tensor {name} has the shape {shape}, which is not a stack of matrices"
        )
    total, first = sum(heights), 0
    found: dict[str, Piece] = {}
    for number, (part, height) in enumerate(zip(stack.pieces, heights, strict=True)):
        rows = (number, total, each) if stack.interleaved else (first, first + height, 1)
        pieces = (Piece(name, stack, index, total, rows) for index in range(count))
        found |= {f"{blocks}.{block}.{one_of(part, piece.index)}": piece for piece in pieces}
        first += height
    return found


def one_of(part: str, index: int) -> str:
    """Fill the placeholder {expert} or {head} of a part name with `index`."""
    return part.format(expert=index, head=index)


def restacked(tensors: Mapping[str, Rows], row: Architecture, count: int) -> Iterator[tuple[str, Rows]]:
    """Yield `tensors` with per-expert or per-head pieces joined into the checkpoint's stacks, for `count` blocks."""
    left = dict(tensors)
    made: dict[str, Rows] = {}
    for prefix in (f"{row.blocks}.{block}." for block in range(count)):
        for stack in row.stacks:
            groups: list[list[Rows]] = []
            while all(prefix + one_of(piece, len(groups)) in left for piece in stack.pieces):
                groups.append([left.pop(prefix + one_of(piece, len(groups))) for piece in stack.pieces])
            if groups:
                made[prefix + stack.part] = _stack_of(stack, groups)
    yield from (left | made).items()


def _stack_of(stack: Stack, groups: list[list[Rows]]) -> Rows:
    height = sum(piece.shape[0] for piece in groups[0])
    columns = groups[0][0].shape[1:]

    def matrix(index: int) -> NDArray[np.float32]:
        parts = [piece.whole() for piece in groups[index]]
        whole = np.stack(parts, 1).reshape(height, *columns) if stack.interleaved else np.concatenate(parts)
        return whole.T if stack.transposed else whole

    if stack.rows is None:
        shape = (*columns, height) if stack.transposed else (height, *columns)
        return Rows((len(groups), *shape), lambda start, stop: np.stack([matrix(i) for i in range(start, stop)]))

    def flat(start: int, stop: int) -> NDArray[np.float32]:
        first = start // height
        whole = np.concatenate([matrix(index) for index in range(first, -(-stop // height))])
        return whole[start - first * height : stop - first * height]

    return Rows((len(groups) * height, *columns), flat)
