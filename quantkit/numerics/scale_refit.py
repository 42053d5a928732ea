"""Scales after rounding: with the codes held, the scales that bring the layer's outputs nearest, in closed form.

Minimizes tr((W - S o C) H (W - S o C)^T) over the scales of each row's groups, C being codes minus zeros: linear least
squares with one unknown for each group. Rows do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quantkit.numerics.grid import stored_scale
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.second_moments import permuted

RIDGE = 1e-4  # share of the mean diagonal added to the normal equations
SLAB_ELEMENTS = 1 << 21  # of the rows that are fitted together
TILE_ELEMENTS = 1 << 19  # of a product that is summed up while it is in the processor's cache
WIDEST = 2.0  # a scale may move by this factor at most


def refit_scales(target: torch.Tensor, hessian: torch.Tensor, layer: GroupedWeight) -> GroupedWeight:
    """Return `layer` with refitted scales; a row whose error would not fall keeps its own.

    target (N, K) float32 is the weight aimed at, hessian (K, K) float32 E[x x^T].
    """
    return Refit(target, hessian, layer.beside())(layer)[0]


class Refit:
    """Fits the scales of layers whose codes aim at one weight, `target` (N, K) float32, with `hessian` (K, K) float32.

    `order` (K,) int64 puts the columns of each group side by side, where they do not lie so.
    """

    def __init__(self, target: torch.Tensor, hessian: torch.Tensor, order: torch.Tensor | None = None) -> None:
        self._order = order
        aim = target @ hessian
        self._aim = aim if order is None else aim.index_select(1, order)
        self._hessian = hessian if order is None else permuted(hessian, order)

    def __call__(self, layer: GroupedWeight) -> tuple[GroupedWeight, torch.Tensor]:
        """`layer` as of `refit_scales`, and each row's error (N,) float64, less what it would be with codes of zero."""
        columns, groups = layer.shape[1], layer.scales.shape[1]
        scales: list[torch.Tensor] = []
        errors: list[torch.Tensor] = []
        step = max(1, SLAB_ELEMENTS // max(columns, groups**2))
        for aim, slab in zip(self._aim.split(step), layer.split(step), strict=True):
            codes = slab.steps() if self._order is None else slab.steps().index_select(1, self._order)
            fitted, error = _refit_rows(aim, self._hessian, codes, slab.scales)
            scales.append(fitted)
            errors.append(error)
        return replace(layer, scales=torch.cat(scales)), torch.cat(errors)

    def rounds(self, layer: GroupedWeight, count: int, anew: Callable[[GroupedWeight], GroupedWeight]) -> GroupedWeight:
        """`layer` refitted, and then so often that it is `count` roundings rounded by its scales and refitted anew.

        A row keeps what is better.
        """
        layer, error = self(layer)
        for _ in range(count - 1):
            again, other = self(anew(layer))
            better = other < error
            error = torch.where(better, other, error)
            layer = layer.with_rows(better, again)
        return layer


def _refit_rows(
    aim: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, stored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (n, G) float16 in place of the `stored` ones, and the rows' errors.

    `aim`, the target times the Hessian, and codes less zeros are (n, K), groups side by side.
    """
    scales = stored.to(torch.float32)
    groups = stored.shape[1]
    normal, aimed = normal_equations([codes], hessian, groups), unit_sums(aim * codes, groups)
    solved = solve_rows(normal, aimed, RIDGE).to(torch.float32)
    ratio = solved / scales  # of either sign, which stays
    sane = (ratio > 1 / WIDEST) & (ratio < WIDEST)
    solved = stored_scale(torch.where(sane, solved, scales))
    best = better_rows(normal, aimed, solved, scales)
    return best.to(torch.float16), row_errors(normal, aimed, best)


def normal_equations(parts: Sequence[torch.Tensor], hessian: torch.Tensor, units: int) -> torch.Tensor:
    """p_g^T H_gh q_h (n, P * U, P * U) float64 for all parts p, q of a row and units g, h of columns side by side.

    `parts` are P of (n, K), of `units` U each; hessian (K, K) float32.
    """
    rows, columns = parts[0].shape
    size, count = columns // units, len(parts)
    wide = max(1, TILE_ELEMENTS // (rows * size))  # units
    normal = torch.empty(rows, count, units, count, units, dtype=torch.float64, device=hessian.device)
    for g in range(units):
        own = slice(g * size, (g + 1) * size)
        for first in range(g, units, wide):
            stop = min(first + wide, units)
            tile = slice(first * size, stop * size)
            for i, part in enumerate(parts):
                spread = part[:, own] @ hessian[own, tile]
                for j, other in enumerate(parts):
                    sums = unit_sums(spread * other[:, tile], stop - first)
                    normal[:, i, g, j, first:stop] = normal[:, j, first:stop, i, g] = sums
    return normal.view(rows, count * units, count * units)


def unit_sums(values: torch.Tensor, units: int) -> torch.Tensor:
    """(n, K) -> (n, units) float64: the sums of columns side by side."""
    return values.view(len(values), units, -1).sum(-1).to(torch.float64)


def solve_rows(normal: torch.Tensor, aimed: torch.Tensor, ridge: float, near: torch.Tensor | float = 0) -> torch.Tensor:
    """The s (n, U) with least s^T N s - 2 a^T s of each row, for `normal` N (n, U, U) and `aimed` a (n, U), float64.

    They are held at `near` (n, U) by the share `ridge` of the mean diagonal.
    """
    held = ridge * torch.diagonal(normal, dim1=1, dim2=2).mean(1)[:, None] + 1e-30
    return torch.linalg.solve(normal + torch.diag_embed(held.expand_as(aimed)), aimed + held * near)


def better_rows(normal: torch.Tensor, aimed: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Rows (n, U) of `new` where s^T N s - 2 a^T s is less than that of `old`, else of `old`."""
    better = row_errors(normal, aimed, new) < row_errors(normal, aimed, old)
    return torch.where(better[:, None], new, old)


def row_errors(normal: torch.Tensor, aimed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """s^T N s - 2 a^T s (n,) float64 of each row's s (n, U)."""
    s = scales.to(torch.float64)
    return ((normal @ s[..., None])[..., 0] * s - 2 * aimed * s).sum(-1)
