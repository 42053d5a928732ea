"""Learned codes: positions trained through a staircase that sharpens from a slope to rounding.

The staircase comes from DSQ (Gong et al., arXiv:1908.05033). It is exact at every code and smooth between codes. While
it is smooth, gradients move a weight between codes in small steps. As it sharpens, the weights near codes settle first.
GSQ (Dadgarnia et al., arXiv:2604.18556) anneals a softmax over each weight's codes for the same purpose, with a logit
for each code and Gumbel noise. Here each weight has one number and no noise, and a step takes half the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import torch

from quantkit.numerics.grid import stored_scale

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


@runtime_checkable
class Tunable(Protocol):
    """A quantized weight (N, K) whose values are linear in its float16 factors."""

    @property
    def bits(self) -> int:
        """Return the number of bits of a code."""

    @property
    def codes(self) -> torch.Tensor:
        """Return the codes, uint8 (N, K), or of any shape where they cannot be trained."""

    @property
    def factors(self) -> torch.Tensor:
        """Return the factors, float32 (N, F); each scales a part of the values."""

    def dense(self) -> torch.Tensor:
        """Return the values, float32 (N, K)."""

    def values(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the values for other codes, float32, which may be overwritten, and other factors."""

    def factor_slopes(self, gradient: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the gradient by the factors (N, F), given that by the values (N, K); `codes` may be overwritten."""


class Learnable(Tunable, Protocol):
    """A quantized weight whose values are linear between neighbouring codes, too."""

    def positions(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight`, float32 (N, K), on the scale of the codes, before rounding and clamping."""

    def code_steps(self) -> torch.Tensor:
        """Return how far the values of neighbouring codes are apart, float32 (N, K)."""

    def learned(self, codes: torch.Tensor, factors: torch.Tensor) -> Self:
        """Return a copy with other codes, uint8 (N, K), and factors, float32 (N, F) exact in float16."""


Layer = TypeVar("Layer", bound=Learnable)


class SoftFactors:
    """The factors of one layer under training: factor * (1 + stretch), rounded to float16."""

    def __init__(self, factors: torch.Tensor) -> None:
        self.factors = factors
        self.stretch = torch.zeros_like(self.factors)
        self._of_factors = Adam(self.stretch)

    def stored(self) -> torch.Tensor:
        return torch.where(self.factors == 0, 0.0, stored_scale(self.factors * (1 + self.stretch)))

    def step_factors(self, slopes: torch.Tensor, rate: float, count: int) -> None:
        """Take Adam's step number `count` (from 1); `slopes` (N, F) is the loss's gradient by the factors."""
        self.stretch.sub_(self._of_factors.direction(slopes * self.factors, count), alpha=rate)


class SoftCodes(SoftFactors, Generic[Layer]):
    """One layer under training, whose codes are staircase(position)."""

    def __init__(self, layer: Layer, weight: torch.Tensor, training: Sharpening) -> None:
        super().__init__(layer.factors)
        self.layer, self.top, self.training = layer, (1 << layer.bits) - 1, training
        codes = layer.codes.to(torch.float32)
        # The unquantized weight's position, within the code's cell.
        plain = layer.positions(weight)
        self.position = plain.clamp_(codes - 0.49, codes + 0.49).lerp_(codes, training.pull).clamp_(0, self.top)
        self._of_positions = Adam(self.position)
        self.best = layer

    def value(self, number: int | None = None) -> torch.Tensor:
        codes = self.position.round()
        if number is not None:
            codes, _ = staircase(self.position, self.top, self.training.sharpness_at(number))
        return self.layer.values(codes, self.stored())

    def step(self, gradient: torch.Tensor, number: int) -> None:
        training, layer, rate = self.training, self.layer, self.training.rate(number)
        codes, slope = staircase(self.position, self.top, training.sharpness_at(number))
        self.step_factors(layer.factor_slopes(gradient, codes), training.scale_rate * rate, number + 1)
        gradient.mul_(slope).mul_(layer.code_steps())
        self.position.sub_(self._of_positions.direction(gradient, number + 1), alpha=training.code_rate * rate)
        self.position.clamp_(0, self.top)

    def keep(self) -> None:
        self.best = self.layer.learned(self.position.round().to(torch.uint8), self.stored())

    def finished(self) -> Layer:
        return self.best
