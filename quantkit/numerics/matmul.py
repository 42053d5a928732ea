"""Products in the processor's fastest float type: bfloat16 if it has hardware for it, else float32.

A processor without bfloat16 hardware (most of today's desktops and laptops) needs about seven times as long for it as
for float32; an Intel processor with AVX-512's bfloat16 instructions, but without AMX (or if a virtual machine hides
it), 1.6 times as long. There, the inputs and parts of the weight are converted to float32, the product is summed in
float32 and rounded once, as the hardware does elsewhere.
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
    """Return whether the processor multiplies the dtype no slower than float32."""
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
    """Return whether an x86 processor's fastest bfloat16 path does as many products per cycle as float32.

    Intel's cores start one VDPBF16PS of 32 products a cycle, and two FMAs of 16 (https://uops.info); AMD's one of each.
    """
    return str(processor.get("cpu_name", "")).startswith("Intel") and not processor.get("amx_bf16", False)


def fast_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the fastest dtype to multiply `x` in on its device: its own, or float32."""
    return x.dtype if x.device.type != "cpu" or _has_units(x.dtype) else torch.float32


def quick_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for float32 products that need few digits on `device`: bfloat16 or float32."""
    return torch.bfloat16 if device.type == "cpu" and _has_units(torch.bfloat16) else torch.float32


def quick(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values in `quick_dtype`."""
    return values.to(quick_dtype(values.device))


def product_in(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a (M, K) float32 by b (K, N), `quick` or float32, in b's dtype; return (M, N) float32."""
    return (a.to(b.dtype) @ b).to(torch.float32)


def quick_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a (M, K) by b (K, N) float32 in `quick_dtype`; return (M, N) float32. b is converted in column blocks.

    In bfloat16, both factors and the result are rounded, to a relative error of 2^-9 at most, and sums are float32. Use
    it for small corrections, and for directions from a point whose error is known.
    """
    near = quick(a)
    if near.dtype == b.dtype:
        return a @ b
    return torch.cat([product_in(near, quick(part)) for part in b.split(QUICK_COLUMNS, 1)], 1)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x (..., K) by the transposed weight (N, K) and add bias (N,): (..., N), in their dtype."""
    if fast_dtype(x) == x.dtype or x.numel() <= FEW_ROWS * x.shape[-1]:
        return LINEAR(x, weight, bias)
    values: torch.Tensor = _Widened.apply(x, weight, bias)
    return values


class _Widened(torch.autograd.Function):
    """`product` through float32; saves its inputs for gradients, not the converted tensors."""

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
    """A linear layer that calls `product`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)


def use_products(model: nn.Module) -> None:
    """Change the linear layers of `model` to the class `Linear`, in place.

    Replacing layers would miss second references to them: a skeleton of GPT-NeoX has its
    output layer by the checkpoint's name and by transformers' name.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


class products_everywhere(TorchFunctionMode):  # noqa: N801 - it is called like a function
    """Within this context, linear layers of any class call `product`, for models that quantkit must not change."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (product if function is LINEAR else function)(*args, **(kwargs or {}))


def elements_together(elements: int, device: torch.device) -> int:
    """Return the number of elements to compute together: `elements` on the CPU, at least `GPU_ELEMENTS` elsewhere."""
    return elements if device.type == "cpu" else max(elements, GPU_ELEMENTS)


def rows_together(weight: torch.Tensor, elements: int) -> int:
    """Return how many rows of `weight` (N, K) to compute together; `elements` is their size on the CPU."""
    return max(1, elements_together(elements, weight.device) // weight.shape[1])
