"""Error feedback for K-quants and IQ types: GPTQ-style codes and refitted scales in unchanged block formats.

ggml first quantizes each layer, weighted by the mean squared inputs. On that grid, codes are chosen again column by
column, and each error is fed forward through the input Hessian (numerics/error_feedback.py). Inputs come from the
already quantized layers (true sequential, GPTAQ). Finally the scales are refitted (ggml/scale_refit.py).

IQ2 and IQ3: each 8 (IQ3_S: 4) columns are rounded jointly to a codebook entry. All entries are searched for
the least error after feedback, so errors within these columns may cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from quantkit.calibration.activations import Activations
from quantkit.calibration.block import Block
from quantkit.calibration.channel_scales import ScaleSearch, block_values, scale_block
from quantkit.calibration.learned_codes import Tunable
from quantkit.calibration.learned_options import Learned
from quantkit.calibration.learned_rounding import refine
from quantkit.calibration.moments import LinearGroup
from quantkit.calibration.scale_tuning import Tuning, tune
from quantkit.calibration.walk import walk
from quantkit.checkpoints.spool import Spool
from quantkit.contracts.method import CheckedJob, Job
from quantkit.contracts.run import Run
from quantkit.errors import SourceError
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS, SIGN_RUN, Codebook
from quantkit.formats.gguf.ggml.kquants import KQUANTS, Bytes, Floats, KQuant, read_grid, with_codes
from quantkit.formats.gguf.ggml.packed_rows import LEARNED, KRows, PointRows, trainable
from quantkit.formats.gguf.ggml.scale_refit import refit, refit_factors
from quantkit.formats.gguf.imatrix import without_silent_runs
from quantkit.formats.gguf.plan import Plan, PlannedTensor
from quantkit.methods.gptq import SLAB_ELEMENTS
from quantkit.models.awq_mappings import Scaling, provable_scalings
from quantkit.models.skeleton import load
from quantkit.numerics.error_feedback import ColumnGrids, Feedback, FeedbackSettings, round_columns, round_groups
from quantkit.numerics.matmul import rows_together
from quantkit.numerics.quantized_weight import ScaledWeight
from quantkit.numerics.second_moments import permuted

FEEDBACK = FeedbackSettings(damp_percent=0.01, shrinkage=0.5, gptaq_share=0.25, ample_tokens=80)
TINY_SCALE = 1e-30  # replaces a scale of zero, whose codes have no effect
SCALE_POINTS = 20  # exponents tried for AWQ's scales
ROWS = 256  # rows multiplied with all points of a table at a time

Weight = Callable[[str], torch.Tensor]  # returns a layer's weight by name, float32 (N, K)


def quantize_blocks(job: CheckedJob[Any], run: Run, plan: Plan, spool: Spool) -> None:
    """Quantize every linear layer of the blocks; store packed rows, uint8 (rows, bytes) in source order, in `spool`.

    Resumes after the blocks that `spool` already holds.
    """
    options, settings = job.options, recorded(job.options)
    tensors = {part: tensor for tensor in plan.tensors for part in tensor.parts}
    restore = partial(_finished, tensors, spool)
    then = partial(_tune, job, run, tensors, spool) if options.tuned else None
    exact, ample = settings["gptaq_share"], int(settings["ample_tokens"])
    scalings = usable_scalings(job, plan) if options.awq else []
    for block in walk(job, run, exact=exact, ample=ample, restore=restore, then=then):
        scaled = _scaled(job, block, tensors, scalings[block.index], spool) if options.awq else {}
        weight = partial(_weight, job, scaled)
        layers: dict[str, Bytes] = {}
        quantize = partial(_quantize_group, job, block, tensors, layers, weight)
        block.for_each_group(quantize, keep_outputs=not options.learned)
        if options.learned:
            _refine(job, block, tensors, layers, weight)
        for name, packed in layers.items():
            spool.add(name, torch.from_numpy(packed))
        spool.finish_block(block.index, run.findings.to_values())


def recorded(options: Learned) -> dict[str, float]:
    """Return this module's settings, as manifests record them."""
    share, ample = (1.0, 0) if options.refine else (FEEDBACK.gptaq_share, FEEDBACK.ample_tokens)
    damping = {"damp_percent": FEEDBACK.damp_percent, "shrinkage": FEEDBACK.shrinkage}
    return {**damping, "gptaq_share": share, "ample_tokens": ample}


def usable_scalings(job: Job, plan: Plan) -> list[list[Scaling]]:
    """Return each block's valid scalings of channels whose tensors the file holds as they are, in search order."""
    plain = {part for tensor in plan.tensors if not tensor.is_of_heads for part in tensor.parts}
    found = []
    for index, scalings in enumerate(provable_scalings(job.skeleton, job.source.config)):
        prefix = job.skeleton.block_prefix(index)
        names = [(one, (one.before, *one.layers, *one.follow)) for one in scalings]
        found.append([one for one, parts in names if plain >= {f"{prefix}{part}.weight" for part in parts}])
    return found


def _scaled(
    job: CheckedJob[Any], block: Block, tensors: Mapping[str, PlannedTensor], scalings: list[Scaling], spool: Spool
) -> dict[str, torch.Tensor]:
    """Scale input channels as AWQ does; return the changed weights of linear layers, float32, by name.

    Other changed parameters, such as norms, are stored in `spool`.
    """
    values = block_values(job, block)
    before = dict(values)
    search = ScaleSearch(SCALE_POINTS, lambda name: partial(_tried, tensors[name]), FEEDBACK)
    scale_block(job, block, scalings, values, block.hessians(block.groups(), sequences=search.sequences(block)), search)
    changed = {name: value for name, value in values.items() if value is not before[name]}
    for name in [name for name in changed if name not in block.linears]:
        value = changed.pop(name)
        rows = value.reshape(len(value), -1).contiguous()  # a vector becomes rows of one value
        spool.add(name, torch.from_numpy(ggml.quantize(tensors[name].type, rows.cpu().numpy())))
        block.replace(name, value)
    return changed


def _weight(job: Job, scaled: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the layer's weight from `scaled`, or else from the source, float32 (N, K)."""
    return scaled[name] if name in scaled else load(job.source, job.skeleton, name).to(torch.float32)


def _tried(tensor: PlannedTensor, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Return a weight, float32 (n, K), after ggml's rounding to the tensor's type, weighted by importance (K,).

    NaN if ggml would corrupt the weight.
    """
    order = slice(None) if tensor.columns is None else torch.from_numpy(tensor.columns)
    rows, weights = weight[:, order].contiguous(), without_silent_runs(importance[order].cpu().numpy())
    try:
        packed = ggml.quantize(tensor.type, rows.cpu().numpy(), weights)
    except ValueError:
        return torch.full_like(weight, torch.nan)
    return _values(tensor, packed).to(weight.device)


def _refine(
    job: CheckedJob[Any], block: Block, tensors: Mapping[str, PlannedTensor], layers: dict[str, Bytes], weight: Weight
) -> None:
    """Learn the codes and factors of the block's K-quants, and replace them in `layers`; other types stay."""
    learnable = {
        name: KRows(tensors[name].type, packed, tensors[name].columns, block.device)
        for name, packed in layers.items()
        if tensors[name].type in LEARNED
    }
    if learnable:
        weights = {name: weight(name).to(block.device) for name in learnable}
        refined = refine(block, learnable, weights, job.options.refine_steps, job.recipe.seed)
        layers |= {name: rows.packed for name, rows in refined.items()}


def _tune(
    job: CheckedJob[Any], run: Run, tensors: Mapping[str, PlannedTensor], spool: Spool, targets: Activations
) -> None:
    """Tune the block factors of all layers in `spool`, and replace them there."""

    def rows_of(name: str) -> KRows | PointRows | None:
        tensor = tensors[name]
        return trainable(tensor.type, spool.get(name).numpy(), tensor.columns, torch.device("cpu"))

    def values(prefix: str) -> dict[str, torch.Tensor | Tunable | ScaledWeight]:
        names = [name for name in spool.names() if name.startswith(prefix)]
        return {name: rows_of(name) or _values(tensors[name], spool.get(name).numpy()) for name in sorted(names)}

    for name, factors in tune(job, run, values, Tuning(job.options.tune_steps), targets).items():
        if (rows := rows_of(name)) is not None:
            spool.replace(name, torch.from_numpy(rows.with_factors(factors).packed))


def _quantize_group(
    job: Job,
    block: Block,
    tensors: Mapping[str, PlannedTensor],
    layers: dict[str, Bytes],
    weight: Weight,
    group: LinearGroup,
) -> None:
    """Quantize linear layers with a common input; update the block's weights and add the packed rows to `layers`."""
    known = [name for name in group.names if name in tensors]  # others are rounded with the file
    if not known:
        return
    columns = tensors[known[0]].columns
    moments = _moments(group, None if columns is None else torch.from_numpy(columns))
    for name in known:
        value, kind = weight(name), tensors[name].type
        value = value if columns is None else value[:, torch.from_numpy(columns)].contiguous()
        try:
            layers[name] = quantize_layer(kind, value, moments)
        except ValueError as error:
            raise SourceError(
                f"{job.source.model}: the tensor {name} cannot be stored as {kind}: {error}. Choose other bits, "
                "or fix the checkpoint or the calibration text."
            ) from None
        block.replace(name, _values(tensors[name], layers[name]))


def _moments(group: LinearGroup, columns: torch.Tensor | None) -> Feedback:
    """Return the second moments of the group's inputs, with columns permuted to the file's order if given."""
    hessian, cross, paired = group.hessian, group.cross, group.paired
    if columns is not None:
        hessian = permuted(hessian, columns)
        cross, paired = (moment if moment is None else permuted(moment, columns) for moment in (cross, paired))
    return Feedback(hessian, cross, paired, shrinkage=FEEDBACK.shrinkage, damp_percent=FEEDBACK.damp_percent)


def _values(tensor: PlannedTensor, packed: Bytes) -> torch.Tensor:
    """Dequantize packed rows, with columns in the source's order; a vector is packed as rows of one value."""
    if len(tensor.shape) == 1:
        return torch.from_numpy(ggml.dequantize(tensor.type, packed, 1)).reshape(-1)
    values = ggml.dequantize(tensor.type, packed, tensor.shape[-1])
    return torch.from_numpy(values if tensor.columns is None else values[:, np.argsort(tensor.columns)])


def quantize_layer(name: str, weight: torch.Tensor, moments: Feedback) -> Bytes:
    """Quantize `weight`, float32 (N, K), to type `name`; types without error feedback use ggml alone.

    Raises ValueError for values that ggml would corrupt.
    """
    if name in ggml.WIDE or name == "F16":
        return ggml.quantize(name, weight.numpy())
    mean_squares = moments.importance.cpu().to(torch.float32)
    # Inputs that are always zero count a little: ggml sets weights without importance to zero.
    importance = without_silent_runs((mean_squares + 1e-6 * mean_squares.mean() + 1e-30).numpy())
    slabs = weight.split(rows_together(weight, SLAB_ELEMENTS))
    return np.concatenate([_rows(name, slab, importance, moments) for slab in slabs])


def _rows(name: str, weight: torch.Tensor, importance: Floats, moments: Feedback) -> Bytes:
    target = moments.target(weight.to(moments.order.device))
    packed = ggml.quantize(name, np.ascontiguousarray(target.cpu().numpy()), importance)
    if name in KQUANTS:
        return _with_feedback(KQUANTS[name], packed, target, moments)
    if name in CODEBOOKS:
        return _with_points(CODEBOOKS[name], packed, target, moments)
    return packed


def _with_feedback(kind: KQuant, packed: Bytes, target: torch.Tensor, moments: Feedback) -> Bytes:
    """Choose new K-quant codes with error feedback for `target`, float32 (n, K), on ggml's grid; refit the scales."""
    scales, minima = (torch.from_numpy(part).to(target.device) for part in read_grid(kind.name, packed))
    scales = torch.where(scales == 0, TINY_SCALE, scales)
    zeros = torch.full_like(scales, -kind.steps[0]) if kind.steps else minima / scales
    codes = torch.empty(target.shape[::-1], dtype=torch.uint8, device=target.device)
    codes[moments.order] = round_columns(
        target.index_select(1, moments.order).T.contiguous(),
        moments.factor,
        ColumnGrids(scales.T.contiguous(), zeros.T.contiguous(), moments.order // kind.group, (1 << kind.bits) - 1),
        nearest=_nearest_of(kind.steps, target.device) if kind.steps else None,
    )
    if kind.steps:
        numbers = torch.tensor(kind.steps, device=target.device) - kind.steps[0]
        codes = torch.searchsorted(numbers, codes).to(torch.uint8)
    rounded = with_codes(kind.name, packed, np.ascontiguousarray(codes.T.cpu().numpy()))
    return refit(kind.name, rounded, target, moments.hessian)


def _nearest_of(steps: Sequence[int], device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that rounds each value to the nearest of `steps`."""
    values = torch.tensor(steps, dtype=torch.float32, device=device)
    between = (values[1:] + values[:-1]) / 2
    return lambda x: values[torch.bucketize(x, between)]


def _finished(
    tensors: Mapping[str, PlannedTensor], spool: Spool, index: int, prefix: str
) -> dict[str, torch.Tensor] | None:
    """Return the dequantized weights of block `index` if an interrupted run finished it, else None."""
    if index >= spool.finished:
        return None
    done = [name for name in spool.names() if name.startswith(prefix)]
    return {name: _values(tensors[name], spool.get(name).numpy()) for name in done}


def _with_points(codebook: Codebook, packed: Bytes, target: torch.Tensor, moments: Feedback) -> Bytes:
    """Choose new codebook entries and signs for `target`, float32 (n, K), on ggml's scales; refit the factors."""
    size = SIGN_RUN if codebook.even else codebook.size  # signs with a common parity are chosen together
    order, factor = moments.by_group(size)
    rounding = _Rounding(codebook, torch.from_numpy(codebook.scales(packed)).to(target.device), order)
    round_groups(target.index_select(1, order).T.contiguous(), factor, size, rounding.nearest)
    rounded = codebook.with_points(packed, rounding.indices(), rounding.signs())
    return refit_factors(codebook, rounded, target, moments.hessian)


class _Rounding:
    """Codebook entries and signs chosen so far for n rows; `scales` are (n, K / run), `order` (K,) permutes columns."""

    def __init__(self, codebook: Codebook, scales: torch.Tensor, order: torch.Tensor) -> None:
        rows, device = len(scales), scales.device
        self._codebook, self._scales, self._columns = codebook, scales, order.tolist()
        self._table = torch.from_numpy(codebook.table).to(device)
        first, second = torch.triu_indices(codebook.size, codebook.size, 1, device=device)
        self._pairs = first, second
        # Terms of a point's error, which is linear in them: its values and all products of two values.
        squares = torch.cat([self._table[:, first] * self._table[:, second], self._table.square()], 1)
        self._features = torch.cat([self._table, squares], 1).T.contiguous()
        self._indices = torch.zeros(rows, len(order) // codebook.size, dtype=torch.int32, device=device)
        self._minus = torch.zeros(rows, len(order), dtype=torch.bool, device=device)

    def indices(self) -> np.ndarray:
        """Return the codebook indices, uint16 (n, K / size)."""
        return self._indices.cpu().numpy().astype(np.uint16)

    def signs(self) -> Bytes:
        """Return the sign bits (1: minus), uint8 (n, K / 8)."""
        return np.packbits(self._minus.cpu().numpy(), axis=1, bitorder="little")

    def nearest(self, first: int, moved: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
        """Round `moved` (columns, n), consecutive columns from position `first` of the order; return their values."""
        column, count = self._columns[first], len(moved)
        values = torch.empty_like(moved)
        for at in range(0, moved.shape[1], ROWS):
            rows = slice(at, at + ROWS)
            scale = self._scales[rows, column // self._codebook.run, None]
            x = torch.where(scale == 0, 0.0, moved[:, rows].T / scale)
            minus = x < 0
            if self._codebook.even:
                cheapest = (x.abs() * metric.diagonal()).argmin(1, keepdim=True)
                odd = (minus.sum(1, keepdim=True) % 2).bool()
                minus.scatter_(1, cheapest, minus.gather(1, cheapest) ^ odd)
            points = self._points(x, torch.where(minus, -1.0, 1.0), metric, rows, column // self._codebook.size)
            self._minus[rows, column : column + count] = minus
            values[:, rows] = (points * scale).T
        return values

    def _points(
        self, x: torch.Tensor, signs: torch.Tensor, metric: torch.Tensor, rows: slice, index: int
    ) -> torch.Tensor:
        """Return the signed codebook values nearest to x (r, columns) in the given metric.

        If the columns hold several entries, all but the last are re-chosen once with the others fixed.
        """
        size = self._codebook.size
        error = torch.zeros_like(x)
        parts = [slice(k, k + size) for k in range(0, x.shape[1], size)]
        for part in parts + parts[:-1]:
            error[:, part] = 0
            cross = error @ metric[:, part]
            chosen = self._best(x[:, part], signs[:, part], metric[part, part], cross)
            self._indices[rows, index + part.start // size] = chosen.to(torch.int32)
            error[:, part] = x[:, part] - signs[:, part] * self._table[chosen]
        return x - error

    def _best(self, x: torch.Tensor, signs: torch.Tensor, metric: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
        """Return per row the index (r,) of the entry p with the least e metric e^T + 2 e cross^T, e = x - signs * p."""
        first, second = self._pairs
        linear = (x @ metric + cross) * signs * -2
        pairs = signs[:, first] * signs[:, second] * (2 * metric[first, second])
        squares = metric.diagonal().expand(len(x), -1)
        return _least(torch.cat([linear, pairs, squares], 1) @ self._features)


def _least(scores: torch.Tensor) -> torch.Tensor:
    """Return each row's argmin of scores (r, P); on a CPU numpy is ten times as fast as torch."""
    return torch.from_numpy(scores.numpy().argmin(1)) if scores.device.type == "cpu" else scores.argmin(1)
