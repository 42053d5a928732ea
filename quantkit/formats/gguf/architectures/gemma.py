"""The Gemma family. Gemma 3n and 4 have per-layer embeddings, and their last blocks reuse earlier keys and values.

llama.cpp: src/models/gemma3n.cpp and gemma4.cpp; `reuse` in llama-model.cpp for the shared KV cache.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    FOUR_NORMS,
    FULL,
    HEAD_NORMS,
    LLAMA,
    MLP,
    NO_BIAS,
    OUTSIDE,
    RMS,
    SLIDING,
    Architecture,
    RequiredConfig,
    Setting,
    experts_of,
    fused_experts,
    one_or_list,
    require,
    takes_keys,
    unless,
    weights,
    windows,
)
from quantkit.formats.gguf.shapes import EXPERTS, INNER, KEY_HEADS, KEY_LENGTH

TANH = {"hidden_activation": "gelu_pytorch_tanh"}
_CAPPED: dict[str, Setting] = {"final_logit_softcapping": "final_logit_softcapping"}


def _query_scale(config: Any) -> int:
    """Return the d for which llama.cpp scales queries by 1/sqrt(d): head_dim, or hidden size / heads in 27B models."""
    large = config.num_hidden_layers == (46 if config.model_type == "gemma2" else 62)
    return int(config.hidden_size // config.num_attention_heads if large else config.head_dim)


def _takes_from(config: Any) -> str | None:
    """Return an error text if the KV-sharing blocks reuse keys of other blocks than llama.cpp assumes, else None."""
    kinds, first = list(config.layer_types), config.num_hidden_layers - config.num_kv_shared_layers
    for kind, place in ((FULL, first - 1), (SLIDING, first - 2)):
        given = max((block for block in range(first) if kinds[block] == kind), default=None)
        if kind in kinds[first:] and given != place:
            return f"blocks of {kind} reuse the keys of block {given}, but llama.cpp those of block {place}"
    return None


_KNOWN_KINDS = require(
    lambda config: SLIDING in config.layer_types and {*config.layer_types} <= {SLIDING, FULL},
    f"layer_types = {{0.layer_types}}, but llama.cpp has some {SLIDING}, the others {FULL}",
)
# Tables with a row per token.
_TOKENS: RequiredConfig = {
    "vocab_size_per_layer_input": lambda config: (
        config.vocab_size if config.hidden_size_per_layer_input else config.vocab_size_per_layer_input
    )
}
_SHARED_KEYS: dict[str, Setting] = RMS | windows(None) | {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": lambda config: config.hidden_size_per_layer_input or 0,
}  # fmt: skip
_PER_LAYER = weights("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_PER_LAYER_OUTSIDE = weights(
    "model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"
)
_WINDOWED: dict[str, Any] = {"follows_window": True, "rope_types": ("default",)}

# Gemma 3n


def _sparsity_scale(config: Any) -> list[float]:
    """Return each block's gate threshold in standard deviations above the mean; llama.cpp ignores this key."""
    return [NormalDist().inv_cdf(share) if share else -math.inf for share in config.activation_sparsity_pattern]


# AltUp's tensors for all states except the first.
_STATES = weights("model.altup_projections.{state}", "model.altup_unembed_projections.{state}")

# Gemma 4


def _head(config: Any, kind: str) -> int:
    return int(config.per_layer_config[list(config.layer_types).index(kind)].head_dim)


def _key_heads(config: Any) -> int | list[int]:
    own = config.per_layer_config
    return one_or_list([int(own[block].num_key_value_heads) for block in range(config.num_hidden_layers)])


def _widths(config: Any) -> int | list[int]:
    double = [config.use_double_wide_mlp and takes_keys(config, block) for block in range(config.num_hidden_layers)]
    return one_or_list([int(config.intermediate_size) * (2 if wide else 1) for wide in double])


# llama.cpp has one head size for blocks with a window and one for all others.
_HEADS_BY_KIND = (
    require(
        lambda config: all(
            config.per_layer_config[block].head_dim == _head(config, kind)
            for block, kind in enumerate(config.layer_types)
        ),
        "blocks of one kind have heads of several sizes, but llama.cpp supports one",
    ),
    require(
        lambda config: (
            not any(
                _head(config, kind) % 2
                or config.num_attention_heads % config.per_layer_config[block].num_key_value_heads
                for block, kind in enumerate(config.layer_types)
            )
        ),
        "heads of an odd size, or {0.num_attention_heads} query heads that the key heads of a block do not divide",
    ),
)


def _has_values(config: Any, block: int) -> bool:
    """Return whether a block has a value projection; without one, the un-normalized keys serve as values."""
    same = config.attention_k_eq_v and config.layer_types[block] == FULL
    return not takes_keys(config, block) and not same


_KEYS_AND_VALUES = (
    (unless(takes_keys), weights("self_attn.k_proj", "self_attn.k_norm")), (_has_values, weights("self_attn.v_proj"))
)  # fmt: skip
_EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
# Without experts and per-block inputs, which its configurations lack.
_GEMMA4 = Architecture(
    "gemma4_unified_text", "gemma4",
    (*weights("self_attn.q_proj", "self_attn.q_norm", "self_attn.o_proj", *MLP, *FOUR_NORMS), "layer_scalar"),
    per_block=_KEYS_AND_VALUES, by_block=True, shares_keys=True,
    keys=_SHARED_KEYS | {
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
            lambda config: _head(config, SLIDING),
        ),
        KEY_LENGTH: lambda config: _head(config, FULL), KEY_HEADS: _key_heads, INNER: _widths,
        "final_logit_softcapping": lambda config: float(config.final_logit_softcapping or 0.0),
        "embedding_length_per_layer_input": 0,
    },
    required_config={"use_bidirectional_attention": (None, "vision"), **TANH, **NO_BIAS},
    checks=(_KNOWN_KINDS, _takes_from, *_HEADS_BY_KIND), follows_window=True, rope_types=("proportional", "default"),
)  # fmt: skip
_GEMMA = Architecture("gemma", "gemma", LLAMA, norm_shift=1.0, keys=RMS, required_config=NO_BIAS)

ROWS = (
    _GEMMA.like("gemma", required_config={"hidden_act": TANH["hidden_activation"]}, rope_types=("default",)),
    _GEMMA.like(
        "gemma2", "gemma2", parts=weights(*ATTENTION, *MLP, *FOUR_NORMS), **_WINDOWED,
        keys={"attn_logit_softcapping": "attn_logit_softcapping"} | windows(2) | _CAPPED,
        required_config={**TANH, "query_pre_attn_scalar": _query_scale},
    ),
    _GEMMA.like(
        "gemma3_text", "gemma3", parts=weights(*ATTENTION, *HEAD_NORMS, *MLP, *FOUR_NORMS),
        keys=windows(6) | _CAPPED, follows_window=True, rope_types=("default", "linear"),
        required_config={
            **TANH, "query_pre_attn_scalar": _query_scale, "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
    Architecture(
        "gemma3n_text", "gemma3n",
        (
            *weights(
                *ATTENTION, *HEAD_NORMS, *MLP, *FOUR_NORMS, "altup.correction_coefs", "altup.prediction_coefs",
                "altup.modality_router", "altup.router_norm", "laurel.linear_left", "laurel.linear_right",
                "laurel.post_laurel_norm",
            ),
            *_PER_LAYER, "altup.correct_output_scale",
        ),
        outside=(*OUTSIDE, *_PER_LAYER_OUTSIDE, *_STATES), shares_keys=True, zero_keys=True, **_WINDOWED,
        keys=_SHARED_KEYS | {
            INNER: lambda config: config.intermediate_size[0], "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs", "activation_sparsity_scale": _sparsity_scale,
        },
        required_config={
            "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True, "laurel_rank": 64,
            "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0,
            "num_kv_shared_layers": lambda config: max(0, config.num_hidden_layers - 20),
            "activation_sparsity_pattern":
                lambda config: [0.95 if block < 10 else 0.0 for block in range(config.num_hidden_layers)],
            **_TOKENS, **TANH, **NO_BIAS,
        },
        checks=(_KNOWN_KINDS, _takes_from, require(
            lambda config: len(set(config.intermediate_size)) == 1,
            "intermediate_size = {0.intermediate_size}, but llama.cpp has one for all blocks",
        )),
        differs="llama.cpp computes the deviation of a sparse block's gates over one value less than the source",
    ),
    _GEMMA4,
    _GEMMA4.like(
        "gemma4_text",
        per_block=(
            *_KEYS_AND_VALUES, ("hidden_size_per_layer_input", _PER_LAYER),
            ("enable_moe_block", (
                *weights("router.proj", *_EXPERT_NORMS), "router.scale", "router.per_expert_scale",
                *experts_of("experts"),
            )),
        ),
        outside_if=(("hidden_size_per_layer_input", _PER_LAYER_OUTSIDE),), stacks=fused_experts("experts"),
        keys={
            EXPERTS: lambda config: config.num_experts if config.enable_moe_block else 0,
            "expert_used_count": lambda config: config.top_k_experts if config.enable_moe_block else None,
            "expert_feed_forward_length":
                lambda config: config.moe_intermediate_size if config.enable_moe_block else None,
            "embedding_length_per_layer_input": lambda config: config.hidden_size_per_layer_input or 0,
        },
        required_config=_TOKENS,
    ),
)  # fmt: skip
