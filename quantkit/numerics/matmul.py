"""Matrix products in the CPU's fastest float type: bfloat16 with hardware support, else float32.

Without bfloat16 hardware (most desktops and laptops), a bfloat16 product takes about seven times as long as float32;
on Intel CPUs with AVX-512 bfloat16 but no (visible) AMX, 1.6 times as long. There, inputs and parts of the
weight are converted to float32, the product is accumulated in float32 and rounded once, as hardware does
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

LINEAR = nn.functional.linear
FEW_ROWS = 4  # up to this many rows are multiplied directly, as converting the weight would take longer
SLAB_ELEMENTS = 1 << 20  # elements of the weight converted at a time
QUICK_COLUMNS = 1024
# Each kernel takes a GPU some microseconds to start, so few large kernels are faster than many small ones. 268 MB in
# float32 hold the largest layer of an 8B model.
GPU_ELEMENTS = 1 << 26


@cache
def _has_units(dtype: torch.dtype) -> bool:
    """Return whether the CPU multiplies this dtype at least as fast as float32."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and _only_avx512(torch.cpu.get_capabilities()):
        return False
    known = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(known[dtype]()) if dtype in known else True


def _only_avx512(processor: Mapping[str, Any]) -> bool:
    """Return whether an x86 CPU's fastest bfloat16 path has no more throughput than float32.

    Intel cores issue one VDPBF16PS (32 products) or two FMAs of 16 per cycle (https://uops.info); AMD one of each.
    """
    return str(processor.get("cpu_name", "")).startswith("Intel") and not processor.get("amx_bf16", False)


def fast_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the fastest dtype for products with `x` on its device: its own dtype, or float32."""
    return x.dtype if x.device.type != "cpu" or _has_units(x.dtype) else torch.float32


def quick_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for approximate products of float32 values on `device`: bfloat16 or float32."""
    return torch.bfloat16 if device.type == "cpu" and _has_units(torch.bfloat16) else torch.float32


def quick(values: torch.Tensor) -> torch.Tensor:
    """Cast float32 values to `quick_dtype`."""
    return values.to(quick_dtype(values.device))


def product_in(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a, float32 (M, K), by b (K, N), float32 or in `quick_dtype`, in b's dtype; return float32 (M, N)."""
    return (a.to(b.dtype) @ b).to(torch.float32)


def quick_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a (M, K) by b (K, N), both float32, in `quick_dtype`; return float32 (M, N). b is cast in column blocks.

    In bfloat16, factors and result are rounded (relative error up to 2^-9), and sums are float32. Use it for small
    corrections, or for search directions whose result is checked.
    """
    near = quick(a)
    if near.dtype == b.dtype:
        return a @ b
    return torch.cat([product_in(near, quick(part)) for part in b.split(QUICK_COLUMNS, 1)], 1)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x (..., K) times the transposed weight (N, K), plus bias (N,), in their dtype: (..., N)."""
    if fast_dtype(x) == x.dtype or x.numel() <= FEW_ROWS * x.shape[-1]:
        return LINEAR(x, weight, bias)
    values: torch.Tensor = _Widened.apply(x, weight, bias)
    return values


class _Widened(torch.autograd.Function):
    """Autograd function for `product` via float32; it saves the original inputs, not the casts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        wide, values = x.float(), x.new_empty(*x.shape[:-1], len(weight))
        step = max(1, SLAB_ELEMENTS // weight.shape[1])
        for start in range(0, len(weight), step):
            part = slice(start, start + step)
            shift = None if bias is None else bias[part].float()
            values[..., part] = LINEAR(wide, weight[part].float(), shift)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, wide = gradients[0].flatten(0, -2), x.flatten(0, -2).float()
        needs = ctx.needs_input_grad
        inner = torch.zeros_like(wide) if needs[0] else None
        of_weight = torch.empty_like(weight) if needs[1] else None
        of_bias = weight.new_empty(len(weight)) if needs[2] else None
        step = max(1, SLAB_ELEMENTS // weight.shape[1])
        for start in range(0, len(weight), step):
            part = slice(start, start + step)
            slope = rows[:, part].float()
            if inner is not None:
                inner.addmm_(slope, weight[part].float())
            if of_weight is not None:
                of_weight[part] = slope.T @ wide
            if of_bias is not None:
                of_bias[part] = slope.sum(0)
        return None if inner is None else inner.view(x.shape).to(x.dtype), of_weight, of_bias


class Linear(nn.Linear):
    """An `nn.Linear` that computes with `product`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)


def use_products(model: nn.Module) -> None:
    """Change the class of the model's linear layers to `Linear`, in place.

    Replacing modules would miss aliases: GPT-NeoX skeletons register the output layer under the
    checkpoint's name and transformers' name.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


class products_everywhere(TorchFunctionMode):  # noqa: N801 - it is called like a function
    """Context manager: every `nn.Linear` computes with `product`, for models that must not be modified."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (product if function is LINEAR else function)(*args, **(kwargs or {}))


def elements_together(elements: int, device: torch.device) -> int:
    """Return how many elements to process at once: `elements` on a CPU, at least `GPU_ELEMENTS` on a GPU."""
    return elements if device.type == "cpu" else max(elements, GPU_ELEMENTS)


def rows_together(weight: torch.Tensor, elements: int) -> int:
    """Return how many rows of `weight` (N, K) to process at once; `elements` is the CPU's number of elements."""
    return max(1, elements_together(elements, weight.device) // weight.shape[1])
