"""Sound checkpoints that are quantized, as other tools write them: without a manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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
GROUPS, MXFP4 = "compressed groups", "mxfp4"
NAMES = (*ROUNDED, *SAVED, *FP8_BLOCKS, GROUPS, MXFP4)
GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 4096, "head_dim": 16}


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
    import torch
    from safetensors.torch import load_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, value in list(tensors.items()):
        if "_proj" in name:
            rows, columns = block or value.shape
            scales = torch.stack(
                [torch.stack([part.abs().max() / 448 for part in band.split(columns, 1)]) for band in value.split(rows)]
            )
            spread = scales.repeat_interleave(rows, 0)[: len(value)].repeat_interleave(columns, 1)[:, : value.shape[1]]
            tensors[name] = (value / spread).to(torch.float8_e4m3fn)
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
