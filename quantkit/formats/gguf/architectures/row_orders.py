"""Rows in another order: what llama.cpp wants of fused or rotated weights, and the way back.

An order is a list of the source's rows as the file has them. A new one is an entry of `ORDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Heads:
    """Counts of query heads and of key-value heads, and the rows of each."""

    query: int
    key: int
    size: int


def _halves(count: int, heads: Heads) -> Rows:
    """Halves of a head become neighbouring pairs: transformers rotates halves, ggml's first kind of rope pairs."""
    return np.arange(count * heads.size).reshape(count, 2, heads.size // 2).swapaxes(1, 2).reshape(-1)


def _thirds(heads: Heads) -> Rows:
    """(heads, query key value, size): all queries first, then all keys, then all values."""
    return np.arange(3 * heads.query * heads.size).reshape(heads.query, 3, heads.size).swapaxes(0, 1).reshape(-1)


def _groups(heads: Heads) -> Rows:
    """(key heads, their queries and key and value, size): all queries first, then all keys, then all values."""
    rows = np.arange((heads.query + 2 * heads.key) * heads.size).reshape(heads.key, -1, heads.size)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


ORDERS: dict[str, Callable[[Heads], Rows]] = {
    "query halves": lambda heads: _halves(heads.query, heads),
    "key halves": lambda heads: _halves(heads.key, heads),
    "thirds": _thirds,
    "groups": _groups,
}


def order_of(name: str, heads: Heads) -> Rows:
    """The source's rows in the order of the file."""
    return ORDERS[name](heads)


def restored(rows: NDArray[Any], order: Rows) -> NDArray[Any]:
    """Rows (len(order), ...) of the file in the order of the source."""
    found = np.empty_like(rows)
    found[order] = rows
    return found


def gather(read: Callable[[int, int], NDArray[Any]], wanted: Rows) -> NDArray[Any]:
    """Rows `wanted` of what `read(start, stop)` reads, with one call for each run of neighbouring rows."""
    sort = np.argsort(wanted)
    rows = wanted[sort]
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [read(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, cuts)]
    together = runs[0] if len(runs) == 1 else np.concatenate(runs)
    return restored(together, sort)
