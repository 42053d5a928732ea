"""Uniform integer grids: each group's scale and zero point, by min/max or a weighted search.

A weight w becomes code = clamp(round(w / scale) + zero, 0, 2**bits - 1). Symmetric grids have zero = 2**(bits-1), so
they reach one step further on the negative side. A searched scale may be negative, which moves the extra step to
the side that needs it (as in ggml's Q4_0).
Scales are rounded to float16 before use, because checkpoints store float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from quantkit.errors import ValuesError
from quantkit.numerics.matmul import rows_together
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups

COARSE_STEPS = 11  # number of shares of the range to try, down to the least
LEAST_SHRINK = 0.3
FINE = (-2 / 3, -1 / 3, 1 / 3, 2 / 3)  # then around the best of them, in coarse steps
OFFSETS = (-1, 0, 1)  # offsets of zero points to try, from the range's
MANY_CODES = 15  # with as many codes or more, coarse steps try no other zero point
QUICK = (0.925, 0.85, 0.775, 0.7)  # shares of the range in a quick search
SLAB_ELEMENTS = 1 << 17  # elements of rows fitted together, so that they stay in the processor's cache
TINY_SCALE = 2.0**-24  # the smallest float16 above zero


@dataclass(frozen=True)
class Grid:
    """Scales, float16 (N, G), and zero points, uint8 (N, G), of a layer with `bits`-bit codes."""

    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1


def stored_scale(scale: torch.Tensor) -> torch.Tensor:
    """Round scales of either sign to float16, avoiding zero and infinity; return float32."""
    size = scale.abs().clamp_(TINY_SCALE, 65504.0)
    return torch.copysign(size, scale).to(torch.float16).to(torch.float32)


def _range(groups: torch.Tensor, bits: int, symmetric: bool, least_zero: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = (1 << bits) - 1
    if symmetric:
        # Codes reach from -half to half - 1; the larger side determines the scale.
        scale = groups.abs().amax(-1) * 2 / top
        zero = torch.full_like(scale, 1 << (bits - 1))
        return scale, zero
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    # A zero point that may not be 0 leaves fewer codes for the positive side.
    scale = torch.maximum((high - low) / top, high / (top - least_zero))
    zero = torch.clamp(torch.round(-low / stored_scale(scale)), least_zero, top)
    return scale, zero


class _Losses:
    """Evaluates trial grids, scales and zeros (n, G), on `groups` (n, G, group) by weighted squared error.

    `middle`: the common zero point of all groups, if any. Trials share one scratch buffer.
    """

    def __init__(self, groups: torch.Tensor, weight: torch.Tensor, top: int, middle: float | None) -> None:
        self.top, self.middle = top, middle
        self._groups, self._weight = groups, weight
        self._scratch = torch.empty_like(groups)

    def steps(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return codes minus zeros (n, G, group); the buffer is reused by the next call."""
        codes = torch.div(self._groups, scale[..., None], out=self._scratch).round_()
        if self.middle is not None:
            return codes.clamp_(-self.middle, self.top - self.middle)
        # torch clamps ten times slower with tensors than with numbers.
        return codes.add_(zero[..., None]).clamp_(0, self.top).sub_(zero[..., None])

    def at(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return the weighted squared errors (n, G) for these scales and zeros."""
        steps = self.steps(scale, zero)
        error = torch.addcmul(self._groups, steps, scale[..., None], value=-1, out=self._scratch)
        return error.square_().mul_(self._weight).sum(-1)

    def least_squares(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return the least-squares scales (n, G) for the codes that these scales and zeros give."""
        c = self.steps(scale, zero)
        return (self._weight * self._groups * c).sum(-1) / (self._weight * c.square()).sum(-1).clamp(min=1e-30)


def fit_grid(
    weight: torch.Tensor,
    group_size: int,
    bits: int,
    *,
    symmetric: bool,
    importance: torch.Tensor | None = None,
    search: bool | Literal["quick"] = False,
    least_zero: int = 0,
) -> Grid:
    """Fit a grid to each row and group of `group_size` adjacent columns of `weight`, float32 (N, K).

    Without `search`, the grid spans the group's range. With it, smaller ranges are tried, scales are refined in closed
    form, and the grid with the least squared error, weighted by `importance` (K,) (for example, the Hessian's
    diagonal), wins. A ``quick`` search tries four smaller ranges without refinement. `least_zero` is 1 for GPTQ's
    layout, which cannot store a zero point of 0.
    """
    columns = weight.shape[1]
    each = torch.ones(columns, device=weight.device) if importance is None else importance.to(torch.float32)
    quick = search == "quick"
    each = each.contiguous().reshape(1, -1, group_size)  # a matrix's diagonal is scattered in memory
    fitted = [
        _fit_rows(rows.reshape(len(rows), -1, group_size), bits, symmetric, each if search else None, quick, least_zero)
        for rows in weight.split(rows_together(weight, SLAB_ELEMENTS))
    ]
    scales, zeros = (torch.cat(parts) for parts in zip(*fitted, strict=True))
    return Grid(scales.to(torch.float16), zeros.to(torch.uint8), bits)


def _fit_rows(
    groups: torch.Tensor, bits: int, symmetric: bool, each: torch.Tensor | None, quick: bool, least_zero: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zeros, float32 (n, G), for groups (n, G, group); error weights `each` enable the search."""
    full, zero = _range(groups, bits, symmetric, least_zero)
    scale = stored_scale(full)
    if each is None:
        return scale, zero
    losses = _Losses(groups, each, (1 << bits) - 1, float(1 << (bits - 1)) if symmetric else None)
    best = _searched(losses, full, zero, -groups.amin(-1).clamp(max=0), quick, least_zero)
    if symmetric:
        best = _better(best, _searched(losses, -full, zero, zero, quick, least_zero))
    return best[1], best[2]


def _better(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the better of two fits (4, n, G) for each row and group; the first of the four values is the loss."""
    return torch.where(other[0] < one[0], other, one)


def _searched(
    losses: _Losses, full: torch.Tensor, zero: torch.Tensor, low: torch.Tensor, quick: bool, least_zero: int
) -> torch.Tensor:
    """Return the best (losses, scales, zeros, range shares), float32 (4, n, G), for scales with the sign of `full`.

    `full` (n, G) are scales that span the groups; `low` are the groups' minima.
    """
    symmetric, top = losses.middle is not None, losses.top
    # Symmetric codes reach one step less to one side, so slightly more than the range can be best.
    widest = top / (top - 1) if symmetric else 1.0
    apart = (widest - LEAST_SHRINK) / COARSE_STEPS
    scale = stored_scale(full)
    best = torch.stack([losses.at(scale, zero), scale, zero, torch.ones_like(scale)])

    def attempt(trial: torch.Tensor, trial_zero: torch.Tensor, shrink: torch.Tensor) -> None:
        nonlocal best
        best = _better(best, torch.stack([losses.at(trial, trial_zero), trial, trial_zero, shrink]))

    def attempt_share(shrink: torch.Tensor, offsets: tuple[int, ...]) -> None:
        trial = stored_scale(full * shrink)
        middle = zero if symmetric else torch.round(low * shrink / trial)
        for offset in (0,) if symmetric else offsets:
            attempt(trial, zero if symmetric else (middle + offset).clamp(least_zero, top), shrink)

    if quick:
        for share in QUICK:
            attempt_share(torch.full_like(scale, share), (0,))
        return best
    for step in range(COARSE_STEPS):
        attempt_share(torch.full_like(scale, widest - apart * step), (0,) if top >= MANY_CODES else OFFSETS)
    around = best[3]
    for offset in FINE:
        attempt_share(around + apart * offset, OFFSETS)
    for _ in range(2):
        # Least squares for the scale with the codes held: s = sum(h w c) / sum(h c^2).
        _, scale, fixed_zero, shrink = best
        fitted = losses.least_squares(scale, fixed_zero)
        attempt(stored_scale(torch.where(fitted * full > 0, fitted, scale)), fixed_zero, shrink)
    return best


def round_to_grid(weight: torch.Tensor, grid: Grid, group_size: int) -> torch.Tensor:
    """Round `weight` (N, K) to the nearest codes, uint8 (N, K)."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    step = rows_together(weight, SLAB_ELEMENTS)
    for rows, *given in zip(*(t.split(step) for t in (codes, weight, grid.scales, grid.zeros)), strict=True):
        values, scale, zero = (t.to(torch.float32) for t in given)
        groups = values.unflatten(1, (values.shape[1] // group_size, group_size))
        rows.copy_((torch.round(groups / scale[..., None]) + zero[..., None]).clamp(0, grid.top).flatten(1))
    return codes


def round_to_nearest(weight: torch.Tensor, group_size: int, bits: int, **how: Any) -> GroupedWeight:
    """Fit a grid to `weight`, float32 (N, K), and round to nearest, in groups of adjacent columns.

    A `group_size` of -1 is the whole row; `how` holds the other arguments of `fit_grid`.
    """
    columns = weight.shape[1]
    size = columns if group_size == -1 else group_size
    grid = fit_grid(weight, size, bits, **how)
    codes = round_to_grid(weight, grid, size)
    return GroupedWeight(codes, grid.scales, grid.zeros, contiguous_groups(columns, size, weight.device), bits)


def cast_finite(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast `tensor` to `dtype`; raise ValuesError if finite values would become infinite."""
    rounded = tensor.to(dtype)
    if not bool(torch.isfinite(rounded).all()):
        kind = str(dtype).removeprefix("torch.")
        raise ValuesError(f"{name} has values beyond {kind}'s range ({torch.finfo(dtype).max:g})")
    return rounded
