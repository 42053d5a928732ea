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
    """W (out, in), or (in, out) where `transposed`, with A (r, in), B (out, r), and m (out) of DoRA; all float32."""
    delta = b @ a
    delta = (delta.T if transposed else delta) * scale
    if magnitude is None:
        return weight + delta
    norm = _norms(weight.T if transposed else weight, delta.T if transposed else delta)
    factor = (magnitude / norm).view(-1, 1)
    return (factor.T if transposed else factor) * (weight + delta)


def merge_embedding(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, magnitude: torch.Tensor | None = None
) -> torch.Tensor:
    """E (tokens, width) with A (r, tokens), B (width, r), and m (width) of DoRA; all float32."""
    delta = (b @ a).T * scale
    if magnitude is None:
        return weight + delta
    return (magnitude / _norms(weight.T, delta.T)).view(1, -1) * (weight + delta)


def _norms(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """(out): the length of each row of the sum of two (out, in)."""
    return torch.linalg.norm(weight + delta, dim=1)
