"""Mixture-of-experts architectures with standard attention, some with sliding windows or sparse attention."""

from __future__ import annotations

from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EQUAL_HEADS,
    EXPERTS_USED,
    FULL,
    GRANITE_SCALES,
    HEAD_NORMS,
    LLAMA,
    MLP,
    NORMS,
    PLAIN_EXPERTS,
    QUERY_KEY_VALUE_BIASES,
    RMS,
    ROTARY,
    SILU,
    SLIDING,
    UNBIASED,
    UNBIASED_MLP,
    W_EXPERTS,
    Architecture,
    Check,
    Condition,
    Parts,
    RequiredConfig,
    Setting,
    Stack,
    biases,
    every_fourth,
    experts_of,
    fused_experts,
    of_config,
    one_or_list,
    require,
    unless,
    weights,
    windows,
)
from quantkit.formats.gguf.shapes import EXPERTS, INNER, KEY_HEADS, QUERY_HEADS

SOFTMAX, SIGMOID = 1, 2  # llama_expert_gating_func_type
KINDS = ("gate", "up", "down")
EXPERT_INNER: dict[str, Setting] = {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED_INNER: dict[str, Setting] = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SHARED_EXPERT, SHARED_EXPERTS, _SHARED_MLP = (
    tuple(f"mlp.{name}.{kind}_proj" for kind in KINDS) for name in ("shared_expert", "shared_experts", "shared_mlp")
)
SHARED_PARTS = (*SHARED_EXPERT, "mlp.shared_expert_gate")
SCORES = "mlp.gate.e_score_correction_bias"  # correction of the router's scores
_WIDE_NORMS = {"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)}
_EVERY_FOURTH: RequiredConfig = {"layer_types": every_fourth(FULL, SLIDING)}

# Experts behind dense blocks


def is_dense(config: Any, block: int) -> bool:
    """Return whether `mlp_layer_types` makes this block dense (an MLP instead of experts)."""
    return list(config.mlp_layer_types)[block : block + 1] == ["dense"]


DENSE_FIRST = require(
    lambda config: "dense" not in list(config.mlp_layer_types)[list(config.mlp_layer_types).count("dense") :],
    "mlp_layer_types = {0.mlp_layer_types}, but llama.cpp has dense blocks first",
)
DENSE_BLOCKS: dict[str, Setting] = {
    "leading_dense_block_count": lambda config: list(config.mlp_layer_types).count("dense")
}


def before_experts(config: Any, block: int) -> bool:
    """Return whether `first_k_dense_replace` makes this block dense (an MLP instead of experts)."""
    return bool(block < config.first_k_dense_replace)


def in_dense_layers(config: Any, block: int) -> bool:
    """Return whether `num_dense_layers` makes this block dense (an MLP instead of experts)."""
    return bool(block < config.num_dense_layers)


def mixed(dense: Any, *parts: str) -> tuple[tuple[Condition, Parts], ...]:
    """Return `per_block` entries: an MLP where the condition `dense` holds, else experts and the extra `parts`."""
    return (dense, weights(*MLP)), (unless(dense), (*parts, *PLAIN_EXPERTS))


def routed(gating: int, shared: str = "n_shared_experts") -> dict[str, Setting]:
    """Return the GGUF keys of a DeepSeek-style mixture; `shared`: config attribute with the shared-expert count."""
    return RMS | EXPERTS_USED | EXPERT_INNER | {
        "leading_dense_block_count": "first_k_dense_replace", "expert_shared_count": shared,
        "expert_weights_scale": lambda config: float(config.routed_scaling_factor),
        "expert_weights_norm": lambda config: bool(config.norm_topk_prob), "expert_gating_func": gating,
        "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    }  # fmt: skip


def _weighed(scale: str) -> dict[str, Setting]:
    """Return the GGUF keys for a normalized sigmoid router; `scale` names the setting with the expert-weight scale."""
    return {
        "expert_weights_scale": lambda config: float(getattr(config, scale)),
        "expert_weights_norm": True, "expert_gating_func": SIGMOID,
    }  # fmt: skip


def whole_experts(shared: Setting, inner: str, name: str) -> Check:
    """Return a check that the shared experts' width is a multiple of one expert's, since llama.cpp stores a count."""
    return require(
        lambda config: (
            getattr(config, inner) > 0
            and of_config(config, shared) > 0
            and of_config(config, shared) % getattr(config, inner) == 0
        ),
        f"a {name} that is not a multiple of an expert's {{0.{inner}}}, as llama.cpp needs",
    )


# Granite

GRANITE_STACKS = tuple(
    Stack(f"block_sparse_moe.{part}.weight", pieces)
    for part, pieces in (("input_linear", W_EXPERTS[:2]), ("output_linear", W_EXPERTS[2:]))
)
GRANITE_SHARED = weights("shared_mlp.gate", "shared_mlp.up", "shared_mlp.output_linear")
GRANITE_SHARED_STACK = Stack(
    "shared_mlp.input_linear.weight", GRANITE_SHARED[:2],
    rows=lambda config, _block: (config.shared_intermediate_size,) * 2,
)  # fmt: skip
_SHARED_LENGTH: dict[str, Setting] = {
    "expert_shared_feed_forward_length": lambda config: config.shared_intermediate_size or None
}

# Settings fixed in llama.cpp


def _routes(config: Any, block: int) -> bool:
    return bool((block + 1) % config.interleave_moe_layer_step == 0)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


_SOME_SLIDE = require(
    lambda config: SLIDING in config.layer_types,
    "layer_types = {0.layer_types}, but llama.cpp aborts if no block has a window",
)


def _window_or_none(config: Any) -> int:
    """Return the sliding-window size in tokens, or 0 (llama.cpp's "none") if no block has a window."""
    return (config.sliding_window or 0) if SLIDING in config.layer_types else 0


def _mimo_heads(config: Any) -> list[int]:
    """Return the number of key-value heads of each block; sliding-window blocks have twice as many."""
    return [config.num_key_value_heads * (2 if kind == SLIDING else 1) for kind in config.layer_types]


def _laguna_turns(config: Any) -> int | None:
    local = config.rope_parameters.get(SLIDING)
    return None if local is None else int(config.head_dim * local.get("partial_rotary_factor", 1.0))


def _minimax_halves(stem: str, setting: str) -> Stack:
    """Return the Stack that splits an MLP's fused gate and up projection."""
    pieces = weights(*(f"{stem}.{kind}_proj" for kind in KINDS[:2]))
    return Stack(f"{stem}.gate_up_proj.weight", pieces, rows=lambda config, _block: (getattr(config, setting),) * 2)


_MIXTRAL = Architecture(
    "mixtral", "llama", (*weights(*ATTENTION, *NORMS, "block_sparse_moe.gate"), *W_EXPERTS), transforms=ROTARY,
    keys=RMS | EXPERTS_USED | {EXPERTS: "num_local_experts"},
)  # fmt: skip
_QWEN3 = Architecture(
    "qwen3_moe", "qwen3moe", (*weights(*ATTENTION, *HEAD_NORMS, *NORMS, "mlp.gate"), *PLAIN_EXPERTS),
    keys=RMS | EXPERTS_USED | EXPERT_INNER | {EXPERTS: "num_experts"},
    required_config={**UNBIASED, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)  # fmt: skip
_GRANITE = _MIXTRAL.like(
    "granitemoe", "granitemoe",
    parts=(*weights(*ATTENTION, *NORMS, "block_sparse_moe.router.layer"), *W_EXPERTS), stacks=GRANITE_STACKS,
    keys=GRANITE_SCALES, rope_types=("default",), required_config=UNBIASED,
)  # fmt: skip
_ROUTED = Architecture(
    "dots1", "dots1", weights(*ATTENTION, *HEAD_NORMS, *NORMS),
    per_block=mixed(before_experts, *weights("mlp.gate", *SHARED_EXPERTS), SCORES),
    keys=routed(SIGMOID) | {EXPERTS: "n_routed_experts"},
)  # fmt: skip
_GLM4 = _ROUTED.like(
    "glm4_moe", "glm4moe", parts=weights(*ATTENTION, *NORMS), partial_rotary=True, rope_types=("default",),
    per_block=(
        *_ROUTED.per_block, ("use_qk_norm", weights(*HEAD_NORMS)), ("attention_bias", QUERY_KEY_VALUE_BIASES)
    ),
)  # fmt: skip
_WINDOWS = windows(None)
_GRANITE_SWA: dict[str, Any] = {
    "transforms": ROTARY, "rope_types": ("default",), "follows_window": True,
    "checks": (_SOME_SLIDE, require(  # llama.cpp has one base for all blocks that rotate
        lambda config: {*config.layer_rope_theta} <= {0, config.rope_parameters["rope_theta"]},
        "layer_rope_theta = {0.layer_rope_theta}, but llama.cpp supports one base or none",
    )),
    "keys": RMS | GRANITE_SCALES | _WINDOWS | {
        "attention.rope_pattern": lambda config: [bool(base) for base in config.layer_rope_theta]
    },
}  # fmt: skip
_INDEXER = {
    f"self_attn.indexer.{part}.weight": f"indexer.{part}.weight" for part in ("q_proj", "k_proj", "q_norm", "k_norm")
}

ROWS = (
    _MIXTRAL,
    _QWEN3,
    Architecture(
        "qwen2_moe", "qwen2moe", (*weights(*ATTENTION, *NORMS, "mlp.gate", *SHARED_PARTS), *PLAIN_EXPERTS),
        per_block=(("qkv_bias", QUERY_KEY_VALUE_BIASES),), head_always=True, keys={**_QWEN3.keys, **SHARED_INNER},
        required_config={
            "hidden_act": SILU, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []
        },
    ),
    Architecture(
        "olmoe", "olmoe", _QWEN3.parts, head_always=True, rope_types=("default",), shapes=_WIDE_NORMS,
        keys=RMS | EXPERTS_USED | {EXPERTS: "num_experts"},
        required_config={**UNBIASED, **EQUAL_HEADS, "norm_topk_prob": False, "clip_qkv": None},
    ),
    Architecture(
        "gpt_oss", "gpt-oss",
        (
            *weights(*ATTENTION, *NORMS, "mlp.router"), *biases(*ATTENTION, "mlp.router"), "self_attn.sinks",
            *PLAIN_EXPERTS, *experts_of("mlp.experts", kind="bias"),
        ),
        head_always=True, follows_window=True,
        stacks=(
            *fused_experts("mlp.experts", transposed=True, interleaved=True),
            Stack("mlp.experts.gate_up_proj_bias", experts_of("mlp.experts", kind="bias")[:2], interleaved=True),
            Stack("mlp.experts.down_proj_bias", experts_of("mlp.experts", kind="bias")[2:], interleaved=True),
        ),
        keys=RMS | EXPERTS_USED | {"expert_feed_forward_length": "intermediate_size"} | windows(2) | {
            EXPERTS: "num_local_experts"
        },
        required_config={
            "hidden_act": SILU, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        },
    ),
    _GRANITE,
    _GRANITE.like(
        "granitemoeshared", per_block=(("shared_intermediate_size", GRANITE_SHARED),),
        stacks=(*GRANITE_STACKS, GRANITE_SHARED_STACK), keys=_SHARED_LENGTH,
    ),
    Architecture(
        "hy_v3", "hy_v3", weights(*ATTENTION, *HEAD_NORMS, *NORMS), names_like="dots1",
        per_block=mixed(is_dense, *weights("mlp.router.gate", *_SHARED_MLP), "mlp.expert_bias"),
        gguf_names={"mlp.expert_bias": "exp_probs_b"},
        keys=RMS | EXPERTS_USED | EXPERT_INNER | {
            EXPERTS: "num_experts",
            "expert_shared_feed_forward_length":
                lambda config: config.moe_intermediate_size * config.num_shared_experts,
        } | _weighed("router_scaling_factor"),
        rope_types=("default", "dynamic"), required_config=UNBIASED_MLP,
        checks=(require(
            lambda config: len(config.mlp_layer_types) >= config.num_hidden_layers,
            "mlp_layer_types = {0.mlp_layer_types}, and {0.num_hidden_layers} blocks",
        ),),
    ),
    _GLM4,
    _GLM4.like(
        "solar_open", per_block=(), rope_types=("default", "yarn"), required_config=UNBIASED,
        parts=(*weights(*ATTENTION, *NORMS, "mlp.gate", *SHARED_EXPERTS), SCORES, *PLAIN_EXPERTS),
        keys={INNER: "moe_intermediate_size", "leading_dense_block_count": 0},
    ),
    Architecture(
        "minimax_m2", "minimax-m2",
        (
            *weights(*ATTENTION, *HEAD_NORMS, *NORMS, "block_sparse_moe.gate"),
            "block_sparse_moe.e_score_correction_bias", *W_EXPERTS,
        ),
        head_always=True, partial_rotary=True,
        keys=RMS | EXPERTS_USED | {
            EXPERTS: "num_local_experts", "expert_feed_forward_length": "intermediate_size",
            "expert_gating_func": SIGMOID,
        },
        shapes=_WIDE_NORMS, rope_types=("default",),
    ),
    Architecture(
        "ernie4_5_moe", "ernie4_5-moe", weights(*ATTENTION, *NORMS),
        per_block=mixed(
            lambda config, n: n < config.moe_layer_start_index or (n + 1) % config.moe_layer_interval != 0,
            *weights("mlp.gate", *SHARED_EXPERTS), "mlp.moe_statics.e_score_correction_bias",
        ),
        shapes={"exp_probs_b": ("one", "experts", "one")},  # a bias, without the last length
        keys=RMS | {
            EXPERTS: "moe_num_experts",
            "expert_used_count": "moe_k", "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts", "leading_dense_block_count": "moe_layer_start_index",
            "expert_shared_feed_forward_length":
                lambda config: config.moe_intermediate_size * config.moe_num_shared_experts,
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        rope_types=("default",),
        required_config={
            "hidden_act": SILU, "use_bias": False,
            "moe_layer_end_index": lambda config: (config.num_hidden_layers - 1, -1),
        },
    ),
    _ROUTED.like("dots1", head_always=True, required_config={**UNBIASED, **EQUAL_HEADS}),
    Architecture(
        "llama4_text", "llama4", weights(*ATTENTION, *NORMS),
        per_block=(
            (unless(_routes), weights(*(f"feed_forward.{kind}_proj" for kind in KINDS))),
            (_routes, (
                *weights("feed_forward.router", *(f"feed_forward.shared_expert.{kind}_proj" for kind in KINDS)),
                *experts_of("feed_forward.experts"),
            )),
        ),
        stacks=fused_experts("feed_forward.experts", transposed=True), rope_types=("default", "llama3"),
        keys=RMS | EXPERTS_USED | {
            EXPERTS: "num_local_experts", INNER: "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size", "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        checks=(require(
            lambda config: config.num_hidden_layers > 3,
            "{0.num_hidden_layers} blocks; llama.cpp aborts below four blocks, as every fourth has no rope",
        ),),
        follows_window=True,
        required_config={
            "no_rope_layers": every_fourth(0, 1), "layer_types": every_fourth(FULL, "chunked_attention"),
            "moe_layers":
                lambda config: [block for block in range(config.num_hidden_layers) if _routes(config, block)],
            "use_qk_norm": lambda config: config.num_local_experts != 128,
            "attention_chunk_size": 8192, "attn_temperature_tuning": (True, 1, 4), "floor_scale": 8192,
            "attn_scale": 0.1, **UNBIASED,
        },
    ),
    _ROUTED.like(
        "exaone_moe", "exaone-moe", head_always=True, required_config=_EVERY_FOURTH, follows_window=True,
        per_block=mixed(before_experts, *weights("mlp.gate", *SHARED_EXPERTS), "mlp.e_score_correction_bias"),
        keys={EXPERTS: "num_experts", "expert_shared_count": "num_shared_experts"} | windows(4),
    ),
    Architecture(
        "afmoe", "afmoe",
        weights(*ATTENTION, "self_attn.gate_proj", *HEAD_NORMS, *NORMS, "pre_mlp_layernorm", "post_mlp_layernorm"),
        head_always=True, follows_window=True,
        per_block=mixed(in_dense_layers, *weights("mlp.router.gate", *SHARED_EXPERTS), "mlp.expert_bias"),
        shapes={"attn_gate": ("queries", "hidden")},
        keys=RMS | EXPERTS_USED | EXPERT_INNER | windows(4) | {
            EXPERTS: "num_experts", "leading_dense_block_count": "num_dense_layers",
            "expert_shared_count": "num_shared_experts",
        } | _weighed("route_scale"),
        required_config={**UNBIASED, **_EVERY_FOURTH, "mup_enabled": True},
    ),
    Architecture(
        "hunyuan_v1_moe", "hunyuan-moe",
        (
            *weights(
                *ATTENTION, "self_attn.query_layernorm", "self_attn.key_layernorm", *NORMS, "mlp.gate.wg", *_SHARED_MLP
            ),
            *PLAIN_EXPERTS,
        ),
        rope_types=("default", "dynamic"), required_config=UNBIASED,
        keys=RMS | {
            EXPERTS: lambda config: _first(config.num_experts),
            "expert_used_count": lambda config: _first(config.moe_topk),
            "expert_feed_forward_length": "intermediate_size", "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
    Architecture(
        "granite_swa", "granite_swa", (*LLAMA, "self_attn.sinks"), names_like="granite",
        required_config=UNBIASED_MLP, **_GRANITE_SWA,
    ),
    Architecture(
        "granitemoe_swa", "granite_swa",
        (
            *weights(*ATTENTION, *NORMS, "block_sparse_moe.router"), "self_attn.sinks",
            *experts_of("block_sparse_moe.experts"),
        ),
        per_block=(("shared_intermediate_size", {
            "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        }),),
        names_like="granitemoe",
        stacks=fused_experts("block_sparse_moe.experts"), shapes={"ffn_up_shexp": ("two shared inner", "hidden")},
        required_config=UNBIASED, **_GRANITE_SWA | {
            "keys": _GRANITE_SWA["keys"] | EXPERTS_USED | _SHARED_LENGTH | {EXPERTS: "num_local_experts"}
        },
    ),
    Architecture(
        "mellum", "mellum", _QWEN3.parts, names_like="qwen3moe", head_always=True,
        keys=RMS | EXPERTS_USED | _WINDOWS | EXPERT_INNER | {
            EXPERTS: "num_experts", "attention.sliding_window": _window_or_none
        },
        checks=(require(  # llama.cpp applies no scaling in blocks with a window, and uses the other blocks' base
            lambda config: len({config.rope_parameters[kind]["rope_theta"] for kind in config.layer_types}) == 1,
            "rope_theta = {0.rope_parameters}, but llama.cpp has one for all blocks",
        ),),
        follows_window=True, rope_types=("default", "yarn"),
        required_config={
            **UNBIASED, "norm_topk_prob": True,
            "mlp_layer_types": lambda config: ["sparse"] * config.num_hidden_layers,
        },
    ),
    Architecture(
        "cohere2_moe", "cohere2moe", weights(*ATTENTION, "input_layernorm"), names_like="dots1",
        per_block=(
            *mixed(is_dense, *weights("mlp.gate")),
            (lambda config, block: not is_dense(config, block) and config.num_shared_experts, weights(*SHARED_EXPERTS)),
        ),
        keys=EXPERTS_USED | _WINDOWS | {
            EXPERTS: "num_experts",
            INNER: lambda config: config.prefix_dense_intermediate_size or config.intermediate_size,
            "attention.layer_norm_epsilon":
                lambda config: config.layer_norm_eps if config.rms_norm_eps is None else None,
            "attention.layer_norm_rms_epsilon": "rms_norm_eps", "logit_scale": "logit_scale",
        } | DENSE_BLOCKS | {
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": lambda config: config.num_shared_experts or None,
            "expert_weights_norm":
                lambda config: bool(config.expert_selection_fn == "softmax" or config.norm_topk_prob),
            "expert_gating_func": lambda config: SIGMOID if config.expert_selection_fn == "sigmoid" else SOFTMAX,
        },
        checks=(
            _SOME_SLIDE, DENSE_FIRST,
            require(
                lambda config: config.prefix_dense_sliding_window_pattern == 1
                or {*config.layer_types[: list(config.mlp_layer_types).count("dense")]} <= {SLIDING},
                "prefix_dense_sliding_window_pattern = {0.prefix_dense_sliding_window_pattern}, but llama.cpp rotates "
                "in all dense blocks",
            ),
            require(
                lambda config: not config.num_shared_experts or config.shared_expert_combination_strategy == "average",
                "shared_expert_combination_strategy = {0.shared_expert_combination_strategy!r}, but llama.cpp computes "
                "'average'",
            ),
        ),
        follows_window=True, rope_types=("default",),
        required_config={**UNBIASED, "expert_selection_fn": ("softmax", "sigmoid")},
    ),
    Architecture(
        "mimo_v2_flash", "mimo2", weights(*ATTENTION, *NORMS), head_always=True, partial_rotary=True, by_block=True,
        per_block=(
            *mixed(is_dense, *weights("mlp.gate"), SCORES),
            (lambda config, block: config.layer_types[block] == SLIDING, ("self_attn.attention_sink_bias",)),
        ),
        shapes={"attn_v": ("key heads' values", "hidden"), "attn_output": ("hidden", "values")},
        keys=RMS | EXPERTS_USED | _WINDOWS | {
            EXPERTS: "n_routed_experts", KEY_HEADS: lambda config: one_or_list(_mimo_heads(config)),
            "attention.value_length": "v_head_dim", "attention.value_scale":
                lambda config: 1.0 if config.attention_value_scale is None else float(config.attention_value_scale),
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        },
        checks=(
            _SOME_SLIDE,
            require(
                lambda config: config.num_attention_heads % max(_mimo_heads(config)) == 0,
                "{0.num_attention_heads} query heads, which twice the {0.num_key_value_heads} key heads do not divide",
            ),
            require(
                lambda config: len(shares := {
                    config.rope_parameters[kind].get("partial_rotary_factor") for kind in config.layer_types
                }) == 1 and None not in shares,
                "rope_parameters = {0.rope_parameters}, but llama.cpp has one partial_rotary_factor for all blocks",
            ),
            require(
                lambda config: config.attention_value_scale != 0,
                "attention_value_scale = 0, but llama.cpp treats 0 as absent",
            ),
        ),
        follows_window=True, rope_types=("default",),
        required_config={**UNBIASED, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    ),
    Architecture(
        "laguna", "laguna", weights(*ATTENTION, "self_attn.g_proj", *HEAD_NORMS, *NORMS), names_like="dots1",
        per_block=mixed(is_dense, *weights("mlp.gate", *SHARED_EXPERT), "mlp.experts.e_score_correction_bias"),
        by_block=True, partial_rotary=True, shapes={"attn_gate": ("gates", "hidden")},
        gate=lambda config: 1 if config.gating in (True, "per-head") else config.head_dim,
        keys=RMS | EXPERTS_USED | EXPERT_INNER | SHARED_INNER | _WINDOWS | {
            EXPERTS: "num_experts", QUERY_HEADS: lambda config: one_or_list(config.num_attention_heads_per_layer),
            "attention.sliding_window": _window_or_none, "rope.dimension_count_swa": _laguna_turns,
        } | DENSE_BLOCKS | _weighed("moe_routed_scaling_factor"),
        checks=(
            DENSE_FIRST,
            require(
                lambda config: (turns := _laguna_turns(config)) is None or (turns and turns % 2 == 0),
                "rope_parameters = {0.rope_parameters}, but blocks with a window must rotate an even number of values",
            ),
            require(
                lambda config: not any(n % config.num_key_value_heads for n in config.num_attention_heads_per_layer),
                "{0.num_attention_heads_per_layer} query heads and {0.num_key_value_heads} key heads",
            ),
        ),
        follows_window=True, rope_types=("default", "yarn"),
        required_config={**UNBIASED, "moe_router_logit_softcapping": 0.0},
    ),
    Architecture(
        "minimax_m3_vl_text", "minimax-m3", weights(*ATTENTION, *HEAD_NORMS, *NORMS), names_like="dots1",
        head_always=True, partial_rotary=True, norm_shift=1.0, rope_types=("default",),
        per_block=(*mixed(is_dense, *weights("mlp.gate", *SHARED_EXPERTS), SCORES), (unless(is_dense), _INDEXER)),
        stacks=(
            _minimax_halves("mlp", "dense_intermediate_size"),
            _minimax_halves("mlp.shared_experts", "shared_intermediate_size"), *fused_experts("mlp.experts"),
        ),
        keys=RMS | EXPERTS_USED | {
            EXPERTS: "num_local_experts", INNER: "dense_intermediate_size",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": lambda config: config.shared_intermediate_size // config.intermediate_size,
        } | _weighed("routed_scaling_factor") | DENSE_BLOCKS | {
            "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.top_k": "index_topk_blocks", "attention.indexer.block_size": "index_block_size",
            "attention.indexer.local_blocks": "index_local_blocks",
        },
        required_config={
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "index_n_heads": lambda config: config.num_key_value_heads,
        },
        checks=(
            DENSE_FIRST,
            require(
                lambda config: list(config.layer_types) == [
                    FULL if is_dense(config, n) else "minimax_m3_sparse" for n in range(config.num_hidden_layers)
                ],
                "layer_types = {0.layer_types}, but llama.cpp attends to selected tokens only in blocks with experts",
            ),
            require(
                lambda config: config.index_head_dim
                >= int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)),
                "index_head_dim = {0.index_head_dim}, but llama.cpp rotates as many values as in the other heads",
            ),
            require(
                lambda config: min(config.index_block_size, config.index_topk_blocks) > 0,
                "{0.index_topk_blocks} blocks of {0.index_block_size} tokens",
            ),
            whole_experts("shared_intermediate_size", "intermediate_size", "shared_intermediate_size"),
        ),
        differs="llama.cpp selects blocks of tokens only with flash attention (-fa on), else it attends to all",
    ),
)  # fmt: skip
