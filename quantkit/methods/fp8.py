"""FP8: weights as 8-bit floats (E4M3) with a scale per row or block; engines also round activations to FP8.

Paper: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. No calibration. Each scale minimizes the
squared error of its row or block within one octave, instead of mapping the maximum to the largest code.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from quantkit.calibration.kv_scales import WithKvScales
from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.methods._layer_by_layer import write_layers
from quantkit.models.skeleton import load
from quantkit.numerics.quantized_weight import ScaledWeight
from quantkit.numerics.scaled_rounding import BLOCK, round_float8


class Options(WithKvScales):
    """Options of FP8."""

    granularity: Literal["channel", "block"] = Field(
        "channel",
        description="values with a common scale: channel: a row, and a token of inputs; block: 128 x 128, 128 inputs",
    )
    scale_search: bool = Field(True, description="search scales for the least squared error; false: maximum / 448")


def _layout(job: Job[Options]) -> Layout:
    return Layout(8, BLOCK if job.options.granularity == "block" else -1, values="float8")


def _check(job: Job[Options]) -> Checked[Layout]:
    return job.check_layout(_layout(job))


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    options = job.options
    blocks = options.granularity == "block"

    def rounded(name: str) -> ScaledWeight:
        weight = load(job.source, job.skeleton, name).to(torch.float32)
        return round_float8(weight, blocks=blocks, search=options.scale_search)

    write_layers(job, run, "rounding layers", lambda _names: rounded)


def _peak_memory(job: Job[Options], shapes: Shapes) -> PeakMemory:
    # One layer: as stored, in float32, and its values in float32 and in 8 bits; trials take a few rows.
    return PeakMemory(float(job.options.kv_scales), work=4 * 4 * shapes.largest_layer)


METHOD = Method(
    name="fp8",
    summary="8-bit floats with a scale per row or block; engines round inputs to 8 bits, too",
    reference="arXiv:2209.05433",
    bits=("8",),
    default_bits="8",
    Options=Options,
    makes=Content.SCALED_VALUES,
    default_format="compressed-tensors",
    check=_check,
    write=_write,
    calibrated=lambda options: options.kv_scales,
    peak_memory=_peak_memory,
)
