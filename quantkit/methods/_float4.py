"""What `gptq` and `rtn` share where bits are nvfp4 or mxfp4, 4-bit floats: layout, options, one grid a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import Job
from quantkit.contracts.run import Checked
from quantkit.errors import RecipeError
from quantkit.methods._layer_bits import BitsByLayer, GroupedOptions
from quantkit.models.skeleton import load
from quantkit.numerics.scaled_rounding import FLOAT4_GROUPS, Float4, divisor_of

BITS = tuple(FLOAT4_GROUPS)
OTHER_KINDS = {
    bits: (Content.MXFP4_VALUES if bits == "mxfp4" else Content.SCALED_VALUES, "compressed-tensors") for bits in BITS
}


def check_float4(job: Job[GroupedOptions]) -> Checked[Layout]:
    """Refuse what these grids have not, and what the format cannot hold; raises RecipeError, UnsupportedError."""
    size, options = FLOAT4_GROUPS[job.bits], job.options
    if options.group_size not in ("auto", size):
        raise RecipeError(f"{job.bits} has groups of {size} columns, not of {options.group_size}: leave group_size out")
    plain = {"sym": True, "desc_act": False, "static_groups": True, "refine": False}
    fixed: dict[str, bool | None] = {**plain, **dict.fromkeys(BitsByLayer.model_fields)}
    for name, value in fixed.items():
        if getattr(options, name, value) is not value:
            raise RecipeError(f"{name} = {getattr(options, name)} is not for {job.bits}: leave it out")
    checked = job.check_layout(Layout(4, size, values=job.bits, head_bits=options.head_bits))
    return replace(checked, options={"group_size": size})


def grid_of(job: Job, names: Iterable[str]) -> Float4:
    """The grid of the layers of a decoder block, `names` being their weights.

    They have one divisor, because engines compute some of them as one layer, which has one.
    """
    if job.bits != "nvfp4":
        return Float4(job.bits)
    largest = (float(load(job.source, job.skeleton, name).to(torch.float32).abs().max()) for name in names)
    return Float4(job.bits, divisor_of(max(largest)))
