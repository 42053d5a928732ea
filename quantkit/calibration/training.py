"""Training on a part of the calibration sequences while the rest is only looked at, and what does best there stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.system.ranks.group import place, size, sum_over


@dataclass(frozen=True)
class HeldOut:
    """One sequence in `share` is held out. Every `interval` steps, and after the last, the loss there is measured.

    With `patience`, training ends with a measurement in its second half where so many in a row were no new best.
    """

    share: int
    interval: int
    patience: int | None = None


def train(
    sequences: int,
    batch: int,
    steps: int,
    held_out: HeldOut,
    seed: int,
    *,
    measure: Callable[[list[int]], float],
    step: Callable[[int, list[int], float], None],
    keep: Callable[[], None],
    report: Callable[[float, float], None] = lambda _first, _best: None,
) -> None:
    """Train on batches of the numbers of sequences, in an order that depends on `seed` and the numbers alone.

    measure(batch) is the mean loss of held-out sequences, step(number, batch, first) one step, where `first` is the
    held-out loss before all, keep() keeps the state as the best one, and report(first, best) is told of each step.
    Each of several ranks has `sequences` of its own and takes its share of `batch`; losses are those of all together.
    All call `measure` and `step` at the same times, so one that has fewer held-out sequences looks at some once more.
    """
    held = list(range(held_out.share - 1, sequences, held_out.share))
    trained = [number for number in range(sequences) if (number + 1) % held_out.share]
    batch = max(1, batch // size())
    parts = [held[start : start + batch] for start in range(0, len(held), batch)]
    numbers = torch.zeros(size(), dtype=torch.float64)
    numbers[place().rank] = len(parts)
    sum_over(numbers)
    more = int(numbers.max()) - len(parts)

    def held_out_loss() -> float:
        sums = torch.tensor([sum(measure(part) * len(part) for part in parts), len(held)], dtype=torch.float64)
        for _ in range(more):
            measure((held or trained)[:1])
        sum_over(sums)
        return float(sums[0]) / max(1, int(sums[1]))

    first = best = held_out_loss()
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    worse = 0
    for number in range(steps):
        if len(queue) < batch:
            queue = [trained[i] for i in torch.randperm(len(trained), generator=generator).tolist()]
        step(number, queue[:batch], first)
        queue = queue[batch:]
        done = number + 1 == steps
        if done or (number + 1) % held_out.interval == 0:
            loss = held_out_loss()
            worse += 1
            if loss < best:
                best, worse = loss, 0
                keep()
            out_of_patience = held_out.patience is not None and worse >= held_out.patience
            done = done or (out_of_patience and number >= steps // 2)
        report(first, best)
        if done:
            break
