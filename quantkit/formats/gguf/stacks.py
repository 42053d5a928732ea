"""Tensors with a matrix of every expert or head: split for a file, and put together again.

gpt-oss, Llama 4 and Granite have such experts, DeepSeek such keys and values of heads. A file has a tensor of all gates
and one of all ups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import TensorInfo
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.architectures.record import Architecture, Stack
from quantkit.models.overrides import OverriddenSource, Override
from quantkit.models.source import Source


@dataclass(frozen=True)
class Piece:
    """One matrix (or bias): number `index` of the tensor `name`, and its `rows` (first, end, step) of `height`."""

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
    """Return the source with its stacks taken apart, or itself; raise UnsupportedError for other shapes."""
    pieces: dict[str, Piece] = {}
    behind = {stack.part: stack for stack in row.stacks}
    for name in source.tensors if behind else ():
        block, part = row.block_and_part(name)
        if block >= 0 and part in behind:
            pieces |= _pieces_of(source, name, row.blocks, block, behind[part])
    if not pieces:
        return source

    @lru_cache(maxsize=1)  # pieces of a matrix are read one after the other, in slabs
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
            f"{source.model}: the tensor {name} has the shape {shape}, which is no stack of matrices"
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
    """Return the name of a part of one expert or head."""
    return part.format(expert=index, head=index)


def restacked(tensors: Mapping[str, Rows], row: Architecture, count: int) -> Iterator[tuple[str, Rows]]:
    """Yield `tensors` with the pieces of each stack put together under its name, in `count` blocks."""
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
