"""Data on architectures by `model_type`: which are tested, and the tensor names of published checkpoints.

Tested: for a tiny random model, the block-by-block walk equals the whole model, transformers computes the same logits
from values that are read back, and AWQ's scaling does not change the model. Other decoders of transformers with linear
layers in their blocks also work, with a note that they are untested; an error in transformers' code is reported in
one line (`running`). For a tested architecture every error is raised unchanged, since it is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.errors import QuantkitError, UnsupportedError, one_line, reason_of, shortage_of
from quantkit.system.untrusted import shown

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

FIX = "Try another method, such as rtn, or another engine"
LONGEST_PART = 120  # characters of the name of the part that ran


class Signal(Exception):  # noqa: N818 - a signal, not an error
    """Base class of exceptions that end a forward pass early, on purpose."""


@contextmanager
def running(settings: Any, part: str) -> Iterator[None]:
    """Turn exceptions of external code into UnsupportedError with the model type and the running `part`.

    `settings` is the transformers configuration. Unchanged: errors of tested architectures, QuantkitErrors, OSErrors,
    interruptions, and out-of-memory errors.
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
            f"the architecture {shown(settings.model_type)} is untested, and transformers' code for it ended with an "
            f"error in {one_line(part, LONGEST_PART)}: {reason if reason.startswith(kind) else f'{kind}: {reason}'}. "
            f"{FIX}"
        ) from raised


def is_proven(settings: Any) -> bool:
    """Return whether this configuration's architecture, or its text model's, is tested."""
    return not PROVEN.isdisjoint((settings.model_type, settings.get_text_config(decoder=True).model_type))


def block_of(index: int, module: object) -> str:
    """Return a decoder block's name for messages."""
    return f"block {index} ({type(module).__name__})"


@dataclass(frozen=True)
class ExpertNames:
    """Names of an expert's matrices in published checkpoints; empty where transformers uses the same name."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = ""  # the module with the experts
    router: tuple[str, str] = ("", "")  # in transformers and published
    stacks: tuple[str, str] = ("", "")  # of gate and up, and of down
    sent: bool = False  # the stack gets all tokens for each expert, with zeros for tokens of other experts


Names = Mapping[str, str]  # transformers' names -> published names


@dataclass(frozen=True)
class PublishedNames:
    """How names in published checkpoints differ from transformers' modules; names are relative to a block."""

    experts: ExpertNames = ExpertNames()
    renamed: tuple[str, str] = ("", "")  # a part of the model, in transformers and published
    moved: Names = field(default_factory=dict)  # modules or parameters
    moved_beside: tuple[str, Names] | None = None  # more of them, in blocks that have the named part
    written: Names = field(default_factory=dict)  # parts that transformers saves under another name
    split: str = ""  # a convolution that is published split into queries, keys and values
    # Parts of names of linear layers that stay unquantized: published checkpoints do not quantize them, or the
    # classes of all other architectures with such a layer store it in float32.
    left_alone: tuple[str, ...] = ()


_W123 = ExpertNames("w1", "w3", "w2")
_SPARSE = ExpertNames("w1", "w3", "w2", "block_sparse_moe")
_BIAS = "e_score_correction_bias"
# By model_type; all others have transformers' names.
PUBLISHED = {
    "aria_text": PublishedNames(ExpertNames(stacks=("experts.fc1.weight", "experts.fc2.weight"))),
    "axk1": PublishedNames(moved={"mlp.post_mlp_layernorm": "post_mlp_layernorm"}),
    "axk2": PublishedNames(
        moved={
            "self_attn.q_gate_proj": "self_attn.q_b_proj",
            "input_layernorm.mlp.fc1": "input_layernorm.W_down",
            "input_layernorm.mlp.fc2": "input_layernorm.W_up",
            "post_attention_layernorm.mlp.fc1": "post_attention_layernorm.W_down",
            "post_attention_layernorm.mlp.fc2": "post_attention_layernorm.W_up",
        },
        left_alone=("W_down", "W_up"),  # norms' gates
    ),
    "bailing_hybrid": PublishedNames(
        renamed=("model.embed_tokens", "model.word_embeddings"),
        moved={
            "self_attn.forget_gate.f_proj": "self_attn.f_proj",
            "self_attn.forget_gate.dt_bias": "self_attn.dt_bias",
            "self_attn.forget_gate.A_log": "self_attn.A_log",
            "self_attn.o_proj": "self_attn.dense",
            "self_attn": "attention",
            f"mlp.gate.{_BIAS}": "mlp.gate.expert_bias",
        },
        split="self_attn.conv1d",
    ),
    "dots3_note_text": PublishedNames(left_alone=("indexer.weights_proj",)),
    "ernie4_5_moe": PublishedNames(moved={"mlp.gate.moe_statics": "mlp.moe_statics"}),
    "exaone_moe": PublishedNames(moved={f"mlp.gate.{_BIAS}": f"mlp.{_BIAS}"}),
    "flint": PublishedNames(moved={"self_attn.sinks": "self_attn.softmax_offset"}),
    "gpt_neox": PublishedNames(renamed=("lm_head", "embed_out")),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        PublishedNames(
            replace(_W123, router=("router", "router.layer"), stacks=("input_linear.weight", "output_linear.weight"))
        ),
    ),
    "hy_v3": PublishedNames(
        moved={
            "mlp.gate": "mlp.router.gate",
            f"mlp.{_BIAS}": "mlp.expert_bias",
            "mlp.shared_experts": "mlp.shared_mlp",
        }
    ),
    "kimi_linear": PublishedNames(
        _SPARSE,
        moved={
            "self_attn.forget_gate.f_a_proj": "self_attn.f_a_proj",
            "self_attn.forget_gate.f_b_proj": "self_attn.f_b_proj",
            "self_attn.forget_gate.dt_bias": "self_attn.dt_bias",
            "self_attn.forget_gate.A_log": "self_attn.A_log",
            "mlp.shared_experts": "block_sparse_moe.shared_experts",  # they move with their block
        },
        written={"mlp": "block_sparse_moe"},
        split="self_attn.conv1d",
    ),
    "kolibri1": PublishedNames(
        moved={
            f"mlp.gate.{_BIAS}": "moe.router.expert_bias",
            "post_self_attn_layernorm": "post_attn_norm",
            "post_mlp_layernorm": "post_ffn_norm",
        }
    ),
    "laguna": PublishedNames(
        moved={f"mlp.gate.{_BIAS}": f"mlp.experts.{_BIAS}", "mlp.shared_experts": "mlp.shared_expert"}
    ),
    "lfm2_moe": PublishedNames(_W123),
    "lfm3": PublishedNames(moved={"self_attn.g_proj": "self_attn.gate_proj"}),
    "llama4_text": PublishedNames(ExpertNames(sent=True)),
    "mimo_v2_flash": PublishedNames(moved={"self_attn.sinks": "self_attn.attention_sink_bias"}),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), PublishedNames(_SPARSE)),
    "nemotron_h": PublishedNames(renamed=("model", "backbone")),
    "olmo_hybrid": PublishedNames(
        moved_beside=(
            "linear_attn",
            {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"},
        ),
        written={"post_attention_layernorm": "feedforward_layer_norm"},
        split="linear_attn.conv1d",
    ),
    "phimoe": PublishedNames(replace(_SPARSE, router=("router", "gate"))),
}


def published_names(kind: str) -> PublishedNames:
    """Return the published names of a model type."""
    return PUBLISHED.get(kind, PublishedNames())
