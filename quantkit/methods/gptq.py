"""GPTQ: round column by column, feeding each error forward into the remaining columns.

Paper: Frantar et al., GPTQ, arXiv:2210.17323, algorithm 1 (lazy block updates, Cholesky form).
Differences: scales are searched with Hessian-diagonal weights instead of min/max; columns are processed by importance
even with contiguous groups (static groups), so g_idx stays sorted.
Grids are integers or 4-bit floats: NVFP4, and MXFP4 of the OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from pydantic import Field

from quantkit.calibration.block import Block
from quantkit.calibration.kv_scales import add_kv_scales
from quantkit.calibration.learned_options import Learned
from quantkit.calibration.learned_rounding import refine, refuse_few_sequences
from quantkit.calibration.moments import LinearGroup
from quantkit.calibration.scale_tuning import refining_bytes, tune_scales
from quantkit.calibration.walk import exact_sequences, finished_block, walk
from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.methods._float4 import BITS as FLOAT4
from quantkit.methods._float4 import OTHER_KINDS, check_float4, grid_of
from quantkit.methods._layer_bits import BIT_SEARCH, KIND, GroupedOptions, base_bits, check_bits
from quantkit.methods._targets import AUTO
from quantkit.models.skeleton import load
from quantkit.numerics.error_feedback import ColumnGrids, Feedback, FeedbackSettings, RoundingErrors, round_columns
from quantkit.numerics.grid import Grid, fit_grid
from quantkit.numerics.matmul import elements_together, rows_together
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight
from quantkit.numerics.scale_refit import PartedHessian, Refit, RoundedLayer
from quantkit.numerics.scaled_rounding import Float4, float4_with_feedback
from quantkit.system.ranks import ALONE, Shards

SLAB_ELEMENTS = 1 << 24  # elements of rows quantized together
JOINED_ELEMENTS = 1 << 22  # elements of layers with the same inputs, quantized as one


class Options(Learned, GroupedOptions):
    """Options of GPTQ."""

    sym: bool = Field(
        True, description="symmetric grid; vLLM loads only symmetric ones in GPTQ's format; default in mlx: false"
    )
    desc_act: bool = Field(False, description="form groups along the activation order (g_idx); vLLM refuses it")
    static_groups: bool = Field(
        True, description="fix all scales first; columns go by importance, groups stay contiguous"
    )
    damp_percent: float = Field(0.01, gt=0, lt=1, description="share of the mean diagonal added to the Hessian")
    shrinkage: float = Field(0.5, ge=0, description="share of each diagonal entry added to it, against overfitting")
    scale_search: bool = Field(True, description="search scales weighted by each column's error; false: min/max")
    refit: bool = Field(True, description="fit the scales to the layer's outputs once more after rounding")
    rounds: int = Field(
        2, ge=1, le=16, description="roundings; each but the first with the scales refitted to the codes before it"
    )
    gptaq: bool = Field(True, description="let each layer compensate for errors of quantized layers before it")
    gptaq_share: float = Field(
        0.25, gt=0, le=1, description="share of the calibration sequences that measure those errors"
    )
    ample_tokens: int = Field(
        80,
        ge=0,
        description="use every second token if that leaves this many per column; 0 or with refine: all tokens",
    )
    true_sequential: bool = Field(True, description="calibrate each layer of a block on the quantized ones before it")

    @property
    def feedback(self) -> FeedbackSettings:
        return FeedbackSettings(**{field.name: getattr(self, field.name) for field in fields(FeedbackSettings)})


class Solver:
    """Quantizes the weights of linear layers with the same input; owns and modifies the moments (K, K).

    `group_size` is in columns; -1 is the whole row. With a cross moment, outputs approximate those on unquantized
    inputs, which compensates for errors of earlier layers. `rows` is the total row count of all weights.
    """

    def __init__(
        self,
        group: LinearGroup,
        bits: int,
        group_size: int,
        settings: FeedbackSettings,
        rows: int | None = None,
        shards: Shards = ALONE,
    ) -> None:
        columns = len(group.hessian)
        self.bits, self.settings = bits, settings
        self.group = columns if group_size == -1 else group_size
        self.moments = Feedback(
            group.hessian,
            group.cross,
            group.paired,
            by_importance=settings.desc_act or (settings.static_groups and self.group < columns),
            shrinkage=settings.shrinkage,
            damp_percent=settings.damp_percent,
            by_rows=shards.by_rows,
            rows=rows,
        )
        self.natural = torch.arange(columns, device=group.hessian.device)
        self.g_idx = self.natural // self.group
        if settings.desc_act:
            self.g_idx = torch.empty_like(self.natural)
            self.g_idx[self.moments.order] = self.natural // self.group
        self._parted: PartedHessian | None = None  # for all rows

    def quantize(self, weight: torch.Tensor) -> GroupedWeight:
        """Quantize `weight`, float32 (N, K), a slab of rows at a time."""
        slabs = [self._rows(rows) for rows in weight.split(rows_together(weight, SLAB_ELEMENTS))]
        codes, scales, zeros = (torch.cat([getattr(s, name) for s in slabs]) for name in ("codes", "scales", "zeros"))
        return GroupedWeight(codes, scales, zeros, self.g_idx, self.bits)

    def _fit(self, part: torch.Tensor, members: torch.Tensor) -> Grid:
        weights = self.moments.costs[members]
        return fit_grid(
            part,
            min(self.group, part.shape[1]),
            self.bits,
            symmetric=self.settings.sym,
            importance=weights + 1e-6 * weights.mean() + 1e-30,
            search=self.settings.scale_search,
            least_zero=1,
        )

    def _rows(self, weight: torch.Tensor) -> GroupedWeight:
        rows, columns = weight.shape
        order, group = self.moments.order, self.group
        weight = self.moments.target(weight)
        scales = torch.empty(columns // group, rows, device=weight.device)
        zeros = torch.empty_like(scales)

        def fit(column: int, ahead: torch.Tensor) -> None:
            members = order[column : column + group]
            grid, g = self._fit(ahead.T, members), int(self.g_idx[members[0]])
            scales[g], zeros[g] = grid.scales[:, 0].to(torch.float32), grid.zeros[:, 0].to(torch.float32)

        fixed = self.settings.static_groups or group == columns
        if fixed:
            # Regroup so that each group's columns are contiguous, in any order that the format stores.
            members = order if self.settings.desc_act else self.natural
            grid = self._fit(weight.index_select(1, order) if self.settings.desc_act else weight, members)
            scales, zeros = grid.scales.to(torch.float32).T.contiguous(), grid.zeros.to(torch.float32).T.contiguous()
        ahead = weight.index_select(1, order).T.contiguous()
        layer = self._rounded(ahead, scales, zeros, *(() if fixed else (fit, group)))
        if not self.settings.refit:
            return layer[0]
        if self._parted is None:
            self._parted = PartedHessian(self.moments.hessian, layer[0].group_order())
        refit = Refit(weight, self._parted)
        del weight

        def requantize(fitted: GroupedWeight) -> RoundedLayer:
            return self._rounded(ahead, fitted.scales.to(torch.float32).T.contiguous(), zeros)

        return refit.rounds(layer, self.settings.rounds, requantize)

    def _rounded(
        self,
        ahead: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        fit: Callable[[int, torch.Tensor], None] | None = None,
        group: int = 1,
    ) -> RoundedLayer:
        """Round the transposed weight, float32 (K, N) in rounding order, on scales and zeros, float32 (G, N)."""
        moments, order = self.moments, self.moments.order
        codes = torch.empty(ahead.shape, dtype=torch.uint8, device=ahead.device)
        errors = RoundingErrors(ahead) if self.settings.refit else None
        grids = ColumnGrids(scales, zeros, self.g_idx[order], (1 << self.bits) - 1)
        codes[order] = round_columns(ahead, moments.factor, grids, fit, group, record=errors)
        layer = GroupedWeight(
            codes.T.contiguous(), scales.T.to(torch.float16), zeros.T.to(torch.uint8), self.g_idx, self.bits
        )
        del codes
        return layer, None if errors is None else moments.slopes(errors)


def in_shares(
    quantize: Callable[[torch.Tensor], GroupedWeight], shards: Shards
) -> Callable[[torch.Tensor], GroupedWeight]:
    """Distribute `quantize` over ranks that all hold the weight (N, K): each rounds some rows, all get the result."""

    def shared(weight: torch.Tensor) -> GroupedWeight:
        rows = len(weight)
        if rows < shards.size or shards.size == 1:
            return quantize(weight)
        start, stop = shards.rows(rows)
        part = quantize(weight[start:stop])
        codes, scales, zeros = (shards.joined_rows(values, rows) for values in (part.codes, part.scales, part.zeros))
        return replace(part, codes=codes, scales=scales, zeros=zeros)

    return shared


Layer = TypeVar("Layer", GroupedWeight, ScaledWeight)


def quantize_each(
    quantize: Callable[[torch.Tensor], Layer],
    sizes: dict[str, int],
    weight: Callable[[str], torch.Tensor],
    device: torch.device,
) -> Iterator[tuple[str, Layer]]:
    """Quantize layers, given their element counts by name; `weight` loads each one, float32 (N, K) on `device`.

    Small layers are concatenated: rows are independent, so one column loop serves them all.
    """
    for names in _together(sizes, elements_together(JOINED_ELEMENTS, device)):
        weights = [weight(name) for name in names]
        joined = quantize(torch.cat(weights) if len(weights) > 1 else weights[0])
        yield from zip(names, joined.split([len(value) for value in weights]), strict=True)


def _together(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Group consecutive names while the group has at most `most` elements."""
    groups: list[list[str]] = []
    total = 0
    for name, size in sizes.items():
        total += size
        if groups and total <= most:
            groups[-1].append(name)
        else:
            groups.append([name])
            total = size
    return groups


def _layout(job: Job[Options]) -> Layout:
    options = job.options
    settings = {name: getattr(options, name) for name in ("static_groups", "damp_percent", "true_sequential")}
    layout = Layout(base_bits(job), options.group_size, options.sym, options.desc_act, settings=settings)
    return replace(layout, head_bits=options.head_bits)


def _check(job: Job[Options]) -> Checked[Layout]:
    if job.bits in FLOAT4:
        return check_float4(job)
    if job.options.refine:
        refuse_few_sequences(job)
    return check_bits(job, _layout(job))


def refuse_ranks(job: Job) -> str | None:
    """Return why several ranks cannot share this job, or None."""
    return "one process fits all 4-bit floats" if job.bits in FLOAT4 else None


def exact_share(options: Options) -> float:
    """Return the share of calibration sequences that also run through the unquantized model."""
    if options.refine:
        return 1.0
    return options.gptaq_share if options.gptaq and options.true_sequential else 0.0


def streams(job: CheckedJob, shapes: Shapes, share: float) -> float:
    """Return how many copies of the activations are held if a `share` also runs through the unquantized model."""
    spec = job.recipe.calibration
    sequences, length = (spec.sequences, spec.length) if job.calibration is None else job.calibration.ids.shape
    return 1 + exact_sequences(share, sequences, length, shapes.widest) / sequences


def feedback_bytes(shapes: Shapes, device: str, gptaq: bool = True) -> int:
    """Return the peak bytes of error feedback: moments and factors of one layer group, and a slab of rows."""
    # H and the cross moment, plus two squares in float64 for the factor (or the factor and the correction's
    # two sides); two squares fewer while rows are rounded, and one fewer without the cross moment.
    squares = 6 if gptaq else 5
    work, place = 0, torch.device(device)
    joined, slab = (elements_together(number, place) for number in (JOINED_ELEMENTS, SLAB_ELEMENTS))
    for rows, columns in shapes.stages:
        square = 4 * columns**2
        largest = max(height * width for height, width in shapes.layers if width == columns)
        layer = 4 * max(largest, min(rows * columns, joined))
        work = max(work, squares * square, (squares - 2) * square + layer + 9 * min(layer, 4 * slab))
    return work


def _peak_memory(job: CheckedJob[Options, Layout], shapes: Shapes) -> PeakMemory:
    options = job.options
    work = feedback_bytes(shapes, job.device, options.gptaq)
    work = max(work, refining_bytes(options, shapes))
    return PeakMemory(streams(job, shapes, exact_share(options)), options.true_sequential, work)


def _quantize_group(
    job: CheckedJob[Options, Layout],
    block: Block,
    layers: dict[str, GroupedWeight] | dict[str, ScaledWeight],
    float4: Float4 | None,
    group: LinearGroup,
) -> None:
    """Quantize linear layers with a common input; update the block's weights and add the results to `layers`."""
    options = job.options
    rows = sum(block.linears[name].out_features for name in group.names)
    if not options.gptaq:
        group = replace(group, cross=None, paired=None)
    quantize: Any
    if float4 is None:
        layout = job.checked.plan
        bits = layout.bits_of(group.names[0])  # layers with the same inputs have the same bits
        solver = Solver(group, bits, int(layout.group_size), options.feedback, rows, job.shards)
        quantize = in_shares(solver.quantize, job.shards)
    else:
        moments = Feedback(
            group.hessian, group.cross, group.paired,
            shrinkage=options.shrinkage, damp_percent=options.damp_percent, rows=rows,
        )  # fmt: skip
        quantize = partial(float4_with_feedback, moments=moments, grid=float4, search=options.scale_search)
    sizes = {name: block.linears[name].weight.numel() for name in group.names}

    def weight(name: str) -> torch.Tensor:
        return load(job.source, job.skeleton, name).to(block.device, torch.float32)

    for name, layer in quantize_each(quantize, sizes, weight, block.device):
        layers[name] = layer
        block.replace(name, layer.dense())


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    options = job.options
    with job.open_writer(run, job.checked.plan) as writer:
        for block in walk(
            job,
            run,
            exact=exact_share(options),
            ample=0 if options.refine else options.ample_tokens,
            restore=partial(finished_block, writer),
            then=partial(tune_scales, job, run, writer, options.tune_steps) if options.tuned else None,
        ):
            layers: dict[str, Any] = {}
            float4 = grid_of(job, block.linears) if job.bits in FLOAT4 else None
            quantize = partial(_quantize_group, job, block, layers, float4)
            if options.true_sequential:
                block.for_each_group(quantize, keep_outputs=not options.learned)
            else:
                groups = block.groups()
                hessians = block.hessians(groups)
                for names in groups:
                    quantize(LinearGroup(names, hessians[names[0]]))
            if options.learned:
                weights = {
                    name: load(job.source, job.skeleton, name).to(block.device, torch.float32) for name in layers
                }
                layers = refine(block, layers, weights, options.refine_steps, job.recipe.seed)
            for name, layer in layers.items():
                writer.add(name, layer.cpu())
            writer.finish_block(block.index)
        add_kv_scales(job, run, writer)


METHOD = Method(
    name="gptq",
    summary="error feedback through the inputs' Hessian",
    reference="arXiv:2210.17323",
    bits=("2", "3", "4", "6", "8", *FLOAT4, AUTO),
    default_bits="4",
    Options=Options,
    makes=Content.GROUPED_CODES,
    default_format="gptq",
    check=_check,
    write=_write,
    calibrated=lambda _options: True,
    peak_memory=_peak_memory,
    other_kinds=OTHER_KINDS | KIND,
    refuse_ranks=refuse_ranks,
    bit_search=BIT_SEARCH,
)
