"""Architectures that stand for the others in the quick lane."""

import pytest
from tiny_architectures import ARCHITECTURES

REPRESENTATIVE = {
    "llama", "llama, tied", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "qwen2_moe", "deepseek_v3", "llama4",
    "gpt_oss", "qwen3_next", "gemma4",
}  # fmt: skip


def each(names=ARCHITECTURES):
    """The names as parameters; all but the representative ones are slow."""
    return [name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow) for name in names]
