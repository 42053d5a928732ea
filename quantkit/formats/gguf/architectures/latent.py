"""Architectures with DeepSeek's multi-head latent attention (MLA), some with a sparse-attention indexer.

llama.cpp: deepseek2.cpp, deepseek32.cpp, dots3note.cpp and minicpm3.cpp in src/models/; src/llama-kv-cache.cpp for
the rotation of the indexer's values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantkit.formats.gguf.architectures.mixtures import (
    DENSE_BLOCKS,
    DENSE_FIRST,
    SCORES,
    SHARED_EXPERTS,
    SIGMOID,
    SOFTMAX,
    before_experts,
    is_dense,
    mixed,
    routed,
    whole_experts,
)
from quantkit.formats.gguf.architectures.record import (
    EMBEDDING,
    EQUAL_HEADS,
    MLP,
    NORMS,
    RMS,
    SLIDING,
    UNBIASED,
    UNBIASED_MLP,
    Architecture,
    Setting,
    Stack,
    Transform,
    of_config,
    one_or_list,
    require,
    weights,
    windows,
)
from quantkit.formats.gguf.shapes import (
    EXPERTS,
    INDEX_KEY_PAIRS,
    INDEX_QUERY_PAIRS,
    KEY_HEADS,
    KEY_LENGTH,
    QUERY_HEADS,
    VALUE_LENGTH,
)

LATENT_NORMS = "norms of latent values"
_PARTS = weights("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.o_proj", *NORMS)
_WITH_RANK = weights("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
_QUERIES = (
    (lambda config, _block: config.q_lora_rank is not None, _WITH_RANK),
    (lambda config, _block: config.q_lora_rank is None, weights("self_attn.q_proj")),
)
_MIXTURE = weights("mlp.gate", *SHARED_EXPERTS)


def of_heads(attention: str) -> tuple[str, str]:
    """Return the name patterns of the per-head key and value up-projections, the two parts of `kv_b_proj`."""
    return f"{attention}.kv_b_proj.keys.{{head}}.weight", f"{attention}.kv_b_proj.values.{{head}}.weight"


def stack_of_heads(attention: str) -> Stack:
    """Return the Stack for the checkpoint's `kv_b_proj`, which holds the key and value projections of all heads."""
    return Stack(f"{attention}.kv_b_proj.weight", of_heads(attention), rows=_rows_of_head)


def _rows_of_head(config: Any, _block: int) -> tuple[int, int]:
    return config.qk_nope_head_dim, config.v_head_dim


def whole_key(config: Any) -> int:
    """Return the size of a head's key: its unrotated plus its rotated (RoPE) dimensions."""
    return config.qk_nope_head_dim + config.qk_rope_head_dim


def latent_key(config: Any) -> int:
    """Return the size of llama.cpp's single MLA key head: the latent dimensions plus the rotated (RoPE) dimensions."""
    return config.kv_lora_rank + config.qk_rope_head_dim


# llama.cpp has one key head of latent values, with a matrix per head before and after it. A head has the key
# and value lengths of that key head; the "mla" lengths are the model's.
LATENT_KEYS: dict[str, Setting] = {
    KEY_HEADS: 1, KEY_LENGTH: latent_key, VALUE_LENGTH: "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim", "attention.key_length_mla": whole_key,
    "rope.dimension_count": "qk_rope_head_dim",
}  # fmt: skip


def _is_lite(config: Any) -> bool:
    """Return whether llama.cpp infers from the number of blocks that the model has no `q_lora_rank`."""
    return config.num_hidden_layers in (26, 27) or (config.num_hidden_layers == 48 and config.vocab_size == 128256)


_RANK = require(
    lambda config: (config.q_lora_rank is None) == _is_lite(config),
    "q_lora_rank = {0.q_lora_rank} with {0.num_hidden_layers} blocks, but llama.cpp assumes the opposite",
)
_DEEPSEEK = Architecture(
    "deepseek_v3", "deepseek2", (*_PARTS, *of_heads("self_attn")), names_like="deepseek2",
    per_block=(*mixed(before_experts, *_MIXTURE, SCORES), *_QUERIES),
    stacks=(stack_of_heads("self_attn"),),
    keys=routed(SIGMOID) | LATENT_KEYS | {EXPERTS: "n_routed_experts"},
    rope_types=("default", "yarn"), yarn_scores=True,
    shapes={"attn_q": ("latent queries", "hidden"), "attn_output": ("hidden", "latent values")},
    checks=(_RANK,), required_config=UNBIASED, fixed_epsilon=LATENT_NORMS,
)  # fmt: skip

# MiniCPM 3's factors of embedding, blocks and head, which are fixed in llama.cpp (src/models/minicpm3.cpp).
_MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _depth(config: Any) -> float:
    """Return the residual scale: the factor of each block's output, divided by the factor that llama.cpp hard-codes."""
    return float(config.scale_depth / _MINICPM["scale_depth"])


# Indexers

_INDEXER = {
    f"self_attn.indexer.{part}": f"indexer.{name}" for part, name in {
        "wq_b.weight": "attn_q_b.weight", "wk.weight": "attn_k.weight", "weights_proj.weight": "proj.weight",
        "k_norm.weight": "k_norm.weight", "k_norm.bias": "k_norm.bias",
    }.items()
}  # fmt: skip
_INDEXED = _DEEPSEEK.like(
    "deepseek_v32", per_block=(*mixed(is_dense, *_MIXTURE, SCORES), *_QUERIES), gguf_names=_INDEXER,
    # transformers keeps the first in float32, and calibration ignores it, since no method quantizes it.
    same_inputs={"self_attn.indexer.weights_proj.weight": "self_attn.indexer.wk.weight"},
    shapes={
        "indexer.attn_q_b": ("index queries", "query latent"), "indexer.attn_k": ("index head", "hidden"),
        "indexer.proj": ("index heads", "hidden"),
    },
    keys=DENSE_BLOCKS | {
        "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    },
)  # fmt: skip
INDEXED = "indexed_attention"


# llama.cpp aborts for other sizes: it rotates values by a matrix whose size is a power of two.
_POWER_OF_TWO = require(
    lambda config: config.index_head_dim >= 64 and config.index_head_dim.bit_count() == 1,
    "index_head_dim = {0.index_head_dim}, but llama.cpp needs a power of two, 64 or more",
)


def _of(kind: str, setting: Setting) -> Callable[[Any], Any]:
    """Return a function that reads `setting` from the first block of this attention `kind`, else from block 0."""

    def first(config: Any) -> Any:
        kinds = list(config.layer_types)
        own = config.per_layer_config[kinds.index(kind) if kind in kinds else 0]
        return of_config(own, setting)

    return first


# Settings of a block's latent attention, by the end of the key.
_LENGTHS: dict[str, Setting] = {
    "kv_lora_rank": "kv_lora_rank", "value_length": "kv_lora_rank", "key_length": latent_key,
    "key_length_mla": whole_key, "value_length_mla": "v_head_dim",
}  # fmt: skip


def _two_kinds(config: Any) -> str | None:
    """Return an error text if blocks of one attention kind have different head sizes, else None."""
    kinds = list(config.layer_types)
    if set(kinds) != {INDEXED, SLIDING}:
        return f"layer_types = {kinds}, but llama.cpp needs windows in some blocks and an indexer in the others"
    names = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for kind in (INDEXED, SLIDING):
        blocks = [config.per_layer_config[block] for block, own in enumerate(kinds) if own == kind]
        for name in names:
            if len(values := {getattr(block, name) for block in blocks}) > 1:
                return f"{name} = {sorted(values)} in blocks of {kind}, but llama.cpp has one"
    for name in ("q_lora_rank", "qk_rope_head_dim"):
        one, other = (_of(kind, name)(config) for kind in (INDEXED, SLIDING))
        if one != other:
            return f"{name} = {one}, with a window {other}, but llama.cpp has one for all"
    return None


def _shared_width(config: Any) -> int:
    return config.shared_experts_intermediate_size * config.n_shared_experts


ROWS = (
    _DEEPSEEK.like("deepseek_v3", required_config={"rope_interleave": True}),
    _DEEPSEEK.like(
        "deepseek_v2", per_block=(*mixed(before_experts, *_MIXTURE), *_QUERIES), checks=(_RANK, require(
            lambda config: config.topk_method == "greedy" or (config.n_group or 1) == 1,
            "topk_method = {0.topk_method!r}, but llama.cpp chooses groups of experts by their two best",
        )),
        keys={  # groups, which "greedy" ignores
            "expert_gating_func": SOFTMAX,
            "expert_group_count": lambda config: config.n_group and 1,
            "expert_group_used_count": lambda config: config.topk_group and 1,
        },
        required_config={"norm_topk_prob": False, "mlp_bias": False},
    ),
    _DEEPSEEK.like(
        "youtu", parts=(*_DEEPSEEK.parts, *weights(*MLP)), per_block=_QUERIES,
        required_config={"rope_interleave": True},
        keys={
            **dict.fromkeys(
                (
                    "expert_used_count", "expert_weights_scale", "expert_weights_norm", "expert_group_count",
                    "expert_group_used_count",
                ),
                None,
            ),
            **dict.fromkeys((EXPERTS, "expert_shared_count"), 0),
            "leading_dense_block_count": "num_hidden_layers", "expert_feed_forward_length": "intermediate_size",
            "expert_gating_func": SOFTMAX,
        },
    ),
    _DEEPSEEK.like(
        "glm4_moe_lite", per_block=_INDEXED.per_block, checks=(_RANK, DENSE_FIRST), rope_types=("default",),
        keys=DENSE_BLOCKS, required_config={"rope_interleave": True},
    ),
    _INDEXED.like(
        "deepseek_v32", "deepseek32", parts=(*_DEEPSEEK.parts, *_INDEXER),
        checks=(DENSE_FIRST, _POWER_OF_TWO, require(
            lambda config: (config.rope_parameters or {}).get("rope_type") != "yarn"
            or config.rope_parameters.get("mscale") == 1.0,
            "rope_parameters = {0.rope_parameters}, but llama.cpp has an mscale of 1",
        )),
        required_config={"layer_types": lambda config: [INDEXED] * config.num_hidden_layers},
    ),
    _INDEXED.like(
        "dots3_note_text", "dots3note", rope_types=("default",), rotated_apart=True, by_block=True,
        follows_window=True, fixed_epsilon="",
        parts=(*_DEEPSEEK.parts, *_WITH_RANK, *weights("self_attn.g_proj", "self_attn.k_rope_only_layernorm")),
        per_block=(
            *_INDEXED.per_block[:2], (lambda config, block: config.layer_types[block] != SLIDING, _INDEXER)
        ),
        stacks=(Stack(
            "self_attn.kv_b_proj.weight", of_heads("self_attn"),
            rows=lambda config, block: _rows_of_head(config.per_layer_config[block], block),
        ),),
        transforms={  # transformers rotates neighbouring pairs of an indexer's values, llama.cpp halves
            "self_attn.indexer.wq_b": Transform(INDEX_QUERY_PAIRS), "self_attn.indexer.wk": Transform(INDEX_KEY_PAIRS),
            "self_attn.indexer.k_norm": Transform(INDEX_KEY_PAIRS),
            "self_attn.q_a_layernorm": Transform(sqrt_factors=("hidden", "query latent")),
            "self_attn.kv_a_layernorm": Transform(sqrt_factors=("hidden", "latent")),
        },
        shapes={"attn_gate": ("heads", "hidden"), "attn_k_norm": ("rotated",)},
        keys={
            QUERY_HEADS: lambda config: one_or_list(
                [config.per_layer_config[block].num_attention_heads for block in range(config.num_hidden_layers)]
            ),
            "expert_shared_count": lambda config: _shared_width(config) // config.moe_intermediate_size,
            "attention.indexer.types": lambda config: [kind != SLIDING for kind in config.layer_types],
            **windows(None), "attention.q_lora_rank": _of(INDEXED, "q_lora_rank"),
            "rope.dimension_count": _of(INDEXED, "qk_rope_head_dim"),
            **{
                f"attention.{name}{behind}": _of(kind, setting)
                for kind, behind in ((INDEXED, ""), (SLIDING, "_swa"))
                for name, setting in _LENGTHS.items()
            },
        },
        checks=(DENSE_FIRST, _two_kinds, _POWER_OF_TWO, whole_experts(
            _shared_width, "moe_intermediate_size", "shared_experts_intermediate_size * n_shared_experts"
        )),
    ),
    Architecture(
        "minicpm3", "minicpm3",
        weights(
            *(f"self_attn.{part}" for part in (
                "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"
            )), *MLP, *NORMS,
        ),
        keys=RMS | {
            KEY_LENGTH: whole_key, VALUE_LENGTH: "v_head_dim",
            "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        shapes={"attn_q_b": ("queries", "query latent"), "attn_output": ("hidden", "values")},
        multipliers={
            EMBEDDING: lambda config: config.scale_emb / _MINICPM["scale_emb"],
            "self_attn.o_proj.weight": _depth, "mlp.down_proj.weight": _depth,
            "lm_head.weight": lambda config: config.dim_model_base / _MINICPM["dim_model_base"],
        },
        multiplied=_MINICPM, rope_types=("default", "longrope"), fixed_epsilon=LATENT_NORMS,
        checks=(
            require(
                lambda config: config.q_lora_rank is not None,
                "q_lora_rank = None, but llama.cpp needs a query rank",
            ),
            require(
                lambda config: not (config.rope_parameters or {}).get("mscale_all_dim"),
                "rope_parameters = {0.rope_parameters}, but llama.cpp has no mscale_all_dim",
            ),
        ),
        required_config={**UNBIASED_MLP, **EQUAL_HEADS},
    ),
)  # fmt: skip
