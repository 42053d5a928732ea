"""Slots: each tensor of a file, the source's tensors that it is made from, and the way there and back.

They are a row of `known.KNOWN` for a model's numbers. Plan, writer, reader and checks all use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from quantkit.checkpoints.rows import Rows, rows_of_array, to_float32
from quantkit.formats.gguf.architectures.record import (
    ENDINGS,
    OWN_KEYS,
    TRANSFORMS,
    Architecture,
    Condition,
    Parts,
    Transform,
    of_config,
)
from quantkit.formats.gguf.row_orders import RowOrder, RowReader, in_order
from quantkit.formats.gguf.shapes import ModelShape, expected_shape
from quantkit.models.source import Source

# What the name of a part may count, and the length that says how many there are.
COUNTED = {"expert": "experts", "head": "heads", "state": "other states"}
# Vectors of the source that some files have as matrices, and its convolutions, which are of one channel each.
FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")
CONVOLUTIONS = (".conv.weight", "conv1d.weight")


@dataclass(frozen=True)
class Slot:
    """A tensor of the file, `shape` (..., columns), and the source's tensors `parts` that it is made from."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    model: ModelShape
    transform: Transform
    counted: str = ""  # the kind of parts that are in a further dimension
    factor: float = 1.0  # of a vector
    condition: Callable[[Any], Any] | None = None  # of a configuration: whether a model has the tensor
    group: tuple[int, int] = (0, 0)  # tensors of a block that exist together; it decides between slots with one name

    @cached_property
    def rows(self) -> RowOrder | None:
        """The source's rows as the file has them; raises ValueError."""
        order = self.transform.rows
        return None if order is None else order.of(self.model, self.shape[0])

    @cached_property
    def columns(self) -> RowOrder | None:
        """The source's columns as the file has them; raises ValueError."""
        order = self.transform.columns
        return None if order is None else order.of(self.model, self.shape[-1])

    @property
    def is_vector(self) -> bool:
        """Whether the source has a vector, whatever its shape in the file."""
        return len(self.shape) == 1 or (self.name.startswith("blk.") and self.name.split(".", 2)[2] in FLAT)

    def source_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of a part; `rows` are those of one that is split among several tensors of the file."""
        shape = self.shape[1:] if self.counted else self.shape
        shape = shape[::-1] if self.transform.transposed else shape
        if self.transform.split:
            return (rows, *shape[1:])
        if self.is_vector:
            return tuple(math.prod(shape) if length < 0 else length for length in self.transform.source_shape)
        return (shape[0], 1, shape[1]) if self.parts[0].endswith(CONVOLUTIONS) and len(shape) == 2 else shape

    def to_file(self, source: Source, name: str) -> RowReader:
        """Return a reader of the file's rows, float32, made of the checkpoint's tensor `name`."""
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
        """Yield the parts, made of the file's rows that `read` reads; raise ValueError."""
        transform, total = self.transform, math.prod(self.shape[:-1])
        if self.is_vector:
            with np.errstate(invalid="ignore", divide="ignore"):  # what is not finite is refused by whoever reads it
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
    """Return every tensor that a file with these numbers may have; raise KeyError for a part without name or shape."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[row.names_like or row.name], model.blocks)
    slots: list[Slot] = []

    def mapped(origin: str) -> str | None:
        known = (origin, origin.removeprefix(row.prefix))  # some names are known without it alone
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
            known = mapped(stem + part) if kind and not counted else None  # gguf's names of others lack an ending
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
    if mapped(row.head) is not None:  # llama.cpp ties some heads always
        add((row.head,))
    for block in range(model.blocks):
        add(row.parts, block)
        for group, (condition, parts) in enumerate(row.per_block, 1):
            add(parts, block, condition, group)
    return slots


def _asked(condition: Condition, block: int, config: Any) -> Any:
    return of_config(config, condition) if isinstance(condition, str) else condition(config, block)


def is_taken(name: str, row: Architecture, own_blocks: int) -> bool:
    """Return whether transformers' tensor is of keys or values in a block that takes those of another."""
    block, part = row.block_and_part(name)
    return row.shares_keys and block >= own_blocks and part.startswith(tuple(f"{own}." for own in OWN_KEYS))
