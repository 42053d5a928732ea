"""Calibration: one walk over the decoder blocks in order, with one block and its activations in memory at a time.

`walk` yields each block with its weights loaded. The method asks it for statistics of its linear layers' inputs,
may replace weights by quantized ones, and the walk then computes the next block's inputs with the block as it is
now, so that later blocks are calibrated on what they will really see. With `exact` a second stream of activations
goes through the unquantized blocks beside it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.calibration.block import FEW_TOKENS, Block, Twin, batch_size
from quantkit.calibration.inputs import enter
from quantkit.calibration.suspended import Shelf
from quantkit.calibration.tokens import calibration_tokens
from quantkit.contracts.job import Job
from quantkit.models.skeleton import Skeleton, hold, open_skeleton, release, set_parameter
from quantkit.models.unfuse import expert_of, same_of_every_expert
from quantkit.system.memory import give_back_freed

LEAST_TOKENS = 5  # for each column of the widest layer, in the unquantized stream

Restore = Callable[[int, str], dict[str, torch.Tensor] | None]


def walk(
    job: Job,
    *,
    exact: float = 0.0,
    ample: int = 0,
    restore: Restore = lambda _index, _prefix: None,
    then: Callable[[Activations], None] | None = None,
) -> Iterator[Block]:
    """Yield the blocks in order, each with its weights; its outputs are computed when the next one is asked for.

    `exact` is the share of the calibration sequences, rounded up to whole batches, for which the unquantized blocks
    and their activations are kept beside the quantized ones. `ample` is the blocks'. `restore(index, prefix)` may
    return the finished values of a block from an earlier run, by parameter name: it is then passed through, not
    yielded. After the last block, `then` is given what came out of the unquantized one.
    """
    source = job.source
    device = torch.device(job.device)
    skeleton = open_skeleton(source.config)
    ids, remark = draw(job)
    job.tell(remark)
    widest = max(columns for _, columns in skeleton.linears().values())
    twins = exact_sequences(exact, len(ids), ids.shape[1], widest)
    whole = (len(ids) + twins) / len(ids)

    def spill(size: int) -> Path | None:
        return job.folder / "activations.spill" if size * whole > job.spill_bytes else None

    inputs, arguments = enter(source, skeleton, torch.from_numpy(ids), device, spill)
    give_back_freed()
    room = job.spill_bytes - (int(inputs.nbytes * whole) if inputs.in_memory else 0)
    exact_inputs = Activations(twins, *inputs.shape[1:], None if inputs.in_memory else job.folder / "exact.spill")
    for start in range(twins):
        exact_inputs.write(start, inputs.read(start, start + 1))
    few = _few_teller(job, skeleton)
    step = job.progress.step(f"{job.recipe.method}: calibrating blocks", len(skeleton.blocks))
    with closing(exact_inputs):
        with closing(inputs), closing(Shelf(job.folder / "waiting.spill", room)) as shelf, step as advance:
            for index, module in enumerate(skeleton.blocks):
                prefix = skeleton.block_prefix(index)
                unquantized = copy.deepcopy(module) if twins else None
                finished = restore(index, prefix) or {}
                hold(source, skeleton, index, device, DTYPE)
                if unquantized is not None:
                    for name, value in module.named_parameters():
                        set_parameter(unquantized, name, value)
                for name, restored in finished.items():
                    set_parameter(module, name.removeprefix(prefix), restored.to(device, DTYPE))
                linears = {
                    name: skeleton.model.get_submodule(name.removesuffix(".weight"))
                    for name in skeleton.linears()
                    if name.startswith(prefix)
                }
                block = Block(
                    index=index,
                    prefix=prefix,
                    module=module,
                    inputs=inputs,
                    args=arguments[index][0],
                    kwargs=arguments[index][1],
                    skeleton=skeleton,
                    device=device,
                    linears=linears,
                    twin=Twin(unquantized.to(device), exact_inputs) if unquantized is not None else None,
                    shelf=shelf,
                    ample=ample,
                    few=few,
                )
                if not finished:
                    yield block
                if index + 1 < len(skeleton.blocks):
                    block.finish()
                elif then is not None:
                    block.targets()
                release(module)
                del block, unquantized, linears
                advance()
        give_back_freed()
        if then is not None:
            then(exact_inputs)


def draw(job: Job) -> tuple[np.ndarray, str]:
    """The calibration's token ids (S, T) int64 and a remark on them, drawn once for each job."""
    if job.drawn is None:
        job.drawn = calibration_tokens(job.source.tokenizer(), job.recipe.calibration, job.recipe.seed)
    return job.drawn


def exact_sequences(share: float, sequences: int, length: int, widest: int) -> int:
    """How many of the sequences also go through the unquantized blocks: a share, in whole batches.

    But for a share of zero they hold `LEAST_TOKENS` for each of `widest` columns, or are all.
    """
    step = batch_size(length)
    wanted = max(share * sequences, LEAST_TOKENS * widest / length) if share else 0.0
    return min(sequences, math.ceil(wanted / step - 1e-9) * step)


def _few_teller(job: Job, skeleton: Skeleton) -> Callable[[str], None]:
    """Keep one note of the job up to date: how many experts saw too few tokens, those of earlier runs included."""
    every = {expert for name in skeleton.linears() if (expert := expert_of(name))}
    said = f" of {len(every)} experts saw fewer than {FEW_TOKENS} calibration tokens"
    earlier = sum(int(note.partition(" ")[0]) for note in job.notes if said in note)
    found: set[str] = set()

    def tell(name: str) -> None:
        found.add(str(expert_of(name)))
        job.notes[:] = [note for note in job.notes if said not in note]
        job.tell(
            f"{earlier + len(found)}{said}; they are calibrated on what all experts of their block saw. "
            "Give more or more varied text"
        )

    return tell


def importance(job: Job) -> dict[str, torch.Tensor]:
    """Mean squared input of every linear layer in the blocks: weight name -> (K,) float32.

    An expert that saw too few tokens has that of all experts of its block, and it is told.
    """
    found: dict[str, torch.Tensor] = {}
    for block in walk(job):
        stages = block.stages()
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def gather(name: str, x: torch.Tensor, sums: Any = sums, counts: Any = counts) -> None:
            sums[name] = sums.get(name, 0) + x.to(torch.float32).square().sum(0).cpu()
            counts[name] = counts.get(name, 0) + len(x)

        firsts = [names[0] for names in stages]
        block.collect(firsts, gather, keep_outputs=True)
        for names in stages:
            alike = [names[0]]
            if expert_of(names[0]) is not None and counts[names[0]] < FEW_TOKENS:
                alike = same_of_every_expert(names[0], firsts)
                block.few(names[0])
            mean = sum(sums[name] for name in alike) / sum(counts[name] for name in alike)
            found |= dict.fromkeys(names, torch.as_tensor(mean))
    return found
