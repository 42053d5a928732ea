"""Refit scales after rounding: with fixed codes, find the scales with the least output error, in closed form.

Minimizes tr((W - S o C) H (W - S o C)^T) over the scales of each row's groups, C being codes minus zeros: linear least
squares with one unknown per group. Rows are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quantkit.numerics.grid import stored_scale
from quantkit.numerics.matmul import elements_together, product_in, quick_dtype
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.numerics.second_moments import permuted

RIDGE = 1e-4  # share of the mean diagonal added to the normal equations
SLAB_ELEMENTS = 1 << 21  # elements of rows fitted together
TILE_ELEMENTS = 1 << 19  # elements of a product that is summed while it is in the processor's cache
LEADING = 8  # directions of a Hessian that are separated if products are quick
ITERATIONS = 4  # iterations to find them
SLAB_ROWS = 512  # rows of a Hessian processed at a time
ALIKE_BITS = 4  # from this many bits on, values barely depend on how they are rounded
WIDEST = 2.0  # a scale may move by this factor at most

# A layer and, if known, the slopes E H (N, K) float32 of its errors E = target - values.
RoundedLayer = tuple[GroupedWeight, torch.Tensor | None]


class PartedHessian:
    """H (K, K) float32 split into V diag(s) V^T in float32, V (K, R) its leading directions, and a rest.

    The rest has the dtype of quick products, see numerics/matmul.py.

    Errors after fitting scales are nearly orthogonal to those directions, which can be 10^5 times the others: products
    with all of H in bfloat16 would mostly be rounding error. If that dtype is float32, R is 0
    and the rest is H itself. `order` (K,) int64 makes each group's columns contiguous, if they are not.
    """

    def __init__(self, hessian: torch.Tensor, order: torch.Tensor | None = None) -> None:
        self.order = order
        hessian = hessian if order is None else permuted(hessian, order)
        dtype = quick_dtype(hessian.device)
        if dtype == hessian.dtype:
            self._vectors, self._sizes, self._rest = hessian.new_empty(len(hessian), 0), hessian.new_empty(0), hessian
            return
        drawn = torch.randn(len(hessian), LEADING, generator=torch.Generator().manual_seed(0)).to(hessian.device)
        for _ in range(ITERATIONS):
            drawn = hessian @ torch.linalg.qr(drawn)[0]
        self._vectors = torch.linalg.qr(drawn)[0]
        self._sizes = ((hessian @ self._vectors) * self._vectors).sum(0)
        self._rest = torch.empty(hessian.shape, dtype=dtype, device=hessian.device)
        for rest, rows, part in zip(*(t.split(SLAB_ROWS) for t in (self._rest, hessian, self._vectors)), strict=True):
            rest.copy_(rows - (part * self._sizes) @ self._vectors.T)

    def before(self, values: torch.Tensor) -> torch.Tensor:
        return product_in(values, self._rest).addmm_(values @ self._vectors * self._sizes, self._vectors.T)

    def normal_equations(self, values: torch.Tensor, units: int) -> torch.Tensor:
        """Return the normal equations of one part (n, K)."""
        cut = (units, values.shape[1] // units)
        shares = torch.einsum("ngk,gkr->ngr", values.unflatten(1, cut), self._vectors.unflatten(0, cut))
        shares = shares.to(torch.float64)
        return normal_equations([values], self._rest, units) + (shares * self._sizes) @ shares.mT


class Refit:
    """Fits the scales of layers whose codes approximate one weight, `target` (N, K) float32, for H = E[x x^T] (K, K).

    The direction of the scales' change comes from each layer's own errors; the step from normal equations of its
    values. From `ALIKE_BITS` bits on, the first layer's equations serve all, as all layers are near the target.
    """

    def __init__(self, target: torch.Tensor, hessian: PartedHessian) -> None:
        self._order, self._hessian = hessian.order, hessian
        self._target = self._beside(target)
        self._normals: list[torch.Tensor] = []

    def __call__(self, layer: GroupedWeight, slopes: torch.Tensor | None = None) -> tuple[GroupedWeight, torch.Tensor]:
        """Return `layer` with refitted scales, and each row's error (N,) float64; `slopes`: see `RoundedLayer`.

        A row whose error would not fall keeps its scales.
        """
        columns, groups = layer.shape[1], layer.scales.shape[1]
        scales: list[torch.Tensor] = []
        errors: list[torch.Tensor] = []
        most = elements_together(SLAB_ELEMENTS, self._target.device)
        step = max(1, most // max(columns, groups**2))
        if layer.bits < ALIKE_BITS:
            self._normals.clear()
        for number, (target, slab) in enumerate(zip(self._target.split(step), layer.split(step), strict=True)):
            values = self._beside(slab.dense())
            change = target - values
            if number == len(self._normals):
                self._normals.append(self._hessian.normal_equations(values, groups).to(torch.float32))
            own = slice(number * step, (number + 1) * step)
            slope = self._hessian.before(change) if slopes is None else self._beside(slopes[own])
            fitted, error = self._rows(change, values, slope, slab.scales, self._normals[number].to(torch.float64))
            scales.append(fitted)
            errors.append(error)
        return replace(layer, scales=torch.cat(scales)), torch.cat(errors)

    def rounds(
        self, first: RoundedLayer, count: int, requantize: Callable[[GroupedWeight], RoundedLayer]
    ) -> GroupedWeight:
        """Refit the `first` rounding, then round again and refit, until there were `count` roundings.

        Each row keeps its best result.
        """
        layer, error = self(*first)
        for _ in range(count - 1):
            again, other = self(*requantize(layer))
            better = other < error
            error = torch.where(better, other, error)
            layer = layer.with_rows(better, again)
        return layer

    def _beside(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._order is None else values.index_select(1, self._order)

    def _rows(
        self,
        errors: torch.Tensor,
        values: torch.Tensor,
        slopes: torch.Tensor,
        stored: torch.Tensor,
        normal: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales (n, G) float16 that replace the `stored` ones, and the rows' errors.

        Errors, values and the errors' slopes are (n, K), with contiguous groups; `normal` is (n, G, G) float64.
        The unknowns are the relative changes of the scales.
        """
        aimed = unit_sums(slopes * values, stored.shape[1])
        growth = 1 + solve_rows(normal, aimed, RIDGE)
        sane = (growth > 1 / WIDEST) & (growth < WIDEST)
        scales = stored.to(torch.float64)
        solved = stored_scale(torch.where(sane, scales * growth, scales)).to(torch.float64)
        moves = better_rows(normal, aimed, solved / scales - 1, torch.zeros_like(scales))
        before = (slopes * errors).sum(-1, dtype=torch.float64)
        return (scales * (1 + moves)).to(torch.float16), before + row_errors(normal, aimed, moves)


def normal_equations(parts: Sequence[torch.Tensor], hessian: torch.Tensor, units: int) -> torch.Tensor:
    """Return p_g^T H_gh q_h (n, P * U, P * U) float64 for all parts p, q of a row and contiguous units g, h of columns.

    `parts` are P of (n, K) float32, of `units` U each; hessian (K, K) is float32 or `quick`.
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
                spread = product_in(part[:, own], hessian[own, tile])
                for j, other in enumerate(parts):
                    sums = unit_sums(spread * other[:, tile], stop - first)
                    normal[:, i, g, j, first:stop] = normal[:, j, first:stop, i, g] = sums
    return normal.view(rows, count * units, count * units)


def unit_sums(values: torch.Tensor, units: int) -> torch.Tensor:
    """Return the sums (n, units) float64 over contiguous columns of (n, K)."""
    return values.view(len(values), units, -1).sum(-1).to(torch.float64)


def solve_rows(normal: torch.Tensor, aimed: torch.Tensor, ridge: float, near: torch.Tensor | float = 0) -> torch.Tensor:
    """Return s (n, U) with the least s^T N s - 2 a^T s per row, for `normal` N (n, U, U) and `aimed` a (n, U), float64.

    The share `ridge` of the mean diagonal pulls them towards `near` (n, U).
    """
    held = ridge * torch.diagonal(normal, dim1=1, dim2=2).mean(1)[:, None] + 1e-30
    return torch.linalg.solve(normal + torch.diag_embed(held.expand_as(aimed)), aimed + held * near)


def better_rows(normal: torch.Tensor, aimed: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return rows (n, U) of `new` where s^T N s - 2 a^T s is less than for `old`, else of `old`."""
    better = row_errors(normal, aimed, new) < row_errors(normal, aimed, old)
    return torch.where(better[:, None], new, old)


def row_errors(normal: torch.Tensor, aimed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return s^T N s - 2 a^T s (n,) float64 of each row's s (n, U)."""
    s = scales.to(torch.float64)
    return ((normal @ s[..., None])[..., 0] * s - 2 * aimed * s).sum(-1)
