"""Further architectures that are proven as they are: each a line, its settings by the names of their fields."""

import re

import torch
from safetensors.torch import load_file, save_file
from tiny_llama import VOCABULARY
from transformers import CONFIG_MAPPING

# A size for every name that configurations have for it; experts and their routing after the plain ones.
SIZES = {
    "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "hidden_size": 64,
    "n_embd": 64, "d_model": 64, "intermediate_size": 128, "ffn_dim": 128, "num_hidden_layers": 3, "n_layer": 3,
    "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "n_positions": 128, "sliding_window": 64, "rotary_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64,
}  # fmt: skip
# By `model_type`, the linear layers of all three blocks that are quantized.
MORE = {
    "afmoe": 48, "aria_text": 57, "axk1": 48, "axk2": 54, "bailing_hybrid": 52, "bamba": 17, "beam": 42, "biogpt": 18,
    "bitnet": 21, "cohere2_moe": 57, "cohere_compass_text": 21, "ctrl": 18, "cwm": 21, "deepseek_v32": 54,
    "diffllama": 21, "dots3_note_text": 55, "flint": 33, "gemma4_unified_text": 21, "gpt_bigcode": 12, "gpt_neo": 18,
    "gpt_neox_japanese": 12, "granite_swa": 21, "granitemoe_swa": 48, "granitemoeshared": 48, "hy_v3": 45,
    "hyperclovax": 21, "internlm3": 21, "iquestcoder": 21, "kimi_linear": 56, "kolibri1": 57, "laguna": 48, "lfm3": 18,
    "mellum": 48, "mimo_v2_flash": 39, "minicpm3": 24, "minimax_m3_vl_text": 54, "modernbert-decoder": 18,
    "nanochat": 18, "olmo_hybrid": 27, "persimmon": 12, "vaultgemma": 21, "youtu": 24,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # what is rotated of a head
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}  # of which some layers have a row for each
INDEX = {"index_topk": 16}  # fewer tokens than a text has
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# Settings that the sizes do not tell, or tell otherwise.
FURTHER = {
    "bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16
    },
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_neo": {
        "num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]], "window_size": 16
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "ctrl": {"dff": 128},
    "laguna": {"num_attention_heads": 8, "num_attention_heads_per_layer": [8, 8, 8]},
    "lfm3": {"num_attention_heads": 8, "hidden_size": 128},
    **dict.fromkeys(("axk1", "minicpm3"), LATENT),
    "aria_text": {"moe_num_experts": 4},
    "axk2": {**HEADS, **INDEX, "gated_norm_rank": 16},
    "bailing_hybrid": {**HEADS, "head_dim": 8, "layer_group_size": 2},
    "deepseek_v32": {**INDEX, "num_key_value_heads": 4, "index_n_heads": 4},
    "dots3_note_text": {
        **HEADS, **INDEX, "index_n_heads": 8, "shared_experts_intermediate_size": 32, "head_dim": 24,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32,
        "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    },
    "kimi_linear": {**DELTA, "linear_head_dim": 16, "linear_num_heads": 8, "num_key_value_heads": 4},
    "olmo_hybrid": {**DELTA, **HEADS},
    "youtu": {**LATENT, "pad_token_id": None},
}  # fmt: skip


def settings_of(kind):
    """The sizes that the configuration of a `model_type` has a field for, each by one name."""
    config = CONFIG_MAPPING[kind]
    other = getattr(config, "attribute_map", {})
    known = config().to_dict().keys() | other.keys()
    sizes = {name: size for name, size in SIZES.items() if name in known and other.get(name) not in SIZES}
    return sizes | FURTHER.get(kind, {})


def as_published(folder, kind):
    """A tiny checkpoint with the names that published ones have, where transformers writes others itself."""
    file = folder / "model.safetensors"
    values = load_file(file)
    if kind == "kimi_linear":  # blocks without experts
        values = {re.sub(r"block_sparse_moe(?=\.\w+_proj)", "mlp", name): value for name, value in values.items()}
    if kind == "olmo_hybrid":  # a block of plain attention; parts of three sizes, which transformers writes as equal
        old, new = ("model.layers.1.feedforward_layer_norm.weight", "model.layers.1.post_attention_layernorm.weight")
        values[new] = values.pop(old)
        for place in (f"model.layers.{block}.linear_attn" for block in (0, 2)):
            names = [f"{place}.{part}_conv1d.weight" for part in "qkv"]
            sizes = [len(values[f"{place}.{part}_proj.weight"]) for part in "qkv"]
            joined = torch.cat([values[name] for name in names])
            values |= dict(zip(names, (part.clone() for part in joined.split(sizes)), strict=True))
    save_file(values, file, metadata={"format": "pt"})
    return folder
