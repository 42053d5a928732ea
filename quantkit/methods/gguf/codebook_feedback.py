"""IQ2 and IQ3 types with error feedback: points of their tables by the outputs' error, 8 columns at a time.

ggml chooses the scales. Then each 8 (IQ3_S: 4) columns are rounded together, and their error is fed forward to the
columns that follow (numerics/error_feedback.py). What is nearest is searched among all points of the table, weighed by
what an error of these columns costs after feedback, errors that make each other good included.
"""

from __future__ import annotations

import numpy as np
import torch

from quantkit.formats.gguf.ggml.codebooks import SIGN_RUN, Codebook
from quantkit.formats.gguf.ggml.kquants import Bytes
from quantkit.formats.gguf.ggml.scale_refit import refit_factors
from quantkit.numerics.error_feedback import Feedback, round_groups

ROWS = 256  # whose products with all points are in memory


def with_feedback(codebook: Codebook, packed: Bytes, target: torch.Tensor, moments: Feedback) -> Bytes:
    """Packed rows (n, bytes) of ggml's with points, signs and factors for `target` (n, K) float32."""
    size = SIGN_RUN if codebook.even else codebook.size  # signs that count together are chosen together
    order, factor = moments.by_group(size)
    rounding = _Rounding(codebook, torch.from_numpy(codebook.scales(packed)).to(target.device), order)
    round_groups(target.index_select(1, order).T.contiguous(), factor, size, rounding.nearest)
    rounded = codebook.with_points(packed, rounding.indices(), rounding.signs())
    return refit_factors(codebook, rounded, target, moments.hessian)


class _Rounding:
    """Points and signs of n rows as they are chosen; `scales` (n, K / run) are ggml's, `order` (K,) that of columns."""

    def __init__(self, codebook: Codebook, scales: torch.Tensor, order: torch.Tensor) -> None:
        rows, device = len(scales), scales.device
        self._codebook, self._scales, self._columns = codebook, scales, order.tolist()
        self._table = torch.from_numpy(codebook.table()).to(device)
        first, second = torch.triu_indices(codebook.size, codebook.size, 1, device=device)
        self._pairs = first, second
        # What a point's error is linear in: its values, products of two of them, and of each with itself.
        squares = torch.cat([self._table[:, first] * self._table[:, second], self._table.square()], 1)
        self._features = torch.cat([self._table, squares], 1).T.contiguous()
        self._indices = torch.zeros(rows, len(order) // codebook.size, dtype=torch.int32, device=device)
        self._minus = torch.zeros(rows, len(order), dtype=torch.bool, device=device)

    def indices(self) -> np.ndarray:
        """(n, K / size) uint16."""
        return self._indices.cpu().numpy().astype(np.uint16)

    def signs(self) -> Bytes:
        """(n, K / 8) uint8."""
        return np.packbits(self._minus.cpu().numpy(), axis=1, bitorder="little")

    def nearest(self, first: int, moved: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
        """Round columns `first` .. of the order: moved (columns, n) to values of the same shape."""
        column, count = self._columns[first], len(moved)
        values = torch.empty_like(moved)
        for at in range(0, moved.shape[1], ROWS):
            rows = slice(at, at + ROWS)
            scale = self._scales[rows, column // self._codebook.run, None]
            x = torch.where(scale == 0, 0.0, moved[:, rows].T / scale)
            minus = x < 0
            if self._codebook.even:
                cheapest = (x.abs() * metric.diagonal()).argmin(1, keepdim=True)
                odd = (minus.sum(1, keepdim=True) % 2).bool()
                minus.scatter_(1, cheapest, minus.gather(1, cheapest) ^ odd)
            points = self._points(x, torch.where(minus, -1.0, 1.0), metric, rows, column // self._codebook.size)
            self._minus[rows, column : column + count] = minus
            values[:, rows] = (points * scale).T
        return values

    def _points(
        self, x: torch.Tensor, signs: torch.Tensor, metric: torch.Tensor, rows: slice, index: int
    ) -> torch.Tensor:
        """Points with signs (r, columns) near x: of several points each is chosen anew once the others are there."""
        size = self._codebook.size
        error = torch.zeros_like(x)
        parts = [slice(k, k + size) for k in range(0, x.shape[1], size)]
        for part in parts + parts[:-1]:
            error[:, part] = 0
            cross = error @ metric[:, part]
            chosen = self._best(x[:, part], signs[:, part], metric[part, part], cross)
            self._indices[rows, index + part.start // size] = chosen.to(torch.int32)
            error[:, part] = x[:, part] - signs[:, part] * self._table[chosen]
        return x - error

    def _best(self, x: torch.Tensor, signs: torch.Tensor, metric: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
        """Which point p (r,) has the least e metric e^T + 2 e cross^T, e = x - signs * p, of all points."""
        first, second = self._pairs
        linear = (x @ metric + cross) * signs * -2
        pairs = signs[:, first] * signs[:, second] * (2 * metric[first, second])
        squares = metric.diagonal().expand(len(x), -1)
        return _least(torch.cat([linear, pairs, squares], 1) @ self._features)


def _least(scores: torch.Tensor) -> torch.Tensor:
    """Where each row (r, P) is least. On a CPU numpy takes a tenth of torch's time."""
    return torch.from_numpy(scores.numpy().argmin(1)) if scores.device.type == "cpu" else scores.argmin(1)
