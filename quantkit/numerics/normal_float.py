"""A weight as 4-bit codes of a table of 16 values, a scale for each run of values, as bitsandbytes packs it.

Paper: Dettmers et al., QLoRA, arXiv:2305.14314 (section 3: NF4 and double quantization).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STATE = "quant_state.bitsandbytes__nf4"


@dataclass(frozen=True)
class NormalFloatWeight:
    """`packed` uint8 [N*K/2, 1], two codes a byte, the first one high; `parts` by bitsandbytes' names.

    absmax uint8 [N*K/64], the runs' scales, themselves on a table: nested_quant_map float32 [256], times nested_absmax
    float32 [ceil(N*K/64/256)], plus an offset; or float32 without double quantization. quant_map float32 [16]. `STATE`:
    uint8, the JSON of blocksize, dtype, shape and nested offset.
    """

    packed: torch.Tensor
    parts: Mapping[str, torch.Tensor]

    def dense(self) -> torch.Tensor:
        """The values (N, K) float32, by our own arithmetic; raises ValueError where there are too few codes."""
        import torch

        state = json.loads(bytes(self.parts[STATE].tolist()).decode("utf-8"))
        packed = self.packed.reshape(-1)
        codes = torch.stack([packed >> 4, packed & 15], 1).reshape(-1).to(torch.int64)
        values = self.parts["quant_map"][codes]
        absmax = self.parts["absmax"]
        if "nested_blocksize" in state:
            scale = self.parts["nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(absmax)]
            absmax = self.parts["nested_quant_map"][absmax.to(torch.int64)] * scale + state["nested_offset"]
        shape = torch.Size(state["shape"])
        if shape.numel() > len(values):
            raise ValueError(f"{len(values)} codes for the shape {tuple(shape)}")
        scales = absmax.to(torch.float32).repeat_interleave(state["blocksize"])[: shape.numel()]
        return (values[: shape.numel()] * scales).reshape(shape)
