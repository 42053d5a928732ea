"""Refit the scales of quantized rows to the least output error; the codes stay the same.

Minimizes tr((W - V) H (W - V)^T) over the scales of the quantized values V. K-quants and IQ4_XS: coordinate descent
over the integer scales and minima, then the float16 block factors in closed form; IQ2 and IQ3: block factors only.
Only changes that lower the error are applied.
"""

from __future__ import annotations

import numpy as np
import torch

from quantkit.formats.gguf.ggml.codebooks import Codebook
from quantkit.formats.gguf.ggml.kquants import BLOCK, Bytes
from quantkit.formats.gguf.ggml.packed_rows import KRows
from quantkit.numerics.scale_refit import better_rows, normal_equations, solve_rows, unit_sums

RIDGE = 1e-6  # share of the mean diagonal; pulls factors towards their present values


def refit(name: str, packed: Bytes, target: torch.Tensor, hessian: torch.Tensor) -> Bytes:
    """Refit the scales of packed rows, uint8 (n, bytes), to `target` (n, K), where `hessian` (K, K) is E[x x^T]."""
    rows = KRows(name, packed, None, target.device)
    numbers = rows.numbers(rows.codes)
    _whole_numbers(rows, numbers, (target - rows.dense()) @ hessian, hessian)
    _factors(rows, numbers, target, hessian)
    return rows.repacked()


def _whole_numbers(rows: KRows, every: torch.Tensor, slope: torch.Tensor, hessian: torch.Tensor) -> None:
    """Optimize integer scales and minima in place, one at a time; `slope` (n, K) is (W - V) H, updated in place."""
    kind = rows.kind
    each, size = BLOCK // kind.group, kind.group
    for b in range(rows.blocks):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        inner, codes = hessian[block, block], every[:, block]
        near, moved = slope[:, block].clone(), torch.zeros_like(codes)
        numbers = [(rows.scales, codes, rows.factor[:, b], kind.least, kind.largest)]
        if kind.largest_minimum:
            numbers.append((rows.minima, torch.ones_like(codes), -rows.offset[:, b], 0, kind.largest_minimum))
        for j in range(each):
            part, g = slice(j * size, (j + 1) * size), b * each + j
            for whole, directions, unit, least, largest in numbers:
                direction = directions[:, part]
                gain = (direction * near[:, part]).sum(1)
                curve = ((direction @ inner[part, part]) * direction).sum(1)
                best = gain / (unit * curve)
                best = torch.where(torch.isfinite(best), best, 0.0)
                step = (whole[:, g] + best).round().clamp(least, largest) - whole[:, g]
                moved_by = step * unit
                step = torch.where(2 * moved_by * gain - moved_by.square() * curve > 0, step, 0.0)  # if that lowers it
                whole[:, g] += step
                change = (step * unit)[:, None] * direction
                near -= change @ inner[part]
                moved[:, part] += change
        slope -= moved @ hessian[block]


def _factors(rows: KRows, numbers: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor) -> None:
    """Solve for the float16 factors of all blocks of each row, in place, in closed form."""
    kind, blocks = rows.kind, rows.blocks
    parts = [rows.scales.repeat_interleave(kind.group, 1) * numbers]
    if kind.largest_minimum:
        parts.append(-rows.minima.repeat_interleave(kind.group, 1))
    solved = _solved(parts, rows.factors, target, hessian)
    rows.factor = solved[:, :blocks].contiguous()
    if kind.largest_minimum:
        rows.offset = solved[:, blocks:].contiguous()


def _solved(
    parts: list[torch.Tensor], factors: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Return float16-exact factors (n, P * B) for sums of P parts (n, K); rows that do not improve keep `factors`."""
    blocks, now, along = target.shape[1] // BLOCK, factors.to(torch.float64), target @ hessian
    normal = normal_equations(parts, hessian, blocks)
    aimed = torch.cat([unit_sums(part * along, blocks) for part in parts], 1)
    limit = float(np.finfo(np.float16).max)
    solved = solve_rows(normal, aimed, RIDGE, now).clamp(-limit, limit).to(torch.float16).to(torch.float64)
    return better_rows(normal, aimed, solved, now).to(torch.float32)


def refit_factors(codebook: Codebook, packed: Bytes, target: torch.Tensor, hessian: torch.Tensor) -> Bytes:
    """Refit the float16 block factors of rows packed as an IQ2 or IQ3 type; arguments as in `refit`."""
    factors, values = codebook.without_factors(packed, target.shape[1])
    now, part = torch.from_numpy(factors).to(target.device), torch.from_numpy(values).to(target.device)
    return codebook.with_factors(packed, _solved([part], now, target, hessian).cpu().numpy())
