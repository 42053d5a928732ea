"""Hybrid architectures, in which some blocks replace attention by short convolutions, delta rules or Mamba 2.

llama.cpp code for Kimi Delta Attention: src/models/kimi-linear.cpp and bailingmoe3.cpp.
"""

from __future__ import annotations

import math
from typing import Any

from quantkit.formats.gguf.architectures.latent import LATENT_NORMS, latent_key, of_heads, stack_of_heads, whole_key
from quantkit.formats.gguf.architectures.mixtures import (
    DENSE_BLOCKS,
    DENSE_FIRST,
    EXPERT_INNER,
    GRANITE_SHARED,
    GRANITE_SHARED_STACK,
    GRANITE_STACKS,
    KINDS,
    SHARED_INNER,
    SHARED_PARTS,
    SIGMOID,
    in_dense_layers,
    is_dense,
    routed,
)
from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EMBEDDING,
    EQUAL_HEADS,
    EXP,
    EXPERTS_USED,
    GRANITE_SCALES,
    HEAD_NORMS,
    MINUS_EXP,
    MLP,
    NORMS,
    PLAIN_EXPERTS,
    RMS,
    ROTARY,
    SILU,
    UNBIASED,
    W_EXPERTS,
    Architecture,
    Parts,
    RequiredConfig,
    Setting,
    Transform,
    experts_of,
    require,
    unless,
    weights,
)
from quantkit.formats.gguf.shapes import (
    CHANNELS_OF_GROUPS,
    EXPERTS,
    GATES_OF_GROUPS,
    INNER,
    KEY_HEADS,
    KEY_LENGTH,
    TILED_CHANNELS,
    TILED_HEADS,
    TILED_VALUES,
    VALUE_LENGTH,
)

ATTENDS, RECURS = {"full_attention", "attention"}, {"conv", "linear_attention", "mamba"}


def _attends(config: Any, block: int) -> bool:
    """Return whether a block has attention; otherwise it has a recurrent state or a convolution."""
    return bool(config.layer_types[block] in ATTENDS)


_recurs = unless(_attends)


def _key_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads * _attends(config, block) for block in range(config.num_hidden_layers)]


# llama.cpp aborts if no block has attention or none is recurrent, as half of its memory is empty.
_BOTH_KINDS = require(
    lambda config: ATTENDS & {*config.layer_types} and RECURS & {*config.layer_types},
    "layer_types = {0.layer_types}, but llama.cpp aborts without attention or recurrence",
)

# Short convolutions


_KNOWN_BLOCKS = require(
    lambda config: {*config.layer_types} <= {"full_attention", "conv", "linear_attention"},
    "layer_types = {0.layer_types}",
)


def _lfm2_inner(config: Any) -> int:
    """Return the MLP width as transformers computes it (Lfm2MLP in models/lfm2/modeling_lfm2.py)."""
    inner = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return int(inner)
    inner = int(2 * inner / 3)
    if config.block_ffn_dim_multiplier is not None:
        inner = int(config.block_ffn_dim_multiplier * inner)
    return int(config.block_multiple_of * ((inner + config.block_multiple_of - 1) // config.block_multiple_of))


_LFM2_DENSE = weights(*(f"feed_forward.{part}" for part in ("w1", "w2", "w3")))
_LFM2 = Architecture(
    "lfm2", "lfm2", weights("operator_norm", "ffn_norm"), outside=(EMBEDDING, "model.embedding_norm.weight"),
    per_block=(
        (_attends, weights(*ATTENTION[:3], "self_attn.out_proj", "self_attn.q_layernorm", "self_attn.k_layernorm")),
        (_recurs, weights("conv.conv", "conv.in_proj", "conv.out_proj")),
    ),
    rope_types=("default",), required_config={"conv_bias": False}, checks=(_KNOWN_BLOCKS, _BOTH_KINDS),
)  # fmt: skip
_LFM2_KEYS: dict[str, Setting] = {
    "attention.layer_norm_rms_epsilon": "norm_eps",
    KEY_HEADS: _key_heads,
    "shortconv.l_cache": "conv_L_cache",
}

# Gated delta rules, and attention with a gated output: queries and gates of a head are adjacent

DELTA_LENGTHS = "lengths of queries and keys of delta attention"
_DELTA = "linear_attn"


def _sections(config: Any) -> list[int]:
    """Return llama.cpp's rope sections: rotated dimensions per image coordinate. Text uses one coordinate."""
    given = list((config.rope_parameters or {}).get("mrope_section") or (11, 11, 10))
    return [*given, 0, 0, 0, 0][:4]


def _delta_blocks(*projections: str) -> tuple[Any, ...]:
    own = weights(*(f"{_DELTA}.{part}" for part in (*projections, "conv1d", "norm", "out_proj")))
    return (_attends, weights(*ATTENTION, *HEAD_NORMS)), (_recurs, (*own, f"{_DELTA}.A_log", f"{_DELTA}.dt_bias"))


_QWEN3_NEXT = Architecture(
    "qwen3_next", "qwen3next", (*weights(*NORMS, "mlp.gate", *SHARED_PARTS), *PLAIN_EXPERTS), norm_shift=1.0,
    per_block=_delta_blocks("in_proj_qkvz", "in_proj_ba"),
    transforms={
        f"{_DELTA}.norm": Transform(),
        f"{_DELTA}.in_proj_qkvz": Transform(
            split={"attn_qkv.weight": CHANNELS_OF_GROUPS, "attn_gate.weight": GATES_OF_GROUPS}
        ),
    },
    shapes={"attn_q": ("two queries", "hidden"), "attn_qkv": ("channels", "hidden")}, partial_rotary=True,
    keys=RMS | {
        "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.inner_size": lambda config: config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": lambda config: [kind == "linear_attention" for kind in config.layer_types],
    },
    rope_types=("default",), checks=(_KNOWN_BLOCKS, _BOTH_KINDS), fixed_epsilon=DELTA_LENGTHS,
    required_config={**UNBIASED, "linear_value_head_dim": lambda config: config.linear_key_head_dim},
)  # fmt: skip
_MIXTURE_KEYS = EXPERTS_USED | EXPERT_INNER | SHARED_INNER | {EXPERTS: "num_experts"}
# Qwen 3.5: value heads that share a key head are apart in the file, so that they repeat like tiles.
_QWEN35 = _QWEN3_NEXT.like(
    "qwen3_5_text", "qwen35", parts=weights(*NORMS, *MLP),
    per_block=_delta_blocks("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    transforms={
        f"{_DELTA}.A_log": Transform(TILED_HEADS, function=MINUS_EXP),
        **dict.fromkeys((f"{_DELTA}.{part}" for part in ("dt_bias", "in_proj_a", "in_proj_b")), Transform(TILED_HEADS)),
        **dict.fromkeys((f"{_DELTA}.{part}" for part in ("in_proj_qkv", "conv1d")), Transform(TILED_CHANNELS)),
        f"{_DELTA}.in_proj_z": Transform(TILED_VALUES), f"{_DELTA}.out_proj": Transform(columns=TILED_VALUES),
    },
    checks=(*_QWEN3_NEXT.checks, require(
        lambda config: sum(_sections(config)) <= config.head_dim,
        "mrope_section = {0.rope_parameters} in heads of {0.head_dim}, for which llama.cpp aborts",
    )),
)  # fmt: skip
_SECTIONS: dict[str, Setting] = {"rope.dimension_sections": _sections}

# Mamba 2

_MAMBA, _MIXER = (
    tuple(f"{layer}.{part}" for part in (
        "A_log", "D", "dt_bias", "conv1d.bias", *weights("norm", "in_proj", "out_proj", "conv1d")
    )) for layer in ("mamba", "mixer")
)  # fmt: skip
_MAMBA_SHAPES = {"ssm_a": ("steps", "one"), "ssm_norm": ("groups", "values of a group")}
_MAMBA_KEYS: dict[str, Setting] = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": lambda config: config.mamba_n_heads * config.mamba_d_head,
}  # fmt: skip
_MAMBA_FIXED: RequiredConfig = {
    **UNBIASED, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": ((0.0, math.inf), None)
}  # fmt: skip
_FEED_FORWARD = weights(*(f"feed_forward.{kind}_proj" for kind in KINDS))
_BAMBA = Architecture(
    "bamba", "granitehybrid", (*weights("input_layernorm", "pre_ff_layernorm"), *_FEED_FORWARD),
    per_block=((_attends, weights(*ATTENTION)), (_recurs, _MAMBA)),
    outside=(EMBEDDING, "model.final_layernorm.weight"), shapes=_MAMBA_SHAPES,
    transforms=ROTARY, partial_rotary=True,
    keys=RMS | _MAMBA_KEYS | {KEY_HEADS: _key_heads}, checks=(_BOTH_KINDS,),
    required_config={**_MAMBA_FIXED, "mlp_bias": False, "mamba_expand": 2},
)  # fmt: skip
_ONES = (
    *(f"{kind}_{side}_multiplier" for kind in ("attention", "ssm") for side in ("in", "out")),
    "key_multiplier", "embedding_multiplier", "lm_head_multiplier",
)  # fmt: skip


def _of_in_proj(config: Any) -> list[tuple[int, float]]:
    """Return (rows, factor to fold into the weights) for Mamba's `in_proj` sections: gates, values, B, C, steps."""
    inner, states = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    counts = (inner, inner, states, states, config.mamba_n_heads)
    of_parts = zip(counts, config.ssm_multipliers, strict=True)
    return [(count, factor * config.ssm_in_multiplier) for count, factor in of_parts]


def _is(kind: str) -> Any:
    return lambda config, block: config.layers_block_type[block] == kind


def _nemotron_inners(config: Any) -> list[int]:
    inner = config.moe_intermediate_size if "moe" in config.layers_block_type else config.intermediate_size
    return [int(inner) * (kind in ("mlp", "moe")) for kind in config.layers_block_type]


def _with_experts(setting: str) -> Setting:
    return lambda config: getattr(config, setting) if "moe" in config.layers_block_type else None


# Kimi's delta attention in most blocks, and latent attention in the others


def _kimi_blocks(
    attention: str, mixture: str, experts: tuple[str, ...], delta: Parts, latent: tuple[str, ...] = ()
) -> tuple[tuple[Any, Parts], ...]:
    """Return `per_block` entries: blocks with delta attention, with latent attention, with an MLP, with experts."""
    names = ("q_conv1d", "k_conv1d", "v_conv1d", "b_proj", "o_norm", "k_proj", "v_proj")
    own = weights(*(f"{attention}.{part}" for part in names))
    of_latent = weights(f"{attention}.kv_a_proj_with_mqa", f"{attention}.kv_a_layernorm")
    of_mixture = weights(f"{mixture}.gate", *(f"{mixture}.shared_experts.{kind}_proj" for kind in KINDS))
    return (
        (_recurs, (*own, f"{attention}.A_log", f"{attention}.dt_bias")), (_recurs, delta), (is_dense, weights(*MLP)),
        (_attends, (*of_heads(attention), *latent, *of_latent)), (unless(is_dense), (*of_mixture, *experts)),
    )  # fmt: skip


_KIMI = Architecture(
    "kimi_linear", "kimi-linear", (), names_like="kimi-linear",
    keys=routed(SIGMOID) | DENSE_BLOCKS | {
        EXPERTS: "num_local_experts", KEY_LENGTH: latent_key, VALUE_LENGTH: "kv_lora_rank",
        KEY_HEADS: lambda config: [int(_attends(config, n)) for n in range(config.num_hidden_layers)],
        "attention.kv_lora_rank": "kv_lora_rank", "attention.value_length_mla": "v_head_dim",
        "attention.key_length_mla": whole_key, "rope.dimension_count": "qk_rope_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim",
    },
    shapes={
        "attn_q": ("delta or latent queries", "hidden"), "attn_output": ("hidden", "delta or latent values"),
        **dict.fromkeys(("attn_k", "attn_v", "ssm_g_a", "ssm_f_a"), ("delta", "hidden")),
        **dict.fromkeys((f"ssm_conv1d_{part}" for part in "qkv"), ("delta", "one", "kernel")),
        "ssm_beta": ("heads", "hidden"), "ssm_a": ("heads", "one"), "ssm_dt": ("delta",),
        "ssm_norm": ("delta head",),
    },
    fixed_epsilon=f"{LATENT_NORMS} and the {DELTA_LENGTHS}", checks=(DENSE_FIRST, _BOTH_KINDS),
    required_config={
        "linear_num_heads": lambda config: config.num_attention_heads, "tie_word_embeddings": False,
        **UNBIASED, **EQUAL_HEADS,
    },
)  # fmt: skip


ROWS = (
    Architecture(
        "nemotron_h", "nemotron_h", weights("norm"), name_with_experts="nemotron_h_moe", blocks="backbone.layers",
        outside=("backbone.embeddings.weight", "backbone.norm_f.weight"), head_always=True, rope_types=(),
        per_block=(
            (_attends, weights(*(f"mixer.{part}_proj" for part in "qkvo"))),
            (_is("mlp"), weights("mixer.up_proj", "mixer.down_proj")), (_is("linear_attention"), _MIXER),
            (_is("moe"), (
                *weights("mixer.gate", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
                "mixer.gate.e_score_correction_bias", *experts_of("mixer.experts", "up_proj", "down_proj"),
            )),
        ),
        shapes=_MAMBA_SHAPES,
        keys={
            EXPERTS: lambda config: config.n_routed_experts if "moe" in config.layers_block_type else 0,
            INNER: _nemotron_inners, KEY_HEADS: _key_heads,
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads",
            "ssm.inner_size": lambda config: config.mamba_num_heads * config.mamba_head_dim,
            **{
                key: _with_experts(setting) for key, setting in {
                    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
                    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
                    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
                    "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group",
                    "expert_group_used_count": "topk_group",
                }.items()
            },
        },
        required_config={
            "mlp_hidden_act": "relu2", "mamba_hidden_act": SILU, "use_conv_bias": True, "use_bias": False,
            "mlp_bias": False, "mamba_proj_bias": False, "moe_latent_size": None, "sliding_window": None,
            "attention_bias": False,
        },
        checks=(require(
            lambda config: not {"mlp", "moe"} <= {*config.layers_block_type},
            "some blocks have experts and some one feed-forward layer, but llama.cpp supports only one kind",
        ), _BOTH_KINDS),
    ),
    Architecture(
        "granitemoehybrid", "granitehybrid", (*weights(*NORMS), *W_EXPERTS), mark="embedding_scale",
        shapes=_MAMBA_SHAPES,
        per_block=(
            *_BAMBA.per_block,
            ("num_local_experts", weights("block_sparse_moe.router.layer")), ("num_local_experts", GRANITE_SHARED),
            (
                lambda config, _block: not config.num_local_experts,
                {part: f"ffn_{kind}.weight" for part, kind in zip(GRANITE_SHARED, KINDS, strict=True)},
            ),
        ),
        transforms=_BAMBA.transforms, stacks=(*GRANITE_STACKS, GRANITE_SHARED_STACK),
        keys=RMS | GRANITE_SCALES | _MAMBA_KEYS | {
            EXPERTS: "num_local_experts", KEY_HEADS: _key_heads,
            INNER: lambda config: config.intermediate_size if config.num_local_experts
            else config.shared_intermediate_size,
            "expert_used_count": lambda config: config.num_experts_per_tok if config.num_local_experts else None,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "rope.scaling.finetuned": lambda config: config.position_embedding_type == "rope",
        },
        required_config={**_MAMBA_FIXED, "mamba_expand": 2}, checks=(_BOTH_KINDS,),
    ),
    _BAMBA,
    Architecture(  # attention and a state in parallel in every block
        "falcon_h1", "falcon-h1",
        (*_BAMBA.parts, *weights(*ATTENTION), *(part for part in _MAMBA if part != "mamba.norm.weight")),
        per_block=(("mamba_rms_norm", weights("mamba.norm")),), outside=_BAMBA.outside, shapes=_MAMBA_SHAPES,
        gguf_names={"pre_ff_layernorm.weight": "ffn_norm"}, rope_types=("default",),
        multipliers={
            "self_attn.q_proj.weight": "attention_in_multiplier", "self_attn.v_proj.weight": "attention_in_multiplier",
            "self_attn.k_proj.weight": lambda config: config.attention_in_multiplier * config.key_multiplier,
            "self_attn.o_proj.weight": "attention_out_multiplier", "mamba.in_proj.weight": _of_in_proj,
            "mamba.out_proj.weight": "ssm_out_multiplier",
            "feed_forward.gate_proj.weight": lambda config: config.mlp_multipliers[0],
            "feed_forward.down_proj.weight": lambda config: config.mlp_multipliers[1],
            EMBEDDING: "embedding_multiplier", "lm_head.weight": "lm_head_multiplier",
        },
        multiplied={
            **dict.fromkeys(_ONES, 1.0), "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5,
        },
        keys=RMS | _MAMBA_KEYS,
        required_config={
            **_MAMBA_FIXED, "projectors_bias": False, "mlp_bias": False,
            # llama.cpp normalizes a state's output after the gate.
            "mamba_norm_before_gate": lambda config: False if config.mamba_rms_norm else (False, True),
        },
    ),
    _LFM2.like(
        "lfm2", parts=(*_LFM2.parts, *_LFM2_DENSE), keys={INNER: _lfm2_inner, **_LFM2_KEYS},
    ),
    _LFM2.like(
        "lfm2_moe", "lfm2moe",
        per_block=(
            *_LFM2.per_block, (in_dense_layers, _LFM2_DENSE),
            (unless(in_dense_layers), (
                *weights("feed_forward.gate"), "feed_forward.expert_bias",
                *experts_of("feed_forward.experts", "w1", "w3", "w2"),
            )),
        ),
        keys=EXPERTS_USED | EXPERT_INNER | _LFM2_KEYS | {
            EXPERTS: "num_experts", "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": SIGMOID,
        },
        required_config={"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    ),
    _QWEN3_NEXT.like(
        "qwen3_next", keys=_MIXTURE_KEYS,
        required_config={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    _QWEN35.like("qwen3_5_text", keys=_SECTIONS),
    _QWEN35.like(
        "qwen3_5_moe_text", "qwen35moe", parts=_QWEN3_NEXT.parts,
        keys=_MIXTURE_KEYS | {INNER: "moe_intermediate_size"} | _SECTIONS,
    ),
    _KIMI.like(
        "kimi_linear", parts=weights("self_attn.q_proj", "self_attn.o_proj", *NORMS), rope_types=(),
        per_block=_kimi_blocks(
            "self_attn", "block_sparse_moe", ("block_sparse_moe.gate.e_score_correction_bias", *W_EXPERTS),
            weights(*(f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b"))),
        ),
        stacks=(stack_of_heads("self_attn"),),
        transforms={"self_attn.A_log": Transform(function=MINUS_EXP, source_shape=(1, 1, -1, 1))},
        shapes=dict.fromkeys(("ssm_f_a", "ssm_g_a"), ("delta head", "hidden"))
        | dict.fromkeys(("ssm_f_b", "ssm_g_b"), ("delta", "delta head")),
        required_config={"norm_topk_prob": True, "q_lora_rank": None},
    ),
    _KIMI.like(
        "bailing_hybrid", "bailingmoe3", parts=weights("attention.q_proj", "attention.dense", *NORMS),
        per_block=_kimi_blocks(
            "attention", "mlp", ("mlp.gate.expert_bias", *PLAIN_EXPERTS),
            {"attention.f_proj.weight": "ssm_f_a.weight", "attention.g_proj.weight": "ssm_g_a.weight"},
            ("attention.g_proj.weight",),
        ),
        stacks=(stack_of_heads("attention"),), transforms={"attention.A_log": Transform(function=EXP)},
        outside=("model.word_embeddings.weight", "model.norm.weight"), shapes={"attn_gate": ("heads", "hidden")},
        keys={"kda.gate_lower_bound": lambda config: float(config.kda_lower_bound)}, rope_types=("default",),
        required_config={"kda_safe_gate": True}, checks=(*_KIMI.checks, require(
            lambda config: config.kda_lower_bound < 0,
            "kda_lower_bound = {0.kda_lower_bound}, which is not below 0",
        )),
    ),
)  # fmt: skip
