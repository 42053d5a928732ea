"""INT8: 8-bit integer weights with a scale per row; engines round activations to 8 bits per token.

Papers: Xiao et al., SmoothQuant, arXiv:2211.10438 (equation 4): divide activation outlier channels by a scale and
multiply the weights by it. Frantar et al., GPTQ, arXiv:2210.17323: rounding with error feedback.
Differences from SmoothQuant: the strength is searched per layer group, by its output error on calibration tokens with
inputs and weights rounded; the inputs of o_proj and down_proj are scaled too, as in AWQ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from pydantic import Field

from quantkit.calibration.block import Block
from quantkit.calibration.channel_scales import block_values, over_heads
from quantkit.calibration.kv_scales import WithKvScales, add_kv_scales
from quantkit.calibration.walk import finished_block, walk
from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.errors import UnsupportedError
from quantkit.methods.gptq import quantize_each
from quantkit.models.awq_mappings import Scaling, fold, heads_of, provable_scalings, unscaled
from quantkit.numerics.error_feedback import Feedback
from quantkit.numerics.grid import cast_finite
from quantkit.numerics.quantized_weight import INT8_TOP, InputRounding, ScaledWeight
from quantkit.numerics.scaled_rounding import int8_with_feedback, round_int8

SAMPLED_TOKENS = 256  # of a layer's inputs in a trial, spread evenly
SAMPLED_ROWS = 256  # rows in a trial, of the layers that share scales
LEAST_SHARE = 1e-5  # of the largest channel; smaller channels count as this
INPUTS = InputRounding("int8")


class Options(WithKvScales):
    """Options of INT8."""

    smooth: bool = Field(True, description="move large input channels into the weights, if the layer before allows it")
    n_grid: int = Field(20, ge=2, le=100, description="number of strengths tried between 0 and 1")
    rounding: Literal["nearest", "gptq"] = Field(
        "gptq", description="how to round the weights: to the nearest integer, or with GPTQ's error feedback"
    )


@dataclass
class InputSample:
    """Every `stride`-th input of a layer, and each channel's largest absolute value over all inputs."""

    stride: int
    parts: list[torch.Tensor] = field(default_factory=list)
    largest: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Add inputs (tokens, K) of any float dtype."""
        if not len(x):
            return
        self.parts.append(x[:: self.stride].to(torch.float32))
        size = x.abs().amax(0).to(torch.float32)
        self.largest = size if self.largest is None else torch.maximum(self.largest, size)

    def joined(self, others: list[InputSample]) -> InputSample:
        """Return this sample merged with others of the same width."""
        every = [self, *others]
        sizes = [one.largest for one in every if one.largest is not None]
        largest = torch.stack(sizes).amax(0) if sizes else None
        return InputSample(self.stride, [part for one in every for part in one.parts], largest)


def smoothing(
    weights: list[torch.Tensor], sample: InputSample, points: int, heads: tuple[int, int] = (1, 1)
) -> torch.Tensor:
    """Return the channel scales, float32 (K,), with the least output error of `weights` [(N, K)] on the sample.

    Trials: no scaling, and max|x|^a / max|w|^(1-a) for a in [0, 1], with inputs / scales and weights * scales
    rounded to int8. `heads` as in `search_scale` of channel_scales.py.
    """
    columns = weights[0].shape[1]
    if sample.largest is None:
        return torch.ones(columns, device=weights[0].device)
    x = torch.cat(sample.parts)
    sizes = [over_heads(size, heads) for size in (sample.largest, torch.cat(weights).abs().amax(0))]
    size, weight_size = (value.clamp(min=float(value.max()) * LEAST_SHARE + 1e-30) for value in sizes)
    every = -(-sum(map(len, weights)) // SAMPLED_ROWS)
    joined = torch.cat([weight[::every] for weight in weights])
    exact = x @ joined.T

    def loss(scale: torch.Tensor) -> torch.Tensor:
        rounded = round_int8(joined * scale, search=False).dense()
        return (INPUTS.rounded(x / scale) @ rounded.T - exact).square().sum()

    trials = [torch.ones(columns, device=x.device)]
    for step in range(points + 1):
        strength = step / points
        trial = size**strength / weight_size ** (1 - strength)
        trials.append(trial / (trial.max() * trial.min()).sqrt())
    errors = torch.stack([loss(trial) for trial in trials]).nan_to_num(math.inf, math.inf)
    return trials[int(errors.argmin())]


def storable(scaling: Scaling, values: dict[str, torch.Tensor], prefix: str, scale: torch.Tensor) -> torch.Tensor:
    """Adjust `scale` (K,) so that the folded norm weight is exact in bfloat16; return the adjusted scales.

    The layers' scales then match the stored norm exactly.
    """
    weight = values[f"{prefix}{scaling.before}.weight"]
    if weight.ndim > 1:  # a linear layer, which is quantized after it is scaled
        return scale
    factor = weight + scaling.offset
    stored = (factor / scale - scaling.offset).to(torch.bfloat16).to(torch.float32) + scaling.offset
    exact = factor / stored
    return torch.where(torch.isfinite(exact) & (exact > 0), exact, scale)


def rounding_noise(x: torch.Tensor) -> float:
    """Return the mean step^2 / 12 for inputs (tokens, K): what int8 rounding adds to the diagonal of E[x x^T]."""
    return float((x.abs().amax(-1) / INT8_TOP).square().mean()) / 12


def _check(job: Job[Options]) -> Checked[Layout]:
    checked = job.check_layout(Layout(8, values="int8"))
    if not job.options.smooth:
        return checked
    count, left, names = unscaled(job.skeleton, provable_scalings(job.skeleton, job.source.config))
    if left == count:
        raise UnsupportedError(
            f"no layer in the blocks of {job.source.architecture!r} can be scaled without changing what the model "
            "computes: give --no-smooth, which is less precise"
        )
    if not left:
        return checked
    note = f"the inputs of {left} of {count} linear layers are not smoothed, because nothing before them can take the "
    return replace(checked, notes=(*checked.notes, f"{note}inverse: {', '.join(names)}"))


def _peak_memory(_job: Job, shapes: Shapes) -> PeakMemory:
    # Memory: all Hessians of the block and its weights in float32; then two squares in float64 for a factor.
    squares = 4 * sum(columns**2 for _, columns in shapes.stages) + 4 * 4 * shapes.widest**2
    return PeakMemory(1, work=squares + 4 * shapes.block_parameters + 8 * 4 * shapes.largest_layer)


def _smooth_block(
    job: Job[Options],
    block: Block,
    scalings: list[Scaling],
    values: dict[str, torch.Tensor],
    hessians: dict[str, torch.Tensor],
    samples: dict[str, InputSample],
) -> None:
    """Search and apply scales: change the weights in `values` (float32, by full name), input Hessians and samples."""
    for scaling in scalings:
        names = [f"{block.prefix}{layer}.weight" for layer in scaling.layers]
        heads = heads_of(scaling, values, block.prefix, job.skeleton.model.config.get_text_config())
        first, *others = [samples[name] for name in names if name in samples]
        scale = smoothing([values[name] for name in names], first.joined(others), job.options.n_grid, heads)
        scale = storable(scaling, values, block.prefix, scale)
        for name in names:
            if name in hessians:
                hessians[name] /= scale[:, None] * scale[None, :]
                samples[name].parts = [part / scale for part in samples[name].parts]
        fold(scaling, values, block.prefix, scale, heads)


def _add_to(samples: dict[str, InputSample], name: str, x: torch.Tensor) -> None:
    samples[name].add(x)


def _round_group(
    job: Job[Options], names: list[str], values: dict[str, torch.Tensor], hessian: torch.Tensor, sample: InputSample
) -> dict[str, ScaledWeight]:
    """Quantize the layers `names`, which have a common input, and remove their weights from `values`."""
    if job.options.rounding == "nearest":
        return {name: round_int8(values.pop(name)) for name in names}
    if sample.parts:
        torch.diagonal(hessian).add_(rounding_noise(torch.cat(sample.parts)))
    moments = Feedback(hessian)
    sizes = {name: values[name].numel() for name in names}
    return dict(quantize_each(lambda weight: int8_with_feedback(weight, moments), sizes, values.pop, hessian.device))


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    scalings = provable_scalings(job.skeleton, job.source.config) if job.options.smooth else []
    with job.open_writer(run, job.checked.plan) as writer:
        for block in walk(job, run, restore=partial(finished_block, writer)):
            values, groups = block_values(job, block), block.groups()
            sequences, length, _ = block.inputs.shape
            stride = max(1, sequences * length // SAMPLED_TOKENS)
            samples = {names[0]: InputSample(stride) for names in groups}
            hessians = block.hessians(groups, partial(_add_to, samples))
            if job.options.smooth:
                _smooth_block(job, block, scalings[block.index], values, hessians, samples)
            layers: dict[str, ScaledWeight] = {}
            for names in groups:
                layers |= _round_group(job, names, values, hessians.pop(names[0]), samples[names[0]])
            for name, value in values.items():
                values[name] = cast_finite(value.cpu(), torch.bfloat16, f"{name} of {job.source.model}")
                block.replace(name, values[name])
                writer.add(name, values[name])
            for name, layer in layers.items():
                block.replace(name, layer.dense())
                writer.add(name, layer.cpu())
            writer.finish_block(block.index)
        add_kv_scales(job, run, writer)


METHOD = Method(
    name="int8",
    summary="8-bit integers with a scale per row, smoothed; engines round inputs to 8 bits, too",
    reference="arXiv:2211.10438",
    bits=("8",),
    default_bits="8",
    Options=Options,
    makes=Content.SCALED_VALUES,
    default_format="compressed-tensors",
    check=_check,
    write=_write,
    weights_comparable=lambda _options: False,
    calibrated=lambda _options: True,
    peak_memory=_peak_memory,
)
