"""Read what all tools write into plain values: GPTQ and AWQ layouts, compressed-tensors, plain checkpoints, GGUF."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bench.folders import BenchError
from quantkit.formats._bit_packing import unpack_awq, unpack_columns, unpack_rows, unpack_string
from quantkit.formats.gguf.reader import read_file
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups

INT8 = "int-quantized"  # compressed-tensors' W8A8, whose inputs are rounded as they come, token by token
Get = Callable[[str], torch.Tensor]


def checkpoint_folder(folder: Path) -> Path:
    """The folder that holds config.json: this one, or (AutoRound) the only one below it."""
    if (folder / "config.json").is_file():
        return folder
    below = sorted(path.parent for path in folder.glob("*/config.json"))
    if len(below) != 1:
        raise BenchError(f"{folder} holds {len(below)} checkpoints, expected one")
    return below[0]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, or the GGUF file of a folder."""
    if files := sorted(folder.glob("*.gguf")):
        return files
    files = sorted(checkpoint_folder(folder).glob("*.safetensors"))
    if not files:
        raise BenchError(f"{folder} holds no safetensors")
    return files


def rounds_inputs(folder: Path) -> set[str]:
    """Names of the layers whose inputs an engine rounds to 8-bit integers."""
    config = json.loads((checkpoint_folder(folder) / "config.json").read_text(encoding="utf-8"))
    if (config.get("quantization_config") or {}).get("format") != INT8:
        return set()
    keys = (key for file in weight_files(folder) for key in safe_open(file, framework="pt").keys())  # noqa: SIM118
    return {key.removesuffix(".weight_scale") for key in keys if key.endswith(".weight_scale")}


def read_values(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (parameter name, values): quantized weights as float32 of exactly what the file says, others as stored."""
    if next(folder.glob("*.gguf"), None):
        for file in weight_files(folder):
            for name, value in read_file(file):
                yield name, torch.from_numpy(value.whole())
        return
    where: dict[str, Any] = {}
    for file in weight_files(folder):
        opened: Any = safe_open(file, framework="pt")
        where.update(dict.fromkeys(opened.keys(), opened))
    config = json.loads((checkpoint_folder(folder) / "config.json").read_text(encoding="utf-8"))
    settings = config.get("quantization_config") or {}
    if "quantization" in config:
        settings = {"quant_method": "mlx", **config["quantization"]}
    method = INT8 if settings.get("format") == INT8 else settings.get("quant_method", "plain")
    if method not in READERS:
        raise BenchError(f"{folder}: no reader for the layout {method!r}")
    key, parts, read = READERS[method]

    def get(name: str) -> torch.Tensor:
        found: torch.Tensor = where[name].get_tensor(name)
        return found

    for name in sorted(where):
        stem, _, leaf = name.rpartition(".")
        if leaf == key:
            yield f"{stem}.weight", read(get, set(where), stem, settings)
        elif leaf not in parts:
            yield name, get(name)


def _bits_of(module: str, settings: dict[str, Any]) -> int:
    """By the first group of compressed-tensors, or expression of GPTQModel, that the layer's name fits."""
    for group in (settings.get("config_groups") or {}).values():
        for target in group["targets"]:
            if target in ("Linear", module) or (target.startswith("re:") and re.match(target[3:], module)):
                return int(group["weights"]["num_bits"])
    for expression, own in (settings.get("dynamic") or {}).items():
        if re.match(expression.removeprefix("+:"), module):
            return int(own["bits"])
    return int(settings["bits"])


def _gptq(get: Get, names: set[str], stem: str, settings: dict[str, Any]) -> torch.Tensor:
    bits = _bits_of(stem, settings)
    form = settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise BenchError(f"no reader for the GPTQ format {form!r}")
    codes = unpack_rows(get(f"{stem}.qweight"), bits).T.contiguous()
    scales = get(f"{stem}.scales").T.contiguous()
    zeros = unpack_columns(get(f"{stem}.qzeros"), bits) + (1 if form == "gptq" else 0)
    if f"{stem}.g_idx" in names:
        g_idx = get(f"{stem}.g_idx").to(torch.int64)
    else:
        g_idx = contiguous_groups(codes.shape[1], codes.shape[1] // scales.shape[1])
    return GroupedWeight(codes, scales, zeros.T.contiguous(), g_idx, bits).dense()


def _awq(get: Get, _names: set[str], stem: str, settings: dict[str, Any]) -> torch.Tensor:
    if settings.get("version", settings.get("format", "gemm")) != "gemm":
        raise BenchError(f"no reader for the AWQ version {settings.get('version')!r}")
    codes = unpack_awq(get(f"{stem}.qweight")).T.contiguous()
    scales = get(f"{stem}.scales").T.contiguous()
    zeros = unpack_awq(get(f"{stem}.qzeros")).T.contiguous()
    g_idx = contiguous_groups(codes.shape[1], codes.shape[1] // scales.shape[1])
    return GroupedWeight(codes, scales, zeros, g_idx, 4).dense()


def _compressed(get: Get, names: set[str], stem: str, settings: dict[str, Any]) -> torch.Tensor:
    """Signed codes packed along the input side, stored plus 2^(bits-1); zero points packed along the output side."""
    if settings.get("format") != "pack-quantized":
        raise BenchError(f"no reader for the compressed-tensors format {settings.get('format')!r}")
    bits = _bits_of(stem, settings)
    rows, columns = (int(size) for size in get(f"{stem}.weight_shape"))
    codes = unpack_columns(get(f"{stem}.weight_packed"), bits)[:rows, :columns].contiguous()
    scales = get(f"{stem}.weight_scale")
    if f"{stem}.weight_zero_point" in names:
        zeros = unpack_rows(get(f"{stem}.weight_zero_point"), bits)[:rows].contiguous()
    else:
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    if f"{stem}.weight_g_idx" in names:
        g_idx = get(f"{stem}.weight_g_idx").to(torch.int64)
    else:
        g_idx = contiguous_groups(columns, columns // scales.shape[1])
    return GroupedWeight(codes, scales, zeros, g_idx, bits).dense()


def _int8(get: Get, names: set[str], stem: str, _settings: dict[str, Any]) -> torch.Tensor:
    """Signed 8-bit values with a scale for each row; what is not quantized has none."""
    weight = get(f"{stem}.weight")
    return weight.float() * get(f"{stem}.weight_scale").float() if f"{stem}.weight_scale" in names else weight


def _mlx(get: Get, names: set[str], stem: str, settings: dict[str, Any]) -> torch.Tensor:
    """Codes times scales plus biases; what is not quantized has none. Settings of a layer of its own have its name."""
    weight = get(f"{stem}.weight")
    if f"{stem}.scales" not in names:
        return weight
    own = settings.get(stem, settings)
    scales, biases = (get(f"{stem}.{part}").float() for part in ("scales", "biases"))
    codes = unpack_string(weight.view(torch.int32), own["bits"], scales.shape[1] * own["group_size"]).float()
    wide_scales, wide_biases = (part.repeat_interleave(own["group_size"], 1) for part in (scales, biases))
    return codes * wide_scales + wide_biases


def _plain(get: Get, _names: set[str], stem: str, _settings: dict[str, Any]) -> torch.Tensor:
    return get(f"{stem}.weight")


Reader = Callable[[Get, set[str], str, dict[str, Any]], torch.Tensor]
READERS: dict[str, tuple[str, tuple[str, ...], Reader]] = {
    "gptq": ("qweight", ("qzeros", "scales", "g_idx"), _gptq),
    "awq": ("qweight", ("qzeros", "scales"), _awq),
    "compressed-tensors": (
        "weight_packed",
        ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        _compressed,
    ),
    INT8: ("weight", ("weight_scale",), _int8),
    "mlx": ("weight", ("scales", "biases"), _mlx),
    "plain": ("weight", (), _plain),
}
