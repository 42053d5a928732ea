"""A linear layer on scaled values whose inputs are rounded as they come, in float32.

The products of codes that vLLM's kernels sum exactly or in float32 are those of the rounded inputs and the dequantized
weight here, which is widened some rows at a time.
"""

from __future__ import annotations

import torch
from torch import nn

from quantkit.numerics.scaled_weight import ScaledWeight

SLAB_ELEMENTS = 1 << 20  # of the weight that are wide at a time


class ScaledLinear(nn.Module):
    """y = round(x) W^T + b for a ScaledWeight W (N, K) with `inputs`. Holds what is stored: a byte a weight."""

    bias: nn.Parameter | None

    def __init__(self, weight: ScaledWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, self.columns = weight.shape
        self.inputs, self.dtype = weight.inputs, dtype
        self.slabs = weight.split(max(1, SLAB_ELEMENTS // self.columns))
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., N)."""
        wide = x.float() if self.inputs is None else self.inputs.rounded(x)
        y = torch.cat([nn.functional.linear(wide, slab.dense()) for slab in self.slabs], -1)
        y = y if self.bias is None else y + self.bias.float()
        return y.to(self.dtype)
