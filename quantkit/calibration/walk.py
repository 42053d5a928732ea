"""The calibration walk over the decoder blocks in order, with one block and its activations in memory at a time.

`walk` yields each block with its weights loaded. The method gets statistics of the linear layers' inputs from it and
may replace weights by quantized ones. The walk then computes the next block's inputs with the changed block, so later
blocks are calibrated on the inputs that they really get. With `exact`, a second stream of activations passes through
the unquantized blocks.
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

FEW = "experts with few tokens"  # key of their number and note in the findings
LEAST_TOKENS = 5  # per column of the widest layer, in the unquantized stream

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
    """Yield the blocks in order, each with its weights; its outputs are computed when the next block is requested.

    `exact`: share of the calibration sequences, rounded up to whole batches, for which the unquantized blocks run, too.
    `ample`: see `Moments`. `restore(index, prefix)` may return a block's finished parameters from an earlier run, by
    name; the walk then runs that block but does not yield it. After the last block, `then` is called with the outputs
    of the unquantized block. With several processes, each walks its share of the sequences; all yield the same blocks.
    The job's skeleton loses a block's weights when the next one is requested or the generator is closed.
    """
    source, skeleton, device = job.source, job.skeleton, torch.device(job.device)
    every = tokens_of(job).ids
    widest = max(columns for _, columns in skeleton.linears().values())
    ids, exact_count = own_sequences(every, exact_sequences(exact, len(every), every.shape[1], widest), job.shards)
    whole = (len(ids) + exact_count) / len(ids)
    of_text = ids.size * beside_states(skeleton.model.config.get_text_config()).of_text * DTYPE.itemsize
    # Both streams count, but values that depend on the text are the same in both.
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
    """Add a note if the final hidden states are as far from the source's as zeros would be, or farther."""
    if last.distance(range(sequences)) >= 1:
        findings.note(
            "the quantized model is unusable: its final hidden states differ from the source's by more than their own "
            "norm. Use more bits or smaller groups, and evaluate it before use"
        )


def batch_size(length: int) -> int:
    """Return the number of sequences of `length` tokens in a batch, the unit that processes and streams share."""
    return max(1, BATCH_TOKENS // length)


def own_sequences(ids: np.ndarray, exact_count: int, shards: Shards) -> tuple[np.ndarray, int]:
    """Return this process's rows of `ids` (S, T), the exact ones first, and how many of its rows are exact.

    Exact and other rows are each divided among the processes in whole batches; if there are exact rows, each process
    has some.
    """
    if shards.size == 1:
        return ids, exact_count
    step = batch_size(ids.shape[1])
    if exact_count:
        exact_count = min(len(ids), max(exact_count, shards.size * step))
    exact, others = ids[:exact_count], ids[exact_count:]
    first, stop = shards.sequences(len(exact), step)
    # From the other end, so that few batches do not all go to the same ranks.
    start, end = shards.sequences(len(others), step, shards.size - 1 - shards.rank)
    exact, others = exact[first:stop], others[start:end]
    return np.concatenate([exact, others]), len(exact)


def finished_block(writer: TensorWriter, index: int, prefix: str) -> dict[str, torch.Tensor] | None:
    """Return the dense parameters of block `index` that an interrupted run has written, by name, or None."""
    if index >= writer.finished:
        return None
    return written_block(writer, prefix)


def written_block(writer: TensorWriter, prefix: str) -> dict[str, torch.Tensor]:
    """Return the dense parameters that were written of the block with this name prefix, by name."""
    values = writer.block(prefix)
    return {name: value if isinstance(value, torch.Tensor) else value.dense() for name, value in values.items()}


def exact_sequences(share: float, sequences: int, length: int, widest: int) -> int:
    """Return the number of sequences that also pass through the unquantized blocks, a multiple of the batch size.

    It is `share` of all, but if `share` is not zero at least `LEAST_TOKENS` tokens per column of `widest`, or all.
    """
    step = batch_size(length)
    least = max(share * sequences, LEAST_TOKENS * widest / length) if share else 0.0
    return min(sequences, math.ceil(least / step - 1e-9) * step)


def _few_tokens_noter(findings: Findings, skeleton: Skeleton) -> Callable[[str], None]:
    """Return a function that notes an expert with too few tokens; the count includes earlier, interrupted runs."""
    experts = {expert for name in skeleton.linears() if (expert := expert_of(name))}
    earlier = findings.numbers.get(FEW, 0)
    seen: set[str] = set()

    def note(name: str) -> None:
        seen.add(str(expert_of(name)))
        findings.numbers[FEW] = earlier + len(seen)
        findings.note(
            f"{findings.numbers[FEW]} of {len(experts)} experts saw fewer than {FEW_TOKENS} calibration tokens; they "
            "are calibrated on the inputs of all experts of their block. Give more or more varied text",
            FEW,
        )

    return note


def measure_importance(job: CheckedJob, run: Run) -> dict[str, NDArray[np.float32]]:
    """Return the mean squared input of every linear layer in the blocks: weight name -> (columns,) float32.

    An expert with too few tokens gets the mean over all experts of its block, with a note.
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
    """Sums (K,) of squared inputs, and the number of tokens."""

    def __init__(self) -> None:
        self.tokens, self.sums = 0, torch.zeros(())

    def add(self, x: torch.Tensor) -> None:
        self.sums = self.sums + x.to(torch.float32).square().sum(0).cpu()
        self.tokens += len(x)
