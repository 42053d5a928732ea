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
    """Counts of query heads and of key-value heads, and the rows of each."""

    query: int
    key: int
    size: int


def _halves(count: int, heads: Heads) -> RowOrder:
    """Halves of a head become neighbouring pairs: transformers rotates halves, ggml's first kind of rope pairs."""
    return np.arange(count * heads.size).reshape(count, 2, heads.size // 2).swapaxes(1, 2).reshape(-1)


def _thirds(heads: Heads) -> RowOrder:
    """(heads, query key value, size): all queries first, then all keys, then all values."""
    return np.arange(3 * heads.query * heads.size).reshape(heads.query, 3, heads.size).swapaxes(0, 1).reshape(-1)


def _groups(heads: Heads) -> RowOrder:
    """(key heads, their queries and key and value, size): all queries first, then all keys, then all values."""
    rows = np.arange((heads.query + 2 * heads.key) * heads.size).reshape(heads.key, -1, heads.size)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


ORDERS: dict[str, Callable[[Heads], RowOrder]] = {
    "query halves": lambda heads: _halves(heads.query, heads),
    "key halves": lambda heads: _halves(heads.key, heads),
    "thirds": _thirds,
    "groups": _groups,
}


def order_of(name: str, heads: Heads, rows: int) -> RowOrder:
    """The order `name` of a tensor of so many rows; raises ValueError where they are not those of the heads."""
    if heads.query % heads.key or rows % heads.size or (heads.size % 2 and name.endswith("halves")):
        raise ValueError(f"{rows} rows are no {heads.query} query and {heads.key} key heads of {heads.size}")
    order = ORDERS[name](heads)
    if len(order) != rows:
        raise ValueError(f"{rows} rows, and its heads have {len(order)}")
    return order


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
