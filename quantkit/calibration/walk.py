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

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.calibration.block import Block, Stream
from quantkit.calibration.moments import FEW_TOKENS, Moments
from quantkit.calibration.passes import SourceValues, embed
from quantkit.calibration.suspended import OffloadFile
from quantkit.calibration.tokens import tokens_of
from quantkit.contracts.format import TensorWriter
from quantkit.contracts.method import BATCH_TOKENS, CheckedJob
from quantkit.contracts.run import Findings, Run
from quantkit.models.config import beside_states
from quantkit.models.skeleton import Skeleton, load_block, set_parameter
from quantkit.models.unfuse import expert_of, same_of_every_expert
from quantkit.system.memory import MemoryTrimmer, trim_heap
from quantkit.system.ranks import Shards

FEW = "experts with few tokens"  # what findings call their number and the note on it
LEAST_TOKENS = 5  # for each column of the widest layer, in the unquantized stream

Restore = Callable[[int, str], dict[str, torch.Tensor] | None]


def walk(
    job: CheckedJob,
    run: Run,
    *,
    exact: float = 0.0,
    ample: int = 0,
    restore: Restore = lambda _index, _prefix: None,
    then: Callable[[Activations], None] | None = None,
) -> Iterator[Block]:
    """Yield the blocks in order, each with its weights; its outputs are computed when the next one is asked for.

    `exact` is the share of the calibration sequences, rounded up to whole batches, for which the unquantized blocks
    and their activations are kept alongside the quantized ones. `ample` is that of `Moments`.
    `restore(index, prefix)` may return the finished values of a block from an earlier run, by parameter name: it is
    then passed through, not yielded. After the last block, `then` is given what came out of the unquantized one.
    Each of several processes walks its share of the sequences; all come to the same blocks.
    The job's skeleton loses a block's weights when the next one is asked for or the generator is closed.
    """
    source, skeleton, device = job.source, job.skeleton, torch.device(job.device)
    every = tokens_of(job).ids
    widest = max(columns for _, columns in skeleton.linears().values())
    ids, exact_count = own_sequences(every, exact_sequences(exact, len(every), every.shape[1], widest), job.shards)
    whole = (len(ids) + exact_count) / len(ids)
    of_text = ids.size * beside_states(skeleton.model.config.get_text_config()).of_text * DTYPE.itemsize
    # Both streams count, but what depends on the text is the same in both.
    twice = of_text * (whole - 1)
    path = run.folder / "activations.offload"
    values = SourceValues(source, skeleton)
    inputs = embed(values, skeleton, torch.from_numpy(ids), device, path, (job.offload_bytes + twice) / whole)
    trim_heap()
    in_memory = inputs.path is None
    room = job.offload_bytes - (int(inputs.held_bytes * whole - twice) if in_memory else 0)
    exact_inputs = inputs.like(None if in_memory else run.folder / "exact.offload", range(exact_count))
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
                    exact_stream = None
                    if unquantized is not None:
                        for name, value in module.named_parameters():
                            set_parameter(unquantized, name, value)
                        exact_stream = Stream(index, unquantized.to(device), exact_inputs)
                    for name, restored in finished.items():
                        set_parameter(module, name.removeprefix(prefix), restored.to(device, DTYPE))
                    linears = skeleton.linears_of(index)
                    moments = Moments(linears, device, job.shards, every.size, ample, exact_count > 0, note_few)
                    stream = Stream(index, module, inputs)
                    block = Block(prefix, stream, exact_stream, moments, offload_file, job.batch_tokens, trimmer)
                    if not finished:
                        yield block
                    if index + 1 < len(skeleton.blocks):
                        block.finish()
                    elif exact_count:
                        _note_if_unusable(block, min(batch_size(every.shape[1]), exact_count), run.findings)
                del block, stream, exact_stream, moments, unquantized, module
                advance()
        trim_heap()
        if then is not None:
            then(exact_inputs)


def _note_if_unusable(last: Block, sequences: int, findings: Findings) -> None:
    """Note where the quantized model's final hidden states are no nearer to the source's than zeros would be."""
    if last.distance(range(sequences)) >= 1:
        findings.note(
            "the quantized model is unusable: its final hidden states differ from the source's by more than their own "
            "norm. Take more bits or smaller groups, and evaluate it before it is used"
        )


def batch_size(length: int) -> int:
    """How many sequences of `length` tokens are one share of the work: of ranks, and of the unquantized stream."""
    return max(1, BATCH_TOKENS // length)


def own_sequences(ids: np.ndarray, exact_count: int, shards: Shards) -> tuple[np.ndarray, int]:
    """Of the sequences (S, T) those of this process, and how many of them are exact: the first of its own, as of all.

    It gets its share of the exact ones and of the others, in whole batches, and some exact ones where there are any.
    """
    if shards.size == 1:
        return ids, exact_count
    step = batch_size(ids.shape[1])
    if exact_count:
        exact_count = min(len(ids), max(exact_count, shards.size * step))
    exact, others = ids[:exact_count], ids[exact_count:]
    first, stop = shards.sequences(len(exact), step)
    # From the other end, so that none of few batches go to the same ranks.
    start, end = shards.sequences(len(others), step, shards.size - 1 - shards.rank)
    exact, others = exact[first:stop], others[start:end]
    return np.concatenate([exact, others]), len(exact)


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


def measure_importance(job: CheckedJob, run: Run) -> dict[str, NDArray[np.float32]]:
    """Mean squared input of every linear layer in the blocks: weight name -> (columns,) float32.

    An expert that saw too few tokens has that of all experts of its block, which is noted.
    """
    means: dict[str, NDArray[np.float32]] = {}
    for block in walk(job, run):
        groups = block.groups()
        seen = {names[0]: _Squares() for names in groups}

        def add(name: str, x: torch.Tensor, seen: dict[str, _Squares] = seen) -> None:
            seen[name].add(x)

        block.collect(list(seen), add, keep_outputs=True)
        for first, *others in groups:
            alike = [first]
            if expert_of(first) is not None and seen[first].tokens < FEW_TOKENS:
                alike = same_of_every_expert(first, seen)
                block.moments.few(first)
            sums, tokens = sum(seen[name].sums for name in alike), sum(seen[name].tokens for name in alike)
            means |= dict.fromkeys((first, *others), torch.as_tensor(sums / tokens).float().numpy())
    return means


class _Squares:
    """The sums (K,) of the squares of inputs."""

    def __init__(self) -> None:
        self.tokens, self.sums = 0, torch.zeros(())

    def add(self, x: torch.Tensor) -> None:
        self.sums = self.sums + x.to(torch.float32).square().sum(0).cpu()
        self.tokens += len(x)
