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

import numpy as np
import torch

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.calibration.block import FEW_TOKENS, Block, FullPrecisionBlock, batch_size
from quantkit.calibration.passes import SourceValues, embed
from quantkit.calibration.suspended import OffloadFile
from quantkit.calibration.tokens import tokens_of
from quantkit.contracts.format import TensorWriter
from quantkit.contracts.method import Job
from quantkit.contracts.run import Findings, Run
from quantkit.models.config import beside_states
from quantkit.models.skeleton import Skeleton, load_block, set_parameter
from quantkit.models.unfuse import expert_of
from quantkit.system.memory import MemoryTrimmer, trim_heap
from quantkit.system.ranks.group import place, share, size

FEW = "experts with few tokens"  # what findings call their number and the note on it
LEAST_TOKENS = 5  # for each column of the widest layer, in the unquantized stream

Restore = Callable[[int, str], dict[str, torch.Tensor] | None]


def walk(
    job: Job,
    run: Run,
    *,
    exact: float = 0.0,
    ample: int = 0,
    suspend: bool = True,
    restore: Restore = lambda _index, _prefix: None,
    then: Callable[[Activations], None] | None = None,
) -> Iterator[Block]:
    """Yield the blocks in order, each with its weights; its outputs are computed when the next one is asked for.

    `exact` is the share of the calibration sequences, rounded up to whole batches, for which the unquantized blocks
    and their activations are kept beside the quantized ones. `ample` and `suspend` are the blocks'.
    `restore(index, prefix)` may return the finished values of a block from an earlier run, by parameter name: it is
    then passed through, not yielded. After the last block, `then` is given what came out of the unquantized one.
    Each of several ranks walks its share of the sequences; all come to the same blocks.
    The job's skeleton loses a block's weights when the next one is asked for or the generator is closed.
    """
    source, skeleton, device = job.source, job.skeleton, torch.device(job.device)
    every = tokens_of(job).ids
    widest = max(columns for _, columns in skeleton.linears().values())
    ids, exact_count = of_this_rank(every, exact_sequences(exact, len(every), every.shape[1], widest))
    whole = (len(ids) + exact_count) / len(ids)
    of_text = ids.size * beside_states(skeleton.model.config.get_text_config()).of_text * DTYPE.itemsize
    held = 0

    def offload(size: int) -> Path | None:
        nonlocal held
        held = int(size * whole - of_text * (whole - 1))  # what depends on the text is the same in both streams
        return run.folder / "activations.offload" if held > job.offload_bytes else None

    inputs, arguments = embed(SourceValues(source, skeleton), skeleton, torch.from_numpy(ids), device, offload)
    trim_heap()
    room = job.offload_bytes - (held if inputs.in_memory else 0)
    exact_path = None if inputs.in_memory else run.folder / "exact.offload"
    exact_inputs = inputs.like(exact_path, exact_count)
    for start in range(exact_count):
        exact_inputs.write(start, inputs.read(start, start + 1))
    note_few = _few_tokens_noter(run.findings, skeleton)
    trimmer = MemoryTrimmer()
    step = run.progress.step(f"{job.method.name}: calibrating blocks", len(skeleton.blocks), work=True)
    with closing(exact_inputs):
        batches = OffloadFile(run.folder / "batches.offload", room)
        with closing(inputs), closing(batches) as offload_file, step as advance:
            for index in range(len(skeleton.blocks)):
                prefix = skeleton.block_prefix(index)
                unquantized = copy.deepcopy(skeleton.blocks[index]) if exact_count else None
                finished = restore(index, prefix) or {}
                with load_block(source, skeleton, index, device, DTYPE) as module:
                    if unquantized is not None:
                        for name, value in module.named_parameters():
                            set_parameter(unquantized, name, value)
                    for name, restored in finished.items():
                        set_parameter(module, name.removeprefix(prefix), restored.to(device, DTYPE))
                    block = Block(
                        index=index,
                        prefix=prefix,
                        module=module,
                        inputs=inputs,
                        arguments=arguments[index],
                        skeleton=skeleton,
                        device=device,
                        offload_file=offload_file,
                        batch_tokens=job.batch_tokens,
                        suspend=suspend,
                        ample=ample,
                        all_tokens=every.size,
                        linears=skeleton.linears_of(index),
                        full_precision_block=None
                        if unquantized is None
                        else FullPrecisionBlock(unquantized.to(device), exact_inputs),
                        few=note_few,
                        trimmer=trimmer,
                    )
                    if not finished:
                        yield block
                    if index + 1 < len(skeleton.blocks):
                        block.finish()
                    elif unquantized is not None:
                        _tell_if_lost(block, min(batch_size(every.shape[1]), exact_count), run.findings)
                del block, unquantized, module
                advance()
        trim_heap()
        if then is not None:
            then(exact_inputs)


def _tell_if_lost(last: Block, sequences: int, findings: Findings) -> None:
    """Note where the quantized model's last hidden states are no nearer to the source's than zeros would be."""
    if last.distance(range(sequences)) >= 1:
        findings.note(
            "the quantized model is lost: its last hidden states are further from the source's than zeros are. Take "
            "more bits or smaller groups, and judge it before it is used"
        )


def of_this_rank(ids: np.ndarray, exact_count: int) -> tuple[np.ndarray, int]:
    """Of the sequences (S, T) those of this rank, and how many of them are exact: the first of its own, as of all.

    It gets its share of the exact ones and of the others, in whole batches, and some exact ones where there are any.
    """
    if size() == 1:
        return ids, exact_count
    step = batch_size(ids.shape[1])
    if exact_count:
        exact_count = min(len(ids), max(exact_count, size() * step))
    exact, others = ids[:exact_count], ids[exact_count:]
    first, stop = _whole_batches(len(exact), step, place().rank)
    # From the other end, so that none of few batches go to the same ranks.
    start, end = _whole_batches(len(others), step, size() - 1 - place().rank)
    exact, others = exact[first:stop], others[start:end]
    return np.concatenate([exact, others]), len(exact)


def fewest_exact(sequences: int, length: int) -> int:
    """How many sequences the rank with the fewest gets where all are exact."""
    bounds = (_whole_batches(sequences, batch_size(length), rank) for rank in range(size()))
    return min(stop - first for first, stop in bounds)


def _whole_batches(count: int, step: int, rank: int) -> tuple[int, int]:
    """A rank's share of `count` sequences in batches of `step`: the first, and the one behind the last."""
    first, stop = share(math.ceil(count / step), rank)
    return min(first * step, count), min(stop * step, count)


def finished_block(writer: TensorWriter, index: int, prefix: str) -> dict[str, torch.Tensor] | None:
    """The values of block `index` as an earlier, interrupted run has written them, or None."""
    if index >= writer.finished:
        return None
    values = writer.block(prefix)
    return {name: value if isinstance(value, torch.Tensor) else value.dense() for name, value in values.items()}


def exact_sequences(share: float, sequences: int, length: int, widest: int) -> int:
    """How many of the sequences also go through the unquantized blocks: a share, in whole batches.

    But for a share of zero they hold `LEAST_TOKENS` for each of `widest` columns, or are all.
    """
    step = batch_size(length)
    least = max(share * sequences, LEAST_TOKENS * widest / length) if share else 0.0
    return min(sequences, math.ceil(least / step - 1e-9) * step)


def _few_tokens_noter(findings: Findings, skeleton: Skeleton) -> Callable[[str], None]:
    """Keep one note up to date: how many experts saw too few tokens, those of earlier runs included."""
    experts = {expert for name in skeleton.linears() if (expert := expert_of(name))}
    earlier = findings.numbers.get(FEW, 0)
    seen: set[str] = set()

    def note(name: str) -> None:
        seen.add(str(expert_of(name)))
        findings.numbers[FEW] = earlier + len(seen)
        findings.note(
            f"{findings.numbers[FEW]} of {len(experts)} experts saw fewer than {FEW_TOKENS} calibration tokens; they "
            "are calibrated on what all experts of their block saw. Give more or more varied text",
            FEW,
        )

    return note
