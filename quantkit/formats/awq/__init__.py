"""The AWQ checkpoint layout, GEMM version: 4 bits with zero points, groups of neighbouring columns.

Per linear layer with weight (N, K): `qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` float16 [K/g, N].
Loaded by vLLM, transformers with gptqmodel, TGI.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quantkit.contracts.format import Format, Layout
from quantkit.formats._grouped import GroupedReader, Packing, check, tells, write
from quantkit.formats._packing import pack_awq, unpack_awq
from quantkit.formats._quantization_config import recognizes

USAGE = """
vLLM:

```bash
vllm serve FOLDER
```

transformers, with `pip install optimum gptqmodel`:

{transformers}
"""


def _refusal(name: str, n: int, _k: int, _bits: int) -> str | None:
    return f"{name} has {n} rows; AWQ's packing needs a multiple of 8" if n % 8 else None


def _quantization(layout: Layout, group_size: int | str) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": layout.bits,
        "group_size": group_size,
        "zero_point": True,
        "modules_to_not_convert": None,
    }


PACKING = Packing(
    name="awq",
    bits=(4,),
    pack=lambda codes, _bits: pack_awq(codes),
    unpack=lambda words, _bits: unpack_awq(words),
    pack_zeros=lambda zeros, _bits: pack_awq(zeros),
    unpack_zeros=lambda words, _bits: unpack_awq(words),
    refusal=_refusal,
    quantization=_quantization,
    packs_rows=False,
)

FORMAT = Format(
    name="awq",
    summary="4-bit codes with zero points in AWQ's GEMM layout",
    reference="https://github.com/casper-hansen/AutoAWQ",
    holds=("grouped codes",),
    engines=("reference", "vllm"),
    recognizes=partial(recognizes, "awq"),
    open=partial(GroupedReader, PACKING),
    check=partial(check, PACKING),
    writer=partial(write, PACKING),
    tells=tells,
    usage=USAGE,
)
