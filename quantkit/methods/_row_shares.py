"""Rows of a weight rounded by several ranks, each its share: with the inputs' moments no row depends on another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantkit.numerics.error_feedback import Ways
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.system.ranks.group import by_one_each, every_row, share, size


def in_shares(quantize: Callable[[torch.Tensor], GroupedWeight]) -> Callable[[torch.Tensor], GroupedWeight]:
    """`quantize` for weights (N, K) that all ranks hold: each rank rounds its share of the rows, and gets all."""
    if size() == 1:
        return quantize

    def shared(weight: torch.Tensor) -> GroupedWeight:
        rows = len(weight)
        if rows < size():
            return quantize(weight)
        start, stop = share(rows)
        part = quantize(weight[start:stop])
        codes, scales, zeros = (every_row(values, rows) for values in (part.codes, part.scales, part.zeros))
        return GroupedWeight(codes, scales, zeros, part.g_idx, part.bits)

    return shared


def ways() -> Ways | None:
    """How several ranks share out what comes before the rounding; None in a single process."""
    return None if size() == 1 else Ways(by_one_each, _of_rows)


def _of_rows(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    start, stop = share(len(values))
    return every_row(function(values[start:stop]).contiguous(), len(values))
