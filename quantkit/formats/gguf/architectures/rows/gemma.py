"""Gemma, of which 3n and 4 have inputs of each block and keys and values that later blocks take from earlier ones.

What llama.cpp has fixed for these two: src/models/gemma3n.cpp, gemma3n in models.h, gemma4.cpp, and the memory's
`reuse` in llama-model.cpp, of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    FOUR_NORMS,
    HEAD_NORMS,
    LLAMA,
    MLP,
    NO_BIAS,
    OUTSIDE,
    RMS,
    Architecture,
    Blocks,
    Setting,
    Stack,
    experts_of,
    takes_keys,
    weights,
    where_unlike,
    windows,
)  # fmt: skip

TANH = {"hidden_activation": ("gelu_pytorch_tanh",)}
SLIDING, FULL = "sliding_attention", "full_attention"
_CAPPED: dict[str, Setting] = {"final_logit_softcapping": "final_logit_softcapping"}


def _query_scale(config: Any) -> str | None:
    """llama.cpp scales queries by the head's size; in its 27B models by hidden size over heads."""
    large = config.num_hidden_layers == (46 if config.model_type == "gemma2" else 62)
    size = config.hidden_size // config.num_attention_heads if large else config.head_dim
    if config.query_pre_attn_scalar == size:
        return None
    return f"query_pre_attn_scalar = {config.query_pre_attn_scalar}, and llama.cpp has {size} for such a model"


def _known_kinds(config: Any) -> str | None:
    """llama.cpp ends the program where no block has a window."""
    kinds = set(config.layer_types)
    if kinds <= {SLIDING, FULL} and SLIDING in kinds:
        return None
    return f"layer_types = {config.layer_types}, and llama.cpp has some {SLIDING}, the others {FULL}"


def _takes_from(config: Any) -> str | None:
    """The last blocks take from the last one of their kind; llama.cpp from that right before them or the second."""
    kinds, first = list(config.layer_types), config.num_hidden_layers - config.num_kv_shared_layers
    for kind, place in ((FULL, first - 1), (SLIDING, first - 2)):
        given = max((block for block in range(first) if kinds[block] == kind), default=None)
        if kind in kinds[first:] and given != place:
            return f"blocks of {kind} that take the keys of block {given}, and llama.cpp has those of block {place}"
    return None


def _row_for_each_token(config: Any) -> str | None:
    rows, tokens = config.vocab_size_per_layer_input, config.vocab_size
    if not config.hidden_size_per_layer_input or rows == tokens:
        return None
    return f"vocab_size_per_layer_input = {rows} in config.json, and llama.cpp has a row for each of {tokens} tokens"


def _slides(config: Any) -> list[bool]:
    return [kind == SLIDING for kind in config.layer_types]


def _has_keys(config: Any, block: int) -> bool:
    return not takes_keys(config, block)


SHARED_KEYS: dict[str, Setting] = RMS | {
    "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": _slides,
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": lambda config: config.hidden_size_per_layer_input or 0,
}  # fmt: skip
PER_LAYER = weights("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
PER_LAYER_OUTSIDE = weights(
    "model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"
)

# Gemma 3n


def _first_own_blocks(config: Any) -> str | None:
    shared = max(0, config.num_hidden_layers - 20)
    if config.num_kv_shared_layers == shared:
        return None
    return (
        f"num_kv_shared_layers = {config.num_kv_shared_layers} of {config.num_hidden_layers} blocks, and llama.cpp has "
        f"{shared}: all behind the first 20"
    )


def _sparsity(config: Any) -> str | None:
    given = list(config.activation_sparsity_pattern)
    meant = [0.95 if block < 10 else 0.0 for block in range(config.num_hidden_layers)]
    return None if given == meant else f"activation_sparsity_pattern = {given}, and llama.cpp has {meant}"


def _one_width(config: Any) -> str | None:
    widths = config.intermediate_size
    return None if len(set(widths)) == 1 else f"intermediate_size = {widths}, and llama.cpp has one for all blocks"


def _sparsity_scale(config: Any) -> list[float]:
    """By block, how many deviations above the mean a gate must be; llama.cpp writes the key and does not read it."""
    return [NormalDist().inv_cdf(share) if share else -math.inf for share in config.activation_sparsity_pattern]


_STATES = ("altup_projections", "altup_unembed_projections")  # of AltUp, beside the first one
_GEMMA3N = Architecture(
    "gemma3n_text", "gemma3n",
    (
        *weights(
            *ATTENTION, *HEAD_NORMS, *MLP, *FOUR_NORMS, "altup.correction_coefs", "altup.prediction_coefs",
            "altup.modality_router", "altup.router_norm", "laurel.linear_left", "laurel.linear_right",
            "laurel.post_laurel_norm",
        ),
        *PER_LAYER, "altup.correct_output_scale",
    ),
    outside=(*OUTSIDE, *PER_LAYER_OUTSIDE),
    outside_stacks={
        f"{name}.weight": tuple(f"model.{stack}.{index}.weight" for index in range(3))
        for name, stack in zip(("altup_proj", "altup_unembd_proj"), _STATES, strict=True)
    },
    named={"altup.correct_output_scale": "altup_correct_scale.weight"}, shares_keys=True, zero_keys=True,
    fields={"inner": lambda config: config.intermediate_size[0]},
    keys=SHARED_KEYS | {
        "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs",
        "activation_sparsity_scale": _sparsity_scale,
    },
    fixed={
        "altup_num_inputs": (4,), "altup_active_idx": (0,), "altup_correct_scale": (True,), "laurel_rank": (64,),
        "hidden_size_per_layer_input": (256,), "final_logit_softcapping": (30.0,), **TANH, **NO_BIAS,
    },
    checks=(_known_kinds, _first_own_blocks, _takes_from, _sparsity, _one_width, _row_for_each_token),
    follows_window=True, rope_types=("default",),
    differs="llama.cpp takes the deviation of a sparse block's gates over one value less than the source",
)  # fmt: skip

# Gemma 4


def _head(config: Any, kind: str) -> int:
    """The values of a head in blocks of that kind."""
    return int(config.per_layer_config[list(config.layer_types).index(kind)].head_dim)


def _head_of_full(config: Any) -> int:
    return _head(config, FULL)


def _head_of_sliding(config: Any) -> int:
    return _head(config, SLIDING)


def _key_heads(config: Any) -> list[int]:
    return [int(config.per_layer_config[block].num_key_value_heads) for block in range(config.num_hidden_layers)]


def _widths(config: Any) -> list[int]:
    double = [config.use_double_wide_mlp and takes_keys(config, block) for block in range(config.num_hidden_layers)]
    return [int(config.intermediate_size) * (2 if wide else 1) for wide in double]


def _heads_by_kind(config: Any) -> str | None:
    """llama.cpp has one size of heads for blocks with a window and one for the others."""
    for block, kind in enumerate(config.layer_types):
        own, size = config.per_layer_config[block], _head(config, kind)
        if own.head_dim != size:
            return f"heads of {own.head_dim} in block {block}, and llama.cpp has {size} for all of {kind}"
        if size % 2 or config.num_attention_heads % own.num_key_value_heads:
            keys = own.num_key_value_heads
            return f"{config.num_attention_heads} query heads and {keys} key heads of {size} in block {block}"
    return None


def _if(setting: str, value: Any = lambda _config, _block: True) -> Blocks:
    return lambda config, block: bool(getattr(config, setting)) and bool(value(config, block))


def _has_values(config: Any, block: int) -> bool:
    """Whether values are made by themselves; else they are the keys before their norm."""
    return _has_keys(config, block) and not (config.attention_k_eq_v and config.layer_types[block] == FULL)


_EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
_EXPERTS = "enable_moe_block"
_GEMMA4 = Architecture(
    "gemma4_text", "gemma4",
    (*weights("self_attn.q_proj", "self_attn.q_norm", "self_attn.o_proj", *MLP, *FOUR_NORMS), "layer_scalar"),
    some=(
        (_has_keys, weights("self_attn.k_proj", "self_attn.k_norm")), (_has_values, weights("self_attn.v_proj")),
        (_if("hidden_size_per_layer_input"), PER_LAYER),
        (_if(_EXPERTS), (*weights("router.proj", *_EXPERT_NORMS), "router.scale", "router.per_expert_scale")),
    ),
    outside_optional=dict.fromkeys(PER_LAYER_OUTSIDE, "hidden_size_per_layer_input"),
    named={
        "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    },
    experts=experts_of("experts.{}", "gate_proj", "down_proj", "up_proj"),
    stacks=(
        Stack("experts.gate_up_proj", ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")),
        Stack("experts.down_proj", ("experts.{}.down_proj.weight",)),
    ),
    by_block=True, shares_keys=True,
    fields={
        "head_dim": _head_of_full, "kv_heads": lambda config: _key_heads(config)[0],
        "inner": lambda config: _widths(config)[0],
        "experts": lambda config: config.num_experts if config.enable_moe_block else 0,
    },
    keys=SHARED_KEYS | {
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
                        _head_of_sliding),
        "attention.head_count_kv": lambda config: where_unlike(_key_heads(config)),
        "feed_forward_length": lambda config: where_unlike(_widths(config)),
        "final_logit_softcapping": lambda config: float(config.final_logit_softcapping or 0.0),
        "expert_used_count": lambda config: config.top_k_experts if config.enable_moe_block else None,
        "expert_feed_forward_length": lambda config: config.moe_intermediate_size if config.enable_moe_block else None,
    },
    fixed={"use_bidirectional_attention": (None, "vision"), **TANH, **NO_BIAS},
    checks=(_known_kinds, _takes_from, _heads_by_kind, _row_for_each_token),
    follows_window=True, rope_types=("proportional", "default"),
)  # fmt: skip
# The same without experts and inputs of each block, which its configurations do not name.
_WITHOUT = ("expert_used_count", "expert_feed_forward_length")
_GEMMA4_UNIFIED = replace(
    _GEMMA4, model_type="gemma4_unified_text", some=_GEMMA4.some[:2], outside_optional={}, experts={}, stacks=(),
    fields={name: value for name, value in _GEMMA4.fields.items() if name != "experts"},
    keys={key: value for key, value in _GEMMA4.keys.items() if key not in _WITHOUT}
    | {"embedding_length_per_layer_input": lambda _config: 0},
    checks=(_known_kinds, _takes_from, _heads_by_kind),
)  # fmt: skip

ROWS = (
    Architecture(
        "gemma", "gemma", LLAMA, norm_shift=1.0, keys=RMS,
        fixed={"hidden_act": ("gelu_pytorch_tanh",)} | NO_BIAS, rope_types=("default",),
    ),
    Architecture(
        "gemma2", "gemma2", weights(*ATTENTION, *MLP, *FOUR_NORMS), norm_shift=1.0, checks=(_query_scale,),
        keys=RMS | {"attn_logit_softcapping": "attn_logit_softcapping"} | windows(2) | _CAPPED,
        fixed={"hidden_activation": ("gelu_pytorch_tanh",)} | NO_BIAS, follows_window=True, rope_types=("default",),
    ),
    Architecture(
        "gemma3_text", "gemma3", weights(*ATTENTION, *HEAD_NORMS, *MLP, *FOUR_NORMS), norm_shift=1.0,
        checks=(_query_scale,), keys=RMS | windows(6) | _CAPPED,
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (False,), **NO_BIAS,
        },
        follows_window=True, rope_types=("default", "linear"),
    ),
    _GEMMA3N,
    _GEMMA4_UNIFIED,
    _GEMMA4,
)  # fmt: skip
