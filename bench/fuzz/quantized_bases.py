"""Sound checkpoints that are quantized, as other tools write them: without a manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROUNDED = {  # of the plain model, by quantkit itself
    "gptq": ["rtn", "--bits", "4", "--no-sym", "--group-size", "32"],
    "gptq order": ["gptq", "--bits", "4", "--desc-act", "--group-size", "32"],
    "awq": ["rtn", "--bits", "4", "--no-sym", "--format", "awq"],
    "compressed": ["rtn", "--bits", "8", "--group-size", "-1", "--format", "compressed-tensors"],
    "compressed zeros": ["rtn", "--bits", "4", "--no-sym", "--format", "compressed-tensors"],
    "nf4": ["nf4"],
}
SAVED: dict[str, dict[str, Any]] = {  # by transformers
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
FP8_BLOCKS = {"fp8": (32, 48), "fp8 tensor": None}
# compressed-tensors: the group of a layer is the first whose words its name holds; "" are all others.
SCALED: dict[str, dict[str, str]] = {
    "compressed int8": {"": "int8"},
    "compressed fp8": {"": "float8"},
    "compressed fp8 blocks": {"": "float8 blocks"},
    "compressed nvfp4": {"": "nvfp4"},
    "compressed mxfp4": {"": "mxfp4"},
    "compressed mixed": {"down_proj": "nvfp4", "q_proj": "int8", "": "float8 blocks"},
}
GROUPS, MXFP4 = "compressed groups", "mxfp4"
NAMES = (*ROUNDED, *SAVED, *FP8_BLOCKS, *SCALED, GROUPS, MXFP4)
GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 4096, "head_dim": 16}
BLOCK = (32, 48)  # rows and columns of "float8 blocks"
LAYERS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")  # how names of layers in blocks end
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEAST = 1e-8  # the largest value of what is all zeros


def _rewrite(folder: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def save_with_transformers(source: Path, folder: Path, settings: dict[str, Any]) -> None:
    """bitsandbytes' kinds."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    shutil.copytree(source, folder)
    quantization = BitsAndBytesConfig(**settings)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=quantization).save_pretrained(folder)


def save_fp8(source: Path, folder: Path, block: tuple[int, int] | None) -> None:
    """FP8 in blocks, or with one scale a matrix."""
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, value in list(tensors.items()):
        if name.endswith(LAYERS):
            tensors[name], scales = _float8(value.float(), block or tuple(value.shape))
            tensors[f"{name}_scale_inv"] = scales if block else scales.reshape(())
    size = list(block) if block else None
    _rewrite(folder, tensors, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size})


def save_mxfp4(source: Path, folder: Path) -> None:
    """A tiny gpt-oss with random codes."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=draw)
    _rewrite(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": None})


def save_groups(whole: Path, zeros: Path, folder: Path) -> None:
    """compressed-tensors of two groups: down_proj as in `zeros`, all else as in `whole`."""
    from safetensors.torch import load_file

    shutil.copytree(whole, folder)
    kept, others = (load_file(path / "model.safetensors") for path in (whole, zeros))
    tensors = {name: value for name, value in kept.items() if "down_proj" not in name}
    tensors |= {name: value for name, value in others.items() if "down_proj" in name}
    settings = json.loads((whole / "config.json").read_text())["quantization_config"]
    other = json.loads((zeros / "config.json").read_text())["quantization_config"]
    (rest,), (down,) = settings["config_groups"].values(), other["config_groups"].values()
    groups = {"group_0": {**down, "targets": ["re:.*down_proj$"]}, "group_1": rest}
    _rewrite(folder, tensors, {**settings, "config_groups": groups})


# compressed-tensors' scaled values, rounded by plain arithmetic


def save_scaled(source: Path, folder: Path, kinds: Mapping[str, str]) -> None:
    """compressed-tensors of one group for each of the `kinds`: see SCALED."""
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(LAYERS)]:
        kind = next(kind for words, kind in kinds.items() if words in name)
        value, stem = tensors.pop(name).float(), name.removesuffix("weight")
        tensors |= {stem + part: stored for part, stored in _scaled(value, kind).items()}
    groups = {
        f"group_{number}": {"targets": [f"re:.*{words}.*"] if words else ["Linear"], **group_of(kind)}
        for number, (words, kind) in enumerate(kinds.items())
    }
    formats = {group["format"] for group in groups.values()}
    settings = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    whole = formats.pop() if len(formats) == 1 else "mixed-precision"
    _rewrite(folder, tensors, {**settings, "format": whole, "config_groups": groups})


def group_of(kind: str) -> dict[str, Any]:
    """What config.json says of a group of layers, but for its targets."""
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False, "type": "float", "num_bits": 8}
    layout = "float-quantized"
    if kind == "int8":
        layout, weights = "int-quantized", {**weights, "type": "int", "strategy": "channel"}
    elif kind == "float8":
        weights |= {"strategy": "channel"}
    elif kind == "float8 blocks":
        weights |= {"strategy": "block", "block_structure": list(BLOCK)}
    else:
        layout, size = f"{kind}-pack-quantized", 16 if kind == "nvfp4" else 32
        weights |= {"num_bits": 4, "group_size": size, "strategy": "tensor_group" if kind == "nvfp4" else "group"}
        weights |= {"scale_dtype": "torch.float8_e4m3fn" if kind == "nvfp4" else "torch.uint8"}
    return {"format": layout, "weights": weights, "input_activations": None}


def _scaled(value: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """The parts of a layer (N, K) float32."""
    import torch

    if kind == "int8":
        scales = (value.abs().amax(1, keepdim=True).clamp(min=LEAST) / 127).bfloat16()
        return {"weight": (value / scales.float()).round().clamp(-127, 127).to(torch.int8), "weight_scale": scales}
    if kind.startswith("float8"):
        codes, scales = _float8(value, BLOCK if kind == "float8 blocks" else (1, value.shape[1]))
        return {"weight": codes, "weight_scale": scales.bfloat16()}
    size = 16 if kind == "nvfp4" else 32
    largest = value.unflatten(1, (-1, size)).abs().amax(-1).clamp(min=LEAST)
    if kind == "mxfp4":
        scales = (largest.log2().floor() - 2 + 127).clamp(0, 254).to(torch.uint8)
        parts, factors = {"weight_scale": scales}, torch.exp2(scales.float() - 127)
    else:
        divisor = (448 * 6 / value.abs().max().clamp(min=LEAST)).reshape(1)
        scales = (largest / 6 * divisor).clamp(min=2**-9).to(torch.float8_e4m3fn)
        parts, factors = {"weight_scale": scales, "weight_global_scale": divisor}, scales.float() / divisor
    steps = value / factors.repeat_interleave(size, 1)
    codes = (steps.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1) + 8 * (steps < 0)
    return {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), **parts}


def _float8(value: torch.Tensor, block: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales of blocks of that many rows and columns."""
    import torch

    rows, columns = block
    bands = [band.split(columns, 1) for band in value.split(rows)]
    scales = torch.stack([torch.stack([part.abs().max() for part in band]) for band in bands]).clamp(min=LEAST) / 448
    spread = scales.repeat_interleave(rows, 0)[: len(value)].repeat_interleave(columns, 1)[:, : value.shape[1]]
    return (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn), scales
