"""RTN: round every weight to nearest on its group's grid. No calibration; a baseline for other methods.

Grids are integers or 4-bit floats: NVFP4, and MXFP4 of the OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field

from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.methods._float4 import BITS as FLOAT4
from quantkit.methods._float4 import OTHER_KINDS, check_float4, grid_of
from quantkit.methods._layer_bits import BIT_SEARCH, KIND, GroupedOptions, base_bits, check_bits, targeted
from quantkit.methods._layer_by_layer import write_layers
from quantkit.methods._targets import AUTO
from quantkit.models.skeleton import load
from quantkit.numerics.grid import round_to_nearest
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight


class Options(GroupedOptions):
    """Options of RTN."""

    sym: bool = Field(
        True, description="symmetric grid; vLLM loads only symmetric ones in GPTQ's format; default in mlx: false"
    )
    scale_search: bool = Field(False, description="search scales for the least squared error; false: min/max")


def round_layer(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool, search: bool = False
) -> GroupedWeight:
    """Round a layer's weight, float32 (N, K), to nearest."""
    return round_to_nearest(weight, group_size, bits, symmetric=symmetric, search=search, least_zero=1)


def _layout(job: Job[Options]) -> Layout:
    options = job.options
    return Layout(base_bits(job), options.group_size, options.sym, head_bits=options.head_bits)


def _check(job: Job[Options]) -> Checked[Layout]:
    if job.bits in FLOAT4:
        return check_float4(job)
    return check_bits(job, _layout(job))


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    layout, search = job.checked.plan, job.options.scale_search

    def of_block(names: list[str]) -> Callable[[str], GroupedWeight | ScaledWeight]:
        float4 = grid_of(job, names) if job.bits in FLOAT4 else None

        def rounded(name: str) -> GroupedWeight | ScaledWeight:
            weight = load(job.source, job.skeleton, name).to(torch.float32)
            if float4 is not None:
                return float4.round(weight, search=search)
            return round_layer(weight, layout.bits_of(name), int(layout.group_size), layout.symmetric, search)

        return rounded

    write_layers(job, run, "rounding layers", of_block)


def _peak_memory(job: Job[Options], shapes: Shapes) -> PeakMemory:
    # One layer: as stored, in float32, and temporaries of the grid and the codes.
    return PeakMemory(float(job.options.kv_scales), work=10 * 4 * shapes.largest_layer)


METHOD = Method(
    name="rtn",
    summary="round to nearest, a baseline for other methods",
    reference="arXiv:2103.13630",
    bits=("2", "3", "4", "6", "8", *FLOAT4, AUTO),
    default_bits="4",
    Options=Options,
    makes=Content.GROUPED_CODES,
    default_format="gptq",
    check=_check,
    write=_write,
    peak_memory=_peak_memory,
    other_kinds=OTHER_KINDS | KIND,
    calibrated=lambda options: options.kv_scales or targeted(options),
    bit_search=BIT_SEARCH,
)
