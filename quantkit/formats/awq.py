"""AWQ's GEMM layout: 4-bit codes with zero points. Loaded by vLLM, TGI, and transformers with gptqmodel.

Per linear layer with weight (N, K): `qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` float16 [K/g, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from quantkit.contracts.format import Content, Format, Layout, Loading
from quantkit.errors import ArtifactError
from quantkit.formats import _grouped_codes as grouped
from quantkit.formats._bit_packing import pack_awq, unpack_awq
from quantkit.formats._grouped_codes import GroupedPacking
from quantkit.formats._packed_layers import Parts, StoredLayer
from quantkit.formats._quantization_config import Untouched, recognizes
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.system.untrusted import shown

FORMER = {"w_bit": "bits", "q_group_size": "group_size"}


class _AwqPacking(GroupedPacking):
    """AWQ's packing: codes are packed into words along the output dimension."""

    name = "awq"
    bits = (4,)
    parts = ("qweight", "qzeros", "scales")
    records_symmetry = False

    def stored(self, rows: int, columns: int, groups: int, _kind: Layout) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            "qweight": ("int32", (columns, rows // 8)),
            "qzeros": ("int32", (groups, rows // 8)),
            "scales": ("float16", (groups, rows)),
        }

    def pack_codes(self, weight: GroupedWeight, _layout: Layout) -> dict[str, torch.Tensor]:
        return {"qweight": pack_awq(weight.codes.T), "qzeros": pack_awq(weight.zeros.T)}

    def unpack_codes(self, parts: Parts, _bits: int) -> torch.Tensor:
        return unpack_awq(parts["qweight"]).T.contiguous()

    def unpack_zeros(self, parts: Parts, _bits: int, _rows: int, _groups: int) -> torch.Tensor:
        return unpack_awq(parts["qzeros"]).T.contiguous()

    def size(self, layer: StoredLayer, _bits: int) -> tuple[int, int, int]:
        return super().size(layer, 32)  # parts are transposed

    def refusal(self, name: str, rows: int, _columns: int, _bits: int) -> str | None:
        return f"{name} has {rows} rows; AWQ's packing needs a multiple of 8" if rows % 8 else None

    def quantization(self, layout: Layout, untouched: Untouched) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": layout.bits,
            "group_size": layout.group_size,
            "zero_point": True,
            "modules_to_not_convert": list(untouched.modules) or None,
        }

    def settings(self, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
        return {new: quantization[old] for old, new in FORMER.items() if old in quantization} | dict(quantization)

    def variant(self, quantization: Mapping[str, Any]) -> GroupedPacking:
        """Return self; raise ArtifactError for other versions such as gemv, which pack codes in another order."""
        versions = [quantization.get(key) or "gemm" for key in ("version", "checkpoint_format", "format")]
        versions += [quantization.get("backend")] * (quantization.get("backend") == "llm-awq")
        if others := [version for version in versions if str(version).lower() != "gemm"]:
            raise ArtifactError(
                f"quantization_config has AWQ's version {shown(others[0])}, and only gemm is supported. Give the "
                "unquantized model."
            )
        return self


PACKING = _AwqPacking()

FORMAT = Format(
    name="awq",
    summary="4-bit codes with zero points in AWQ's GEMM layout",
    reference="https://github.com/casper-hansen/AutoAWQ",
    holds=(Content.GROUPED_CODES,),
    loading={"reference": grouped.IN_REFERENCE, "vllm": Loading("0.32")},
    recognizes=partial(recognizes, "awq"),
    open=partial(grouped.open_grouped, PACKING),
    check=partial(grouped.check, PACKING),
    writer=partial(grouped.write, PACKING),
    open_quantized=partial(grouped.open_grouped, PACKING, own=False),
    kinds=grouped.kinds(PACKING),
    refusals=lambda _quantization: {"transformers": grouped.NEEDS_GPTQMODEL},
    servers={"sglang": "", "tgi": "--quantize awq"},
    recorded_options=partial(grouped.recorded_options, PACKING),
    usage=grouped.usage("optimum gptqmodel"),
)
