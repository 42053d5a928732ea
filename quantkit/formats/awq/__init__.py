"""The AWQ checkpoint layout, GEMM version: 4 bits with zero points, groups of neighbouring columns.

Per linear layer with weight (N, K): `qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` float16 [K/g, N].
Loaded by vLLM, transformers with gptqmodel, TGI.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Format, Layout
from quantkit.errors import ArtifactError
from quantkit.formats._grouped import GroupedReader, check, write
from quantkit.formats._grouped_layout import NEEDS_GPTQMODEL, LayerShape, Packing, Parts, kinds, matrix
from quantkit.formats._grouped_tells import tells
from quantkit.formats._packing import pack_awq, unpack_awq
from quantkit.formats._quantization_config import Untouched, recognizes
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.untrusted import shown

FORMER = {"w_bit": "bits", "q_group_size": "group_size"}
USAGE = """
vLLM:

```bash
vllm serve FOLDER
```

transformers, with `pip install optimum gptqmodel`:

{transformers}
"""


class AwqPacking(Packing):
    """Words of codes along the rows; zero points as they are."""

    name = "awq"
    bits = (4,)
    codes, scales = "qweight", "scales"
    parts = ("qweight", "qzeros", "scales")
    tells_symmetry = False

    def stored(self, layer: LayerShape) -> dict[str, tuple[str, tuple[int, ...]]]:
        """`qweight`, `qzeros` and `scales`."""
        n, k, groups = layer.rows, layer.columns, layer.groups
        return {
            "qweight": ("int32", (k, n // 8)),
            "qzeros": ("int32", (groups, n // 8)),
            "scales": ("float16", (groups, n)),
        }

    def pack(self, weight: GroupedWeight, _layout: Layout) -> dict[str, torch.Tensor]:
        """All three parts."""
        return {
            "qweight": pack_awq(weight.codes.T),
            "qzeros": pack_awq(weight.zeros.T),
            "scales": self.pack_scales(weight.scales),
        }

    def unpack(self, parts: Parts, bits: int) -> GroupedWeight:
        """The inverse."""
        codes = unpack_awq(parts["qweight"]).T.contiguous()
        groups = len(parts["scales"])
        return GroupedWeight(
            codes,
            parts["scales"].T.contiguous(),
            self.unpack_zeros(parts, bits, codes.shape[0], groups),
            self.groups(parts, codes.shape[1], groups),
            bits,
        )

    def unpack_zeros(self, parts: Parts, _bits: int, _rows: int, _groups: int) -> torch.Tensor:
        """From `qzeros`."""
        return unpack_awq(parts["qzeros"]).T.contiguous()

    def pack_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """(G, N) float16."""
        return scales.T.contiguous().to(torch.float16)

    def size(self, stored: StoredTensors, stem: str, _bits: int) -> tuple[int, int, int]:
        """From the shapes of codes and scales."""
        codes, (groups, rows) = matrix(stored, stem + self.codes), matrix(stored, stem + self.scales)
        return rows, codes[0], groups

    def refusal(self, name: str, rows: int, _columns: int, _bits: int) -> str | None:
        """A word holds 8 rows."""
        return f"{name} has {rows} rows; AWQ's packing needs a multiple of 8" if rows % 8 else None

    def quantization(self, layout: Layout, untouched: Untouched) -> dict[str, Any]:
        """As AutoAWQ writes it."""
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": layout.bits,
            "group_size": layout.group_size,
            "zero_point": True,
            "modules_to_not_convert": list(untouched.modules) or None,
        }

    def settings(self, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
        """AutoAWQ's former names are known, too."""
        return {new: quantization[old] for old, new in FORMER.items() if old in quantization} | dict(quantization)

    def variant(self, quantization: Mapping[str, Any]) -> Packing:
        """Refuse other versions, such as gemv, whose words hold other codes."""
        versions = [quantization.get(key) or "gemm" for key in ("version", "checkpoint_format", "format")]
        versions += [quantization.get("backend")] * (quantization.get("backend") == "llm-awq")
        if others := [version for version in versions if str(version).lower() != "gemm"]:
            raise ArtifactError(f"quantization_config has AWQ's version {shown(others[0])}, and only gemm is supported")
        return self


PACKING = AwqPacking()

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
    open_quantized=partial(GroupedReader, PACKING, own=False),
    kinds=kinds(PACKING),
    refusals=lambda _quantization: {"transformers": NEEDS_GPTQMODEL},
    since={"reference": "", "vllm": "0.32"},
    servers={"sglang": "", "tgi": "--quantize awq"},
    tells=partial(tells, PACKING),
    usage=USAGE,
)
