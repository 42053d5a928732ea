"""Rows packed in ggml's types as tensors whose codes or block factors can be trained (calibration/learned_codes.py)."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS
from quantkit.formats.gguf.ggml.kquants import (
    BLOCK,
    KQUANTS,
    Bytes,
    Scales,
    read_codes,
    read_scales,
    with_codes,
    with_scales,
)


class _Rows:
    """n packed rows, uint8 (n, bytes); `order` (K,): the source's column of each column, or None for the same order."""

    def __init__(self, name: str, packed: Bytes, order: NDArray[np.int64] | None, device: torch.device) -> None:
        self.name, self.packed, self.order, self.device = name, packed, order, device
        self._there = None if order is None else torch.from_numpy(order).to(device)
        self._back = None if self._there is None else self._there.argsort()

    def _in_file(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._there is None else values[:, self._there]

    def _in_source(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._back is None else values[:, self._back]

    def _with(self, packed: Bytes) -> Self:
        return type(self)(self.name, packed, self.order, self.device)


class KRows(_Rows):
    """Rows of a K-quant or IQ4_XS; `factors` (n, B or 2 B): the blocks' factors, then those of their minima, if any."""

    def __init__(self, name: str, packed: Bytes, order: NDArray[np.int64] | None, device: torch.device) -> None:
        super().__init__(name, packed, order, device)
        self.kind, stored = KQUANTS[name], read_scales(name, packed)
        self.bits, rows = self.kind.bits, len(packed)
        parts = (stored.factor, stored.offset, stored.scales, stored.minima)
        factor, offset, scales, minima = (torch.from_numpy(part).to(device).reshape(rows, -1) for part in parts)
        self.factors = torch.cat([factor, offset], 1) if self.kind.largest_minimum else factor
        groups = (rows, -1, BLOCK // self.kind.group, 1)
        self._scales, self._minima = scales.reshape(groups), minima.reshape(groups)
        self._levels = torch.tensor(self.kind.steps, dtype=torch.float32, device=device)
        self.codes = self._in_source(torch.from_numpy(read_codes(name, packed)).to(device))

    @property
    def learns_codes(self) -> bool:
        return not self.kind.steps

    def _groups(self, values: torch.Tensor) -> torch.Tensor:
        """Return values (n, K) in groups: (n, B, groups of a block, group)."""
        return self._in_file(values).reshape(*self._scales.shape[:3], self.kind.group)

    def _of_groups(self, values: torch.Tensor) -> torch.Tensor:
        return self._in_source(values.expand(*values.shape[:3], self.kind.group).reshape(len(values), -1))

    def _grid(self, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and the minimum of each group, (n, B, groups of a block, 1)."""
        factor, *offset = factors[..., None, None].split(self._scales.shape[1], 1)
        return factor * self._scales, offset[0] * self._minima if offset else self._minima

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        codes = self._groups(codes)
        return codes - self.kind.zero if self.learns_codes else self._levels[codes.to(torch.int64)]

    def dense(self) -> torch.Tensor:
        return self.values(self.codes.float(), self.factors)

    def values(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        scale, minimum = self._grid(factors)
        return self._of_groups(self._numbers(codes) * scale - minimum)

    def positions(self, weight: torch.Tensor) -> torch.Tensor:
        scale, minimum = self._grid(self.factors)
        places = self._of_groups((self._groups(weight) + minimum) / scale + self.kind.zero)
        return torch.where(places.isfinite(), places, self.codes.float())

    def code_steps(self) -> torch.Tensor:
        return self._of_groups(self._grid(self.factors)[0])

    def factor_slopes(self, gradient: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        slopes = self._groups(gradient)
        sums = [((slopes * self._numbers(codes)).sum(3, keepdim=True) * self._scales).sum((2, 3))]
        if self.kind.largest_minimum:
            sums.append(-(slopes.sum(3, keepdim=True) * self._minima).sum((2, 3)))
        return torch.cat(sums, 1)

    def learned(self, codes: torch.Tensor, factors: torch.Tensor) -> Self:
        return self._with(with_codes(self.name, self.packed, self._in_file(codes).cpu().numpy())).with_factors(factors)

    def with_factors(self, factors: torch.Tensor) -> Self:
        blocks = self._scales.shape[1]
        parts = (factors[:, :blocks], factors[:, blocks:], self._scales, self._minima)
        factor, offset, scales, minima = (part.reshape(len(factors) * blocks, -1).cpu().numpy() for part in parts)
        return self._with(with_scales(self.name, self.packed, Scales(factor, offset, scales, minima)))


class PointRows(_Rows):
    """Rows of an IQ2 or IQ3 type; `factors` (n, B) are the blocks' factors, all else is fixed."""

    learns_codes = False

    def __init__(self, name: str, packed: Bytes, order: NDArray[np.int64] | None, device: torch.device) -> None:
        super().__init__(name, packed, order, device)
        book = CODEBOOKS[name]
        self.bits = int(name[2])
        factors, points = book.without_factors(packed, packed.shape[1] // book.nbytes * BLOCK)
        self.factors = torch.from_numpy(factors).to(device)
        self._points = torch.from_numpy(points).to(device).reshape(*factors.shape, BLOCK)
        self.codes = torch.empty(0, dtype=torch.uint8)

    def dense(self) -> torch.Tensor:
        return self.values(self.codes, self.factors)

    def values(self, _codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return self._in_source((self._points * factors[..., None]).flatten(1))

    def factor_slopes(self, gradient: torch.Tensor, _codes: torch.Tensor) -> torch.Tensor:
        return (self._in_file(gradient).reshape(self._points.shape) * self._points).sum(2)

    def with_factors(self, factors: torch.Tensor) -> Self:
        return self._with(CODEBOOKS[self.name].with_factors(self.packed, factors.cpu().numpy()))


def trainable(
    name: str, packed: Bytes, order: NDArray[np.int64] | None, device: torch.device
) -> KRows | PointRows | None:
    """Return rows packed as type `name` for training, or None if it has nothing to train here."""
    if name in KQUANTS:
        return KRows(name, packed, order, device)
    return PointRows(name, packed, order, device) if name in CODEBOOKS else None
