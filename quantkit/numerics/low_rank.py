"""What an adapter does to a weight, in float32: LoRA (W + s B A), DoRA, and the same for embeddings.

LoRA: https://arxiv.org/abs/2106.09685, section 4.1. rsLoRA only has another s: https://arxiv.org/abs/2312.03732.
DoRA: https://arxiv.org/abs/2402.09353, equation 5: m (W + s B A) / ||W + s B A||, the norm of each output.
Products and sums come in the order of PEFT's `merge`, so that the values agree with its to the last bit.
"""

from __future__ import annotations

import torch


def merge_linear(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    magnitude: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """W (out, in) with A (r, in), B (out, r), and m (out) of DoRA; all float32.

    W is (in, out) where it is stored `transposed`, as embeddings (tokens, width) are.
    """
    delta = b @ a
    delta = (delta.T if transposed else delta) * scale
    if magnitude is None:
        return weight + delta
    norm = torch.linalg.norm(weight.T + delta.T if transposed else weight + delta, dim=1)
    factor = (magnitude / norm).view(-1, 1)
    return (factor.T if transposed else factor) * (weight + delta)
