"""NF4: bitsandbytes' 4-bit NormalFloat with double quantization, stored as transformers stores it.

Paper: Dettmers et al., QLoRA, arXiv:2305.14314 (section 3: NF4 and double quantization).
Loaded by transformers with bitsandbytes. Per linear layer with weight (N, K): `weight` uint8 [N*K/2, 1] (two codes a
byte, high nibble first), `weight.absmax` uint8 [N*K/64], `weight.nested_absmax` float32 [ceil(N*K/64/256)],
`weight.nested_quant_map` float32 [256], `weight.quant_map` float32 [16], and `weight.quant_state.bitsandbytes__nf4`,
the JSON of blocksize, dtype, shape and nested offset as uint8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from pydantic import Field

from quantkit.artifact import Artifact
from quantkit.checkpoints.writer import checkpoint, stored_tensors
from quantkit.contracts.job import Job
from quantkit.contracts.method import Method
from quantkit.conversion.alternatives import instead
from quantkit.errors import ArtifactError, UnsupportedError, missing_package
from quantkit.models.skeleton import linears_to_quantize, load, open_skeleton, refuse_shapes
from quantkit.models.unfuse import expert_of
from quantkit.recipe import Strict

BLOCK = 64
STATE = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", STATE)

USAGE = """
transformers, with `pip install bitsandbytes`:

{transformers}
"""


class Options(Strict):
    """Options of NF4."""

    double_quant: bool = Field(True, description="quantize the block scales too (0.37 bits a weight less)")
    compute_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="type that engines compute in, and of what is not quantized"
    )


def _functional() -> Any:
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise missing_package("bitsandbytes", "bitsandbytes", error) from None
    return functional


def _check(job: Job) -> int:
    _functional()
    source = job.source
    skeleton = open_skeleton(source.config)
    refuse_shapes(source, skeleton)
    linears = linears_to_quantize(source, skeleton)
    if any(expert_of(name) for name in linears):
        raise UnsupportedError(
            f"transformers keeps the experts of {source.architecture!r} stacked, and bitsandbytes leaves those "
            f"unquantized. {instead(source)}"
        )
    quantized = sum(n * k for n, k in linears.values())
    return int(quantized * 4.6 / 8 + (source.parameters - quantized) * 2 + 50_000_000)


def _write(job: Job) -> None:
    functional = _functional()
    options: Options = job.options
    dtype = getattr(torch, options.compute_dtype)
    quantization = {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": options.compute_dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": options.double_quant,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
    skeleton = open_skeleton(job.source.config)
    linears = skeleton.linears()
    names = skeleton.parameter_names()
    with (
        checkpoint(job.folder, job.source, quantization, options.compute_dtype) as writer,
        job.progress.step("nf4: quantizing tensors", len(names)) as advance,
    ):
        for name in names:
            value = load(job.source, skeleton, name).to(dtype)
            if name in linears:
                packed, state = functional.quantize_4bit(
                    value.contiguous(), blocksize=BLOCK, compress_statistics=options.double_quant, quant_type="nf4"
                )
                writer.add(name, packed)
                for key, part in state.as_dict(packed=True).items():
                    writer.add(f"{name}.{key}", part)
                job.count("nf4")
            else:
                writer.add(name, value)
                job.count(options.compute_dtype)
            advance()


def _dequantize(name: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Dense (N, K) float32 from the stored parts, by our own arithmetic (no bitsandbytes)."""
    state = json.loads(bytes(get(f"{name}.{STATE}").tolist()).decode("utf-8"))
    packed = get(name).reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], 1).reshape(-1).to(torch.int64)
    values = get(f"{name}.quant_map")[codes]
    absmax = get(f"{name}.absmax")
    if "nested_blocksize" in state:
        scale = get(f"{name}.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(absmax)]
        absmax = get(f"{name}.nested_quant_map")[absmax.to(torch.int64)] * scale + state["nested_offset"]
    shape = torch.Size(state["shape"])
    if shape.numel() > len(values):
        raise ArtifactError(f"{name} holds {len(values)} codes for the shape {tuple(shape)}. Convert again.")
    blocks = absmax.to(torch.float32).repeat_interleave(state["blocksize"])[: shape.numel()]
    return (values[: shape.numel()] * blocks).reshape(shape)


def _read(artifact: Artifact) -> Iterator[tuple[str, torch.Tensor]]:
    names, get = stored_tensors(artifact)
    known = set(names)
    origins = open_skeleton(dict(artifact.manifest.source.config)).origins
    for name in names:
        if f"{name}.{STATE}" in known:
            value = _dequantize(name, get)
            yield name, value.T if name in origins and origins[name].transposed else value
        elif not name.endswith(tuple(f".weight.{part}" for part in PARTS)):
            yield name, get(name)


METHOD = Method(
    name="nf4",
    summary="bitsandbytes 4-bit NormalFloat with double quantization (transformers)",
    reference="arXiv:2305.14314",
    bits=("4",),
    default_bits="4",
    Options=Options,
    check=_check,
    write=_write,
    read=_read,
    engines=("transformers", "reference"),
    usage=USAGE,
)
