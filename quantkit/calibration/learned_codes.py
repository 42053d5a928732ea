"""Learned codes: positions trained through a staircase that sharpens from a slope to rounding.

The staircase comes from DSQ (Gong et al., arXiv:1908.05033). It is exact at every code and smooth between codes. While
it is smooth, gradients move a weight between codes in small steps. As it sharpens, the weights near codes settle first.
GSQ (Dadgarnia et al., arXiv:2604.18556) anneals a softmax over each weight's codes for the same purpose, with a logit
for each code and Gumbel noise. Here each weight has one number and no noise, and a step takes half the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quantkit.numerics.grid import stored_scale
from quantkit.numerics.quantized_weight import GroupedWeight

BETAS = (0.9, 0.95)


class Adam:
    """Adam's direction (Kingma and Ba, arXiv:1412.6980) for one tensor of parameters."""

    def __init__(self, like: torch.Tensor) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)

    def direction(self, gradient: torch.Tensor, count: int) -> torch.Tensor:
        """Return the direction of step number `count` (from 1), to be subtracted times a rate."""
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        mean = self.first / (1 - BETAS[0] ** count)
        size = (self.second / (1 - BETAS[1] ** count)).sqrt_()
        return mean / (size + 1e-12)


@dataclass(frozen=True)
class Sharpening:
    """Hyperparameters of learned codes.

    `code_rate`: step size of a position, in codes; `scale_rate`: of a scale, relative to it. Both rise over `warm_up`
    steps, then fall linearly to zero. `sharpness`: the staircase's at first and at last; in between it grows by equal
    factors. `pull`: share of the way from the unquantized weight to its code where a position starts.
    """

    steps: int = 64
    code_rate: float = 0.08
    scale_rate: float = 0.002
    sharpness: tuple[float, float] = (6.0, 100.0)
    pull: float = 0.8
    warm_up: int = 5

    def rate(self, number: int) -> float:
        return min(1.0, (number + 1) / self.warm_up) * (1 - number / self.steps)

    def sharpness_at(self, number: int) -> float:
        first, last = self.sharpness
        return first * (last / first) ** (number / max(1, self.steps - 1))


def staircase(position: torch.Tensor, top: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smooth code of each position in [0, top], and its derivative."""
    below = position.floor().clamp_(max=top - 1)
    across = (position - below).sub_(0.5).mul_(sharpness / 2).tanh_()
    most = math.tanh(sharpness / 4)
    slope = across.square().neg_().add_(1).mul_(sharpness / (4 * most))
    return across.div_(2 * most).add_(0.5).add_(below), slope


class SoftCodes:
    """One layer under training: value = (staircase(position) - zero) * scale * (1 + stretch)."""

    def __init__(self, layer: GroupedWeight, weight: torch.Tensor, training: Sharpening) -> None:
        self.layer, self.top, self.training = layer, (1 << layer.bits) - 1, training
        self.scale = layer.scales.to(torch.float32)
        codes = layer.codes.to(torch.float32)
        # The unquantized weight's position, within the code's cell.
        plain = weight / layer.spread(self.scale) + layer.spread(layer.zeros)
        self.position = plain.clamp_(codes - 0.49, codes + 0.49).lerp_(codes, training.pull).clamp_(0, self.top)
        self.stretch = torch.zeros_like(self.scale)
        self._of_positions, self._of_scales = Adam(self.position), Adam(self.stretch)
        self.best = layer

    def _stored(self) -> torch.Tensor:
        return stored_scale(self.scale * (1 + self.stretch))

    def value(self, number: int | None = None) -> torch.Tensor:
        codes = self.position.round()
        if number is not None:
            codes, _ = staircase(self.position, self.top, self.training.sharpness_at(number))
        return codes.sub_(self.layer.spread(self.layer.zeros)).mul_(self.layer.spread(self._stored()))

    def step(self, gradient: torch.Tensor, number: int) -> None:
        training, layer, rate = self.training, self.layer, self.training.rate(number)
        codes, slope = staircase(self.position, self.top, training.sharpness_at(number))
        towards = layer.sums(codes.sub_(layer.spread(layer.zeros)).mul_(gradient)).mul_(self.scale)
        self.stretch.sub_(self._of_scales.direction(towards, number + 1), alpha=training.scale_rate * rate)
        gradient.mul_(slope).mul_(layer.spread(self.scale))
        self.position.sub_(self._of_positions.direction(gradient, number + 1), alpha=training.code_rate * rate)
        self.position.clamp_(0, self.top)

    def keep(self) -> None:
        codes = self.position.round().to(torch.uint8)
        self.best = replace(self.layer, codes=codes, scales=self._stored().to(torch.float16))

    def finished(self) -> GroupedWeight:
        return self.best
