"""K-quants and IQ types with error feedback: codes by GPTQ's rule, scales refitted to them, the same bytes and readers.

Each linear layer's blocks are first quantized by ggml itself, weighted by the inputs' mean squares. On that grid the
codes are then chosen anew, column by column, each error fed forward through the inputs' Hessian
(numerics/error_feedback.py), on inputs from the layers quantized before (true sequential, GPTAQ). Then the scales
follow (ggml/scale_refit.py). IQ2 and IQ3 types: codebook_feedback.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from quantkit.calibration.block import Block
from quantkit.calibration.moments import LinearGroup
from quantkit.calibration.walk import walk
from quantkit.checkpoints.spool import Spool
from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.errors import SourceError
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS
from quantkit.formats.gguf.ggml.kquants import KQUANTS, Bytes, Floats, KQuant, read_grid, with_codes
from quantkit.formats.gguf.ggml.scale_refit import refit
from quantkit.formats.gguf.imatrix import without_silent_runs
from quantkit.formats.gguf.plan import Plan, PlannedTensor
from quantkit.methods import gptq
from quantkit.methods.gguf.codebook_feedback import with_feedback
from quantkit.models.skeleton import load
from quantkit.numerics.error_feedback import Feedback, round_columns
from quantkit.numerics.matmul import rows_together
from quantkit.numerics.second_moments import permuted

TINY_SCALE = 1e-30  # instead of a scale of zero, whose codes do not matter


def quantize_blocks(job: Job, run: Run, plan: Plan, spool: Spool) -> None:
    """Quantize every linear layer of the blocks into `spool`: packed rows (rows, bytes) uint8 in the source's order.

    Goes on after the blocks that `spool` holds already.
    """
    defaults = gptq.Options()
    tensors = {part: tensor for tensor in plan.tensors for part in tensor.parts}
    share = gptq.exact_share(defaults)
    restore = partial(_finished, tensors, spool)
    for block in walk(job, run, exact=share, ample=defaults.ample_tokens, restore=restore):
        block.for_each_group(partial(_quantize_group, job, block, tensors, spool))
        spool.finish_block(block.index, run.findings.to_values())


def _quantize_group(
    job: Job, block: Block, tensors: Mapping[str, PlannedTensor], spool: Spool, group: LinearGroup
) -> None:
    known = [name for name in group.names if name in tensors]  # others lie otherwise in the file, and are rounded there
    columns = next((tensors[name].columns for name in known), None)
    moments = _moments(group, None if columns is None else torch.from_numpy(columns)) if known else None
    for name in known:
        assert moments is not None
        weight, kind = load(job.source, job.skeleton, name).to(torch.float32), tensors[name].type
        weight = weight if columns is None else weight[:, torch.from_numpy(columns)].contiguous()
        try:
            packed = quantize_layer(kind, weight, moments)
        except ValueError as error:
            raise SourceError(
                f"{job.source.model}: the tensor {name} cannot be stored as {kind}: {error}. Choose other bits, "
                "or mend the checkpoint or the calibration text."
            ) from None
        spool.add(name, torch.from_numpy(packed))
        block.replace(name, _values(tensors[name], packed))


def _moments(group: LinearGroup, columns: torch.Tensor | None) -> Feedback:
    """What the group's inputs say, of columns in the order of the file."""
    moments = group.hessian, group.cross, group.paired
    if columns is None:
        return Feedback(*moments)
    return Feedback(*(None if moment is None else permuted(moment, columns) for moment in moments))  # type: ignore[arg-type]


def _values(tensor: PlannedTensor, packed: Bytes) -> torch.Tensor:
    """The values of a layer as it is packed, its columns as the source has them."""
    values = ggml.dequantize(tensor.type, packed, tensor.shape[-1])
    return torch.from_numpy(values if tensor.columns is None else values[:, np.argsort(tensor.columns)])


def quantize_layer(name: str, weight: torch.Tensor, moments: Feedback) -> Bytes:
    """Pack `weight` (N, K) float32 as type `name`; types without feedback are rounded by ggml alone.

    Raises ValueError for values that ggml would spoil.
    """
    if name in ggml.WIDE or name == "F16":
        return ggml.quantize(name, weight.numpy())
    mean_squares = moments.importance.cpu().to(torch.float32)
    # Inputs that never fire count a little: ggml turns weights without importance to zero.
    importance = without_silent_runs((mean_squares + 1e-6 * mean_squares.mean() + 1e-30).numpy())
    slabs = weight.split(rows_together(weight, gptq.SLAB_ELEMENTS))
    return np.concatenate([_rows(name, slab, importance, moments) for slab in slabs])


def _rows(name: str, weight: torch.Tensor, importance: Floats, moments: Feedback) -> Bytes:
    target = moments.target(weight.to(moments.order.device))
    packed = ggml.quantize(name, np.ascontiguousarray(target.cpu().numpy()), importance)
    if name in KQUANTS:
        return _with_feedback(KQUANTS[name], packed, target, moments)
    if name in CODEBOOKS:
        return with_feedback(CODEBOOKS[name], packed, target, moments)
    return packed


def _with_feedback(kind: KQuant, packed: Bytes, target: torch.Tensor, moments: Feedback) -> Bytes:
    """Packed rows of ggml's with codes and scales for `target` (n, K) float32."""
    scales, minima = (torch.from_numpy(part).to(target.device) for part in read_grid(kind.name, packed))
    scales = torch.where(scales == 0, TINY_SCALE, scales)
    zeros = torch.full_like(scales, -kind.steps[0]) if kind.steps else minima / scales
    codes = torch.empty(target.shape[::-1], dtype=torch.uint8, device=target.device)
    codes[moments.order] = round_columns(
        target.index_select(1, moments.order).T.contiguous(),
        moments.factor,
        scales.T.contiguous(),
        zeros.T.contiguous(),
        moments.order // kind.group,
        (1 << kind.bits) - 1,
        nearest=_nearest_of(kind.steps, target.device) if kind.steps else None,
    )
    if kind.steps:
        numbers = torch.tensor(kind.steps, device=target.device) - kind.steps[0]
        codes = torch.searchsorted(numbers, codes).to(torch.uint8)
    rounded = with_codes(kind.name, packed, np.ascontiguousarray(codes.T.cpu().numpy()))
    return refit(kind.name, rounded, target, moments.hessian)


def _nearest_of(steps: Sequence[int], device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """The nearest of the steps for each value."""
    values = torch.tensor(steps, dtype=torch.float32, device=device)
    between = (values[1:] + values[:-1]) / 2
    return lambda x: values[torch.bucketize(x, between)]


def _finished(
    tensors: Mapping[str, PlannedTensor], spool: Spool, index: int, prefix: str
) -> dict[str, torch.Tensor] | None:
    """The values of block `index` as an earlier, interrupted run has packed them, or None."""
    if index >= spool.finished:
        return None
    done = [name for name in spool.names() if name.startswith(prefix)]
    return {name: _values(tensors[name], spool.get(name).numpy()) for name in done}
