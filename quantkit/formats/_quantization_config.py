"""What config.json says of how a checkpoint was quantized: `quantization_config`, as transformers defines it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def quantization_of(folder: Path) -> dict[str, Any]:
    """`quantization_config` of the config.json in `folder`; empty where there is none."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return values if isinstance(values, dict) else {}


def recognizes(quant_method: str, path: Path) -> bool:
    """Whether `path` is a folder whose config.json names this `quant_method`."""
    return quantization_of(path).get("quant_method") == quant_method
