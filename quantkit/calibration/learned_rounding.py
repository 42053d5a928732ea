"""Learned rounding: train a block's codes and scales so that its outputs approximate the unquantized block's.

Inputs come from the quantized model, targets from the unquantized one, and training starts from GPTQ's or AWQ's codes.
Each token's error is divided by its magnitude. The result is the state with the least error on held-out calibration
sequences. At 2 and 3 bits positions go through a staircase that sharpens (`learned_codes`). With more bits the steps
are signed, as in Cheng et al., SignRound (AutoRound), arXiv:2309.05516; scales are trained directly, and training ends
when the held-out error stops falling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from pydantic import Field

from quantkit.calibration.block import Block
from quantkit.calibration.learned_codes import Sharpening, SoftCodes
from quantkit.calibration.walk import batch_size
from quantkit.contracts.method import Job, Shapes
from quantkit.errors import RecipeError
from quantkit.numerics.grid import stored_scale
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.records.recipe import Strict
from quantkit.system.ranks import Shards


@dataclass(frozen=True)
class HeldOut:
    """Held-out validation: one sequence in `share` is held out; its loss is measured every `interval` steps.

    With `patience`, training stops in its second half after that many measurements in a row without a new best.
    """

    share: int
    interval: int
    patience: int | None = None


class Student(Protocol):
    """Interface of a model that `train` trains; batches are lists of sequence numbers."""

    def measure(self, sequences: list[int]) -> float:
        """Return the mean loss on these held-out sequences."""

    def step(self, number: int, sequences: list[int], first: float) -> None:
        """Do one training step; `first` is the held-out loss before training."""

    def keep(self) -> None:
        """Save the current state as the best one."""

    def report(self, first: float, best: float) -> None:
        """Report, after each step, the held-out loss before training and the best one so far."""


def train(
    student: Student, sequences: int, batch: int, steps: int, held_out: HeldOut, seed: int, shards: Shards
) -> None:
    """Train `student` for at most `steps` steps on batches of `batch` of its `sequences` sequences.

    The order depends only on `seed` and the counts. With several processes, each has its own `sequences` and its share
    of `batch`; losses are averaged over all processes. All processes call `measure` and `step` equally often, so one
    with fewer held-out sequences measures some twice.
    """
    held = list(range(held_out.share - 1, sequences, held_out.share))
    trained = [number for number in range(sequences) if (number + 1) % held_out.share]
    batch = max(1, batch // shards.size)
    parts = [held[start : start + batch] for start in range(0, len(held), batch)]
    numbers = torch.zeros(shards.size, dtype=torch.float64)
    numbers[shards.rank] = len(parts)
    shards.sum(numbers)
    more = int(numbers.max()) - len(parts)

    def held_out_loss() -> float:
        sums = torch.tensor([sum(student.measure(part) * len(part) for part in parts), len(held)], dtype=torch.float64)
        for _ in range(more):
            student.measure((held or trained)[:1])
        shards.sum(sums)
        return float(sums[0]) / max(1, int(sums[1]))

    first = best = held_out_loss()
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    worse = 0
    for number in range(steps):
        if len(queue) < batch:
            queue = [trained[i] for i in torch.randperm(len(trained), generator=generator).tolist()]
        student.step(number, queue[:batch], first)
        queue = queue[batch:]
        done = number + 1 == steps
        if done or (number + 1) % held_out.interval == 0:
            loss = held_out_loss()
            worse += 1
            if loss < best:
                best, worse = loss, 0
                student.keep()
            out_of_patience = held_out.patience is not None and worse >= held_out.patience
            done = done or (out_of_patience and number >= steps // 2)
        student.report(first, best)
        if done:
            break


HELD_OUT = HeldOut(share=8, interval=10, patience=4)
BATCH_TOKENS = 2048
FEW_BITS = 3  # codes of a block with a layer of at most so many bits are learned through a staircase
LEAST_SIZE = 1e-3  # share of the median token's mean square added to every token's


class Learned(Strict):
    """Options of methods that can refine their result by learned rounding and scale tuning."""

    refine: bool = Field(
        False, description="also learn each block's rounding and tune all scales end to end; better but much slower"
    )
    refine_steps: int | None = Field(
        None, ge=0, le=10_000, description="most training steps per block; default: 24, at 2 and 3 bits 64"
    )
    tune_steps: int = Field(20, ge=0, le=10_000, description="training steps of the scales, end to end")

    @property
    def learned(self) -> bool:
        return self.refine and self.refine_steps != 0

    @property
    def tuned(self) -> bool:
        return self.refine and self.tune_steps > 0


@dataclass(frozen=True)
class Training:
    """Hyperparameters of learned rounding.

    `code_rate`: initial step size of a position, in codes; `scale_rate`: initial step size of a scale, relative to it.
    Both fall linearly to zero. `margin`: least initial distance of a position from the rounding border, in codes.
    """

    steps: int = 24
    code_rate: float = 0.006
    scale_rate: float = 0.002
    margin: float = 0.02


class Latent(Protocol):
    """One layer under training."""

    def value(self, number: int | None = None) -> torch.Tensor:
        """Return the weight (N, K) whose gradient step `number` follows; None: the one that would be stored now."""

    def step(self, gradient: torch.Tensor, number: int) -> None:
        """Take step `number`; `gradient` (N, K) is the loss's gradient w.r.t. `soft`, float32, and may be changed."""

    def keep(self) -> None:
        """Save the current state as the best one."""

    def finished(self) -> GroupedWeight:
        """Return the best state."""


class _Latent:
    """One layer under training: code = round(position), value = (code - zero) * scale * (1 + stretch)."""

    def __init__(self, layer: GroupedWeight, weight: torch.Tensor, training: Training) -> None:
        self.training, margin = training, training.margin
        self.layer, self.top = layer, (1 << layer.bits) - 1
        self.zero = layer.spread(layer.zeros)
        self.scale = layer.scales.to(torch.float32)
        codes = layer.codes.to(torch.float32)
        # The unquantized weight's position, moved to the solution's side of the border.
        plain = weight / layer.spread(self.scale) + self.zero
        self.position = torch.minimum(torch.maximum(plain, codes - 0.5 + margin), codes + 0.5 - margin)
        self.stretch = torch.zeros_like(self.scale)
        self.sign = self.scale.sign()
        self.best = (self.position.clone(), self.stretch.clone())

    def codes(self) -> torch.Tensor:
        return self.position.round().clamp_(0, self.top)

    def stored(self) -> torch.Tensor:
        return stored_scale(self.scale * (1 + self.stretch))

    def value(self, _number: int | None = None) -> torch.Tensor:
        return self.codes().sub_(self.zero).mul_(self.layer.spread(self.stored()))

    def step(self, gradient: torch.Tensor, number: int) -> None:
        training = self.training
        rate = 1 - number / training.steps
        towards = gradient * self.codes().sub_(self.zero)
        self.stretch.sub_(torch.sign(self.layer.sums(towards)).mul_(self.sign), alpha=training.scale_rate * rate)
        # For a negative scale, a larger code is a smaller value.
        up = torch.sign(gradient).mul_(self.layer.spread(self.sign))
        # At most half a code beyond the grid, so that positions can come back.
        self.position.sub_(up, alpha=training.code_rate * rate).clamp_(-0.49, self.top + 0.49)

    def keep(self) -> None:
        self.best = (self.position.clone(), self.stretch.clone())

    def finished(self) -> GroupedWeight:
        self.position, self.stretch = self.best
        return replace(self.layer, codes=self.codes().to(torch.uint8), scales=self.stored().to(torch.float16))


def refuse_few_sequences(job: Job) -> None:
    """Raise RecipeError if any process would have too few calibration sequences to hold some out."""
    asked, shards, least = job.recipe.calibration, job.shards, 2 * HELD_OUT.share
    batch = batch_size(asked.length)
    bounds = (shards.sequences(asked.sequences, batch, rank) for rank in range(shards.size))
    if min(stop - first for first, stop in bounds) < least:
        each = f" in each of {shards.size} processes, in whole batches of {batch}" if shards.size > 1 else ""
        raise RecipeError(
            f"learned rounding holds out one calibration sequence in {HELD_OUT.share} and needs {least} or more{each}; "
            f"only {asked.sequences} were given. Give more sequences, or leave refine out."
        )


def learning_bytes(shapes: Shapes) -> int:
    """Return the forecast of training's peak memory in bytes: three numbers a weight, gradients, one layer's step."""
    return 24 * shapes.block_parameters


def refine(
    block: Block,
    layers: dict[str, GroupedWeight],
    weights: dict[str, torch.Tensor],
    steps: int | None,
    seed: int,
    training: Training | Sharpening | None = None,
) -> dict[str, GroupedWeight]:
    """Train the codes and scales of `layers`, put the results into the block, and return them by name.

    `weights` are the unquantized weights (N, K) float32; they are taken out of the mapping. `steps`: None for the
    default. The walk must run the unquantized blocks for all sequences. The block's inputs are unchanged. The order of
    batches depends only on `seed` and the block's index. With several processes, each trains on its own sequences, and
    all follow the sum of their gradients.
    """
    if training is None:
        training = Sharpening() if min(layer.bits for layer in layers.values()) <= FEW_BITS else Training()
    training = training if steps is None else replace(training, steps=steps)
    student = _BlockStudent(block, layers, weights, training)
    count, length, _ = block.inputs.shape
    batch, seed = max(1, BATCH_TOKENS // length), seed * 1_000_003 + block.index
    # A staircase is nearly rounding only at the end.
    held_out = HELD_OUT if isinstance(training, Training) else HeldOut(HELD_OUT.share, max(1, training.steps // 2))
    train(student, count, batch, training.steps, held_out, seed, block.shards)
    tuned = {name: latent.finished() for name, latent in student.latents.items()}
    for name, layer in tuned.items():
        block.replace(name, layer.dense())
    return tuned


class _BlockStudent:
    def __init__(
        self,
        block: Block,
        layers: dict[str, GroupedWeight],
        weights: dict[str, torch.Tensor],
        training: Training | Sharpening,
    ) -> None:
        self.latents: dict[str, Latent] = {}
        for name, layer in layers.items():
            weight = weights.pop(name)
            if isinstance(training, Training):
                self.latents[name] = _Latent(layer, weight, training)
            else:
                self.latents[name] = SoftCodes(layer, weight, training)
        self._block, self._targets = block, block.targets()
        self._stale = False  # whether the block's weights are not those that would be stored

    def _loss(self, sequences: list[int], parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        exact = self._targets.select(sequences).to(self._block.device)
        out = self._block.call_with(parameters, sequences)
        error = (out.to(torch.float32) - exact.to(torch.float32)).square().mean(-1)
        # The next norm divides each token by its size; otherwise a few huge tokens would dominate.
        size = exact.to(torch.float32).square().mean(-1)
        return (error / (size + LEAST_SIZE * size.median())).mean()

    def measure(self, sequences: list[int]) -> float:
        if self._stale:
            self._place(None)
        with torch.no_grad():
            return float(self._loss(sequences, {}))

    def _place(self, number: int | None) -> None:
        for name, latent in self.latents.items():
            self._block.replace(name, latent.value(number))
        self._stale = number is not None

    def step(self, number: int, sequences: list[int], first: float) -> None:
        block = self._block
        self._place(number)
        parameters = {name: block.linears[name].weight.detach().requires_grad_() for name in self.latents}
        loss = self._loss(sequences, parameters) / max(first, 1e-30)
        gradients = list(torch.autograd.grad(loss, list(parameters.values())))
        del parameters, loss
        for latent in reversed(self.latents.values()):
            gradient = gradients.pop().to(torch.float32).contiguous()
            block.shards.sum(gradient)  # steps do not depend on its size
            latent.step(gradient, number)
        block.trimmer.trim()

    def keep(self) -> None:
        for latent in self.latents.values():
            latent.keep()

    def report(self, first: float, best: float) -> None:
        """Report nothing: the walk has its own progress."""
