"""Architectures that stand for the others in the quick lane."""

from collections.abc import Iterable
from typing import Any

import pytest
from tiny_architectures import ARCHITECTURES

REPRESENTATIVE = {
    "llama": "dense, untied",
    "llama, tied": "tied, with biases",
    "phi3": "fused layers",
    "gpt2": "transposed layers",
    "gpt_neox": "heads interleaved in a fused layer",
    "opt": "projections around the blocks",
    "mixtral": "experts",
    "qwen2_moe": "a shared expert",
    "deepseek_v3": "latent attention",
    "llama4": "stacked experts",
    "gpt_oss": "stacked experts with biases",
    "qwen3_next": "recurrent layers",
    "gemma4": "half of a multimodal model; blocks that share keys and values",
}


def each(names: Iterable[str] = ARCHITECTURES) -> list[Any]:
    """The names as parameters; all but the representative ones are slow."""
    return [name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow) for name in names]
