"""Architectures of which some blocks have no attention: short convolutions, gated delta rules, Mamba 2."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EMBEDDING,
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
    Blocks,
    Setting,
    experts_of,
    weights,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.mixtures import (
    EXPERT_INNER,
    GRANITE_SHARED,
    GRANITE_SHARED_STACK,
    GRANITE_STACKS,
    SHARED_INNER,
    SHARED_PARTS,
    SIGMOID,
    behind_dense_layers,
)  # fmt: skip

ATTENDS, RECURS = {"full_attention", "attention"}, {"conv", "linear_attention", "mamba"}


def attends(config: Any, block: int) -> bool:
    """Whether a block has attention to all tokens."""
    return bool(config.layer_types[block] in ATTENDS)


def recurs(config: Any, block: int) -> bool:
    """Whether it has a state or a convolution instead."""
    return not attends(config, block)


def _key_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads * attends(config, block) for block in range(config.num_hidden_layers)]


def both_kinds(config: Any) -> str | None:
    """llama.cpp ends the program where no block has attention, or none is recurrent: a half of its memory is empty."""
    kinds = set(config.layer_types)
    if kinds & ATTENDS and kinds & RECURS:
        return None
    return f"blocks of {', '.join(sorted(kinds))} alone, and llama.cpp ends without attention or recurrence"


def _is(*kinds: str) -> Blocks:
    return lambda config, block: config.layers_block_type[block] in kinds


def _nemotron_inner(config: Any) -> int:
    return int(config.moe_intermediate_size if "moe" in config.layers_block_type else config.intermediate_size)


def _nemotron_inners(config: Any) -> list[int]:
    """Of each block, 0 without a feed-forward layer."""
    return [_nemotron_inner(config) * (kind in ("mlp", "moe")) for kind in config.layers_block_type]


def _with_experts(setting: str, config: Any) -> Any:
    return getattr(config, setting) if "moe" in config.layers_block_type else None


def _nemotron_kinds(config: Any) -> str | None:
    kinds = set(config.layers_block_type)
    if kinds <= {"linear_attention", "full_attention", "mlp"} or "mlp" not in kinds:
        return None
    return "blocks with experts beside blocks with one feed-forward layer, and llama.cpp has either"


def _known_blocks(config: Any) -> str | None:
    known = {"full_attention", "conv", "linear_attention"}
    return None if set(config.layer_types) <= known else f"layer_types = {config.layer_types}"


def _lfm2_inner(config: Any) -> int:
    """As transformers computes it (models/lfm2/modeling_lfm2.py, Lfm2MLP)."""
    inner = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return int(inner)
    inner = int(2 * inner / 3)
    if config.block_ffn_dim_multiplier is not None:
        inner = int(config.block_ffn_dim_multiplier * inner)
    return int(config.block_multiple_of * ((inner + config.block_multiple_of - 1) // config.block_multiple_of))


_LFM2_PARTS = weights("operator_norm", "ffn_norm")
_LFM2_SOME = (
    (attends, weights(*ATTENTION[:3], "self_attn.out_proj", "self_attn.q_layernorm", "self_attn.k_layernorm")),
    (recurs, weights("conv.conv", "conv.in_proj", "conv.out_proj")),
)
_LFM2_DENSE = weights(*(f"feed_forward.{part}" for part in ("w1", "w2", "w3")))
_LFM2_KEYS: dict[str, Setting] = {
    "attention.layer_norm_rms_epsilon": "norm_eps", "attention.head_count_kv": _key_heads,
    "shortconv.l_cache": "conv_L_cache",
}  # fmt: skip
DELTA_LENGTHS = "lengths of queries and keys of delta attention"
_DELTA = "linear_attn"
_DELTA_NAMES = {
    f"{_DELTA}.A_log": "ssm_a", f"{_DELTA}.dt_bias": "ssm_dt.bias", f"{_DELTA}.norm.weight": "ssm_norm.weight",
    f"{_DELTA}.conv1d.weight": "ssm_conv1d.weight", f"{_DELTA}.out_proj.weight": "ssm_out.weight",
}  # fmt: skip
_DELTA_KEYS: dict[str, Setting] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.linear_value_head_dim * config.linear_num_value_heads,
    "attention.recurrent_layers": lambda config: [kind == "linear_attention" for kind in config.layer_types],
}  # fmt: skip
_TILED = ("A_log", "dt_bias", "in_proj_a", "in_proj_b")


def _square_heads(config: Any) -> str | None:
    sizes = config.linear_key_head_dim, config.linear_value_head_dim
    return None if sizes[0] == sizes[1] else f"linear heads of {sizes}, and llama.cpp has keys and values alike"


def _sections(config: Any) -> list[int]:
    """Of the rotated values, by the coordinate of an image; of text all coordinates are the same."""
    given = list((config.rope_parameters or {}).get("mrope_section") or (11, 11, 10))
    return [*given, 0, 0, 0, 0][:4]


def _few_sections(config: Any) -> str | None:
    """llama.cpp ends the program where the sections are longer than a head."""
    count = sum(_sections(config))
    return f"mrope_section = {_sections(config)} in heads of {config.head_dim}" if count > config.head_dim else None


def _delta(model_type: str, name: str, *parts: str, **other: Any) -> Architecture:
    """A gated delta rule, and attention whose output is gated: queries and gates of a head lie side by side."""
    keys = RMS | _DELTA_KEYS | other.pop("keys")
    fixed = {"hidden_act": SILU, **NO_BIAS, **other.pop("fixed", {})}
    own = weights(*(f"{_DELTA}.{part}" for part in (*other.pop("inner"), "conv1d", "norm", "out_proj")))
    return Architecture(
        model_type, name, weights(*NORMS, *parts), norm_shift=1.0, unshifted=(f"{_DELTA}.norm.weight",),
        some=(
            (attends, weights(*ATTENTION, *HEAD_NORMS)),
            (recurs, (*own, f"{_DELTA}.A_log", f"{_DELTA}.dt_bias")),
        ),
        named=_DELTA_NAMES | other.pop("named", {}), functions={f"{_DELTA}.A_log": "minus exp"}, keys=keys, fixed=fixed,
        shapes={"attn_q": ("two queries", "hidden"), "attn_qkv": ("channels", "hidden")}, partial_rotary=True,
        rope_types=("default",), checks=(_known_blocks, both_kinds, _square_heads, *other.pop("checks", ())),
        fixed_epsilon=DELTA_LENGTHS, **other,
    )  # fmt: skip


def _delta35(model_type: str, name: str, *parts: str, **other: Any) -> Architecture:
    """Qwen 3.5: value heads that share a key head lie apart in the file, so that they repeat like tiles."""
    return _delta(
        model_type, name, *parts, inner=("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
        named={
            f"{_DELTA}.in_proj_{part}.weight": f"{name}.weight"
            for part, name in (("qkv", "attn_qkv"), ("z", "attn_gate"), ("a", "ssm_alpha"), ("b", "ssm_beta"))
        },
        orders={f"{_DELTA}.{part}": "tiled heads" for part in _TILED}
        | {f"{_DELTA}.{part}": "tiled channels" for part in ("in_proj_qkv", "conv1d")}
        | {f"{_DELTA}.in_proj_z": "tiled values"},
        columns={f"{_DELTA}.out_proj": "tiled values"}, checks=(_few_sections,), **other,
    )  # fmt: skip


# Of a Mamba 2 layer: part -> its name in the file.
_MAMBA = {
    "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight",
    "in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight", "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
}  # fmt: skip
_MAMBA_SHAPES = {"ssm_a": ("steps", "one"), "ssm_norm": ("groups", "values of a group")}
_GRANITE_MAMBA, _NEMOTRON_MAMBA = (
    {f"{layer}.{part}": name for part, name in _MAMBA.items()} for layer in ("mamba", "mixer")
)
_MAMBA_KEYS: dict[str, Setting] = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": lambda config: config.mamba_n_heads * config.mamba_d_head,
}  # fmt: skip
_FEED_FORWARD = tuple(f"feed_forward.{part}_proj" for part in ("gate", "up", "down"))
_NEMOTRON_EXPERTS: dict[str, Setting] = {
    key: partial(_with_experts, setting) for key, setting in {
        "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }.items()
}  # fmt: skip
_MIXER = "mixer.{}_proj".format


def _of_in_proj(config: Any) -> list[tuple[int, float]]:
    """(rows, factor) of gates, values, input and output states, and steps; all are taken of a scaled input."""
    inner, states = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    counts = (inner, inner, states, states, config.mamba_n_heads)
    of_parts = zip(counts, config.ssm_multipliers, strict=True)
    return [(count, factor * config.ssm_in_multiplier) for count, factor in of_parts]


def _gates_first(config: Any) -> str | None:
    """llama.cpp's norm of what a state gives comes behind the gate."""
    norm = config.mamba_rms_norm and config.mamba_norm_before_gate
    return "mamba_norm_before_gate = True, and llama.cpp gates first" if norm else None


ROWS = (
    Architecture(
        "nemotron_h", "nemotron_h", weights("norm"), name_with_experts="nemotron_h_moe", blocks="backbone.layers",
        outside=("backbone.embeddings.weight", "backbone.norm_f.weight"), head_always=True,
        some=(
            (attends, weights(*map(_MIXER, "qkvo"))), (_is("mlp"), weights(*map(_MIXER, ("up", "down")))),
            (_is("linear_attention"), tuple(_NEMOTRON_MAMBA)),
            (_is("moe"), (
                *weights("mixer.gate", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
                "mixer.gate.e_score_correction_bias",
            )),
        ),
        named=_NEMOTRON_MAMBA | {
            "mixer.gate.weight": "ffn_gate_inp.weight", "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
            **{f"mixer.shared_experts.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("up", "down")},
        },
        functions={"mixer.A_log": "minus exp"},
        shapes=_MAMBA_SHAPES,
        experts={f"mixer.experts.{{}}.{kind}_proj.weight": f"ffn_{kind}_exps.weight" for kind in ("down", "up")},
        experts_in=_is("moe"), rope_types=(),
        fields={
            "experts": lambda config: config.n_routed_experts if "moe" in config.layers_block_type else 0,
            "inner": _nemotron_inner,
        },
        keys={
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.head_count_kv": _key_heads,
            "feed_forward_length": _nemotron_inners,
            "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads",
            "ssm.inner_size": lambda config: config.mamba_num_heads * config.mamba_head_dim,
            **_NEMOTRON_EXPERTS,
        },
        fixed={
            "mlp_hidden_act": ("relu2",), "mamba_hidden_act": SILU, "use_conv_bias": (True,), "use_bias": (False,),
            "mlp_bias": (False,), "mamba_proj_bias": (False,), "moe_latent_size": (None,), "sliding_window": (None,),
            **NO_BIAS,
        },
        checks=(_nemotron_kinds, both_kinds),
    ),
    Architecture(
        "granitemoehybrid", "granitehybrid", (*weights(*NORMS), *GRANITE_SHARED), orders=ROTARY, mark="embedding_scale",
        some=(
            (attends, weights(*ATTENTION)), (recurs, tuple(_GRANITE_MAMBA)),
            (lambda config, _block: bool(config.num_local_experts), weights("block_sparse_moe.router.layer")),
        ),
        named=_GRANITE_MAMBA | {part: f"{name}_shexp.weight" for part, name in GRANITE_SHARED.items()},
        named_without_experts={part: f"{name}.weight" for part, name in GRANITE_SHARED.items()},
        functions={"mamba.A_log": "minus exp"},
        shapes=_MAMBA_SHAPES,
        experts=experts_of("block_sparse_moe.experts.{}", "w1", "w2", "w3"),
        stacks=(
            *GRANITE_STACKS,
            GRANITE_SHARED_STACK,
        ),
        fields={
            "experts": "num_local_experts",
            "inner": lambda config: config.intermediate_size if config.num_local_experts
            else config.shared_intermediate_size,
        },
        keys=RMS | GRANITE_SCALES | _MAMBA_KEYS | {
            "attention.head_count_kv": _key_heads,
            "expert_used_count": lambda config: config.num_experts_per_tok if config.num_local_experts else None,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "rope.scaling.finetuned": lambda config: config.position_embedding_type == "rope",
        },
        fixed={
            "hidden_act": SILU, "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "mamba_expand": (2,),
            "time_step_limit": ((0.0, math.inf), None), **NO_BIAS,
        },
        checks=(both_kinds,),
    ),
    Architecture(
        "bamba", "granitehybrid", weights("input_layernorm", "pre_ff_layernorm", *_FEED_FORWARD), orders=ROTARY,
        some=((attends, weights(*ATTENTION)), (recurs, tuple(_GRANITE_MAMBA))),
        outside=(EMBEDDING, "model.final_layernorm.weight"),
        named=_GRANITE_MAMBA | {"pre_ff_layernorm.weight": "ffn_norm.weight"},
        functions={"mamba.A_log": "minus exp"}, shapes=_MAMBA_SHAPES, partial_rotary=True,
        keys=RMS | _MAMBA_KEYS | {"attention.head_count_kv": _key_heads},
        fixed={
            "hidden_act": SILU, "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "mamba_expand": (2,),
            "mlp_bias": (False,), "time_step_limit": ((0.0, math.inf), None), **NO_BIAS,
        },
        checks=(both_kinds,),
    ),
    Architecture(  # attention and a state in every block, side by side
        "falcon_h1", "falcon-h1",
        (
            *weights(*ATTENTION, "input_layernorm", "pre_ff_layernorm"),
            *weights(*_FEED_FORWARD),
            *(part for part in _GRANITE_MAMBA if part != "mamba.norm.weight"),
        ),
        some=((lambda config, _block: bool(config.mamba_rms_norm), weights("mamba.norm")),),
        outside=(EMBEDDING, "model.final_layernorm.weight"),
        named=_GRANITE_MAMBA | {"pre_ff_layernorm.weight": "ffn_norm"}, functions={"mamba.A_log": "minus exp"},
        shapes=_MAMBA_SHAPES, rope_types=("default",),
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
            **dict.fromkeys((f"attention_{side}_multiplier" for side in ("in", "out")), 1.0),
            **dict.fromkeys((f"ssm_{side}_multiplier" for side in ("in", "out")), 1.0),
            **dict.fromkeys(("key_multiplier", "embedding_multiplier", "lm_head_multiplier"), 1.0),
            "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5,
        },
        keys=RMS | _MAMBA_KEYS,
        fixed={
            "hidden_act": SILU, "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "projectors_bias": (False,),
            "mlp_bias": (False,), "time_step_limit": ((0.0, math.inf), None), **NO_BIAS,
        },
        checks=(_gates_first,),
    ),
    Architecture(
        "lfm2", "lfm2", (*_LFM2_PARTS, *_LFM2_DENSE), some=_LFM2_SOME,
        outside=(EMBEDDING, "model.embedding_norm.weight"), fields={"inner": _lfm2_inner}, keys=_LFM2_KEYS,
        fixed={"conv_bias": (False,)}, rope_types=("default",), checks=(_known_blocks, both_kinds),
    ),
    Architecture(
        "lfm2_moe", "lfm2moe", _LFM2_PARTS,
        some=(
            *_LFM2_SOME, (lambda config, block: not behind_dense_layers(config, block), _LFM2_DENSE),
            (behind_dense_layers, (*weights("feed_forward.gate"), "feed_forward.expert_bias")),
        ),
        named={"feed_forward.expert_bias": "exp_probs_b.bias"},
        experts=experts_of("feed_forward.experts.{}", "w1", "w2", "w3"), experts_in=behind_dense_layers,
        outside=(EMBEDDING, "model.embedding_norm.weight"), fields={"experts": "num_experts"},
        keys=EXPERTS | EXPERT_INNER | _LFM2_KEYS | {
            "leading_dense_block_count": "num_dense_layers", "expert_gating_func": lambda _config: SIGMOID,
        },
        fixed={
            "conv_bias": (False,), "use_expert_bias": (True,), "norm_topk_prob": (True,),
            "routed_scaling_factor": (1.0,),
        },
        rope_types=("default",), checks=(_known_blocks, both_kinds),
    ),
    _delta(
        "qwen3_next", "qwen3next", "mlp.gate", *SHARED_PARTS, inner=("in_proj_qkvz", "in_proj_ba"),
        named={f"{_DELTA}.in_proj_ba.weight": "ssm_ba.weight"},
        splits={f"{_DELTA}.in_proj_qkvz.weight": (
            ("attn_qkv.weight", "channels of groups"), ("attn_gate.weight", "gates of groups"),
        )},
        experts=PLAIN_EXPERTS, fields={"experts": "num_experts"}, keys=EXPERTS | EXPERT_INNER | SHARED_INNER,
        fixed={"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    ),
    _delta35(
        "qwen3_5_text", "qwen35", *MLP, keys={"rope.dimension_sections": _sections},
    ),
    _delta35(
        "qwen3_5_moe_text", "qwen35moe", "mlp.gate", *SHARED_PARTS, experts=PLAIN_EXPERTS,
        fields={"experts": "num_experts", "inner": "moe_intermediate_size"},
        keys=EXPERTS | EXPERT_INNER | SHARED_INNER | {"rope.dimension_sections": _sections},
    ),
)  # fmt: skip
