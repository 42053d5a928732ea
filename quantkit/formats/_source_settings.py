"""Read how another tool says that a checkpoint is quantized: in config.json, or in a file of its own.

AutoRound stores GPTQ's or AWQ's tensors under names of its own for them: https://github.com/intel/auto-round,
auto_round/inference/backend.py, where `auto_round:auto_gptq` has "zp+-1" and `auto_round` has zero points as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import ArtifactError
from quantkit.untrusted import read_object, shown

KEYS = ("quantization_config", "compression_config")  # of config.json; the second is compressed-tensors' former one
# Files of AutoGPTQ and AutoAWQ, with the method where they name none.
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
GPTQ, GPTQ_V2 = ({"quant_method": "gptq", "checkpoint_format": name} for name in ("gptq", "gptq_v2"))
AWQ = {"quant_method": "awq", "version": "gemm"}
# What AutoRound calls `packing_format`, and `backend` before version 0.5.
AUTO_ROUND = {
    **dict.fromkeys(("auto", "auto_round:gptq", "auto_round:auto_gptq"), GPTQ),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2"), GPTQ_V2),
    **dict.fromkeys(("auto_round:awq", "auto_round:auto_awq"), AWQ),
}


def source_settings(folder: Path) -> tuple[str, dict[str, Any] | None]:
    """Return where a checkpoint's settings are and, in the words of its format, what they are; None without any.

    Raises ArtifactError for a file that cannot be read, and for a layout of AutoRound that is not supported.
    """
    config = read_object(folder / "config.json", ArtifactError)
    for key in KEYS:
        if (found := config.get(key)) is not None:
            settings = found if isinstance(found, dict) else {"quant_method": found}
            return f"config.json: {key}", _of_format(settings, folder)
    for name, method in FILES.items():
        if (folder / name).is_file():
            return name, {"quant_method": method, **read_object(folder / name, ArtifactError)}
    return "config.json", None


def _of_format(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "auto-round" not in str(settings.get("quant_method")):
        return settings
    packing, kind = settings.get("packing_format") or settings.get("backend") or "auto", settings.get("data_type")
    if not isinstance(packing, str) or packing not in AUTO_ROUND or kind not in (None, "int"):
        raise ArtifactError(
            f"{folder / 'config.json'}: AutoRound's packing_format {shown(packing)} with data_type {shown(kind)} is "
            f"not supported. These are, with data_type int: {', '.join(AUTO_ROUND)}."
        )
    layers = settings.get("extra_config") or {}
    named = {f"+:{name}": own for name, own in layers.items()} if isinstance(layers, dict) else layers
    return {**settings, **AUTO_ROUND[packing], "dynamic": named}


def layer_overrides(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what `dynamic` says of layers whose settings differ; which layers these are, their tensors show."""
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ArtifactError(f"dynamic is {shown(dynamic)}, not a mapping of layers to their settings")
    named = {str(pattern): own for pattern, own in dynamic.items()}
    return [own for pattern, own in named.items() if isinstance(own, dict) and not pattern.startswith("-:")]
