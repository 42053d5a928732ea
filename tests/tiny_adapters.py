"""Tiny adapters, written as PEFT writes them, without it."""

import json

import torch
from safetensors.torch import load_file, save_file

from quantkit.models.adapter import CONFIG, PREFIX, WEIGHTS

RANK, ALPHA = 4, 6


def save_adapter(folder, tensors, **config):
    """An adapter of these tensors, whose names lack PEFT's prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": None, **config}
    (folder / CONFIG).write_text(json.dumps(values))
    save_file(
        {PREFIX + name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()},
        folder / WEIGHTS,
    )
    return folder


def low_rank(model, paths, rank=RANK, seed=1):
    """Random matrices for linear layers of a checkpoint in one file: A (rank, in), B (out, rank)."""
    weights = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in paths:
        out, columns = weights[f"{path}.weight"].shape
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, columns, generator=noise) * 0.1
        tensors[f"{path}.lora_B.weight"] = torch.randn(out, rank, generator=noise) * 0.1
    return tensors
