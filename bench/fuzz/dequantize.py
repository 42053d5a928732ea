"""The values of a quantized checkpoint by plain arithmetic, or by the library whose format it is; none of our code.

Settings are taken as they are: what they must be like is not asked here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7
Tensors = dict[str, torch.Tensor]


def values_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors by the model's names, float32."""
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    read = {
        "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "bitsandbytes": _bitsandbytes, "fp8": _fp8,
        "mxfp4": _mxfp4, "mlx": _mlx,
    }.get(settings.get("quant_method"), lambda found, _settings: found)  # fmt: skip
    return {name: value.float().numpy() for name, value in read(tensors, settings).items()}


def _stems(tensors: Tensors, part: str) -> list[str]:
    return [name.removesuffix(part) for name in tensors if name.endswith(f".{part}")]


def _bits(words: torch.Tensor, bits: int, axis: int) -> np.ndarray:
    """Codes out of a bit string that runs along an axis of int32 words."""
    plain = np.moveaxis(np.ascontiguousarray(words.numpy()), axis, -1).astype("<i4")
    string = np.unpackbits(np.ascontiguousarray(plain).view(np.uint8), axis=-1, bitorder="little")
    count = string.shape[-1] // bits
    codes = string[..., : count * bits].reshape(*string.shape[:-1], count, bits) @ (1 << np.arange(bits))
    return np.moveaxis(codes, -1, axis)


def _times_scales(codes: Any, zeros: Any, scales: torch.Tensor, groups: Any) -> torch.Tensor:
    """(N, K) codes, (N, G) zeros and scales, (K,) groups."""
    exact = scales.float().numpy()
    return torch.from_numpy(((codes - zeros[:, groups]) * exact[:, groups]).astype(np.float32))


def _gptq(tensors: Tensors, settings: dict[str, Any]) -> Tensors:
    bits, more = settings["bits"], 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    for stem in _stems(tensors, "qweight"):
        words, zeros, scales = (tensors.pop(stem + part) for part in ("qweight", "qzeros", "scales"))
        codes = _bits(words, bits, 0).T
        groups = np.arange(codes.shape[1]) * len(scales) // codes.shape[1]
        groups = tensors.pop(stem + "g_idx").numpy() if stem + "g_idx" in tensors else groups
        tensors[stem + "weight"] = _times_scales(codes, _bits(zeros, bits, 1).T + more, scales.T, groups)
    return tensors


def _awq(tensors: Tensors, _settings: dict[str, Any]) -> Tensors:
    order = np.argsort(AWQ_ORDER)

    def plain(words: torch.Tensor) -> np.ndarray:
        codes = _bits(words, 4, 1)
        return codes.reshape(len(codes), -1, 8)[..., order].reshape(codes.shape)

    for stem in _stems(tensors, "qweight"):
        words, zeros, scales = (tensors.pop(stem + part) for part in ("qweight", "qzeros", "scales"))
        codes = plain(words).T
        groups = np.arange(codes.shape[1]) * len(scales) // codes.shape[1]
        tensors[stem + "weight"] = _times_scales(codes, plain(zeros).T, scales.T, groups)
    return tensors


def _compressed(tensors: Tensors, settings: dict[str, Any]) -> Tensors:
    """Layers of several kinds may lie side by side, each of which its parts tell."""
    groups = [group["weights"] for group in settings["config_groups"].values()]
    for stem in _stems(tensors, "weight_packed"):
        if tensors[stem + "weight_packed"].dtype == torch.int32:
            tensors[stem + "weight"] = _packed(tensors, stem, groups)
        else:
            tensors[stem + "weight"] = _float4(tensors, stem)
    for stem in _stems(tensors, "weight_scale"):
        tensors[stem + "weight"] = _blocks(tensors[stem + "weight"], tensors.pop(stem + "weight_scale"), groups)
        tensors.pop(stem + "weight_zero_point", None)
    return tensors


def _packed(tensors: Tensors, stem: str, groups: list[dict[str, Any]]) -> torch.Tensor:
    """The bits of a layer are those of the one group, or those that its words have room for."""
    asked = {group["num_bits"] for group in groups}
    rows, columns = tensors.pop(stem + "weight_shape").tolist()
    words, scales = tensors.pop(stem + "weight_packed"), tensors.pop(stem + "weight_scale")
    bits = asked.pop() if len(asked) == 1 else 32 * words.shape[1] // columns
    codes = _bits(words, bits, 1)[:, :columns]
    packed = tensors.pop(stem + "weight_zero_point", None)
    middle = np.full(scales.shape, 1 << (bits - 1))
    zeros = middle if packed is None else _bits(packed, bits, 0)[:rows]
    order = np.arange(columns) * scales.shape[1] // columns
    order = tensors.pop(stem + "weight_g_idx").numpy() if stem + "weight_g_idx" in tensors else order
    return _times_scales(codes, zeros, scales, order)


def _float4(tensors: Tensors, stem: str) -> torch.Tensor:
    """Two codes a byte; scales are exponents of two, or floats over a divisor."""
    pairs, scales = tensors.pop(stem + "weight_packed"), tensors.pop(stem + "weight_scale")
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
    signed = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes.long()]
    divisor = tensors.pop(stem + "weight_global_scale", None)
    if scales.dtype == torch.uint8:
        factors = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    else:
        factors = scales.float() / divisor
    return signed * factors.repeat_interleave(codes.shape[1] // scales.shape[1], 1)


def _blocks(codes: torch.Tensor, scales: torch.Tensor, groups: list[dict[str, Any]]) -> torch.Tensor:
    """Rows and columns of a block are those that a group says and that fit, or those of the scales' shape."""
    rows, columns = codes.shape
    grid = tuple(scales.shape) if scales.ndim == 2 else (scales.numel(), 1)
    asked = [group.get("block_structure") for group in groups if group.get("strategy") == "block"]
    fitting = [block for block in asked if (-(-rows // block[0]), -(-columns // block[1])) == grid]
    high, wide = fitting[0] if fitting else (-(-rows // grid[0]), -(-columns // grid[1]))
    spread = scales.float().reshape(grid)[torch.arange(rows) // high][:, torch.arange(columns) // wide]
    return codes.float() * spread


def _bitsandbytes(tensors: Tensors, _settings: dict[str, Any]) -> Tensors:
    from bitsandbytes import functional

    for stem in _stems(tensors, "SCB"):
        tensors.pop(stem + "weight_format", None)
        tensors[stem + "weight"] = functional.int8_vectorwise_dequant(
            tensors[stem + "weight"], tensors.pop(stem + "SCB")
        )
    for name in [name.rpartition(".quant_state.")[0] for name in tensors if ".quant_state." in name]:
        parts = {key.removeprefix(f"{name}."): tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(parts, torch.device("cpu"))
        state.dtype = torch.float32
        tensors[name] = functional.dequantize_4bit(tensors[name], state)
    return tensors


def _fp8(tensors: Tensors, settings: dict[str, Any]) -> Tensors:
    for suffix in ("_scale_inv", "_scale"):
        for name in [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]:
            codes, scales = tensors[name].float(), tensors.pop(name + suffix).float()
            rows, columns = settings.get("weight_block_size") or codes.shape
            scales = scales.reshape(-(-codes.shape[0] // rows), -(-codes.shape[1] // columns))
            spread = scales[torch.arange(codes.shape[0]) // rows][:, torch.arange(codes.shape[1]) // columns]
            tensors[name] = codes * spread
    return tensors


def _mlx(tensors: Tensors, settings: dict[str, Any]) -> Tensors:
    for stem in _stems(tensors, "scales"):
        words, scales, biases = (tensors.pop(stem + part) for part in ("weight", "scales", "biases"))
        codes = _bits(words.view(torch.int32), settings["bits"], 1)
        wide = [part.float().numpy().repeat(codes.shape[1] // scales.shape[1], 1) for part in (scales, biases)]
        tensors[stem + "weight"] = torch.from_numpy(codes.astype(np.float32) * wide[0] + wide[1])
    return tensors


def _mxfp4(tensors: Tensors, _settings: dict[str, Any]) -> Tensors:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return tensors
