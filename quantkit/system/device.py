"""Find torch's devices and their memory."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version

from quantkit.errors import RecipeError, reason_of

AUTO, CPU = "auto", "cpu"
FAILURES = (RuntimeError, AssertionError, NotImplementedError)


def find_device(asked: str = AUTO) -> str:
    """Return torch's name of the device `asked`; "auto" is torch's accelerator if there is one, else the CPU.

    "auto" skips accelerators without float64 (Apple's). Raises RecipeError for a device that is missing or cannot
    compute.
    """
    if asked == CPU or (asked == AUTO and not _may_have_accelerator()):
        return CPU
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    kind = CPU if found is None else found.type
    name = kind if asked == AUTO else asked
    known = list(dict.fromkeys([CPU, kind, *(f"{kind}:{n}" for n in range(torch.accelerator.device_count()))]))
    if name not in known:
        raise RecipeError(f"torch computes on {', '.join(known)} here, not on {asked!r}")
    try:
        ones = torch.ones(2, 2, dtype=torch.float64, device=name)
        (ones @ ones).sum().item()
    except (TypeError, *FAILURES) as error:
        if asked == AUTO and isinstance(error, TypeError):  # no float64
            return CPU
        raise RecipeError(f"the device {name} cannot compute: {reason_of(error)}. Give --device cpu.") from None
    return name


def _may_have_accelerator() -> bool:
    """Return whether torch may know an accelerator, so that importing it is worthwhile; CPU builds need a backend."""
    return "torch" in sys.modules or not version("torch").endswith("+cpu") or bool(entry_points(group="torch.backends"))


def device_label(device: str) -> str:
    """Return the device with its product name if known, such as ``cuda (NVIDIA H200)``."""
    if device == CPU:
        return CPU
    import torch

    try:
        return f"{device} ({torch.get_device_module(device.partition(':')[0]).get_device_name(device)})"
    except (AttributeError, *FAILURES):
        return device


def memory_of(device: str) -> str:
    """Return a phrase for the device's memory in messages."""
    return "memory" if device in (AUTO, CPU) else f"memory on {device}"


def device_memory(device: str) -> tuple[int, int] | None:
    """Return (free, total) bytes of an accelerator's memory, or None if torch does not report it."""
    import torch

    try:
        free, total = torch.get_device_module(device.partition(":")[0]).mem_get_info(device)
    except (AttributeError, *FAILURES):
        return None
    return int(free), int(total)
