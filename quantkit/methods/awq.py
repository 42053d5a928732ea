"""AWQ: scale up input channels with large activations, fold the inverse into the layer before, then round.

Paper: Lin et al., AWQ, arXiv:2306.00978 (section 3.2; clipping as in its code release).
Differences: the output error of each trial is computed exactly from the input Hessian as tr(D H D^T), so no activations
are stored; channel magnitudes are root mean squares; clipping is weighted by the Hessian's diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

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
from quantkit.contracts.method import FEEDBACK_RECORD, CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.errors import UnsupportedError
from quantkit.methods._layer_bits import BIT_SEARCH, KIND, GroupedOptions, base_bits, check_bits
from quantkit.methods._targets import AUTO
from quantkit.methods.gptq import Solver, feedback_bytes, in_shares, quantize_each, streams
from quantkit.models.awq_mappings import Scaling, fold, heads_of, provable_scalings, unscaled
from quantkit.models.skeleton import load
from quantkit.models.unfuse import expert_of
from quantkit.numerics.error_feedback import Feedback, FeedbackSettings
from quantkit.numerics.grid import Grid, cast_finite, round_to_grid, round_to_nearest
from quantkit.numerics.matmul import product_in, quick
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.numerics.scale_refit import PartedHessian, Refit, RoundedLayer
from quantkit.system.ranks import ALONE, Shards

BITS = 4
PANEL = 512  # columns of one product of a trial's loss
COARSE = 4  # step between exponents in the first round of trials
SAMPLED_ROWS = 256  # rows in a trial, spread evenly over the layers that share scales
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

    def round(self, weight: torch.Tensor, importance: torch.Tensor, quick: bool = False) -> GroupedWeight:
        """Round `weight`, float32 (N, K); `importance` (K,) weights range-search errors, `quick` as in `fit_grid`."""
        search = {"importance": importance, "search": "quick" if quick else True} if self.clip else {}
        grids = {"symmetric": self.symmetric, "least_zero": self.least_zero}
        return round_to_nearest(weight, self.group_size, self.bits, **grids, **search)


def output_error(change: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Return E |change x|^2 = tr(change H change^T) as a float64 scalar tensor, without synchronizing the device.

    change is float32 (N, K); H = E[x x^T] is (K, K), float32 or in `quick` dtype, or its diagonal, float32 (K,).
    """
    if hessian.ndim == 1:
        return (change.square().sum(0) * hessian).sum(dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64, device=change.device)
    for left in range(0, change.shape[1], PANEL):
        spread = product_in(change[:, left : left + PANEL], hessian[left : left + PANEL, left:])
        spread[:, PANEL:] *= 2  # H is symmetric: the upper triangle also counts for the lower one
        total += spread.mul_(change[:, left:]).sum()
    return total


def share_heads(values: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Average (heads * d,) values over the query heads of each key-value head; return (kv_heads * d,)."""
    return values.reshape(kv_heads, heads // kv_heads, -1).mean(1).reshape(-1)


def repeat_heads(values: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Repeat (kv_heads * d,) values for all query heads of each key-value head; return (heads * d,)."""
    return values.reshape(kv_heads, 1, -1).expand(kv_heads, heads // kv_heads, -1).reshape(-1)


def search_scale(
    weights: list[torch.Tensor],
    hessian: torch.Tensor,
    rounding: PlainRounding,
    points: int,
    heads: tuple[int, int],
    shards: Shards = ALONE,
) -> torch.Tensor:
    """Return the channel scales, float32 (K,), with the least output error of `weights` [(N, K)] after `rounding`.

    `hessian` as in `output_error`. Trials: no scaling, rms(x)^a, and rms(x)^a / mean|w|^(1-a), for `points` exponents a
    in (0, 1], first every COARSE-th, then those around the best. `heads` (query, key-value) ties the scales of query
    heads that share a value head; (1, 1) leaves all channels free. Ranks share the trials.
    """
    diagonal = hessian if hessian.ndim == 1 else torch.diagonal(hessian)
    rms = diagonal.clamp(min=0).sqrt()
    rms = repeat_heads(share_heads(rms, *heads), *heads)
    rms = rms.clamp(min=float(rms.max()) * 1e-4 + 1e-12)
    size = repeat_heads(share_heads(torch.cat(weights).abs().mean(0), *heads), *heads)
    size = size.clamp(min=float(size.max()) * 1e-4 + 1e-12)
    near = hessian if hessian.ndim == 1 else quick(hessian)
    every = -(-sum(map(len, weights)) // SAMPLED_ROWS)
    weights = [weight[::every] for weight in weights]

    def trial(by_size: bool, point: int) -> torch.Tensor:
        a = point / points
        scale = rms**a / size ** (1 - a) if by_size else rms**a
        return scale / (scale.max() * scale.min()).sqrt()

    def loss(scale: torch.Tensor) -> torch.Tensor:
        importance = diagonal / scale.square()
        total = torch.zeros((), dtype=torch.float64, device=rms.device)
        for weight in weights:
            layer = rounding.round(weight * scale, importance, quick=True)
            total += output_error(layer.dense() / scale - weight, near)
        return total

    errors: dict[tuple[bool, int], float] = {}

    def best_of(kinds: tuple[bool, ...], exponents: Iterable[int]) -> tuple[bool, int]:
        more = [(kind, a) for a in exponents for kind in kinds if (kind, a) not in errors]
        found = torch.zeros(len(more), dtype=torch.float64, device=rms.device)
        for number in range(shards.rank, len(more), shards.size):
            found[number] = loss(trial(*more[number]))
        shards.sum(found)
        errors.update(zip(more, found.tolist(), strict=True))
        # If no trial has a finite error, take the first.
        return min(errors, key=lambda each: errors[each] if math.isfinite(errors[each]) else math.inf)

    best_of((False,), (0, points))  # of which the kinds are the same
    kind, point = best_of((False, True), range(points - COARSE, 0, -COARSE))
    kinds = (kind,) if 0 < point < points else (False, True)
    return trial(*best_of(kinds, range(max(1, point - COARSE + 1), min(points, point + COARSE))))


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
    notes = (*checked.notes, *_unscaled_notes(job, scalings))
    return replace(checked, options={**checked.options, **record}, notes=notes)


def _unscaled_notes(job: Job, scalings: list[list[Scaling]]) -> tuple[str, ...]:
    """Return a note on layers whose inputs AWQ cannot scale; raise UnsupportedError if it can scale none."""
    count, left, names = unscaled(job.skeleton, scalings)
    if left == count:
        raise UnsupportedError(
            f"AWQ finds no layer in the blocks of {job.source.architecture!r} whose inputs it can scale without "
            "changing what the model computes"
        )
    if not left:
        return ()
    return (
        f"AWQ scales no inputs of {left} of {count} linear layers, because nothing "
        f"before them can take the inverse. They are only rounded: {', '.join(names)}",
    )


def _peak_memory(job: CheckedJob[Options, Layout], shapes: Shapes) -> PeakMemory:
    # The block's weights, all Hessians and the search over one group of layers; later, rounding takes each weight.
    with_feedback = job.options.rounding == "gptq"
    squares = 8 * sum(columns**2 for _, columns in shapes.stages)
    work = squares + 4 * shapes.block_parameters + 10 * 4 * shapes.largest_layer
    if with_feedback:
        work = max(work, feedback_bytes(shapes, job.device))
    work = max(work, refining_bytes(job.options, shapes))
    return PeakMemory(streams(job, shapes, _exact_share(job.options)), with_feedback, work)


def _exact_share(options: Options) -> float:
    """Return the share of calibration sequences that also run through the unquantized model."""
    if options.refine:
        return 1.0
    return 0.0 if options.feedback is None else options.feedback.gptaq_share


def _searched_sequences(job: Job[Options], block: Block) -> int | None:
    """Return how many calibration sequences the scale search uses; None means all.

    With plain rounding, search and rounding share their Hessians, so all are used. Error feedback has its own Hessians;
    the search then uses only the share for earlier layers' errors. Experts use all, as each sees few tokens.
    """
    if job.options.feedback is None or any(expert_of(name) is not None for name in block.linears):
        return None
    sequences, length, _ = block.inputs.shape
    widest = max(layer.in_features for layer in block.linears.values())
    return exact_sequences(job.options.feedback.gptaq_share, sequences, length, widest)


def _mean_hessian(hessians: dict[str, torch.Tensor], tokens: dict[str, int]) -> torch.Tensor:
    """Return the mean Hessian of layers that share a scale, weighted by the number of tokens each one saw."""
    if len(hessians) == 1:
        return next(iter(hessians.values()))
    total = sum(tokens[name] for name in hessians)
    return sum((hessian * (tokens[name] / total) for name, hessian in hessians.items()), start=torch.zeros(()))


def _scale_block(
    job: CheckedJob[Options, Layout],
    block: Block,
    scalings: list[Scaling],
    values: dict[str, torch.Tensor],
    hessians: dict[str, torch.Tensor],
) -> None:
    """Search and apply scales: change the weights in `values` (float32, by full name) and input Hessians in place."""
    options, plan = job.options, job.checked.plan
    for scaling in scalings:
        names = [f"{block.prefix}{layer}.weight" for layer in scaling.layers]
        heads = heads_of(scaling, values, block.prefix, job.skeleton.model.config.get_text_config())
        seen = {name: hessians[name] for name in names if name in hessians}
        mean = _mean_hessian(seen, block.moments.tokens)
        # With error feedback, later columns absorb most of a column's error, and the moments are
        # no longer needed.
        costs = mean
        if options.feedback is not None:
            costs = Feedback(mean, shrinkage=FEEDBACK.shrinkage, damp_percent=FEEDBACK.damp_percent).costs
        rounding = PlainRounding(int(plan.group_size), options.sym, plan.bits_of(names[0]), clip=options.apply_clip)
        weights = [values[name] for name in names]
        scale = search_scale(weights, costs, rounding, options.n_grid, heads, job.shards)
        for hessian in seen.values():
            hessian /= scale[:, None] * scale[None, :]
        block.input_scales |= dict.fromkeys(names, scale)
        fold(scaling, values, block.prefix, scale, heads)


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
    scalings = provable_scalings(job.skeleton, job.source.config)
    with job.open_writer(run, job.checked.plan) as writer:
        for block in walk(
            job,
            run,
            exact=_exact_share(options),
            ample=0 if options.refine else FEEDBACK.ample_tokens,
            restore=partial(finished_block, writer),
            then=partial(tune_scales, job, run, writer, options.tune_steps) if options.tuned else None,
        ):
            values = {
                block.prefix + name: load(job.source, job.skeleton, block.prefix + name).to(block.device, torch.float32)
                for name, _ in block.module.named_parameters()
            }
            groups = block.groups()
            hessians = block.hessians(groups, sequences=_searched_sequences(job, block))
            _scale_block(job, block, scalings[block.index], values, hessians)
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
    weights_comparable=False,
    calibrated=lambda _options: True,
    peak_memory=_peak_memory,
    other_kinds=KIND | dict.fromkeys(("2", "3", "8"), KIND[AUTO]),  # AWQ's own format holds only 4 bits
    bit_search=BIT_SEARCH,
    refuse_ranks=lambda _job: None,
    records=(FEEDBACK_RECORD,),
)
