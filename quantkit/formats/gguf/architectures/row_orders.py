"""Rows in another order: what llama.cpp wants of fused or rotated weights, and the way back.

An order is a list of the source's rows as the file has them. A new one is an entry of `ORDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RowOrder = NDArray[np.int64]
RowReader = Callable[[int, int], NDArray[Any]]  # (start, stop) -> those rows


@dataclass(frozen=True)
class Heads:
    """Counts of query heads and of key-value heads, the rows of each, and how many of them turn (0: all)."""

    query: int
    key: int
    size: int
    turned: int = 0


def _halves(count: int, heads: Heads) -> RowOrder:
    """Halves of what turns of a head become neighbouring pairs: transformers turns halves, ggml's first rope pairs."""
    turned = heads.turned or heads.size
    rows = np.arange(count * heads.size).reshape(count, heads.size)
    halves = rows[:, :turned].reshape(count, 2, turned // 2)
    return np.concatenate([halves.swapaxes(1, 2).reshape(count, turned), rows[:, turned:]], 1).reshape(-1)


def _pairs(count: int, heads: Heads) -> RowOrder:
    """Neighbouring pairs of what turns of a head become its halves: the way back."""
    return np.argsort(_halves(count, heads))


def _thirds(heads: Heads) -> RowOrder:
    """(heads, query key value, size): all queries first, then all keys, then all values."""
    return np.arange(3 * heads.query * heads.size).reshape(heads.query, 3, heads.size).swapaxes(0, 1).reshape(-1)


def _groups(heads: Heads) -> RowOrder:
    """(key heads, their queries and key and value, size): all queries first, then all keys, then all values."""
    rows = np.arange((heads.query + 2 * heads.key) * heads.size).reshape(heads.key, -1, heads.size)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


def _tiled(heads: Heads, before: int = 0) -> RowOrder:
    """(key heads, their values, size) after `before` other rows: the first value of each key head, then the second."""
    values = np.arange(heads.query * heads.size).reshape(heads.key, -1, heads.size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + values])


def _of_groups(heads: Heads, gates: bool) -> RowOrder:
    """(key heads, query key values gates, size): the gates, or all queries, then all keys, then all values."""
    shared = heads.query // heads.key
    rows = np.arange(2 * (heads.key + heads.query) * heads.size).reshape(heads.key, -1, heads.size)
    if gates:
        return rows[:, 2 + shared :].reshape(-1)
    return np.concatenate([rows[:, 0].reshape(-1), rows[:, 1].reshape(-1), rows[:, 2 : 2 + shared].reshape(-1)])


ORDERS: dict[str, Callable[[Heads], RowOrder]] = {
    "query halves": lambda heads: _halves(heads.query, heads),
    "key halves": lambda heads: _halves(heads.key, heads),
    "thirds": _thirds,
    "groups": _groups,
}
# Of the heads of a gated delta rule, whose values are called queries here. The last two are each a part of the rows.
LINEAR_ORDERS: dict[str, Callable[[Heads], RowOrder]] = {
    "tiled heads": lambda heads: _tiled(Heads(heads.query, heads.key, 1)),
    "tiled values": _tiled,
    "tiled channels": lambda heads: _tiled(heads, 2 * heads.key * heads.size),
    "channels of groups": lambda heads: _of_groups(heads, gates=False),
    "gates of groups": lambda heads: _of_groups(heads, gates=True),
}
TURNING = ("halves", "pairs")  # how orders are called of which what turns of a head must be a whole number of pairs
# Of the heads of an indexer, of which all have one key.
INDEX_ORDERS: dict[str, Callable[[Heads], RowOrder]] = {
    "index query pairs": lambda heads: _pairs(heads.query, heads),
    "index key pairs": lambda heads: _pairs(heads.key, heads),
}


def _uneven(heads: Heads) -> bool:
    turned = heads.turned or heads.size
    return turned % 2 != 0 or turned > heads.size


def order_of(name: str, heads: Heads, linear: Heads, index: Heads, rows: int) -> RowOrder:
    """The order `name` of a tensor of so many rows; raises ValueError where they are not those of the heads.

    `linear` are the heads of a gated delta rule, `index` those of an indexer.
    """
    orders, own = next(
        (found, own)
        for found, own in ((ORDERS, heads), (LINEAR_ORDERS, linear), (INDEX_ORDERS, index))
        if name in found
    )
    if not (own.query and own.key and own.size) or own.query % own.key or (name.endswith(TURNING) and _uneven(own)):
        raise ValueError(f"{rows} rows are no {own.query} query and {own.key} key heads of {own.size}")
    order = orders[name](own)
    if len(order) != rows:
        raise ValueError(f"{rows} rows, and its heads have {len(order)}")
    return order


def joined(parts: list[tuple[RowReader, RowOrder]]) -> RowReader:
    """Rows of the source that lie in several tensors of the file, each with those in its order."""
    count = sum(len(order) for _, order in parts)
    which, place = np.empty(count, np.int64), np.empty(count, np.int64)
    for number, (_, order) in enumerate(parts):
        which[order], place[order] = number, np.arange(len(order))

    def read(start: int, stop: int) -> NDArray[Any]:
        own, values = which[start:stop], None
        for number, (rows, _) in enumerate(parts):
            mine = own == number
            if mine.any():
                found = gather(rows, place[start:stop][mine])
                values = np.empty((stop - start, *found.shape[1:]), found.dtype) if values is None else values
                values[mine] = found
        assert values is not None
        return values

    return read


def restored(rows: NDArray[Any], order: RowOrder) -> NDArray[Any]:
    """Rows (len(order), ...) of the file in the order of the source."""
    values = np.empty_like(rows)
    values[order] = rows
    return values


def gather(read: RowReader, rows: RowOrder) -> NDArray[Any]:
    """The given rows of what `read` reads, with one call for each run of neighbouring rows."""
    sort = np.argsort(rows)
    ascending = rows[sort]
    cuts = np.flatnonzero(np.diff(ascending) != 1) + 1
    runs = [read(int(run[0]), int(run[-1]) + 1) for run in np.split(ascending, cuts)]
    return restored(runs[0] if len(runs) == 1 else np.concatenate(runs), sort)


def in_order(read: RowReader, order: RowOrder | None) -> RowReader:
    """`read` of rows that are taken in `order`; none: as they are."""
    return read if order is None else lambda start, stop: gather(read, order[start:stop])
