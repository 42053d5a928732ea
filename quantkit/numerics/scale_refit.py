"""Refit scales after rounding: for fixed codes, find the scales with the least output error, in closed form.

Minimizes tr((W - S o C) H (W - S o C)^T) over each row's group scales S, with C = codes - zeros: linear least
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
    """H, float32 (K, K), split into V diag(s) V^T, with V (K, R) its leading eigenvectors, and a remainder.

    V and s are float32; the remainder is in `quick_dtype` (numerics/matmul.py).

    Errors after a refit are nearly orthogonal to V, whose eigenvalues can be 10^5 times the others: bfloat16 products
    with the full H would be mostly rounding error. If `quick_dtype` is float32, R is 0 and the remainder is H.
    `order` (K,) int64 makes groups contiguous if they are not.
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
        """Return the normal equations of `values` (n, K) in `units` contiguous groups: float64 (n, units, units)."""
        cut = (units, values.shape[1] // units)
        shares = torch.einsum("ngk,gkr->ngr", values.unflatten(1, cut), self._vectors.unflatten(0, cut))
        shares = shares.to(torch.float64)
        return normal_equations([values], self._rest, units) + (shares * self._sizes) @ shares.mT


class Refit:
    """Refits scales of layers whose codes approximate `target`, float32 (N, K), for H = E[x x^T] (K, K).

    The direction of the change comes from a layer's own errors, the step size from the normal equations of its values.
    From `ALIKE_BITS` bits on, the first layer's equations serve all later ones, since all are close to the target.
    """

    def __init__(self, target: torch.Tensor, hessian: PartedHessian) -> None:
        self._order, self._hessian = hessian.order, hessian
        self._target = self._beside(target)
        self._normals: list[torch.Tensor] = []

    def __call__(self, layer: GroupedWeight, slopes: torch.Tensor | None = None) -> tuple[GroupedWeight, torch.Tensor]:
        """Return `layer` with refitted scales, and each row's error, float64 (N,); `slopes` as in `RoundedLayer`.

        Rows that would not improve stay unchanged.
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
        """Refit `first`, then alternate `requantize` and refit until there were `count` roundings.

        Each row gets its best result.
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
        """Return new scales, float16 (n, G), in place of `stored`, and the rows' errors.

        `errors`, `values` and `slopes` are (n, K) with contiguous groups; `normal` is float64 (n, G, G). The unknowns
        are relative changes of the scales.
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
    """Return the normal-equation matrices p_g^T H_gh q_h, float64 (n, P * U, P * U), of n rows.

    p, q are among the P `parts`, float32 (n, K); g, h among U = `units` contiguous column units. `hessian` (K, K):
    float32 or `quick`.
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
    """Sum values (n, K) over `units` contiguous units of columns: float64 (n, units)."""
    return values.view(len(values), units, -1).sum(-1).to(torch.float64)


def solve_rows(normal: torch.Tensor, aimed: torch.Tensor, ridge: float, near: torch.Tensor | float = 0) -> torch.Tensor:
    """Return s (n, U) that minimizes s^T N s - 2 a^T s per row, for `normal` N (n, U, U) and `aimed` a (n, U), float64.

    A ridge of `ridge` times the mean diagonal pulls s towards `near` (n, U).
    """
    held = ridge * torch.diagonal(normal, dim1=1, dim2=2).mean(1)[:, None] + 1e-30
    return torch.linalg.solve(normal + torch.diag_embed(held.expand_as(aimed)), aimed + held * near)


def better_rows(normal: torch.Tensor, aimed: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return, row by row, `new` (n, U) where it lowers s^T N s - 2 a^T s, else `old`."""
    better = row_errors(normal, aimed, new) < row_errors(normal, aimed, old)
    return torch.where(better[:, None], new, old)


def row_errors(normal: torch.Tensor, aimed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return s^T N s - 2 a^T s for each row's s (n, U): float64 (n,)."""
    s = scales.to(torch.float64)
    return ((normal @ s[..., None])[..., 0] * s - 2 * aimed * s).sum(-1)
