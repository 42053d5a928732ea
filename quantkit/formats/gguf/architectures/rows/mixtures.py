"""Architectures with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EXPERTS,
    GRANITE_SCALES,
    HEAD_NORMS,
    MLP,
    NO_BIAS,
    NORMS,
    PLAIN_EXPERTS,
    RMS,
    ROTARY,
    SILU,
    Architecture,
    Setting,
    Stack,
    biases,
    every_fourth,
    experts_of,
    weights,
    windows,
)  # fmt: skip

SOFTMAX, SIGMOID = 1, 2  # llama_expert_gating_func_type
EXPERT_INNER: dict[str, Setting] = {"expert_feed_forward_length": "moe_intermediate_size"}
GRANITE_STACKS = tuple(
    Stack(f"block_sparse_moe.{part}.weight", tuple(f"block_sparse_moe.experts.{{}}.{w}.weight" for w in pieces))
    for part, pieces in (("input_linear", ("w1", "w3")), ("output_linear", ("w2",)))
)
GRANITE_SHARED = {
    f"shared_mlp.{part}.weight": f"ffn_{name}"
    for part, name in (("gate", "gate"), ("up", "up"), ("output_linear", "down"))
}
GRANITE_SHARED_STACK = Stack(
    "shared_mlp.input_linear.weight",
    tuple(GRANITE_SHARED)[:2],
    rows=lambda config, _block: (config.shared_intermediate_size,) * 2,
)
SHARED_PARTS = (*(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")), "mlp.shared_expert_gate")
_EVERY_BLOCK: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
SHARED_INNER: dict[str, Setting] = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SHARED_EXPERTS = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
_SHARED_MLP = tuple(f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down"))
_AFMOE_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
_SCORE_BIAS = dict.fromkeys(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"), "exp_probs_b.bias")


def _dense(config: Any, block: int) -> bool:
    return bool(block < config.first_k_dense_replace)


def _sparse(config: Any, block: int) -> bool:
    return not _dense(config, block)


def _hy_sparse(config: Any, block: int) -> bool:
    return bool(config.mlp_layer_types[block] != "dense")


def _shares(config: Any, _block: int) -> bool:
    """Of Granite: whether a block has an expert for all tokens."""
    return bool(config.shared_intermediate_size)


def _ernie_sparse(config: Any, block: int) -> bool:
    return bool(block >= config.moe_layer_start_index and (block + 1) % config.moe_layer_interval == 0)


def _ernie_blocks(config: Any) -> str | None:
    last = config.moe_layer_end_index
    if last in (-1, config.num_hidden_layers - 1):
        return None
    return f"moe_layer_end_index = {last} in config.json, and llama.cpp has experts up to the last block"


def _routed(config: Any, block: int) -> bool:
    """Of Llama 4."""
    return bool((block + 1) % config.interleave_moe_layer_step == 0)


def behind_dense_layers(config: Any, block: int) -> bool:
    """Whether a block has experts, where config.json counts those without as `num_dense_layers`."""
    return bool(block >= config.num_dense_layers)


def whole_experts(name: str, wide: int, inner: int) -> str | None:
    """llama.cpp counts shared experts, each as wide as any; `wide` are the values of all, `name` what they are from."""
    if inner > 0 and wide > 0 and wide % inner == 0:
        return None
    return f"{name} = {wide}, and llama.cpp has a multiple of the {inner} of an expert"


def behind_dense(
    gating: int, *more: str, shared: str = "n_shared_experts", more_keys: Mapping[str, Setting] | None = None
) -> dict[str, Any]:
    """What architectures have whose experts, some of them shared, stand behind a few dense blocks."""
    keys: dict[str, Setting] = {
        "leading_dense_block_count": "first_k_dense_replace", "expert_shared_count": shared,
        "expert_weights_scale": lambda config: float(config.routed_scaling_factor),
        "expert_weights_norm": lambda config: bool(config.norm_topk_prob), "expert_gating_func": lambda _config: gating,
        "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    }  # fmt: skip
    return {
        "some": ((_dense, weights(*MLP)), (_sparse, (*weights("mlp.gate", *SHARED_EXPERTS), *more))),
        "named": _SCORE_BIAS, "experts": PLAIN_EXPERTS, "experts_in": _sparse,
        "keys": {**RMS, **EXPERTS, **EXPERT_INNER, **keys, **(more_keys or {})},
    }  # fmt: skip


def _llama4_blocks(config: Any) -> str | None:
    count, step = config.num_hidden_layers, config.interleave_moe_layer_step
    if count < 4:
        return f"{count} blocks in config.json; llama.cpp ends the program where none is a fourth, without rope"
    given = config.no_rope_layers, config.layer_types, config.moe_layers
    fourth = [(block + 1) % 4 == 0 for block in range(count)]
    kinds = [("chunked_attention", "full_attention")[full] for full in fourth]
    meant = [int(not full) for full in fourth], kinds, list(range(step - 1, count, step))
    for name, one, other in zip(("no_rope_layers", "layer_types", "moe_layers"), given, meant, strict=True):
        if list(one)[: count if name != "moe_layers" else None] != other:
            return f"{name} = {one}, and llama.cpp has {other}"
    if config.use_qk_norm == (config.num_local_experts == 128):
        return f"use_qk_norm = {config.use_qk_norm} with {config.num_local_experts} experts, unlike llama.cpp"
    return None


def _equal_heads(config: Any) -> str | None:
    if config.num_key_value_heads == config.num_attention_heads:
        return None
    return f"num_key_value_heads = {config.num_key_value_heads}, and llama.cpp has one for each query head"


def _first(value: Any) -> Any:
    """Of what may be given for each block."""
    return value[0] if isinstance(value, list) else value


ROWS = (
    Architecture(
        "mixtral", "llama", weights(*ATTENTION, *NORMS, "block_sparse_moe.gate"), orders=ROTARY,
        experts=experts_of("block_sparse_moe.experts.{}", "w1", "w2", "w3"),
        fields={"experts": "num_local_experts"}, keys=RMS | EXPERTS,
    ),
    Architecture(
        "qwen3_moe", "qwen3moe", weights(*ATTENTION, *HEAD_NORMS, *NORMS, "mlp.gate"), experts=PLAIN_EXPERTS,
        fields={"experts": "num_experts"}, keys=RMS | EXPERTS | EXPERT_INNER,
        fixed={"hidden_act": SILU, "norm_topk_prob": (True,), **_EVERY_BLOCK, **NO_BIAS},
    ),
    Architecture(
        "qwen2_moe", "qwen2moe", weights(*ATTENTION, *NORMS, "mlp.gate", *SHARED_PARTS),
        optional=dict.fromkeys(biases(*ATTENTION[:3]), "qkv_bias"), experts=PLAIN_EXPERTS, head_always=True,
        fields={"experts": "num_experts"}, keys=RMS | EXPERTS | EXPERT_INNER | SHARED_INNER,
        fixed={"hidden_act": SILU, "norm_topk_prob": (False,), **_EVERY_BLOCK},
    ),
    Architecture(
        "olmoe", "olmoe", weights(*ATTENTION, *HEAD_NORMS, *NORMS, "mlp.gate"), experts=PLAIN_EXPERTS,
        fields={"experts": "num_experts"}, head_always=True, keys=RMS | EXPERTS, rope_types=("default",),
        shapes={"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)}, checks=(_equal_heads,),
        fixed={"hidden_act": SILU, "norm_topk_prob": (False,), "clip_qkv": (None,), **NO_BIAS},
    ),
    Architecture(
        "gpt_oss", "gpt-oss", weights(*ATTENTION, *NORMS, "mlp.router") + biases(*ATTENTION, "mlp.router")
        + ("self_attn.sinks",), named={"self_attn.sinks": "attn_sinks.weight"}, head_always=True,
        experts=PLAIN_EXPERTS | experts_of("mlp.experts.{}", "gate_proj", "down_proj", "up_proj", kind="bias"),
        stacks=tuple(
            Stack(f"mlp.experts.{part}{behind}", tuple(f"mlp.experts.{{}}.{piece}.{kind}" for piece in pieces),
                  transposed=kind == "weight", interleaved=True)
            for part, pieces in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
            for kind, behind in (("weight", ""), ("bias", "_bias"))
        ),
        fields={"experts": "num_local_experts"}, follows_window=True,
        keys=RMS | EXPERTS | {"expert_feed_forward_length": "intermediate_size"} | windows(2),
        fixed={
            "hidden_act": SILU, "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,),
        },
    ),
    Architecture(
        "granitemoe", "granitemoe", weights(*ATTENTION, *NORMS, "block_sparse_moe.router.layer"), orders=ROTARY,
        experts=experts_of("block_sparse_moe.experts.{}", "w1", "w2", "w3"), stacks=GRANITE_STACKS,
        fields={"experts": "num_local_experts"}, rope_types=("default",), keys=RMS | EXPERTS | GRANITE_SCALES,
        fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    Architecture(
        "granitemoeshared", "granitemoe", weights(*ATTENTION, *NORMS, "block_sparse_moe.router.layer"), orders=ROTARY,
        some=((_shares, tuple(GRANITE_SHARED)),),
        named={part: f"{name}_shexp.weight" for part, name in GRANITE_SHARED.items()},
        experts=experts_of("block_sparse_moe.experts.{}", "w1", "w2", "w3"),
        stacks=(*GRANITE_STACKS, GRANITE_SHARED_STACK), fields={"experts": "num_local_experts"},
        keys=RMS | EXPERTS | GRANITE_SCALES | {
            "expert_shared_feed_forward_length": lambda config: config.shared_intermediate_size or None,
        },
        rope_types=("default",), fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    Architecture(
        "hy_v3", "hy_v3", weights(*ATTENTION, *HEAD_NORMS, *NORMS), names_like="dots1",
        some=(
            (lambda config, block: config.mlp_layer_types[block] == "dense", weights(*MLP)),
            (_hy_sparse, (*weights("mlp.router.gate", *_SHARED_MLP), "mlp.expert_bias")),
        ),
        named={"mlp.expert_bias": "exp_probs_b", "mlp.router.gate.weight": "ffn_gate_inp.weight"},
        experts=PLAIN_EXPERTS, experts_in=_hy_sparse, fields={"experts": "num_experts"},
        keys=RMS | EXPERTS | EXPERT_INNER | {
            "expert_shared_feed_forward_length":
                lambda config: config.moe_intermediate_size * config.num_shared_experts,
            "expert_weights_scale": lambda config: float(config.router_scaling_factor),
            "expert_weights_norm": lambda _config: True, "expert_gating_func": lambda _config: SIGMOID,
        },
        rope_types=("default", "dynamic"), fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS},
    ),
    Architecture(
        "glm4_moe", "glm4moe", weights(*ATTENTION, *NORMS),
        optional=dict.fromkeys(weights(*HEAD_NORMS), "use_qk_norm")
        | dict.fromkeys(biases(*ATTENTION[:3]), "attention_bias"),
        fields={"experts": "n_routed_experts"}, partial_rotary=True, rope_types=("default",),
        **behind_dense(SIGMOID, "mlp.gate.e_score_correction_bias"),
    ),
    Architecture(
        "solar_open", "glm4moe",
        (*weights(*ATTENTION, *NORMS, "mlp.gate", *SHARED_EXPERTS), "mlp.gate.e_score_correction_bias"),
        partial_rotary=True, rope_types=("default", "yarn"),
        fields={"experts": "n_routed_experts", "inner": "moe_intermediate_size"}, named=_SCORE_BIAS,
        experts=PLAIN_EXPERTS, fixed={"hidden_act": SILU, **NO_BIAS},
        keys=behind_dense(SIGMOID)["keys"] | {"leading_dense_block_count": lambda _config: 0},
    ),
    Architecture(
        "minimax_m2", "minimax-m2",
        (
            *weights(*ATTENTION, *HEAD_NORMS, *NORMS, "block_sparse_moe.gate"),
            "block_sparse_moe.e_score_correction_bias",
        ),
        head_always=True, partial_rotary=True,
        named={"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"},
        experts=experts_of("block_sparse_moe.experts.{}", "w1", "w2", "w3"), fields={"experts": "num_local_experts"},
        keys=RMS | EXPERTS | {
            "expert_feed_forward_length": "intermediate_size", "expert_gating_func": lambda _config: SIGMOID,
        },
        shapes={"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)}, rope_types=("default",),
    ),
    Architecture(
        "ernie4_5_moe", "ernie4_5-moe", weights(*ATTENTION, *NORMS),
        some=(
            (lambda config, block: not _ernie_sparse(config, block), weights(*MLP)),
            (_ernie_sparse, (*weights("mlp.gate", *SHARED_EXPERTS), "mlp.moe_statics.e_score_correction_bias")),
        ),
        named={"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
        shapes={"exp_probs_b": ("one", "experts", "one")},  # a bias, which has not the last
        experts=PLAIN_EXPERTS, experts_in=_ernie_sparse, fields={"experts": "moe_num_experts"},
        keys=RMS | {
            "expert_used_count": "moe_k", "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts", "leading_dense_block_count": "moe_layer_start_index",
            "expert_shared_feed_forward_length":
                lambda config: config.moe_intermediate_size * config.moe_num_shared_experts,
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        rope_types=("default",), fixed={"hidden_act": SILU, "use_bias": (False,)}, checks=(_ernie_blocks,),
    ),
    Architecture(
        "dots1", "dots1", weights(*ATTENTION, *HEAD_NORMS, *NORMS), head_always=True, checks=(_equal_heads,),
        fields={"experts": "n_routed_experts"}, fixed={"hidden_act": SILU, **NO_BIAS},
        **behind_dense(SIGMOID, "mlp.gate.e_score_correction_bias"),
    ),
    Architecture(
        "llama4_text", "llama4", weights(*ATTENTION, *NORMS),
        some=(
            (lambda config, block: not _routed(config, block),
             weights(*(f"feed_forward.{part}_proj" for part in ("gate", "up", "down")))),
            (_routed, weights("feed_forward.router",
                              *(f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")))),
        ),
        experts=experts_of("feed_forward.experts.{}", "gate_proj", "down_proj", "up_proj"), experts_in=_routed,
        stacks=(
            Stack("feed_forward.experts.gate_up_proj", (
                "feed_forward.experts.{}.gate_proj.weight", "feed_forward.experts.{}.up_proj.weight"
            ), transposed=True),
            Stack("feed_forward.experts.down_proj", ("feed_forward.experts.{}.down_proj.weight",), transposed=True),
        ),
        fields={"experts": "num_local_experts", "inner": "intermediate_size_mlp"}, rope_types=("default", "llama3"),
        keys=RMS | EXPERTS | {
            "expert_feed_forward_length": "intermediate_size", "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        checks=(_llama4_blocks,), follows_window=True,
        fixed={
            "hidden_act": SILU, "attention_chunk_size": (8192,), "attn_temperature_tuning": (True, 1, 4),
            "floor_scale": (8192,), "attn_scale": (0.1,), **NO_BIAS,
        },
    ),
    Architecture(
        "exaone_moe", "exaone-moe", weights(*ATTENTION, *HEAD_NORMS, *NORMS), head_always=True, follows_window=True,
        fields={"experts": "num_experts"}, fixed={"hidden_act": SILU},
        **behind_dense(SIGMOID, "mlp.e_score_correction_bias", shared="num_shared_experts", more_keys=windows(4)),
        checks=(every_fourth("layer_types", "full_attention", "sliding_attention"),),
    ),
    Architecture(
        "afmoe", "afmoe", weights(*ATTENTION, "self_attn.gate_proj", *HEAD_NORMS, *_AFMOE_NORMS),
        head_always=True, follows_window=True, fields={"experts": "num_experts"},
        some=(
            (lambda config, block: not behind_dense_layers(config, block), weights(*MLP)),
            (behind_dense_layers, (*weights("mlp.router.gate", *SHARED_EXPERTS), "mlp.expert_bias")),
        ),
        named={"mlp.expert_bias": "exp_probs_b.bias"}, shapes={"attn_gate": ("queries", "hidden")},
        experts=PLAIN_EXPERTS, experts_in=behind_dense_layers,
        keys=RMS | EXPERTS | EXPERT_INNER | windows(4) | {
            "leading_dense_block_count": "num_dense_layers", "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": lambda config: float(config.route_scale),
            "expert_weights_norm": lambda _config: True, "expert_gating_func": lambda _config: SIGMOID,
        },
        checks=(every_fourth("layer_types", "full_attention", "sliding_attention"),),
        fixed={"hidden_act": SILU, "mup_enabled": (True,), **NO_BIAS},
    ),
    Architecture(
        "hunyuan_v1_moe", "hunyuan-moe", weights(
            *ATTENTION, "self_attn.query_layernorm", "self_attn.key_layernorm", *NORMS, "mlp.gate.wg",
            *_SHARED_MLP,
        ),
        experts=PLAIN_EXPERTS, rope_types=("default", "dynamic"), fixed={"hidden_act": SILU, **NO_BIAS},
        fields={"experts": lambda config: _first(config.num_experts)},
        keys=RMS | {
            "expert_used_count": lambda config: _first(config.moe_topk),
            "expert_feed_forward_length": "intermediate_size", "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
)  # fmt: skip
