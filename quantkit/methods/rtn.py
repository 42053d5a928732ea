"""RTN: round every weight to the nearest point of its group's grid. No calibration; the plain yardstick.

Grids are of whole numbers, or of 4-bit floats: NVFP4, and MXFP4 of the OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field

from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.methods._budget.choice import CHOICE
from quantkit.methods._budget.layer_bits import KIND, BitsByLayer, base_bits, check_bits, targeted
from quantkit.methods._budget.targets import AUTO
from quantkit.methods._float4 import BITS as FLOAT4
from quantkit.methods._float4 import OTHER_KINDS, check_float4, grid_of
from quantkit.methods._layer_by_layer import write_layers
from quantkit.models.skeleton import load
from quantkit.numerics.grid import fit_grid, on_grid
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.scaled.weight import ScaledWeight


class Options(BitsByLayer):
    """Options of round-to-nearest."""

    group_size: int | Literal["auto"] = Field(
        "auto",
        description="input columns that share a scale; -1: whole row; auto: largest of 128, 64, 32 that divides",
    )
    sym: bool = Field(True, description="symmetric grid; vLLM loads only symmetric ones in GPTQ's format")
    head_bits: Literal[4, 8] | None = Field(
        None, description="bits of an output head that is not tied to the embedding; without it the head has 16"
    )


def round_layer(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool) -> GroupedWeight:
    """Quantize one layer's weight (N, K) float32 by plain rounding."""
    group = weight.shape[1] if group_size == -1 else group_size
    grid = fit_grid(weight, group, bits, symmetric=symmetric, least_zero=1)
    return on_grid(weight, grid, group)


def _layout(job: Job) -> Layout:
    options: Options = job.options
    return Layout(base_bits(job), options.group_size, options.sym, head_bits=options.head_bits)


def _check(job: Job) -> Checked:
    if job.bits in FLOAT4:
        return check_float4(job)
    return check_bits(job, _layout(job))


def _write(job: Job, run: Run) -> None:
    layout: Layout = job.checked.plan

    def of_block(names: list[str]) -> Callable[[str], GroupedWeight | ScaledWeight]:
        float4 = grid_of(job, names) if job.bits in FLOAT4 else None

        def rounded(name: str) -> GroupedWeight | ScaledWeight:
            weight = load(job.source, job.skeleton, name).to(torch.float32)
            if float4 is not None:
                return float4.round(weight)
            return round_layer(weight, layout.bits_of(name), int(layout.group_size), layout.symmetric)

        return rounded

    write_layers(job, run, "rounding layers", of_block)


def _peak_memory(_job: Job, shapes: Shapes) -> PeakMemory:
    # One layer: as stored, in float32, and what the grid and the codes are computed through.
    return PeakMemory(work=10 * 4 * shapes.largest_layer)


METHOD = Method(
    name="rtn",
    summary="round to nearest, the plain yardstick",
    reference="arXiv:2103.13630",
    bits=("2", "3", "4", "8", *FLOAT4, AUTO),
    default_bits="4",
    Options=Options,
    makes=Content.GROUPED_CODES,
    default_format="gptq",
    check=_check,
    write=_write,
    peak_memory=_peak_memory,
    other_kinds=OTHER_KINDS | KIND,
    calibrated=targeted,
    choice=CHOICE,
)
