"""Architectures as data, by `model_type`: which ones are tested, and the names that published checkpoints have.

Tested: a tiny random model of each goes through the tests. The walk sees what the whole model computes, transformers
computes the same logits from the values that are read back, and where AWQ scales, the model computes the same. Any
other decoder of transformers whose blocks hold linear layers is taken, too, with a note that nobody has tried it; what
transformers' code raises for it becomes one line (`running`). Of a tested architecture every error passes: it is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quantkit.errors import QuantkitError, UnsupportedError, one_line, reason_of, shortage_of
from quantkit.untrusted import shown

DENSE = (
    "apertus", "arcee", "bamba", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "cohere_compass_text", "ctrl", "cwm",
    "diffllama", "ernie4_5", "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_unified_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj",
    "granite", "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2",
    "lfm3", "llama", "minicpm3", "ministral", "ministral3", "mistral", "modernbert-decoder", "mpt", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_5_text", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
MIXTURES = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4_text",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4_text", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
PROVEN = frozenset(DENSE + MIXTURES)

FIX = "Another method, such as rtn, or another engine may take it"
LONGEST_PART = 120  # characters of what names the part that ran


class Signal(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass early, on purpose: what it was for has been seen."""


@contextmanager
def running(settings: Any, part: str) -> Iterator[None]:
    """Raise UnsupportedError, with the model type and the `part` of it that runs, for what foreign code raises inside.

    `settings` is the configuration of transformers. Errors of proven architectures pass, and so do errors of ours,
    those of files, interruptions, and what says that memory ran out.
    """
    try:
        yield
    except (QuantkitError, Signal, OSError):
        raise
    except Exception as raised:
        if is_proven(settings) or shortage_of(raised):
            raise
        kind = type(raised).__name__
        reason = reason_of(raised)
        raise UnsupportedError(
            f"the architecture {shown(settings.model_type)} is untested, and transformers' code of it ended with an "
            f"error in {one_line(part, LONGEST_PART)}: {reason if reason.startswith(kind) else f'{kind}: {reason}'}. "
            f"{FIX}"
        ) from raised


def is_proven(settings: Any) -> bool:
    """Whether a model of this configuration, or its text half, goes through the tests."""
    return not PROVEN.isdisjoint((settings.model_type, settings.get_text_config(decoder=True).model_type))


def block_of(index: int, module: object) -> str:
    """How messages call a decoder block."""
    return f"block {index} ({type(module).__name__})"


@dataclass(frozen=True)
class ExpertNames:
    """What published checkpoints call an expert's matrices and, where they are other names than transformers' own, the
    experts' block, its router, and the stacks of (gate and up, down) matrices.

    `sent`: the stack is called with what each expert gets, all tokens for each of them, zeros where it gets none.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = ""
    router: tuple[str, str] = ("", "")
    stacks: tuple[str, str] = ("", "")
    sent: bool = False


# By model_type; every other one has the plain names.
EXPERTS = {
    "mixtral": ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
    "minimax": ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
    "minimax_m2": ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
    "phimoe": ExpertNames("w1", "w3", "w2", "block_sparse_moe", router=("router", "gate")),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        ExpertNames(
            "w1", "w3", "w2", router=("router", "router.layer"), stacks=("input_linear.weight", "output_linear.weight")
        ),
    ),
    "aria_text": ExpertNames(stacks=("experts.fc1.weight", "experts.fc2.weight")),
    "kimi_linear": ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
    "lfm2_moe": ExpertNames("w1", "w3", "w2"),
    "llama4_text": ExpertNames(sent=True),
}
# By model_type: parts that published checkpoints call by another name than transformers does.
RENAMED = {
    "bailing_hybrid": ("model.embed_tokens", "model.word_embeddings"),
    "gpt_neox": ("lm_head", "embed_out"),
    "nemotron_h": ("model", "backbone"),
}
# By model_type: linear layers that are not quantized, by parts of their names: gates of norms, which published
# quantized checkpoints leave alone, and what the classes of all other architectures with such a layer keep in float32.
LEFT_ALONE = {"axk2": ("W_down", "W_up"), "dots3_note_text": ("indexer.weights_proj",)}
# By model_type: convolutions of a block that published checkpoints have apart for queries, keys and values.
SPLIT = {
    "bailing_hybrid": "self_attn.conv1d",
    "kimi_linear": "self_attn.conv1d",
    "olmo_hybrid": "linear_attn.conv1d",
}
# By model_type: parts of a block (modules or parameters) that stand elsewhere in published checkpoints.
_BIAS = "e_score_correction_bias"
MOVED = {
    "axk1": (("mlp.post_mlp_layernorm", "post_mlp_layernorm"),),
    "ernie4_5_moe": (("mlp.gate.moe_statics", "mlp.moe_statics"),),
    "exaone_moe": ((f"mlp.gate.{_BIAS}", f"mlp.{_BIAS}"),),
    "flint": (("self_attn.sinks", "self_attn.softmax_offset"),),
    "hy_v3": (
        ("mlp.gate", "mlp.router.gate"),
        (f"mlp.{_BIAS}", "mlp.expert_bias"),
        ("mlp.shared_experts", "mlp.shared_mlp"),
    ),
    "kolibri1": (
        (f"mlp.gate.{_BIAS}", "moe.router.expert_bias"),
        ("post_self_attn_layernorm", "post_attn_norm"),
        ("post_mlp_layernorm", "post_ffn_norm"),
    ),
    "laguna": ((f"mlp.gate.{_BIAS}", f"mlp.experts.{_BIAS}"), ("mlp.shared_experts", "mlp.shared_expert")),
    "lfm3": (("self_attn.g_proj", "self_attn.gate_proj"),),
    "axk2": (
        ("self_attn.q_gate_proj", "self_attn.q_b_proj"),
        *(
            (f"{norm}.mlp.{own}", f"{norm}.{name}")
            for norm in ("input_layernorm", "post_attention_layernorm")
            for own, name in (("fc1", "W_down"), ("fc2", "W_up"))
        ),
    ),
    "bailing_hybrid": (
        ("self_attn.forget_gate.f_proj", "self_attn.f_proj"),
        ("self_attn.forget_gate.dt_bias", "self_attn.dt_bias"),
        ("self_attn.forget_gate.A_log", "self_attn.A_log"),
        ("self_attn.o_proj", "self_attn.dense"),
        ("self_attn", "attention"),
        (f"mlp.gate.{_BIAS}", "mlp.gate.expert_bias"),
    ),
    "kimi_linear": (
        ("self_attn.forget_gate.f_a_proj", "self_attn.f_a_proj"),
        ("self_attn.forget_gate.f_b_proj", "self_attn.f_b_proj"),
        ("self_attn.forget_gate.dt_bias", "self_attn.dt_bias"),
        ("self_attn.forget_gate.A_log", "self_attn.A_log"),
        ("mlp.shared_experts", "block_sparse_moe.shared_experts"),  # they go there with their block
    ),
    "mimo_v2_flash": (("self_attn.sinks", "self_attn.attention_sink_bias"),),
}
# By model_type: parts of a block that stand elsewhere where the block has a part of that name.
MOVED_BESIDE = {
    "olmo_hybrid": (
        "linear_attn",
        (("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")),
    ),
}
# By model_type: parts of a block that transformers writes under another name than published checkpoints have.
WRITTEN = {
    "kimi_linear": (("mlp", "block_sparse_moe"),),
    "olmo_hybrid": (("post_attention_layernorm", "feedforward_layer_norm"),),
}
