"""Layout, options and grids of the 4-bit float types nvfp4 and mxfp4, shared by `gptq` and `rtn`."""

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
    """Check a 4-bit float job: raise an error for unsupported options, or layers that the format cannot store."""
    size, options = FLOAT4_GROUPS[job.bits], job.options
    if options.group_size not in ("auto", size):
        raise RecipeError(f"{job.bits} has groups of {size} columns, not {options.group_size}: leave group_size out")
    plain = {"sym": True, "desc_act": False, "static_groups": True, "refine": False}
    fixed: dict[str, bool | None] = {**plain, **dict.fromkeys(BitsByLayer.model_fields)}
    for name, value in fixed.items():
        if getattr(options, name, value) is not value:
            raise RecipeError(f"{name} = {getattr(options, name)} does not apply to {job.bits}: leave it out")
    checked = job.check_layout(Layout(4, size, values=job.bits, head_bits=options.head_bits))
    return replace(checked, options={"group_size": size})


def grid_of(job: Job, names: Iterable[str]) -> Float4:
    """Return the 4-bit float grid shared by a decoder block's layers; `names` are their weights.

    With NVFP4 all have the same global scale, because engines fuse some of them.
    """
    if job.bits != "nvfp4":
        return Float4(job.bits)
    largest = (float(load(job.source, job.skeleton, name).to(torch.float32).abs().max()) for name in names)
    return Float4(job.bits, divisor_of(max(largest)))
