"""Training on a part of the calibration sequences; the state with the least loss on the rest stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quantkit.system.ranks import Shards


@dataclass(frozen=True)
class HeldOut:
    """One sequence in `share` is held out. Every `interval` steps, and after the last, the loss there is measured.

    With `patience`, training ends with a measurement in its second half where so many in a row were no new best.
    """

    share: int
    interval: int
    patience: int | None = None


class Student(Protocol):
    """What is trained, on batches of the numbers of sequences."""

    def measure(self, sequences: list[int]) -> float:
        """The mean loss of held-out sequences."""

    def step(self, number: int, sequences: list[int], first: float) -> None:
        """Do one training step; `first` is the held-out loss before all."""

    def keep(self) -> None:
        """Keep the state as the best one."""

    def report(self, first: float, best: float) -> None:
        """Called after each step with the held-out losses before all and of the best state."""


def train(
    student: Student, sequences: int, batch: int, steps: int, held_out: HeldOut, seed: int, shards: Shards
) -> None:
    """Train on batches of `batch` of the `sequences`, in an order that depends on `seed` and the numbers alone.

    Each of several processes has `sequences` of its own and takes its share of `batch`; losses are those of all
    together. All call `measure` and `step` at the same times, so one that has fewer held-out sequences measures some
    once more.
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
