"""Parse and format sizes in bytes and bits."""

from __future__ import annotations

import re

from quantkit.errors import RecipeError
from quantkit.system.untrusted import shown

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
LARGEST = 1 << 60  # bytes


def parse_size(size: str | int, option: str) -> int:
    """Parse a size such as ``90MB``, ``1.2 GiB`` or 90000000 to bytes; raise RecipeError with the option's name."""
    parts = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*", str(size))
    if parts is None or parts[2].upper() not in UNITS:
        raise RecipeError(f"{option} = {shown(size)} is not a size. Give one such as 90MB, 1.2GB or 800MiB.")
    number = float(parts[1]) * UNITS[parts[2].upper()]
    if number > LARGEST:
        raise RecipeError(f"{option} = {shown(size)} is larger than any disk. Give one such as 90MB or 1.2GB.")
    return int(number)


def megabytes(value: float) -> str:
    """Format bytes in MB or GB (powers of ten)."""
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def bits_per_weight(nbytes: int, weights: int) -> float:
    """Return the weight files' bits per weight of the model."""
    return 8 * nbytes / max(1, weights)


def in_one_unit(need: int, have: int) -> tuple[str, str]:
    """Format two byte counts in the same unit, fine enough to show their difference."""
    for unit, digits in (("GB", 2), ("MB", 1), ("kB", 1)):
        size = UNITS[unit.upper()]
        one, other = (f"{number / size:.{digits}f} {unit}" for number in (need, have))
        if one != other and max(need, have) >= size / 10:
            return one, other
    return f"{need:,} bytes", f"{have:,} bytes"
