"""Second moments of activations: E[x x^T] and E[y x^T], summed in float32, with half the work where it is symmetric."""

from __future__ import annotations

import torch

PANEL = 256  # columns of one product; only panels on and above the diagonal are computed
CHUNK = 512  # tokens of one product


class Gram:
    """Sums x^T x of inputs (tokens, K) as they come; `mean` is H (K, K) float32.

    With `cross`, also sums (other - x)^T x, the cross moment of an input and its disturbance. Products of bfloat16
    inputs come from the processor's bfloat16 units, twice as fast as float32: summed in float32 inside a chunk, rounded
    to bfloat16 once (a relative error of 2^-9 at random, less in the sum), and summed over the chunks in float32.
    """

    def __init__(self, columns: int, device: torch.device, cross: bool = False) -> None:
        self.tokens = 0
        self._sum = torch.zeros(columns, columns, device=device)
        self._cross = torch.zeros(columns, columns, device=device) if cross else None

    def add(self, x: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """Take inputs (tokens, K) of any float dtype; `other` (tokens, K) where the cross moment is kept."""
        columns = x.shape[1]
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            for left in range(0, columns, PANEL):
                right = min(left + PANEL, columns)
                self._sum[left:right, left:] += part[:, left:right].T @ part[:, left:]
            if self._cross is not None:
                assert other is not None
                self._cross += (other[start : start + CHUNK] - part).T @ part
        self.tokens += len(x)

    def mean(self, keep: bool = False) -> torch.Tensor:
        """H = E[x x^T], (K, K) float32; zeros where nothing was seen. Hands its sum over unless it is to `keep` it."""
        mean = self._sum.clone() if keep else self._sum
        mean.div_(max(self.tokens, 1))
        for left in range(0, len(mean), PANEL):
            inside = mean[left : left + PANEL, left : left + PANEL]
            inside.copy_(torch.triu(inside) + torch.triu(inside, 1).T)
            mean[left + PANEL :, left : left + PANEL] = mean[left : left + PANEL, left + PANEL :].T
        return mean

    def cross(self, keep: bool = False) -> torch.Tensor | None:
        """C = E[(other - x) x^T], (K, K) float32, or None where it was not kept. Hands its sum over as `mean` does."""
        if self._cross is None:
            return None
        return (self._cross.clone() if keep else self._cross).div_(max(self.tokens, 1))
