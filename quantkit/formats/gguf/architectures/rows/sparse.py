"""Architectures whose tokens attend to some blocks of earlier tokens, those that an indexer scores best.

What llama.cpp has fixed: src/models/minimax-m3.cpp of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    NORMS,
    PLAIN_EXPERTS,
    RMS,
    Architecture,
    Stack,
    weights,
)  # fmt: skip
from quantkit.formats.gguf.architectures.rows.mixtures import SHARED_EXPERTS, SIGMOID, whole_experts

_INDEXER = tuple(f"indexer.{part}.weight" for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
_SCORES = "mlp.gate.e_score_correction_bias"


def _sparse(config: Any, block: int) -> bool:
    return bool(config.mlp_layer_types[block] == "sparse")


def _dense(config: Any, block: int) -> bool:
    return not _sparse(config, block)


def _blocks(config: Any) -> str | None:
    """llama.cpp has blocks without experts first, and an indexer in all others."""
    kinds, attention = list(config.mlp_layer_types), list(config.layer_types)
    count = kinds.count("dense")
    if "dense" in kinds[count:] or kinds.count("sparse") + count != len(kinds):
        return f"mlp_layer_types = {kinds}, and llama.cpp has dense blocks first"
    if attention != ["full_attention"] * count + ["minimax_m3_sparse"] * (len(kinds) - count):
        return f"layer_types = {attention}, and llama.cpp attends to some tokens alone where a block has experts"
    return None


def _indexer(config: Any) -> str | None:
    """llama.cpp has a head of the indexer for each key head, and turns as many values of it."""
    if config.index_n_heads != config.num_key_value_heads:
        return f"index_n_heads = {config.index_n_heads}, and llama.cpp has {config.num_key_value_heads}, the key heads"
    turned = int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))
    if config.index_head_dim < turned:
        return f"index_head_dim = {config.index_head_dim}, and llama.cpp turns {turned} values of it"
    if config.index_block_size < 1 or config.index_topk_blocks < 1:
        return f"{config.index_topk_blocks} blocks of {config.index_block_size} tokens"
    return None


def _whole_experts(config: Any) -> str | None:
    return whole_experts("shared_intermediate_size", config.shared_intermediate_size, config.intermediate_size)


def _halves(stem: str, setting: str) -> Stack:
    """Gate and up of a feed-forward layer below one another."""
    pieces = tuple(f"{stem}.{part}_proj.weight" for part in ("gate", "up"))
    return Stack(f"{stem}.gate_up_proj.weight", pieces, rows=lambda config, _block: (getattr(config, setting),) * 2)


ROWS = (
    Architecture(
        "minimax_m3_vl_text", "minimax-m3", weights(*ATTENTION, *HEAD_NORMS, *NORMS), names_like="dots1",
        head_always=True, partial_rotary=True, norm_shift=1.0,
        some=(
            (_dense, weights(*MLP)),
            (_sparse,
             (*weights("mlp.gate", *SHARED_EXPERTS), _SCORES, *(f"self_attn.{part}" for part in _INDEXER))),
        ),
        named={_SCORES: "exp_probs_b.bias"} | {f"self_attn.{part}": part for part in _INDEXER},
        experts=PLAIN_EXPERTS, experts_in=_sparse,
        stacks=(
            _halves("mlp", "dense_intermediate_size"), _halves("mlp.shared_experts", "shared_intermediate_size"),
            Stack("mlp.experts.gate_up_proj", tuple(
                f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up")
            )),
            Stack("mlp.experts.down_proj", ("mlp.experts.{}.down_proj.weight",)),
        ),
        fields={"experts": "num_local_experts", "inner": "dense_intermediate_size"},
        keys=RMS | EXPERTS | {
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": lambda config: config.shared_intermediate_size // config.intermediate_size,
            "expert_weights_scale": lambda config: float(config.routed_scaling_factor),
            "expert_weights_norm": lambda _config: True, "expert_gating_func": lambda _config: SIGMOID,
            "leading_dense_block_count": lambda config: list(config.mlp_layer_types).count("dense"),
            "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.top_k": "index_topk_blocks", "attention.indexer.block_size": "index_block_size",
            "attention.indexer.local_blocks": "index_local_blocks",
        },
        fixed={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}, checks=(_blocks, _indexer, _whole_experts),
        rope_types=("default",),
        differs="llama.cpp attends to some blocks of tokens alone with flash attention on (-fa on), and to all else",
    ),
)  # fmt: skip
