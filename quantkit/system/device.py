"""Where torch computes."""

from __future__ import annotations

from quantkit.errors import RecipeError, reason_of


def refuse_device(device: str) -> None:
    """Raise RecipeError for a device that torch does not know or that this machine does not have."""
    if device == "cpu":
        return
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RecipeError(
            f"the device {device!r} cannot be used: {reason_of(error)}. Use cpu, or cuda with a torch built for it."
        ) from None
