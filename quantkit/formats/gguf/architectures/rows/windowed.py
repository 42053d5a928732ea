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
    windows,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.mixtures import SIGMOID, SOFTMAX

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
            # Without a window llama.cpp must not be told of one.
            "attention.sliding_window":
                lambda config: (config.sliding_window or 0) if SLIDING in config.layer_types else 0,
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
)  # fmt: skip
