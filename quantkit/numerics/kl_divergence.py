"""The Kullback-Leibler divergence between two sets of logits, and its gradient, in little memory."""

from __future__ import annotations

import torch

SLAB_ELEMENTS = 1 << 19  # of the rows that are worked on together, so that they stay in the processor's cache


def divergence(exact: torch.Tensor, ours: torch.Tensor, gradient: torch.Tensor | None = None) -> float:
    """Sum over the rows of KL(softmax(exact) || softmax(ours)), logits (n, V) of any float dtype, computed in float32.

    With `gradient` (n, V), the gradient by `ours`, softmax(ours) - softmax(exact), goes there; it may be `exact`.
    """
    total = 0.0
    step = max(1, SLAB_ELEMENTS // exact.shape[1])
    for start in range(0, len(exact), step):
        rows = slice(start, start + step)
        apart, log_q = (logits[rows].to(torch.float32, copy=True) for logits in (exact, ours))
        for values in (apart, log_q):
            values.sub_(values.logsumexp(-1, keepdim=True))
        p = apart.exp()
        total += float(torch.dot(p.view(-1), apart.sub_(log_q).view(-1)))
        if gradient is not None:
            gradient[rows] = log_q.exp_().sub_(p)
    return total
