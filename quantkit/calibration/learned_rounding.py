"""Learned rounding: train a block's codes and scales so that its outputs approximate the unquantized block's.

Inputs come from the quantized model, targets from the unquantized one, and training starts from GPTQ's or AWQ's codes.
Each token's error is divided by its magnitude. The result is the state with the least error on held-out calibration
sequences. Codes go through a staircase that sharpens (`learned_codes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Protocol

import torch

from quantkit.calibration.block import Block
from quantkit.calibration.learned_codes import Layer, Sharpening, SoftCodes
from quantkit.calibration.walk import batch_size
from quantkit.contracts.method import Job, Shapes
from quantkit.errors import RecipeError
from quantkit.system.ranks import Shards


@dataclass(frozen=True)
class HeldOut:
    """Held-out validation: one sequence in `share` is held out; its loss is measured every `interval` steps."""

    share: int
    interval: int


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
    """Train `student` for `steps` steps on batches of `batch` of its `sequences` sequences.

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
    for number in range(steps):
        if len(queue) < batch:
            queue = [trained[i] for i in torch.randperm(len(trained), generator=generator).tolist()]
        student.step(number, queue[:batch], first)
        queue = queue[batch:]
        if number + 1 == steps or (number + 1) % held_out.interval == 0:
            loss = held_out_loss()
            if loss < best:
                best = loss
                student.keep()
        student.report(first, best)


HELD_OUT = 8  # one calibration sequence in so many
BATCH_TOKENS = 2048
SHARPENING = Sharpening()
STEPS, FEW_BITS, STEPS_OF_FEW = 24, 3, 64  # of a block; of one with a layer of at most so many bits
LEAST_SIZE = 1e-3  # share of the median token's mean square added to every token's


def refuse_few_sequences(job: Job) -> None:
    """Raise RecipeError if any process would have too few calibration sequences to hold some out."""
    asked, shards, least = job.recipe.calibration, job.shards, 2 * HELD_OUT
    batch = batch_size(asked.length)
    bounds = (shards.sequences(asked.sequences, batch, rank) for rank in range(shards.size))
    if min(stop - first for first, stop in bounds) < least:
        each = f" in each of {shards.size} processes, in whole batches of {batch}" if shards.size > 1 else ""
        raise RecipeError(
            f"learned rounding holds out one calibration sequence in {HELD_OUT} and needs {least} or more{each}; "
            f"only {asked.sequences} were given. Give more sequences, or leave refine out."
        )


def learning_bytes(shapes: Shapes) -> int:
    """Return the forecast of training's peak memory in bytes: three numbers a weight, gradients, one layer's step."""
    return 24 * shapes.block_parameters


def refine(
    block: Block,
    layers: dict[str, Layer],
    weights: dict[str, torch.Tensor],
    steps: int | None,
    seed: int,
    training: Sharpening = SHARPENING,
) -> dict[str, Layer]:
    """Train the codes and scales of `layers`, put the results into the block, and return them by name.

    `weights` are the unquantized weights (N, K) float32; they are taken out of the mapping. `steps`: None for the
    default. The walk must run the unquantized blocks for all sequences. The block's inputs are unchanged. The order of
    batches depends only on `seed` and the block's index. With several processes, each trains on its own sequences, and
    all follow the sum of their gradients.
    """
    if steps is None:
        steps = STEPS_OF_FEW if min(layer.bits for layer in layers.values()) <= FEW_BITS else STEPS
    student = _BlockStudent(block, layers, weights, replace(training, steps=steps))
    count, length, _ = block.inputs.shape
    batch, seed = max(1, BATCH_TOKENS // length), seed * 1_000_003 + block.index
    # The staircase is nearly rounding only at the end.
    held_out = HeldOut(HELD_OUT, max(1, steps // 2))
    train(student, count, batch, steps, held_out, seed, block.shards)
    tuned = {name: latent.finished() for name, latent in student.latents.items()}
    for name, layer in tuned.items():
        block.replace(name, layer.dense())
    return tuned


class _BlockStudent(Generic[Layer]):
    def __init__(
        self,
        block: Block,
        layers: dict[str, Layer],
        weights: dict[str, torch.Tensor],
        training: Sharpening,
    ) -> None:
        self.latents = {name: SoftCodes(layer, weights.pop(name), training) for name, layer in layers.items()}
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
