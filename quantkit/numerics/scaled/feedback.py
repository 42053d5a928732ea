"""Rounding to int8 rows and to 4-bit floats with error feedback: GPTQ's arithmetic on these grids.

Paper: Frantar et al., GPTQ, arXiv:2210.17323. Both grids are whole numbers times a scale: int8 all from -127 to 127,
E2M1 the half steps 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantkit.numerics.error_feedback import Feedback, round_columns
from quantkit.numerics.scaled.fit import (
    INT8,
    Float4,
    fit_scales,
    int8_weight,
    nearest_half_steps,
    nearest_int8,
    stored_bfloat16,
)
from quantkit.numerics.scaled.weight import FLOAT4_TOP, INT8_TOP, ScaledWeight
from quantkit.numerics.slabs import rows_together

SLAB_ELEMENTS = 1 << 24  # of the rows that are rounded together


def int8_with_feedback(weight: torch.Tensor, moments: Feedback) -> ScaledWeight:
    """(N, K) float32 as int8 rows whose outputs come near, by the moments of the inputs.

    Once rounded, each row takes the scale with the least output error, where bfloat16 holds a better one.
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
    """(N, K) float32 on the grid, scales of all groups first, then the columns by the moments' order."""
    parts = []
    for part in weight.split(rows_together(weight, SLAB_ELEMENTS)):
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
    """Whole numbers (N, K) float32 from -top to top for scales (N, G) of groups that lie side by side."""
    order, columns = moments.order, target.shape[1]
    groups = torch.arange(columns, device=target.device) // (columns // scales.shape[1])
    by_group = scales.T.contiguous()
    codes = torch.empty(columns, len(target), dtype=torch.uint8, device=target.device)
    codes[order] = round_columns(
        target.index_select(1, order).T.contiguous(),
        moments.factor,
        by_group,
        torch.full_like(by_group, top),
        groups[order],
        int(2 * top),
        nearest=nearest,
    )
    return codes.T.to(torch.float32).sub_(top)
