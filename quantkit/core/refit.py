"""Scales after rounding: with the codes held, the scales that bring the layer's outputs nearest, in closed form.

Minimizes tr((W - S o C) H (W - S o C)^T) over the scales of each row's groups, C being codes minus zeros: linear least
squares with one unknown for each group. Rows do not depend on each other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quantkit.core.grid import stored_scale
from quantkit.core.grouped import GroupedWeight

RIDGE = 1e-4  # share of the mean diagonal added to the normal equations
WIDEST = 2.0  # a scale may move by this factor at most


def output_error(change: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """E |change x|^2 of each row: diag(change H change^T), (N,), for change (N, K) and H = E[x x^T] (K, K)."""
    return ((change @ hessian) * change).sum(1)


def refit_scales(target: torch.Tensor, hessian: torch.Tensor, layer: GroupedWeight) -> GroupedWeight:
    """Return `layer` with refitted scales; a row whose error would not fall keeps its own.

    target (N, K) float32 is the weight aimed at, hessian (K, K) float32 E[x x^T].
    """
    rows, groups = layer.scales.shape
    member = torch.zeros(groups, layer.shape[1], device=target.device)
    member[layer.g_idx, torch.arange(layer.shape[1], device=target.device)] = 1
    scales = layer.scales.to(torch.float32)
    centred = layer.codes.to(torch.float32) - layer.zeros.to(torch.float32)[:, layer.g_idx]
    normal = torch.empty(rows, groups, groups, dtype=torch.float64, device=target.device)
    for g in range(groups):
        inside = layer.g_idx == g
        normal[:, g] = ((centred[:, inside] @ hessian[inside]) * centred) @ member.T
    wanted = ((target @ hessian) * centred) @ member.T
    diagonal = torch.diagonal(normal, dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.mean(1, keepdim=True) + 1e-30
    found = torch.linalg.solve(normal, wanted.to(torch.float64)).to(torch.float32)
    sane = (found > scales / WIDEST) & (found < scales * WIDEST)
    found = stored_scale(torch.where(sane, found, scales))
    better = output_error(target - centred * found[:, layer.g_idx], hessian) < output_error(
        target - centred * scales[:, layer.g_idx], hessian
    )
    return replace(layer, scales=torch.where(better[:, None], found, scales).to(torch.float16))
