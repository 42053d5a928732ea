"""Orders of rows that llama.cpp wants of fused or rotated weights: the source's rows as the file has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.formats.gguf.shapes import Heads, ModelShape

RowOrder = NDArray[np.int64]
RowReader = Callable[[int, int], NDArray[Any]]  # (start, stop) -> those rows


@dataclass(frozen=True)
class Order:
    """`rows` makes the order of the rows of the `heads` of a model; `rotary`: pairs of a head turn."""

    rows: Callable[[Heads], RowOrder]
    heads: Callable[[ModelShape], Heads] = lambda shape: shape.heads
    rotary: bool = False

    def of(self, shape: ModelShape, count: int) -> RowOrder:
        """Return the order of a tensor of `count` rows; raise ValueError if those are not the heads' rows."""
        heads = self.heads(shape)
        turned = heads.turned or heads.size
        uneven = self.rotary and (turned % 2 != 0 or turned > heads.size)
        if not (heads.query and heads.key and heads.size) or heads.query % heads.key or uneven:
            raise ValueError(f"{count} rows are no {heads.query} query and {heads.key} key heads of {heads.size}")
        order = self.rows(heads)
        if len(order) != count:
            raise ValueError(f"{count} rows, and its heads have {len(order)}")
        return order


def _halves(count: int, heads: Heads) -> RowOrder:
    """Turn halves of what turns of a head into neighbouring pairs: transformers turns halves, ggml pairs."""
    turned = heads.turned or heads.size
    rows = np.arange(count * heads.size).reshape(count, heads.size)
    halves = rows[:, :turned].reshape(count, 2, turned // 2)
    return np.concatenate([halves.swapaxes(1, 2).reshape(count, turned), rows[:, turned:]], 1).reshape(-1)


def _groups(heads: Heads) -> RowOrder:
    """(key heads, their queries and key and value, size): all queries first, then all keys, then all values."""
    rows = np.arange((heads.query + 2 * heads.key) * heads.size).reshape(heads.key, -1, heads.size)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


def _tiled(heads: Heads, size: int, before: int = 0) -> RowOrder:
    """(key heads, their values, size) after `before` other rows: the first value of each key head, then the second."""
    values = np.arange(heads.query * size).reshape(heads.key, -1, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + values])


def _of_groups(heads: Heads, gates: bool) -> RowOrder:
    """(key heads, query key values gates, size): the gates, or all queries, then all keys, then all values."""
    shared = heads.query // heads.key
    rows = np.arange(2 * (heads.key + heads.query) * heads.size).reshape(heads.key, -1, heads.size)
    if gates:
        return rows[:, 2 + shared :].reshape(-1)
    return np.concatenate([rows[:, 0].reshape(-1), rows[:, 1].reshape(-1), rows[:, 2 : 2 + shared].reshape(-1)])


QUERY_HALVES = Order(lambda heads: _halves(heads.query, heads), rotary=True)
KEY_HALVES = Order(lambda heads: _halves(heads.key, heads), rotary=True)
GROUPS = Order(_groups)
# Of a gated delta rule.
_linear = partial(Order, heads=lambda shape: shape.linear_heads)
TILED_HEADS = _linear(lambda heads: _tiled(heads, 1))
TILED_VALUES = _linear(lambda heads: _tiled(heads, heads.size))
TILED_CHANNELS = _linear(lambda heads: _tiled(heads, heads.size, 2 * heads.key * heads.size))
CHANNELS_OF_GROUPS = _linear(lambda heads: _of_groups(heads, gates=False))
GATES_OF_GROUPS = _linear(lambda heads: _of_groups(heads, gates=True))
# Of an indexer, whose heads all have one key: neighbouring pairs of what turns become halves.
_indexer = partial(Order, heads=lambda shape: shape.index_heads, rotary=True)
INDEX_QUERY_PAIRS = _indexer(lambda heads: np.argsort(_halves(heads.query, heads)))
INDEX_KEY_PAIRS = _indexer(lambda heads: np.argsort(_halves(heads.key, heads)))


def in_order(read: RowReader, order: RowOrder | None) -> RowReader:
    """Return a reader of rows in `order`, which reads each run of neighbouring rows with one call of `read`."""
    if order is None:
        return read

    def gather(start: int, stop: int) -> NDArray[Any]:
        sort = np.argsort(order[start:stop])
        ascending = order[start:stop][sort]
        cuts = np.flatnonzero(np.diff(ascending) != 1) + 1
        runs = [read(int(run[0]), int(run[-1]) + 1) for run in np.split(ascending, cuts)]
        return np.concatenate(runs)[np.argsort(sort)]

    return gather


def concatenated(parts: list[tuple[RowReader, int]]) -> RowReader:
    """Return a reader of the rows of several tensors, each given with its number of rows."""

    def read(start: int, stop: int) -> NDArray[Any]:
        found, first = [], 0
        for rows, count in parts:
            if (one := max(start, first)) < (end := min(stop, first + count)):
                found.append(rows(one - first, end - first))
            first += count
        return np.concatenate(found)

    return read
