"""Scales of rows, blocks and groups: from the maximum, or by a search for the least weighted squared error.

The search tries multiples of the maximum's scale, each rounded as stored, so it is never worse. Integers gain from
smaller scales, which clip the largest values. Floats gain within one octave: a factor of two does not change the
representable points, but other factors may bring them closer to the values.

With error feedback: GPTQ (Frantar et al., arXiv:2210.17323) on these grids, as integers times a scale: int8 uses -127
to 127; E2M1 uses the half steps 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.numerics.error_feedback import ColumnGrids, Feedback, round_columns
from quantkit.numerics.matmul import rows_together
from quantkit.numerics.quantized_weight import (
    E8M0_BIAS,
    FLOAT4_TOP,
    FLOAT8_TOP,
    INT8_TOP,
    InputRounding,
    ScaledWeight,
)

OCTAVE = tuple(2 ** (step / 16) for step in range(1, 16))
SHRINKING = tuple(1 - 0.04 * step for step in range(1, 13))
AROUND = tuple(0.7 + 0.05 * step for step in range(17))
NEIGHBOURS = (0.5, 2.0)
LEAST_SCALE = 2.0**-100  # of 8-bit values; the scale of a row of zeros
BLOCK = 128  # rows and columns of an FP8 block
SLAB_ELEMENTS = 1 << 18  # elements fitted together, so that they stay in the processor's cache
FEEDBACK_SLAB_ELEMENTS = 1 << 24  # elements of rows rounded together with feedback
FLOAT4_GROUPS = {"nvfp4": 16, "mxfp4": 32}
# Exponents: of the second largest E8M0 scale, and of the smallest that is not a subnormal float32.
MOST_EXPONENT, LEAST_EXPONENT = 126, -126
SWITCH = 1.75  # from this multiple of a power of two on, the next power is used, as in compressed-tensors' observers

Store = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Points:
    """A set of representable values: its maximum `top`, the rounding function `nearest`, and search `factors`."""

    top: float
    nearest: Callable[[torch.Tensor], torch.Tensor]
    factors: Sequence[float]


def nearest_int8(x: torch.Tensor) -> torch.Tensor:
    """Round to integers from -127 to 127; return float32."""
    return torch.round(x).clamp_(-INT8_TOP, INT8_TOP)


def nearest_float8(x: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn; return float32."""
    return x.clamp(-FLOAT8_TOP, FLOAT8_TOP).to(torch.float8_e4m3fn).to(torch.float32)


def nearest_half_steps(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1 in half steps: for twice the numbers, return twice their E2M1 values, integers from -12 to 12.

    Ties go to the even code.
    """
    size = x.abs()
    step = 1 + (size >= 4).to(x.dtype) + 2 * (size >= 8).to(x.dtype)
    return torch.round(x / step).mul_(step).clamp_(-2 * FLOAT4_TOP, 2 * FLOAT4_TOP)


def nearest_float4(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1; return float32."""
    return nearest_half_steps(2 * x).mul_(0.5)


INT8 = Points(INT8_TOP, nearest_int8, SHRINKING)
FLOAT8 = Points(FLOAT8_TOP, nearest_float8, OCTAVE)
NVFP4 = Points(FLOAT4_TOP, nearest_float4, AROUND)
MXFP4 = Points(FLOAT4_TOP, nearest_float4, NEIGHBOURS)


def stored_bfloat16(scale: torch.Tensor) -> torch.Tensor:
    """Round scales to bfloat16, avoiding zero; return float32."""
    return scale.clamp(min=LEAST_SCALE).to(torch.bfloat16).to(torch.float32)


def stored_float8(divisor: float) -> Store:
    """Return a function that rounds scales as NVFP4 stores them: float8_e4m3fn / divisor, never zero."""

    def store(scale: torch.Tensor) -> torch.Tensor:
        size = (scale * divisor).clamp(2.0**-9, FLOAT8_TOP)
        return size.to(torch.float8_e4m3fn).to(torch.float32) / divisor

    return store


def stored_power(scale: torch.Tensor) -> torch.Tensor:
    """Round scales to powers of two as MXFP4 stores them; a maximum (scale * 6) of 1.75 * 2^n or more rounds up."""
    exponents = torch.frexp(scale * (FLOAT4_TOP / SWITCH))[1] - 2
    exponents = torch.where(scale > 0, exponents, 0).clamp_(LEAST_EXPONENT, MOST_EXPONENT)
    return torch.ldexp(torch.ones_like(scale), exponents)


def fit_scales(
    groups: torch.Tensor,
    points: Points,
    store: Store,
    *,
    search: bool = True,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one scale per group of (..., size), float32 (...), rounded by `store`.

    With `search`, the scale minimizes the squared error weighted by `importance` (broadcast to the groups) among trials
    that include the maximum's scale.
    """
    full = groups.abs().amax(-1) / points.top
    best = store(full)
    if not search:
        return best
    weight = torch.ones(()) if importance is None else importance

    def loss(scale: torch.Tensor) -> torch.Tensor:
        wide = scale[..., None]
        error = torch.addcmul(groups, points.nearest(groups / wide), wide, value=-1)
        return error.square_().mul_(weight).sum(-1)

    least = loss(best)
    for factor in points.factors:
        trial = store(full * factor)
        error = loss(trial)
        better = error < least
        best, least = torch.where(better, trial, best), torch.where(better, error, least)
    return best


def round_rows(weight: torch.Tensor, points: Points, *, search: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `weight`, float32 (N, K), per row; return values (N, K) and bfloat16-exact scales (N, 1), float32."""
    values, scales = [], []
    for part in weight.split(rows_together(weight, SLAB_ELEMENTS)):
        scale = fit_scales(part, points, stored_bfloat16, search=search)[:, None]
        values.append(points.nearest(part / scale))
        scales.append(scale)
    return torch.cat(values), torch.cat(scales)


def round_blocks(weight: torch.Tensor, points: Points, *, search: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Round like `round_rows`, with a scale per 128 x 128 block: float32 (ceil(N / 128), ceil(K / 128))."""
    columns = weight.shape[1]
    values, scales = [], []
    for part in weight.split(BLOCK):
        padded = torch.nn.functional.pad(part, (0, -columns % BLOCK, 0, -len(part) % BLOCK))
        groups = padded.view(BLOCK, -1, BLOCK).transpose(0, 1).reshape(-1, BLOCK * BLOCK)
        scale = fit_scales(groups, points, stored_bfloat16, search=search)
        wide = scale.repeat_interleave(BLOCK)[:columns]
        values.append(points.nearest(part / wide))
        scales.append(scale)
    return torch.cat(values), torch.stack(scales)


def round_float8(weight: torch.Tensor, *, blocks: bool, search: bool = True) -> ScaledWeight:
    """Round `weight`, float32 (N, K), to float8_e4m3fn with bfloat16 scales per row, or per 128 x 128 block.

    Engines will round activations per token, or per token and 128 columns.
    """
    values, scales = (round_blocks if blocks else round_rows)(weight, FLOAT8, search=search)
    return ScaledWeight(
        values.to(torch.float8_e4m3fn),
        scales.to(torch.bfloat16),
        (BLOCK, BLOCK) if blocks else (1, weight.shape[1]),
        inputs=InputRounding("float8", BLOCK if blocks else None),
    )


def round_int8(weight: torch.Tensor, *, search: bool = True) -> ScaledWeight:
    """Round `weight`, float32 (N, K), to int8 with bfloat16 scales per row; activations are rounded per token."""
    values, scales = round_rows(weight, INT8, search=search)
    return int8_weight(values, scales)


def int8_weight(values: torch.Tensor, scales: torch.Tensor) -> ScaledWeight:
    """Return an int8 ScaledWeight from integers (N, K) and bfloat16-exact scales (N, 1)."""
    return ScaledWeight(
        values.to(torch.int8), scales.to(torch.bfloat16), (1, values.shape[1]), inputs=InputRounding("int8")
    )


def divisor_of(largest: float) -> float:
    """Return NVFP4's global divisor for a maximum absolute weight, such that the largest scale is 448.

    Layers that engines fuse must share one divisor.
    """
    divisor = torch.tensor(FLOAT8_TOP * FLOAT4_TOP) / torch.tensor(largest)
    return float(divisor) if largest > 0 and bool(torch.isfinite(divisor)) else 1.0


@dataclass(frozen=True)
class Float4:
    """A 4-bit float grid: ``nvfp4`` with its global divisor, or ``mxfp4``."""

    kind: str
    divisor: float = 1.0

    @property
    def group(self) -> int:
        return FLOAT4_GROUPS[self.kind]

    def fit(self, weight: torch.Tensor, *, search: bool, importance: torch.Tensor | None = None) -> torch.Tensor:
        """Return scales as stored, float32 (N, K / group), for `weight`, float32 (N, K), and `importance` (K,)."""
        points, store = (NVFP4, stored_float8(self.divisor)) if self.kind == "nvfp4" else (MXFP4, stored_power)
        weights = None if importance is None else importance.view(-1, self.group)
        parts = [
            fit_scales(slab.view(len(slab), -1, self.group), points, store, search=search, importance=weights)
            for slab in weight.split(rows_together(weight, SLAB_ELEMENTS))
        ]
        return torch.cat(parts)

    def weight(self, half_steps: torch.Tensor, scales: torch.Tensor) -> ScaledWeight:
        """Return a ScaledWeight from half steps (N, K), integers from -12 to 12, and scales from `fit`."""
        size = half_steps.abs().to(torch.uint8)
        codes = torch.where(size <= 4, size, torch.where(size < 8, 5, torch.where(size < 12, 6, 7))).to(torch.uint8)
        codes += 8 * (half_steps < 0).to(torch.uint8)
        if self.kind == "nvfp4":
            divisor = torch.tensor([self.divisor], dtype=torch.float32, device=scales.device)
            stored = (scales * divisor).to(torch.float8_e4m3fn)
            return ScaledWeight(codes, stored, (1, self.group), divisor)
        stored = (torch.frexp(scales)[1] - 1 + E8M0_BIAS).to(torch.uint8)
        return ScaledWeight(codes, stored, (1, self.group))

    def round(self, weight: torch.Tensor, *, search: bool = False) -> ScaledWeight:
        scales = self.fit(weight, search=search)
        wide = scales.repeat_interleave(self.group, 1)
        return self.weight(nearest_half_steps(2 * weight / wide), scales)


def int8_with_feedback(weight: torch.Tensor, moments: Feedback) -> ScaledWeight:
    """Round `weight`, float32 (N, K), to int8 with error feedback, using the inputs' moments.

    Then refit each row's scale to the least output error, if that is better after rounding to bfloat16.
    """
    target = moments.target(weight)
    weighted = _importance(moments)
    scales = torch.cat([fit_scales(part, INT8, stored_bfloat16, importance=weighted) for part in target.split(512)])
    values = _rounded(target, moments, scales[:, None], nearest_int8, INT8_TOP)
    aimed = (target @ moments.hessian).mul_(values).sum(1)
    normal = (values @ moments.hessian).mul_(values).sum(1)
    refitted = stored_bfloat16(torch.where(normal > 0, aimed / normal, scales))

    def error(scale: torch.Tensor) -> torch.Tensor:
        return scale * (scale * normal - 2 * aimed)

    scales = torch.where(error(refitted) < error(scales), refitted, scales)
    return int8_weight(values, scales[:, None])


def float4_with_feedback(weight: torch.Tensor, moments: Feedback, grid: Float4, *, search: bool = True) -> ScaledWeight:
    """Round `weight`, float32 (N, K), to the grid with error feedback; scales are fixed before rounding."""
    parts = []
    for part in weight.split(rows_together(weight, FEEDBACK_SLAB_ELEMENTS)):
        target = moments.target(part)
        scales = grid.fit(target, search=search, importance=_importance(moments))
        half_steps = _rounded(target, moments, scales / 2, nearest_half_steps, 2 * FLOAT4_TOP)
        parts.append((half_steps, scales))
    return grid.weight(torch.cat([steps for steps, _ in parts]), torch.cat([scales for _, scales in parts]))


def _importance(moments: Feedback) -> torch.Tensor:
    return moments.importance + 1e-6 * moments.importance.mean() + 1e-30


def _rounded(
    target: torch.Tensor,
    moments: Feedback,
    scales: torch.Tensor,
    nearest: Callable[[torch.Tensor], torch.Tensor],
    top: float,
) -> torch.Tensor:
    """Round with error feedback to integers -top to top, float32 (N, K), for scales (N, G) of contiguous groups."""
    order, columns = moments.order, target.shape[1]
    groups = torch.arange(columns, device=target.device) // (columns // scales.shape[1])
    by_group = scales.T.contiguous()
    codes = torch.empty(columns, len(target), dtype=torch.uint8, device=target.device)
    codes[order] = round_columns(
        target.index_select(1, order).T.contiguous(),
        moments.factor,
        ColumnGrids(by_group, torch.full_like(by_group, top), groups[order], int(2 * top)),
        nearest=nearest,
    )
    return codes.T.to(torch.float32).sub_(top)
