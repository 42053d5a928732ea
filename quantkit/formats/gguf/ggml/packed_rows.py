"""Rows packed in ggml's types as tensors, whose codes and block factors can be trained.

See calibration/learned_codes.py.
"""

from __future__ import annotations

from copy import copy
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

LEARNED = {name for name, kind in KQUANTS.items() if not kind.steps}  # types whose codes can be trained


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
    """Rows of a K-quant or IQ4_XS: factor and offset (n, B) of the blocks, scales and minima (n, G) of the groups."""

    def __init__(self, name: str, packed: Bytes, order: NDArray[np.int64] | None, device: torch.device) -> None:
        super().__init__(name, packed, order, device)
        self.kind, stored = KQUANTS[name], read_scales(name, packed)
        self.bits, self.blocks = self.kind.bits, packed.shape[1] // self.kind.nbytes
        self.factor, self.offset, self.scales, self.minima = (
            torch.from_numpy(part.reshape(len(packed), -1).copy()).to(device)
            for part in (stored.factor, stored.offset, stored.scales, stored.minima)
        )
        self.codes = self._in_source(torch.from_numpy(read_codes(name, packed)).to(device))

    @property
    def factors(self) -> torch.Tensor:
        """Return the factors of the scales and, if the type has minima, of these: (n, B or 2 B)."""
        return torch.cat([self.factor, self.offset], 1) if self.kind.largest_minimum else self.factor

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """Return what the scales multiply, float32 (n, K) in the file's order."""
        codes = self._in_file(codes)
        if not self.kind.steps:
            return codes.to(torch.float32) - self.kind.zero
        return torch.tensor(self.kind.steps, dtype=torch.float32, device=codes.device)[codes.to(torch.int64)]

    def _per_weight(self, factors: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return (factors.repeat_interleave(BLOCK // self.kind.group, 1) * whole).repeat_interleave(self.kind.group, 1)

    def dense(self) -> torch.Tensor:
        return self.values(self.codes, self.factors)

    def values(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        values = self.numbers(codes).mul_(self._per_weight(factors[:, : self.blocks], self.scales))
        if self.kind.largest_minimum:
            values.sub_(self._per_weight(factors[:, self.blocks :], self.minima))
        return self._in_source(values)

    def positions(self, weight: torch.Tensor) -> torch.Tensor:
        above = self._in_file(weight) + self._per_weight(self.offset, self.minima)
        places = self._in_source(above / self._per_weight(self.factor, self.scales) + self.kind.zero)
        return torch.where(places.isfinite(), places, self.codes.to(torch.float32))

    def code_steps(self) -> torch.Tensor:
        return self._in_source(self._per_weight(self.factor, self.scales))

    def factor_slopes(self, gradient: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        def sums(slopes: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
            each = slopes.reshape(*whole.shape, -1).sum(2) * whole
            return each.reshape(len(each), self.blocks, -1).sum(2)

        slopes = self._in_file(gradient)
        parts = [sums(slopes * self.numbers(codes), self.scales)]
        return torch.cat([*parts, -sums(slopes, self.minima)], 1) if self.kind.largest_minimum else parts[0]

    def learned(self, codes: torch.Tensor, factors: torch.Tensor) -> Self:
        return self._with(with_codes(self.name, self.packed, self._in_file(codes).cpu().numpy())).with_factors(factors)

    def with_factors(self, factors: torch.Tensor) -> Self:
        changed = copy(self)
        changed.factor, changed.offset = factors[:, : self.blocks], factors[:, self.blocks :]
        return self._with(changed.repacked())

    def repacked(self) -> Bytes:
        """Return the packed rows with the present factors, offsets, scales and minima."""
        parts = (self.factor, self.offset, self.scales, self.minima)
        scales = Scales(*(part.reshape(len(part) * self.blocks, -1).cpu().numpy() for part in parts))
        return with_scales(self.name, self.packed, scales)


class PointRows(_Rows):
    """Rows of an IQ2 or IQ3 type; `factors` (n, B) are the blocks' factors, all else is fixed."""

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
    """Return rows packed as type `name` for training, or None if nothing of the type can be trained."""
    if name in KQUANTS:
        return KRows(name, packed, order, device)
    return PointRows(name, packed, order, device) if name in CODEBOOKS else None
