"""A linear layer on 4-bit codes: torch's int4 CPU kernel for a few rows (decoding), dense for many (prompts).

Kernel: torch.ops.aten._weight_int4pack_mm_for_cpu; value = (code - 8) * scale + zero, with (scale, zero) in bfloat16.
It is fast up to about eight rows and slow above, where the weight is dequantized and multiplied densely instead.
"""

from __future__ import annotations

import torch
from torch import nn

from quantkit.core.grouped import GroupedWeight

KERNEL_ROWS = 8
KERNEL_GROUPS = (32, 64, 128, 256)


def kernel_takes(weight: GroupedWeight) -> bool:
    """Whether the kernel can run this layer: 4 bits, N a multiple of 16, equal groups of a size that it knows."""
    n, k = weight.shape
    group, rest = divmod(k, weight.scales.shape[1])
    return weight.bits == 4 and n % 16 == 0 and rest == 0 and group in KERNEL_GROUPS


class Int4Linear(nn.Module):
    """y = x W^T + b for a GroupedWeight W (N, K). Holds 1 byte a weight: kernel words and codes for prompts."""

    def __init__(self, weight: GroupedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        k = weight.shape[1]
        self.group = k // weight.scales.shape[1]
        order = torch.argsort(weight.g_idx, stable=True)
        self.order = None if torch.equal(order, torch.arange(k)) else order
        codes = weight.codes if self.order is None else weight.codes[:, order]
        self.codes = (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
        scales = weight.scales.to(torch.float32)
        shift = (8 - weight.zeros.to(torch.float32)) * scales
        self.scale_zero = torch.stack([scales.T, shift.T], -1).to(dtype).contiguous()
        self.scales, self.shift = scales, shift
        self.register_parameter("bias", bias)
        self.dtype = dtype

    def dense(self) -> torch.Tensor:
        """W (N, K) in the layer's dtype, columns in the kernel's order."""
        n = len(self.codes)
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1).reshape(n, -1, self.group)
        values = (codes.to(torch.float32) - 8) * self.scales[..., None] + self.shift[..., None]
        return values.reshape(n, -1).to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., N)."""
        flat = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            flat = flat[:, self.order]
        if len(flat) <= KERNEL_ROWS:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat.contiguous(), self.packed, self.group, self.scale_zero)
        else:
            y = flat @ self.dense().T
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)
