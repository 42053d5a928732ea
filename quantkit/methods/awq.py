"""AWQ: scale up input channels with large activations, fold the inverse into the layer before, then round.

Paper: Lin et al., AWQ, arXiv:2306.00978 (section 3.2; clipping as in its code release). Clipping is weighted by the
Hessian's diagonal; calibration/channel_scales.py has the search of scales.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch
from pydantic import Field

from quantkit.calibration.block import Block
from quantkit.calibration.channel_scales import (
    Rounded,
    ScaleSearch,
    block_values,
    scale_block,
    scaling_bytes,
    unscaled_notes,
)
from quantkit.calibration.kv_scales import add_kv_scales
from quantkit.calibration.learned_options import Learned
from quantkit.calibration.learned_rounding import refine, refuse_few_sequences
from quantkit.calibration.moments import LinearGroup
from quantkit.calibration.scale_tuning import refining_bytes, tune_scales
from quantkit.calibration.walk import finished_block, walk
from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import FEEDBACK_RECORD, CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.methods._layer_bits import BIT_SEARCH, KIND, GroupedOptions, base_bits, check_bits
from quantkit.methods._targets import AUTO
from quantkit.methods.gptq import Solver, feedback_bytes, in_shares, quantize_each, streams
from quantkit.models.awq_mappings import provable_scalings
from quantkit.numerics.error_feedback import FeedbackSettings
from quantkit.numerics.grid import Grid, cast_finite, round_to_grid, round_to_nearest
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.numerics.scale_refit import PartedHessian, Refit, RoundedLayer

BITS = 4
# Of rounding with error feedback, which has more settings than AWQ has options.
FEEDBACK = FeedbackSettings(damp_percent=0.01, shrinkage=0.5, gptaq_share=0.25, ample_tokens=80)


class Options(Learned, GroupedOptions):
    """Options of AWQ."""

    sym: bool = Field(False, description="symmetric grid, without zero points")
    apply_clip: bool = Field(True, description="search a clipped range for each group")
    rounding: Literal["nearest", "gptq"] = Field(
        "gptq", description="how to round the scaled weights: with GPTQ's error feedback, or to nearest as in the paper"
    )
    refit: bool = Field(True, description="fit the scales to the layer's outputs once more after rounding")
    rounds: int = Field(
        2, ge=1, le=16, description="roundings; each but the first with the scales refitted to the codes before it"
    )
    n_grid: int = Field(20, ge=2, le=100, description="number of exponents tried between 0 and 1")

    @property
    def feedback(self) -> FeedbackSettings | None:
        if self.rounding != "gptq":
            return None
        return replace(FEEDBACK, sym=self.sym, scale_search=self.apply_clip, refit=self.refit, rounds=self.rounds)


@dataclass(frozen=True)
class PlainRounding:
    """Rounding to nearest on grids of `bits` bits whose zero points are at least `least_zero`.

    `clip`: shrink a group's range where that lowers its error.
    """

    group_size: int
    symmetric: bool = False
    bits: int = BITS
    least_zero: int = 0
    clip: bool = False

    def tried(self, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """Return `weight` after rounding with a quick search; arguments as in `round`."""
        return self.round(weight, importance, quick=True).dense()

    def round(self, weight: torch.Tensor, importance: torch.Tensor, quick: bool = False) -> GroupedWeight:
        """Round `weight`, float32 (N, K); `importance` (K,) weights range-search errors, `quick` as in `fit_grid`."""
        search = {"importance": importance, "search": "quick" if quick else True} if self.clip else {}
        grids = {"symmetric": self.symmetric, "least_zero": self.least_zero}
        return round_to_nearest(weight, self.group_size, self.bits, **grids, **search)


def refitted(weight: torch.Tensor, hessian: PartedHessian, layer: GroupedWeight, rounds: int) -> GroupedWeight:
    """Refit the scales of `layer` to the outputs of `weight`, float32 (N, K), and round again: `rounds` roundings."""

    def requantize(fitted: GroupedWeight) -> RoundedLayer:
        grid = Grid(fitted.scales, fitted.zeros, fitted.bits)
        codes = round_to_grid(weight, grid, weight.shape[1] // fitted.scales.shape[1])
        return replace(fitted, codes=codes), None

    return Refit(weight, hessian).rounds((layer, None), rounds, requantize)


def _check(job: Job[Options]) -> Checked[Layout]:
    options = job.options
    if options.refine:
        refuse_few_sequences(job)
    layout = Layout(base_bits(job), options.group_size, options.sym, head_bits=options.head_bits)
    checked = check_bits(job, layout)
    record = {} if options.feedback is None else {FEEDBACK_RECORD: asdict(options.feedback)}
    scalings = provable_scalings(job.skeleton, job.source.config)
    notes = (*checked.notes, *unscaled_notes(job, scalings))
    return replace(checked, options={**checked.options, **record}, notes=notes)


def _peak_memory(job: CheckedJob[Options, Layout], shapes: Shapes) -> PeakMemory:
    with_feedback = job.options.rounding == "gptq"
    work = scaling_bytes(shapes)  # later, rounding takes each weight
    if with_feedback:
        work = max(work, feedback_bytes(shapes, job.device))
    work = max(work, refining_bytes(job.options, shapes))
    return PeakMemory(streams(job, shapes, _exact_share(job.options)), with_feedback, work)


def _exact_share(options: Options) -> float:
    """Return the share of calibration sequences that also run through the unquantized model."""
    if options.refine:
        return 1.0
    return 0.0 if options.feedback is None else options.feedback.gptaq_share


def _search(job: CheckedJob[Options, Layout]) -> ScaleSearch:
    """Return the search of scales; its trials round to nearest, on the layers' own grids."""
    options, plan = job.options, job.checked.plan

    def rounded(name: str) -> Rounded:
        bits = plan.bits_of(name)
        return PlainRounding(int(plan.group_size), options.sym, bits, clip=options.apply_clip).tried

    return ScaleSearch(options.n_grid, rounded, options.feedback)


def _quantize_group(
    job: CheckedJob[Options, Layout],
    block: Block,
    values: dict[str, torch.Tensor],
    layers: dict[str, GroupedWeight],
    group: LinearGroup,
) -> None:
    """Round linear layers with a common input: to nearest with clipped ranges, or with GPTQ's error feedback."""
    options, plan = job.options, job.checked.plan
    bits = plan.bits_of(group.names[0])  # layers with the same inputs have the same bits
    if options.feedback is not None:
        rows = sum(len(values[name]) for name in group.names)
        solver = Solver(group, bits, int(plan.group_size), options.feedback, rows, job.shards)
        sizes = {name: values[name].numel() for name in group.names}
        layers |= quantize_each(in_shares(solver.quantize, job.shards), sizes, values.pop, block.device)
    else:
        rounding = PlainRounding(int(plan.group_size), plan.symmetric, bits, plan.least_zero, options.apply_clip)
        parted = PartedHessian(group.hessian) if options.refit else None

        def rounded(weight: torch.Tensor) -> GroupedWeight:
            layer = rounding.round(weight, torch.diagonal(group.hessian))
            return layer if parted is None else refitted(weight, parted, layer, options.rounds)

        layers |= {name: in_shares(rounded, job.shards)(values.pop(name)) for name in group.names}
    for name in group.names:
        block.replace(name, layers[name].dense())


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    options = job.options
    scalings, search = provable_scalings(job.skeleton, job.source.config), _search(job)
    with job.open_writer(run, job.checked.plan) as writer:
        for block in walk(
            job,
            run,
            exact=_exact_share(options),
            ample=0 if options.refine else FEEDBACK.ample_tokens,
            restore=partial(finished_block, writer),
            then=partial(tune_scales, job, run, writer, options.tune_steps) if options.tuned else None,
        ):
            values, groups = block_values(job, block), block.groups()
            hessians = block.hessians(groups, sequences=search.sequences(block))
            scale_block(job, block, scalings[block.index], values, hessians, search)
            for name, value in values.items():
                if name not in block.linears:
                    values[name] = cast_finite(value.cpu(), torch.float16, f"{name} of {job.source.model}")
                block.replace(name, values[name])
            scaled = {name: values[name] for names in groups for name in names}
            layers: dict[str, GroupedWeight] = {}
            if options.feedback is not None:
                hessians.clear()
                quantize = partial(_quantize_group, job, block, values, layers)
                block.for_each_group(quantize, keep_outputs=not options.learned)
            else:
                for names in groups:
                    _quantize_group(job, block, values, layers, LinearGroup(names, hessians.pop(names[0])))
            if options.learned:
                layers = refine(block, layers, scaled, options.refine_steps, job.recipe.seed)
            for name, value in values.items():
                writer.add(name, value)
            for name, layer in layers.items():
                writer.add(name, layer.cpu())
            writer.finish_block(block.index)
        add_kv_scales(job, run, writer)


METHOD = Method(
    name="awq",
    summary="activation-aware channel scaling",
    reference="arXiv:2306.00978",
    bits=("2", "3", "4", "6", "8", AUTO),
    default_bits="4",
    Options=Options,
    makes=Content.GROUPED_CODES,
    default_format="awq",
    check=_check,
    write=_write,
    weights_comparable=lambda _options: False,
    calibrated=lambda _options: True,
    peak_memory=_peak_memory,
    other_kinds=KIND | dict.fromkeys(("2", "3", "8"), KIND[AUTO]),  # AWQ's own format holds only 4 bits
    bit_search=BIT_SEARCH,
    refuse_ranks=lambda _job: None,
    records=(FEEDBACK_RECORD,),
)
