"""Architectures with latent attention to a few tokens alone, those that an indexer scores best.

What llama.cpp has fixed: src/models/deepseek32.cpp and dots3note.cpp of https://github.com/ggml-org/llama.cpp, and the
rotation of an indexer's values in src/llama-kv-cache.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quantkit.formats.gguf.architectures.record import NO_BIAS, SILU, Setting, weights, where_unlike
from quantkit.formats.gguf.architectures.rows.latent import (
    BEHIND_DENSE,
    DENSE_BLOCKS,
    WITH_RANK,
    behind_dense_blocks,
    dense_first,
    latent_attention,
    rows_of_heads,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.mixtures import SIGMOID, whole_experts

_INDEXER = {
    f"self_attn.indexer.{part}": f"indexer.{name}" for part, name in {
        "wq_b.weight": "attn_q_b.weight", "wk.weight": "attn_k.weight", "weights_proj.weight": "proj.weight",
        "k_norm.weight": "k_norm.weight", "k_norm.bias": "k_norm.bias",
    }.items()
}  # fmt: skip
# transformers keeps the first in float32 and nobody quantizes it, so that calibration leaves it out.
_LIKE = {"self_attn.indexer.weights_proj.weight": "self_attn.indexer.wk.weight"}
_INDEXER_SHAPES = {
    "indexer.attn_q_b": ("index queries", "query latent"), "indexer.attn_k": ("index head", "hidden"),
    "indexer.proj": ("index heads", "hidden"),
}  # fmt: skip
_INDEXER_KEYS: dict[str, Setting] = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip
INDEXED, SLIDING = "indexed_attention", "sliding_attention"


def _indexer(config: Any) -> str | None:
    """llama.cpp ends the program for other sizes: it turns values by a matrix of a power of two."""
    size = config.index_head_dim
    if size < 64 or size & (size - 1):
        return f"index_head_dim = {size}, and llama.cpp has a power of two, 64 or more"
    return None


def _whole_scale(config: Any) -> str | None:
    """llama.cpp takes YaRN's mscale to be 1."""
    rope = config.rope_parameters or {}
    scale = rope.get("mscale") if rope.get("rope_type") == "yarn" else 1.0
    return None if scale == 1.0 else f"the rope's mscale = {scale}, and llama.cpp has 1"


def _all_indexed(config: Any) -> str | None:
    """llama.cpp has an indexer in every block."""
    kinds = list(config.layer_types)
    return None if set(kinds) == {INDEXED} else f"layer_types = {kinds}, and llama.cpp has an indexer in every block"


def _slides(config: Any, block: int) -> bool:
    return bool(config.layer_types[block] == SLIDING)


def _first(config: Any, kind: str) -> Any:
    """The settings of the first block of a kind, or of the first of all; what differs by block stands there alone."""
    kinds = list(config.layer_types)
    return config.per_layer_config[kinds.index(kind) if kind in kinds else 0]


def _of(kind: str, name: str) -> Callable[[Any], Any]:
    return lambda config: getattr(_first(config, kind), name)


def _whole_head(kind: str) -> Callable[[Any], int]:
    return lambda config: _first(config, kind).qk_nope_head_dim + _first(config, kind).qk_rope_head_dim


def _latent_head(kind: str) -> Callable[[Any], int]:
    """One key of the latent values and of what turns."""
    return lambda config: _first(config, kind).kv_lora_rank + _first(config, kind).qk_rope_head_dim


def _two_kinds(config: Any) -> str | None:
    """llama.cpp has one geometry of blocks with a window, and one of those with an indexer."""
    kinds = list(config.layer_types)
    if set(kinds) != {INDEXED, SLIDING}:
        return f"layer_types = {kinds}, and llama.cpp has windows in some blocks and an indexer in the others"
    names = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for kind in (INDEXED, SLIDING):
        blocks = [config.per_layer_config[block] for block, own in enumerate(kinds) if own == kind]
        for name in names:
            if len(values := {getattr(block, name) for block in blocks}) > 1:
                return f"{name} = {sorted(values)} in blocks of {kind}, and llama.cpp has one"
    for name in ("q_lora_rank", "qk_rope_head_dim"):
        one, other = (getattr(_first(config, kind), name) for kind in (INDEXED, SLIDING))
        if one != other:
            return f"{name} = {one}, with a window {other}, and llama.cpp has one for all"
    return None


def _whole_experts(config: Any) -> str | None:
    wide = config.shared_experts_intermediate_size * config.n_shared_experts
    return whole_experts("shared_experts_intermediate_size * n_shared_experts", wide, config.moe_intermediate_size)


def _heads(config: Any) -> list[int] | None:
    own = config.per_layer_config
    return where_unlike([own[block].num_attention_heads for block in range(config.num_hidden_layers)])


def _rows_of_heads(config: Any, block: int) -> tuple[int, int]:
    return rows_of_heads(config.per_layer_config[block], block)


ROWS = (
    latent_attention(
        "deepseek_v32", SIGMOID, name="deepseek32", same_inputs=_LIKE, named=_INDEXER, shapes=_INDEXER_SHAPES,
        some=(*BEHIND_DENSE, (lambda _config, _block: True, _INDEXER)), experts_in=behind_dense_blocks,
        keys=DENSE_BLOCKS | _INDEXER_KEYS, checks=(dense_first, _all_indexed, _indexer, _whole_scale),
        fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    latent_attention(
        "dots3_note_text", SIGMOID, name="dots3note", rope_types=("default",), rotated_apart=True, by_block=True,
        follows_window=True, optional=dict.fromkeys(WITH_RANK, lambda _config: True),
        some=(
            *BEHIND_DENSE, (lambda config, block: not _slides(config, block), _INDEXER),
            (lambda _config, _block: True, weights("self_attn.g_proj", "self_attn.k_rope_only_layernorm")),
        ),
        same_inputs=_LIKE, named=_INDEXER | {
            "self_attn.g_proj.weight": "attn_gate.weight",
            "self_attn.k_rope_only_layernorm.weight": "attn_k_norm.weight",
        },
        orders={  # transformers turns neighbouring pairs of an indexer's values, llama.cpp halves
            "self_attn.indexer.wq_b": "index query pairs", "self_attn.indexer.wk": "index key pairs",
            "self_attn.indexer.k_norm": "index key pairs",
        },
        shapes=_INDEXER_SHAPES | {"attn_gate": ("heads", "hidden"), "attn_k_norm": ("rotated",)},
        roots={
            "self_attn.q_a_layernorm.weight": ("hidden", "query latent"),
            "self_attn.kv_a_layernorm.weight": ("hidden", "latent"),
        },
        rows=_rows_of_heads, experts_in=behind_dense_blocks, fixed_epsilon="",
        fields={
            "heads": lambda config: config.per_layer_config[0].num_attention_heads, "head_dim": _latent_head(INDEXED),
        },
        keys=DENSE_BLOCKS | _INDEXER_KEYS | {
            "attention.head_count": _heads,
            "expert_shared_count": lambda config: config.shared_experts_intermediate_size * config.n_shared_experts
            // config.moe_intermediate_size,
            "attention.indexer.types": lambda config: [kind != SLIDING for kind in config.layer_types],
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": lambda config: [kind == SLIDING for kind in config.layer_types],
            "attention.q_lora_rank": _of(INDEXED, "q_lora_rank"),
            "rope.dimension_count": _of(INDEXED, "qk_rope_head_dim"),
            **{
                f"attention.{name}{behind}": setting
                for kind, behind in ((INDEXED, ""), (SLIDING, "_swa"))
                for name, setting in {
                    "kv_lora_rank": _of(kind, "kv_lora_rank"), "value_length": _of(kind, "kv_lora_rank"),
                    "key_length": _latent_head(kind), "key_length_mla": _whole_head(kind),
                    "value_length_mla": _of(kind, "v_head_dim"),
                }.items()
            },
        },
        checks=(dense_first, _two_kinds, _indexer, _whole_experts), fixed={"hidden_act": SILU, **NO_BIAS},
    ),
)  # fmt: skip
