"""Architectures whose keys and values come from a few latent numbers of a token (DeepSeek's latent attention)."""

from __future__ import annotations

from typing import Any

from quantkit.formats.gguf.architectures.record import (
    EMBEDDING,
    MLP,
    NO_BIAS,
    NORMS,
    RMS,
    SILU,
    Architecture,
    Setting,
    Stack,
    weights,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.mixtures import SHARED_EXPERTS, SIGMOID, SOFTMAX, behind_dense


def dense_blocks(config: Any) -> int:
    """The number of blocks in front that have no experts, by `mlp_layer_types`."""
    return next((i for i, kind in enumerate(config.mlp_layer_types) if kind != "dense"), len(config.mlp_layer_types))


def dense_first(config: Any) -> str | None:
    """llama.cpp has all blocks without experts in front."""
    kinds = config.mlp_layer_types
    count = dense_blocks(config)
    return None if "dense" not in kinds[count:] else f"mlp_layer_types = {kinds}, and llama.cpp has dense blocks first"


def _latent(config: Any) -> str | None:
    """llama.cpp asks for a rank of the queries but of models that it knows by their numbers of blocks."""
    lite = config.num_hidden_layers in (26, 27) or (config.num_hidden_layers == 48 and config.vocab_size == 128256)
    if (config.q_lora_rank is None) == lite:
        return None
    return f"q_lora_rank = {config.q_lora_rank} with {config.num_hidden_layers} blocks, and llama.cpp has it otherwise"


def _ungrouped(config: Any) -> str | None:
    """llama.cpp chooses groups of experts by their two best, DeepSeek-V2 by the best."""
    grouped = config.topk_method != "greedy" and (config.n_group or 1) > 1
    return f"topk_method = {config.topk_method!r}, and llama.cpp chooses groups otherwise" if grouped else None


def behind_dense_blocks(config: Any, block: int) -> bool:
    """Whether a block has experts, by `mlp_layer_types`."""
    return block >= dense_blocks(config)


def before_experts(config: Any, block: int) -> bool:
    """Whether it has none."""
    return not behind_dense_blocks(config, block)


LATENT_NORMS = "norms of latent values"
# Of models whose configuration has `mlp_layer_types`.
DENSE_BLOCKS: dict[str, Setting] = {"leading_dense_block_count": dense_blocks}
BEHIND_DENSE = (
    (before_experts, weights(*MLP)),
    (behind_dense_blocks, (*weights("mlp.gate", *SHARED_EXPERTS), "mlp.gate.e_score_correction_bias")),
)
_LATENT_PARTS = weights(
    "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.o_proj", *NORMS
)  # fmt: skip
WITH_RANK = weights("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
_KEYS_OF_HEADS, _VALUES_OF_HEADS = "self_attn.kv_b_proj.keys.{}.weight", "self_attn.kv_b_proj.values.{}.weight"


def rows_of_heads(config: Any, _block: int) -> tuple[int, int]:
    """Of keys and of values, of each head."""
    return config.qk_nope_head_dim, config.v_head_dim


def latent_attention(model_type: str, gating: int, *more: str, **other: Any) -> Architecture:
    """Latent attention: llama.cpp has one key head of the latent values, and a matrix for each head before and behind.

    Key and value lengths of a head are those that it has there, the lengths of "mla" those of the model. `gating` is
    llama.cpp's number of how experts are weighed, `more` are further parts of a block with experts.
    """
    shared = behind_dense(gating, *more)
    shared |= {name: other.pop(name) for name in ("some", "experts_in", "experts") if name in other}
    shared["named"] = {**shared["named"], **other.pop("named", {})}
    keys: dict[str, Setting] = shared.pop("keys") | {
        "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length": "kv_lora_rank", "attention.value_length_mla": "v_head_dim",
        "attention.key_length_mla": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": "qk_rope_head_dim",
    }  # fmt: skip
    return Architecture(
        model_type, other.pop("name", "deepseek2"), _LATENT_PARTS, names_like="deepseek2",
        optional=other.pop("optional", None) or dict.fromkeys(WITH_RANK, lambda config: config.q_lora_rank is not None)
        | dict.fromkeys(weights("self_attn.q_proj"), lambda config: config.q_lora_rank is None),
        heads={_KEYS_OF_HEADS: "attn_k_b.weight", _VALUES_OF_HEADS: "attn_v_b.weight"}, transposed=(_KEYS_OF_HEADS,),
        stacks=(Stack(
            "self_attn.kv_b_proj.weight", (_KEYS_OF_HEADS, _VALUES_OF_HEADS), rows=other.pop("rows", rows_of_heads),
        ),),
        fields={
            "experts": other.pop("count", "n_routed_experts"), "kv_heads": lambda _config: 1,
            "head_dim": lambda config: config.kv_lora_rank + config.qk_rope_head_dim, **other.pop("fields", {}),
        },
        keys=keys | other.pop("keys", {}), rope_types=other.pop("rope_types", ("default", "yarn")), yarn_scores=True,
        shapes={
            "attn_q": ("latent queries", "hidden"), "attn_output": ("hidden", "latent values"),
            **other.pop("shapes", {}),
        },
        fixed_epsilon=other.pop("fixed_epsilon", LATENT_NORMS), **shared, **other,
    )  # fmt: skip


def _with_rank(config: Any) -> str | None:
    """llama.cpp has latent queries always, and as many keys as queries; no scale of the scores."""
    if config.q_lora_rank is None:
        return "q_lora_rank = None, and llama.cpp has a rank of the queries"
    if config.num_key_value_heads != config.num_attention_heads:
        return f"num_key_value_heads = {config.num_key_value_heads}, and llama.cpp has one for each query head"
    scale = (config.rope_parameters or {}).get("mscale_all_dim")
    return f"the rope's mscale_all_dim = {scale}, and llama.cpp has none" if scale else None


def _depth(config: Any) -> float:
    """What each block adds is multiplied by, beside the factor that llama.cpp has fixed."""
    return float(config.scale_depth / _MINICPM["scale_depth"])


# MiniCPM 3's factors of embedding, blocks and head, as llama.cpp has fixed them (src/models/minicpm3.cpp).
_MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}

ROWS = (
    latent_attention(
        "deepseek_v2", SOFTMAX, checks=(_latent, _ungrouped),
        keys={  # groups that "greedy" does not look at
            "expert_group_count": lambda config: config.n_group and 1,
            "expert_group_used_count": lambda config: config.topk_group and 1,
        },
        fixed={"hidden_act": SILU, "norm_topk_prob": (False,), "mlp_bias": (False,), **NO_BIAS},
    ),
    latent_attention(
        "deepseek_v3", SIGMOID, "mlp.gate.e_score_correction_bias", checks=(_latent,),
        fixed={"hidden_act": SILU, "rope_interleave": (True,), **NO_BIAS},
    ),
    latent_attention(
        "youtu", SOFTMAX, checks=(_latent,), some=((lambda _config, _block: True, weights(*MLP)),),
        keys={
            "leading_dense_block_count": "num_hidden_layers", "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": lambda _config: 0, "expert_used_count": lambda _config: None,
            "expert_weights_scale": lambda _config: None, "expert_weights_norm": lambda _config: None,
            "expert_group_count": lambda _config: None, "expert_group_used_count": lambda _config: None,
        },
        experts={}, count=lambda _config: 0, fixed={"hidden_act": SILU, "rope_interleave": (True,), **NO_BIAS},
    ),
    latent_attention(
        "glm4_moe_lite", SIGMOID, checks=(_latent, dense_first), rope_types=("default",),
        keys=DENSE_BLOCKS, some=BEHIND_DENSE, experts_in=behind_dense_blocks,
        fixed={"hidden_act": SILU, "rope_interleave": (True,), **NO_BIAS},
    ),
    Architecture(
        "minicpm3", "minicpm3",
        weights(
            *(f"self_attn.{part}" for part in (
                "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"
            )), *MLP, *NORMS,
        ),
        fields={"head_dim": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim},
        keys=RMS | {
            "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
            "attention.value_length": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim",
        },
        shapes={"attn_q_b": ("queries", "query latent"), "attn_output": ("hidden", "values")},
        multipliers={
            EMBEDDING: lambda config: config.scale_emb / _MINICPM["scale_emb"],
            "self_attn.o_proj.weight": _depth, "mlp.down_proj.weight": _depth,
            "lm_head.weight": lambda config: config.dim_model_base / _MINICPM["dim_model_base"],
        },
        multiplied=_MINICPM, rope_types=("default", "longrope"), checks=(_with_rank,), fixed_epsilon=LATENT_NORMS,
        fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS},
    ),
)  # fmt: skip
