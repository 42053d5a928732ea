"""Architectures of which some blocks have a window and others a rope of their own or none."""

from __future__ import annotations

from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EXPERTS,
    GRANITE_SCALES,
    HEAD_NORMS,
    LLAMA,
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
    experts_of,
    weights,
    where_unlike,
    windows,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.mixtures import EXPERT_INNER, SHARED_INNER, SIGMOID, SOFTMAX

SLIDING = "sliding_attention"


def _some_slide(config: Any) -> str | None:
    """llama.cpp ends the program where none does."""
    return None if SLIDING in config.layer_types else f"layer_types = {config.layer_types}, and llama.cpp ends so"


def _one_theta(config: Any) -> str | None:
    """llama.cpp rotates by one base in all blocks that rotate."""
    base = config.rope_parameters["rope_theta"]
    given = list(config.layer_rope_theta)
    return None if set(given) <= {0, base} else f"layer_rope_theta = {given}, and llama.cpp has {base} or none"


def _equal_thetas(config: Any) -> str | None:
    """llama.cpp leaves the scaling out in blocks with a window, and takes the base of the others."""
    bases = [config.rope_parameters[kind]["rope_theta"] for kind in sorted(set(config.layer_types))]
    return None if len(set(bases)) == 1 else f"rope_theta = {bases}, and llama.cpp has one for all blocks"


def _no_dense(config: Any) -> str | None:
    kinds = config.mlp_layer_types
    return f"mlp_layer_types = {kinds}, and llama.cpp has experts in every block" if "dense" in kinds else None


def _dense(config: Any, block: int) -> bool:
    return bool(config.mlp_layer_types[block] == "dense")


def _sparse(config: Any, block: int) -> bool:
    return not _dense(config, block)


def _shares(config: Any, block: int) -> bool:
    return bool(_sparse(config, block) and config.num_shared_experts)


def _dense_first(config: Any) -> str | None:
    """Of Cohere; where blocks of one feed-forward layer stand in front, llama.cpp rotates in them whatever they are."""
    kinds = list(config.mlp_layer_types)
    count = kinds.count("dense")
    if "dense" in kinds[count:]:
        return f"mlp_layer_types = {kinds}, and llama.cpp has dense blocks first"
    if config.prefix_dense_sliding_window_pattern != 1 and set(config.layer_types[:count]) - {SLIDING}:
        every = config.prefix_dense_sliding_window_pattern
        return f"prefix_dense_sliding_window_pattern = {every}, and llama.cpp rotates in all dense blocks"
    if config.num_shared_experts and config.shared_expert_combination_strategy != "average":
        how = config.shared_expert_combination_strategy
        return f"shared_expert_combination_strategy = {how!r}, and llama.cpp computes 'average'"
    return None


def _value_scale(config: Any) -> float:
    return 1.0 if config.attention_value_scale is None else float(config.attention_value_scale)


def _mimo_heads(config: Any) -> list[int]:
    """Blocks with a window have twice the key heads."""
    return [config.num_key_value_heads * (2 if kind == SLIDING else 1) for kind in config.layer_types]


def _mimo_blocks(config: Any) -> str | None:
    """llama.cpp turns as many values in all blocks, and has no scale of 0; transformers has a share of its own."""
    if config.num_attention_heads % max(_mimo_heads(config)):
        return f"{config.num_attention_heads} query heads and {max(_mimo_heads(config))} key heads"
    shares = [config.rope_parameters[kind].get("partial_rotary_factor") for kind in sorted(set(config.layer_types))]
    if None in shares or len(set(shares)) > 1:
        return f"partial_rotary_factor = {shares}, and llama.cpp has one for all blocks"
    return "attention_value_scale = 0, and llama.cpp has none then" if _value_scale(config) == 0 else None


def _laguna_turns(config: Any) -> int | None:
    local = config.rope_parameters.get(SLIDING)
    return None if local is None else int(config.head_dim * local.get("partial_rotary_factor", 1.0))


def _laguna_blocks(config: Any) -> str | None:
    kinds = list(config.mlp_layer_types)
    if "dense" in kinds[kinds.count("dense") :]:
        return f"mlp_layer_types = {kinds}, and llama.cpp has dense blocks first"
    heads, keys = list(config.num_attention_heads_per_layer), config.num_key_value_heads
    turns = _laguna_turns(config)
    if turns is not None and (turns % 2 or not turns):
        return f"{turns} values of a head that turn in blocks with a window"
    return f"{heads} query heads and {keys} key heads" if any(count % keys for count in heads) else None


def _window_or_none(config: Any) -> int:
    """Without a window llama.cpp must not be told of one."""
    return (config.sliding_window or 0) if SLIDING in config.layer_types else 0


_WINDOWS = windows(None)
_TURNING: dict[str, Setting] = {
    "attention.rope_pattern": lambda config: [bool(base) for base in config.layer_rope_theta]
}
_GRANITE_KEYS: dict[str, Setting] = RMS | GRANITE_SCALES | _WINDOWS | _TURNING
_GRANITE: dict[str, Any] = {
    "orders": ROTARY, "rope_types": ("default",), "follows_window": True, "checks": (_some_slide, _one_theta),
}  # fmt: skip
_SINKS = {"self_attn.sinks": "attn_sinks.weight"}
_GRANITE_SHARED = {
    "shared_mlp.input_linear.weight": "ffn_up_shexp.weight", "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
}  # fmt: skip
_ONE_SHARED = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))
_SCORES, _EXPERT_SCORES = "mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias"
_SHARED_PARTS = weights(*(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")))

ROWS = (
    Architecture(
        "granite_swa", "granite_swa", (*LLAMA, "self_attn.sinks"), names_like="granite", named=_SINKS,
        keys=_GRANITE_KEYS, fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS}, **_GRANITE,
    ),
    Architecture(
        "granitemoe_swa", "granite_swa",
        (*weights(*ATTENTION, *NORMS, "block_sparse_moe.router"), "self_attn.sinks"), names_like="granitemoe",
        some=((lambda config, _block: bool(config.shared_intermediate_size), tuple(_GRANITE_SHARED)),),
        named=_SINKS | _GRANITE_SHARED | {"block_sparse_moe.router.weight": "ffn_gate_inp.weight"},
        experts=experts_of("block_sparse_moe.experts.{}", "gate_proj", "down_proj", "up_proj"),
        stacks=(
            Stack("block_sparse_moe.experts.gate_up_proj", tuple(
                f"block_sparse_moe.experts.{{}}.{part}_proj.weight" for part in ("gate", "up")
            )),
            Stack("block_sparse_moe.experts.down_proj", ("block_sparse_moe.experts.{}.down_proj.weight",)),
        ),
        fields={"experts": "num_local_experts"}, shapes={"ffn_up_shexp": ("two shared inner", "hidden")},
        keys=_GRANITE_KEYS | EXPERTS | {
            "expert_shared_feed_forward_length": lambda config: config.shared_intermediate_size or None,
        },
        fixed={"hidden_act": SILU, **NO_BIAS}, **_GRANITE,
    ),
    Architecture(
        "mellum", "mellum", weights(*ATTENTION, *HEAD_NORMS, *NORMS, "mlp.gate"), names_like="qwen3moe",
        head_always=True, experts=PLAIN_EXPERTS, fields={"experts": "num_experts"},
        keys=RMS | EXPERTS | _WINDOWS | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "attention.sliding_window": _window_or_none,
        },
        checks=(_equal_thetas, _no_dense), follows_window=True, rope_types=("default", "yarn"),
        fixed={"hidden_act": SILU, "norm_topk_prob": (True,), **NO_BIAS},
    ),
    Architecture(
        "cohere2_moe", "cohere2moe", weights(*ATTENTION, "input_layernorm"), names_like="dots1",
        some=((_dense, weights(*MLP)), (_sparse, weights("mlp.gate")), (_shares, _SHARED_PARTS)),
        experts=PLAIN_EXPERTS, experts_in=_sparse,
        fields={
            "experts": "num_experts",
            "inner": lambda config: config.prefix_dense_intermediate_size or config.intermediate_size,
        },
        keys=EXPERTS | _WINDOWS | {
            "attention.layer_norm_epsilon":
                lambda config: config.layer_norm_eps if config.rms_norm_eps is None else None,
            "attention.layer_norm_rms_epsilon": "rms_norm_eps", "logit_scale": "logit_scale",
            "leading_dense_block_count": lambda config: list(config.mlp_layer_types).count("dense"),
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": lambda config: config.num_shared_experts or None,
            "expert_weights_norm":
                lambda config: bool(config.expert_selection_fn == "softmax" or config.norm_topk_prob),
            "expert_gating_func": lambda config: SIGMOID if config.expert_selection_fn == "sigmoid" else SOFTMAX,
        },
        checks=(_some_slide, _dense_first), follows_window=True, rope_types=("default",),
        fixed={"hidden_act": SILU, "expert_selection_fn": ("softmax", "sigmoid"), **NO_BIAS},
    ),
    Architecture(
        "mimo_v2_flash", "mimo2", weights(*ATTENTION, *NORMS), head_always=True, partial_rotary=True,
        some=(
            (lambda config, block: config.layer_types[block] == SLIDING, ("self_attn.attention_sink_bias",)),
            (_dense, weights(*MLP)), (_sparse, (*weights("mlp.gate"), _SCORES)),
        ),
        named={"self_attn.attention_sink_bias": "attn_sinks.weight", _SCORES: "exp_probs_b.bias"},
        experts=PLAIN_EXPERTS, experts_in=_sparse, by_block=True,
        fields={"experts": "n_routed_experts", "kv_heads": lambda config: _mimo_heads(config)[0]},
        shapes={"attn_v": ("key heads' values", "hidden"), "attn_output": ("hidden", "values")},
        keys=RMS | EXPERTS | _WINDOWS | {
            "attention.head_count_kv": lambda config: where_unlike(_mimo_heads(config)),
            "attention.value_length": "v_head_dim", "attention.value_scale": _value_scale,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        },
        checks=(_some_slide, _mimo_blocks), follows_window=True, rope_types=("default",),
        fixed={"hidden_act": SILU, "norm_topk_prob": (True,), "routed_scaling_factor": (1.0,), **NO_BIAS},
    ),
    Architecture(
        "laguna", "laguna", weights(*ATTENTION, "self_attn.g_proj", *HEAD_NORMS, *NORMS), names_like="dots1",
        some=((_dense, weights(*MLP)), (_sparse, (*weights("mlp.gate", *_ONE_SHARED), _EXPERT_SCORES))),
        named={
            "self_attn.g_proj.weight": "attn_gate.weight", _EXPERT_SCORES: "exp_probs_b.bias",
            **{f"{part}.weight": f"ffn_{part.split('.')[-1][:-5]}_shexp.weight" for part in _ONE_SHARED},
        },
        experts=PLAIN_EXPERTS, experts_in=_sparse, by_block=True, partial_rotary=True,
        fields={
            "experts": "num_experts", "heads": lambda config: config.num_attention_heads_per_layer[0],
            "gate": lambda config: 1 if config.gating in (True, "per-head") else config.head_dim,
        },
        shapes={"attn_gate": ("gates", "hidden")},
        keys=RMS | EXPERTS | EXPERT_INNER | SHARED_INNER | _WINDOWS | {
            "attention.head_count": lambda config: where_unlike(config.num_attention_heads_per_layer),
            "attention.sliding_window": _window_or_none, "rope.dimension_count_swa": _laguna_turns,
            "leading_dense_block_count": lambda config: list(config.mlp_layer_types).count("dense"),
            "expert_weights_scale": lambda config: float(config.moe_routed_scaling_factor),
            "expert_weights_norm": lambda _config: True, "expert_gating_func": lambda _config: SIGMOID,
        },
        checks=(_laguna_blocks,), follows_window=True, rope_types=("default", "yarn"),
        fixed={"hidden_act": SILU, "moe_router_logit_softcapping": (0.0,), **NO_BIAS},
    ),
)  # fmt: skip
