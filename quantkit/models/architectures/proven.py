"""Which architectures were proven, by `model_type`: a tiny random model of each goes through the tests.

Proven: the walk sees what the whole model computes, transformers computes the same logits from the values that are read
back, and where AWQ scales, the model stays as it is. Any other decoder of transformers whose blocks hold linear layers
is taken, too, and the conversion tells that nobody has tried it.
"""

from __future__ import annotations

DENSE = (
    "apertus", "arcee", "bamba", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "cohere_compass_text", "ctrl", "cwm",
    "diffllama", "ernie4_5", "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_unified_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj",
    "granite", "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2",
    "lfm3", "llama", "minicpm3", "ministral", "ministral3", "mistral", "modernbert-decoder", "mpt", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_5_text", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
MIXTURES = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4_text",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4_text", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
PROVEN = frozenset(DENSE + MIXTURES)
