"""Rounding to a narrower float type, where nothing may overflow."""

from __future__ import annotations

import torch

from quantkit.errors import ValuesError


def cast_finite(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """`tensor` in `dtype`; raises ValuesError where values beyond its range would become infinite."""
    rounded = tensor.to(dtype)
    if not bool(torch.isfinite(rounded).all()):
        kind = str(dtype).removeprefix("torch.")
        raise ValuesError(f"{name} has values beyond {kind}'s range ({torch.finfo(dtype).max:g})")
    return rounded
