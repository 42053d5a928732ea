"""How many rows of a weight are computed together."""

from __future__ import annotations

import torch

# Each kernel takes a GPU some microseconds to start, so few large kernels are faster than many small ones. 268 MB in
# float32 hold the largest layer of an 8B model.
GPU_ELEMENTS = 1 << 26


def elements_together(elements: int, device: torch.device) -> int:
    """The number of elements to compute together: `elements` on the CPU, at least `GPU_ELEMENTS` elsewhere."""
    return elements if device.type == "cpu" else max(elements, GPU_ELEMENTS)


def rows_together(weight: torch.Tensor, elements: int) -> int:
    """How many rows of `weight` (N, K) to compute together; `elements` is their size on the CPU."""
    return max(1, elements_together(elements, weight.device) // weight.shape[1])
