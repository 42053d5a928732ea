"""NF4: bitsandbytes' 4-bit NormalFloat, optionally with double quantization.

Paper: Dettmers et al., QLoRA, arXiv:2305.14314 (section 3: NF4 and double quantization).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field

from quantkit.contracts.format import Content, Layout
from quantkit.contracts.method import CheckedJob, Job, Method, PeakMemory, Shapes
from quantkit.contracts.run import Checked, Run
from quantkit.errors import missing_package
from quantkit.methods._layer_by_layer import write_layers
from quantkit.models.skeleton import load
from quantkit.numerics.grid import cast_finite
from quantkit.numerics.normal_float import NormalFloatWeight
from quantkit.records.recipe import Strict

BLOCK = 64


class Options(Strict):
    """Options of NF4."""

    double_quant: bool = Field(True, description="quantize the block scales too (saves 0.37 bits per weight)")
    compute_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="type that engines compute in, and of tensors that are not quantized"
    )
    min_quantized: float = Field(
        0.5, ge=0, le=1, description="refuse if a smaller share of the linear layers' weights is quantized"
    )


def _functional() -> Any:
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise missing_package("bitsandbytes", "bitsandbytes", error) from None
    return functional


def _layout(job: Job[Options]) -> Layout:
    options = job.options
    settings = {"double_quant": options.double_quant}
    return Layout(4, BLOCK, dtype=options.compute_dtype, settings=settings, min_quantized=options.min_quantized)


def _check(job: Job[Options]) -> Checked[Layout]:
    _functional()
    return job.check_layout(_layout(job))


def round_weight(weight: torch.Tensor, double_quant: bool) -> NormalFloatWeight:
    """Quantize a weight (N, K) with bitsandbytes, in the compute dtype of engines."""
    packed, state = _functional().quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=double_quant, quant_type="nf4"
    )
    return NormalFloatWeight(packed, state.as_dict(packed=True))


def _write(job: CheckedJob[Options, Layout], run: Run) -> None:
    options = job.options

    def rounded(name: str) -> NormalFloatWeight:
        dtype = getattr(torch, options.compute_dtype)
        weight = cast_finite(load(job.source, job.skeleton, name), dtype, f"{name} of {job.source.model}")
        return round_weight(weight, options.double_quant)

    write_layers(job, run, "quantizing layers", lambda _names: rounded)


def _peak_memory(_job: Job, shapes: Shapes) -> PeakMemory:
    # One layer: as stored and cast, and bitsandbytes' floats, scaled floats and codes of its values.
    return PeakMemory(work=(shapes.item_bytes + 18) * shapes.largest_layer)


METHOD = Method(
    name="nf4",
    summary="bitsandbytes' 4-bit NormalFloat with double quantization",
    reference="arXiv:2305.14314",
    bits=("4",),
    default_bits="4",
    Options=Options,
    makes=Content.NORMAL_FLOAT,
    default_format="bitsandbytes",
    check=_check,
    write=_write,
    peak_memory=_peak_memory,
)
