"""The importance of a weight's columns: the mean square of each input on the calibration text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.calibration.block import FEW_TOKENS
from quantkit.calibration.walk import walk
from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.models.unfuse import expert_of, same_of_every_expert


def measure_importance(job: Job, run: Run) -> dict[str, NDArray[np.float32]]:
    """Mean squared input of every linear layer in the blocks: weight name -> (columns,) float32.

    An expert that saw too few tokens has that of all experts of its block, and it is told.
    """
    means: dict[str, torch.Tensor] = {}
    for block in walk(job, run):
        groups = block.groups()
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def gather(name: str, x: torch.Tensor, sums: Any = sums, counts: Any = counts) -> None:
            sums[name] = sums.get(name, 0) + x.to(torch.float32).square().sum(0).cpu()
            counts[name] = counts.get(name, 0) + len(x)

        firsts = [names[0] for names in groups]
        block.collect(firsts, gather, keep_outputs=True)
        for names in groups:
            alike = [names[0]]
            if expert_of(names[0]) is not None and counts[names[0]] < FEW_TOKENS:
                alike = same_of_every_expert(names[0], firsts)
                block.few(names[0])
            mean = sum(sums[name] for name in alike) / sum(counts[name] for name in alike)
            means |= dict.fromkeys(names, torch.as_tensor(mean))
    return {name: value.detach().float().cpu().numpy() for name, value in means.items()}
