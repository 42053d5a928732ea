"""Architectures that have Kimi's delta attention in most blocks and latent attention in the others.

What llama.cpp has fixed: src/models/kimi-linear.cpp and bailingmoe3.cpp of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

from quantkit.formats.gguf.architectures.record import (
    EXPERTS,
    MLP,
    NO_BIAS,
    NORMS,
    PLAIN_EXPERTS,
    RMS,
    SILU,
    Architecture,
    Setting,
    Stack,
    experts_of,
    weights,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.latent import (
    DENSE_BLOCKS,
    LATENT_NORMS,
    before_experts,
    behind_dense_blocks,
    dense_first,
    rows_of_heads,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.mixtures import EXPERT_INNER, SIGMOID
from quantkit.formats.gguf.architectures.rows.recurrent import DELTA_LENGTHS, attends, both_kinds, recurs


def _key_heads(config: Any) -> list[int]:
    """Of each block: latent attention has one key head."""
    return [int(attends(config, block)) for block in range(config.num_hidden_layers)]


def _equal_heads(config: Any) -> str | None:
    """llama.cpp has as many heads in every block, and a matrix of keys and values for each."""
    if config.linear_num_heads != config.num_attention_heads:
        return f"linear_num_heads = {config.linear_num_heads}, and llama.cpp has {config.num_attention_heads} heads"
    if config.num_key_value_heads != config.num_attention_heads:
        return f"num_key_value_heads = {config.num_key_value_heads}, and llama.cpp has one for each query head"
    return None


def _below_zero(config: Any) -> str | None:
    """llama.cpp ends the program for others."""
    return None if config.kda_lower_bound < 0 else f"kda_lower_bound = {config.kda_lower_bound}, which is not below 0"


def _delta(
    model_type: str, name: str, attention: str, mixture: str, output: str, delta: dict[str, str], **other: Any
) -> Architecture:
    """`attention` and `mixture` (of experts) are parts of a block, `output` is the last layer of the first.

    `delta` are the parts of delta attention that the two have otherwise, with their names in the file.
    """
    of_keys, of_values = (f"{attention}.kv_b_proj.{kind}.{{}}.weight" for kind in ("keys", "values"))
    convolutions = {f"{attention}.{part}_conv1d.weight": f"ssm_conv1d_{part}.weight" for part in "qkv"}
    parts = convolutions | {f"{attention}.{part}": kind for part, kind in delta.items()} | {
        f"{attention}.A_log": "ssm_a", f"{attention}.dt_bias": "ssm_dt.bias",
        f"{attention}.b_proj.weight": "ssm_beta.weight", f"{attention}.o_norm.weight": "ssm_norm.weight",
        f"{attention}.k_proj.weight": "attn_k.weight", f"{attention}.v_proj.weight": "attn_v.weight",
    }  # fmt: skip
    latent = {
        f"{attention}.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
        f"{attention}.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    } | other.pop("latent", {})
    every = {f"{attention}.q_proj.weight": "attn_q.weight", f"{attention}.{output}.weight": "attn_output.weight"}
    gates = {f"{mixture}.gate.weight": "ffn_gate_inp.weight", other.pop("scores"): "exp_probs_b.bias"}
    shared = {
        f"{mixture}.shared_experts.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("gate", "up", "down")
    }
    keys: dict[str, Setting] = RMS | EXPERTS | EXPERT_INNER | DENSE_BLOCKS | {
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": lambda config: float(config.routed_scaling_factor),
        "expert_weights_norm": lambda config: bool(config.norm_topk_prob),
        "expert_gating_func": lambda _config: SIGMOID,
        "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        "attention.head_count_kv": _key_heads, "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length": "kv_lora_rank", "attention.value_length_mla": "v_head_dim",
        "attention.key_length_mla": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": "qk_rope_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim",
        "kda.head_dim": "linear_head_dim",
    }  # fmt: skip
    return Architecture(
        model_type, name, (*every, *weights(*NORMS)), names_like="kimi-linear",
        some=(
            (recurs, parts), (attends, latent), (before_experts, weights(*MLP)), (behind_dense_blocks, gates | shared),
        ),
        named=every, experts_in=behind_dense_blocks,
        heads={of_keys: "attn_k_b.weight", of_values: "attn_v_b.weight"}, heads_in=attends, transposed=(of_keys,),
        stacks=(Stack(f"{attention}.kv_b_proj.weight", (of_keys, of_values), rows=rows_of_heads),),
        fields={
            "experts": "num_local_experts", "kv_heads": lambda _config: 1,
            "head_dim": lambda config: config.kv_lora_rank + config.qk_rope_head_dim,
        },
        keys=keys | other.pop("keys", {}),
        shapes={
            "attn_q": ("delta or latent queries", "hidden"), "attn_output": ("hidden", "delta or latent values"),
            **dict.fromkeys(("attn_k", "attn_v", "ssm_g_a", "ssm_f_a"), ("delta", "hidden")),
            **dict.fromkeys((f"ssm_conv1d_{part}" for part in "qkv"), ("delta", "one", "kernel")),
            "ssm_beta": ("heads", "hidden"), "ssm_a": ("heads", "one"), "ssm_dt": ("delta",),
            "ssm_norm": ("delta head",), **other.pop("shapes"),
        },
        functions={f"{attention}.A_log": other.pop("decay")}, fixed_epsilon=f"{LATENT_NORMS} and the {DELTA_LENGTHS}",
        checks=(_equal_heads, dense_first, both_kinds, *other.pop("checks", ())),
        **other,
    )  # fmt: skip


_FIXED: dict[str, tuple[Any, ...]] = {"hidden_act": SILU, "tie_word_embeddings": (False,), **NO_BIAS}
ROWS = (
    _delta(
        "kimi_linear", "kimi-linear", "self_attn", "block_sparse_moe", "o_proj",
        {f"{part}_proj.weight": f"ssm_{part}.weight" for part in ("f_a", "f_b", "g_a", "g_b")},
        scores="block_sparse_moe.gate.e_score_correction_bias", decay="minus exp",
        forms={"self_attn.A_log": (1, 1, -1, 1)},
        experts=experts_of("block_sparse_moe.experts.{}", "w1", "w2", "w3"), rope_types=(),
        shapes=dict.fromkeys(("ssm_f_a", "ssm_g_a"), ("delta head", "hidden"))
        | dict.fromkeys(("ssm_f_b", "ssm_g_b"), ("delta", "delta head")),
        fixed={"norm_topk_prob": (True,), "q_lora_rank": (None,), **_FIXED},
    ),
    _delta(
        "bailing_hybrid", "bailingmoe3", "attention", "mlp", "dense",
        {"f_proj.weight": "ssm_f_a.weight", "g_proj.weight": "ssm_g_a.weight"},
        scores="mlp.gate.expert_bias", decay="exp", latent={"attention.g_proj.weight": "attn_gate.weight"},
        experts=PLAIN_EXPERTS, rope_types=("default",),
        outside=("model.word_embeddings.weight", "model.norm.weight"),
        shapes={"attn_gate": ("heads", "hidden")},
        keys={"kda.gate_lower_bound": lambda config: float(config.kda_lower_bound)},
        fixed={"kda_safe_gate": (True,), **_FIXED}, checks=(_below_zero,),
    ),
)  # fmt: skip
