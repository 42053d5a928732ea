"""Read a checkpoint's quantization settings from config.json's `quantization_config` or another tool's file.

AutoRound renames GPTQ's and AWQ's layouts (https://github.com/intel/auto-round,
auto_round/inference/backend.py): `auto_round:auto_gptq` stores zero points minus 1, `auto_round` stores them as is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.contracts.format import ON_CPU
from quantkit.errors import ArtifactError
from quantkit.models.text_half import roots
from quantkit.system.untrusted import read_object, shown

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton
    from quantkit.models.source import Source

# Of config.json; the second is compressed-tensors' old name, the third is MLX's and has no METHOD_KEY.
KEYS = ("quantization_config", "compression_config", "quantization")
METHOD_KEY, MLX = "quant_method", "mlx"
# Files of AutoGPTQ and AutoAWQ, with the method to assume if they name none.
GPTQ_FILE = "quantize_config.json"
FILES = {GPTQ_FILE: "gptq", "quant_config.json": "awq"}
VERSION_KEYS = ("checkpoint_format", "format")  # where GPTQModel names the version of GPTQ's layout
GPTQ, GPTQ_V2 = ({"quant_method": "gptq", "checkpoint_format": name} for name in ("gptq", "gptq_v2"))
AWQ = {"quant_method": "awq", "version": "gemm"}
# Values of AutoRound's `packing_format` (`backend` before version 0.5).
AUTO_ROUND = {
    **dict.fromkeys(("auto", "auto_round:gptq", "auto_round:auto_gptq"), GPTQ),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2"), GPTQ_V2),
    **dict.fromkeys(("auto_round:awq", "auto_round:auto_awq"), AWQ),
}


def gpus_only(since: str, kernel: str) -> dict[str, str]:
    """Return the refusal of vLLM's CPU build; `kernel` is the file of vLLM's source with the kernel for GPUs."""
    return {
        f"vllm{ON_CPU}": f"vLLM's CPU build (0.32) has no kernel for it. For NVIDIA GPUs, vLLM {since} and newer has "
        f"one (not run by quantkit; source: vllm/model_executor/kernels/linear/{kernel}.py)"
    }


def quantization_of(folder: Path) -> dict[str, Any]:
    """Return the `quantization_config` in a folder's config.json, or an empty dict."""
    try:
        values = read_object(folder / "config.json", ArtifactError).get(KEYS[0])
    except ArtifactError:
        return {}
    return values if isinstance(values, dict) else {}


def source_quantization(folder: Path) -> tuple[str, dict[str, Any] | None]:
    """Return (where the settings are, settings) of a checkpoint; the settings are None if it is not quantized.

    The first item is ``config.json: KEY`` or a file name.
    """
    config = read_object(folder / "config.json", ArtifactError)
    if isinstance(own := config.get(KEYS[2]), dict) and METHOD_KEY not in own:
        return f"config.json: {KEYS[2]}", {METHOD_KEY: MLX, **own}
    for key in KEYS:
        if (found := config.get(key)) is not None:
            settings = found if isinstance(found, dict) else {"quant_method": found}
            if "auto-round" in str(settings.get("quant_method")):
                return f"config.json: {key}", _of_auto_round(settings, folder)
            return f"config.json: {key}", _with_version(settings, folder)
    for name, method in FILES.items():
        if (folder / name).is_file():
            return name, {"quant_method": method, **read_object(folder / name, ArtifactError)}
    return "config.json", None


def _with_version(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add GPTQ's layout version if only quantize_config.json has it; GPTQModel reads that file first."""
    path = folder / GPTQ_FILE
    if any(settings.get(name) for name in VERSION_KEYS) or not path.is_file():
        return settings
    own = read_object(path, ArtifactError)
    return settings | {name: own[name] for name in VERSION_KEYS if name in own}


def _of_auto_round(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
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
    """Return the per-layer settings in `dynamic`, as a list; which layer each applies to follows from the tensors."""
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ArtifactError(f"dynamic is {shown(dynamic)}, not a mapping of layers to their settings")
    named = {str(pattern): own for pattern, own in dynamic.items()}
    return [own for pattern, own in named.items() if isinstance(own, dict) and not pattern.startswith("-:")]


def recognizes(quant_method: str, path: Path) -> bool:
    """Return whether `path` is a folder whose config.json has this `quant_method`."""
    return quantization_of(path).get("quant_method") == quant_method


def refuse_other_dtypes(folder: Path, types: Iterable[str]) -> object:
    """Return config.json's dtype; raise ArtifactError if a stored dtype differs, since loaders would cast it."""
    dtype = read_object(folder / "config.json", ArtifactError, "Convert again.").get("dtype")
    for stored in types:
        if stored != dtype:
            raise ArtifactError(
                f"{folder} holds tensors in {stored}, and its config.json says {shown(dtype)}. Convert again."
            )
    return dtype


@dataclass(frozen=True)
class Untouched:
    """Modules that stay unquantized, under their names in the files and in transformers."""

    linears: tuple[str, ...] = ()  # linear layers of the model
    modules: tuple[str, ...] = ()  # that readers would not skip themselves: outside the model, or unquantized layers

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return regular expressions that match everything inside the modules, with or without a leading ``model.``."""
        bare = sorted({name.removeprefix("model.") for name in self.modules})
        return tuple(rf"(model\.)?{re.escape(name)}(\..*)?$" for name in bare)


def untouched(source: Source, skeleton: Skeleton) -> Untouched:
    """Return the modules that stay unquantized in this model."""
    from torch import nn

    quantized = skeleton.linears()
    linears = (name for name, module in skeleton.model.named_modules() if isinstance(module, nn.Linear))
    others = _names(source, skeleton, (name for name in linears if f"{name}.weight" not in quantized))
    alone = _names(source, skeleton, (name.removesuffix(".weight") for name in skeleton.left_alone()))
    outer = roots(source.passthrough, map(source.published, source.tensors))
    inside = (name if name.startswith("model.") else f"model.{name}" for name in outer)
    return Untouched(tuple(others), tuple(sorted({*outer, *inside, *alone})))


def _names(source: Source, skeleton: Skeleton, layers: Iterable[str]) -> list[str]:
    """Return the names of these skeleton layers in files and in transformers."""
    found = []
    for name in layers:
        origin = skeleton.origins.get(f"{name}.weight")
        found.append(name)
        if origin is not None and name.startswith(f"{skeleton.blocks_path}."):
            found.append(origin.name.removesuffix(".weight"))
    if source.text_prefixes is not None:
        found = [place for name in found for place in source.text_prefixes.modules(name)]
    return list(dict.fromkeys(found))
