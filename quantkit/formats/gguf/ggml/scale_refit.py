"""K-quant scales after rounding: with the codes held, the whole-number scales and minima and the two float16 factors
of each block that bring the layer's outputs nearer.

Lowers tr((W - V) H (W - V)^T) in the values V of a row, by coordinate descent: each scale and each minimum takes the
whole number that is best with all else held; then the factors of all blocks of a row are solved for at once, in closed
form. Rows do not depend on each other. Nothing is taken that does not lower the error.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quantkit.formats.gguf.ggml.kquants import (
    BLOCK,
    KQUANTS,
    Bytes,
    KQuant,
    Scales,
    read_codes,
    read_scales,
    with_scales,
)

RIDGE = 1e-6  # share of the mean diagonal that holds the factors where they are


class _Rows:
    """Scales and codes of n rows in torch: factor, offset (n, B), scales, minima (n, G), codes less zero (n, K)."""

    def __init__(self, kind: KQuant, packed: Bytes, device: torch.device) -> None:
        self.kind, self.blocks = kind, packed.shape[1] // kind.nbytes
        self._found = read_scales(kind.name, packed)
        parts = (self._found.factor, self._found.offset, self._found.scales, self._found.minima)
        rows = len(packed)
        self.factor, self.offset, self.scales, self.minima = (
            torch.from_numpy(part.reshape(rows, -1).copy()).to(device) for part in parts
        )
        self.codes = torch.from_numpy(read_codes(kind.name, packed)).to(device, torch.float32) - kind.zero

    def values(self) -> torch.Tensor:
        """(n, K) float32."""
        each = BLOCK // self.kind.group
        scales = (self.factor.repeat_interleave(each, 1) * self.scales).repeat_interleave(self.kind.group, 1)
        minima = (self.offset.repeat_interleave(each, 1) * self.minima).repeat_interleave(self.kind.group, 1)
        return scales * self.codes - minima

    def stored(self) -> Scales:
        """As the blocks hold them."""
        parts = (self.factor, self.offset, self.scales, self.minima)
        shapes = (self._found.factor, self._found.offset, self._found.scales, self._found.minima)
        found = [part.cpu().numpy().reshape(shape.shape) for part, shape in zip(parts, shapes, strict=True)]
        return replace(self._found, factor=found[0], offset=found[1], scales=found[2], minima=found[3])


def refit(name: str, packed: Bytes, target: torch.Tensor, hessian: torch.Tensor) -> Bytes:
    """Packed rows (n, bytes) of type `name` with refitted scales.

    target (n, K) float32 is the weight aimed at, hessian (K, K) float32 E[x x^T].
    """
    rows = _Rows(KQUANTS[name], packed, target.device)
    _whole_numbers(rows, (target - rows.values()) @ hessian, hessian)
    _factors(rows, target, hessian)
    return with_scales(name, packed, rows.stored())


def _whole_numbers(rows: _Rows, slope: torch.Tensor, hessian: torch.Tensor) -> None:
    """Improve scales and minima one after the other; slope (n, K) = (W - V) H is half the error's negative gradient."""
    kind = rows.kind
    each, size = BLOCK // kind.group, kind.group
    for b in range(rows.blocks):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        inner, codes = hessian[block, block], rows.codes[:, block]
        near, moved = slope[:, block].clone(), torch.zeros_like(codes)
        factor, offset = rows.factor[:, b], rows.offset[:, b]
        for j in range(each):
            part, g = slice(j * size, (j + 1) * size), b * each + j
            square = inner[part, part]
            direction = codes[:, part]
            step = _better(rows.scales[:, g], direction, near[:, part], square, factor, kind.least, kind.most)
            rows.scales[:, g] += step
            change = (step * factor)[:, None] * direction
            near -= change @ inner[part]
            moved[:, part] += change
            if kind.most_minimum:
                ones = torch.ones_like(direction)
                step = _better(rows.minima[:, g], ones, near[:, part], square, -offset, 0, kind.most_minimum)
                rows.minima[:, g] += step
                change = (step * -offset)[:, None] * ones
                near -= change @ inner[part]
                moved[:, part] += change
        slope -= moved @ hessian[block]


def _better(
    now: torch.Tensor,
    direction: torch.Tensor,
    slope: torch.Tensor,
    square: torch.Tensor,
    unit: torch.Tensor,
    least: int,
    most: int,
) -> torch.Tensor:
    """The whole step (n,) of `now` (n,) that lowers the error most: each step of one moves V by unit * direction."""
    gain = (direction * slope).sum(1)
    curve = ((direction @ square) * direction).sum(1)
    wanted = gain / (unit * curve)
    wanted = torch.where(torch.isfinite(wanted), wanted, 0.0)
    step = (now + wanted).round().clamp(least, most) - now
    moved = step * unit
    return torch.where(2 * moved * gain - moved.square() * curve > 0, step, 0.0)


def _factors(rows: _Rows, target: torch.Tensor, hessian: torch.Tensor) -> None:
    """Solve for the float16 factors of all blocks of each row; a row whose error would not fall keeps its own."""
    kind, blocks, count = rows.kind, rows.blocks, len(target)
    parts = [rows.scales.repeat_interleave(kind.group, 1) * rows.codes]
    if kind.most_minimum:
        parts.append(-rows.minima.repeat_interleave(kind.group, 1))
    unknown = len(parts) * blocks
    normal = torch.empty(count, unknown, unknown, dtype=torch.float64, device=target.device)
    wanted = torch.empty(count, unknown, dtype=torch.float64, device=target.device)
    aimed = target @ hessian
    for i, part in enumerate(parts):
        for b in range(blocks):
            block = slice(b * BLOCK, (b + 1) * BLOCK)
            wanted[:, i * blocks + b] = (part[:, block] * aimed[:, block]).sum(1)
            spread = part[:, block] @ hessian[block]
            for other, values in enumerate(parts):
                products = (spread * values).view(count, blocks, BLOCK).sum(-1)
                normal[:, i * blocks + b, other * blocks : (other + 1) * blocks] = products
    now = torch.cat([rows.factor, rows.offset], 1)[:, :unknown].to(torch.float64)

    def error(factors: torch.Tensor) -> torch.Tensor:
        return ((normal @ factors[..., None])[..., 0] * factors - 2 * wanted * factors).sum(1)

    ridge = RIDGE * torch.diagonal(normal, dim1=1, dim2=2).mean(1)[:, None] + 1e-30
    found = torch.linalg.solve(normal + torch.diag_embed(ridge.expand(count, unknown)), wanted + ridge * now)
    limit = float(np.finfo(np.float16).max)
    found = found.clamp(-limit, limit).to(torch.float16).to(torch.float64)
    found = torch.where((error(found) < error(now))[:, None], found, now).to(torch.float32)
    rows.factor = found[:, :blocks].contiguous()
    if kind.most_minimum:
        rows.offset = found[:, blocks:].contiguous()
