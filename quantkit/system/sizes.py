"""Sizes as users say them."""

from __future__ import annotations

import re

from quantkit.errors import RecipeError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(size: str | int, option: str) -> int:
    """Bytes of a size such as ``90MB``, ``1.2 GiB`` or 90000000; raises RecipeError naming the option."""
    parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(size))
    if parts is None or parts[2].upper() not in UNITS:
        raise RecipeError(f"{option} = {size!r} is no size. Give one such as 90MB, 1.2GB or 800MiB.")
    return int(float(parts[1]) * UNITS[parts[2].upper()])
