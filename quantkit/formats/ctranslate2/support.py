"""Which models CTranslate2 computes exactly, measured with CTranslate2 4.8.5 and transformers 5.23."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.formats.ctranslate2.names import FAMILIES

# Why an architecture is refused. FAMILIES has the exact ones.
NO_LOADER = "CTranslate2's converter has no loader for it"
RENAMED = "CTranslate2's converter reads configuration fields that transformers 5 renamed"
REFUSED = {
    "gemma2": "CTranslate2 leaves out its soft-capping, so every answer would be a little wrong",
    "phi": RENAMED,
    "phi3": RENAMED,
    "gpt_neox": RENAMED,
    "gemma4_text": RENAMED,  # a head's size and key heads, which are of each block now
}
UNPROVEN = "nobody has measured that CTranslate2 computes it exactly"
UNPROVEN_LOADERS = ("codegen", "gemma4", "gemma4_unified", "gemma4_unified_text")

EXACT_ROPE = ("default", "linear")
GEMMA_ROPE_THETA = 10_000.0
# The converter takes these of Gemma 3 for granted: it does not find them in a configuration of transformers 5.
GEMMA3_ROPE_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
HEAD_DIM_NOT_EXPORTED = ("llama", "qwen2")
SILU_ONLY = ("llama", "mistral", "qwen2", "qwen3")
# A window shorter than the text is an error in CTranslate2; a shorter one than this would stop ordinary use.
SHORTEST_WINDOW = 2048


def reason_of(kind: str) -> str:
    """Why a model type outside of `FAMILIES` is refused."""
    return UNPROVEN if kind in UNPROVEN_LOADERS else REFUSED.get(kind, NO_LOADER)


def refusal_of_config(config: Mapping[str, Any]) -> str | None:
    """The reason that a config.json gives as it stands, without transformers' defaults, or None."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return reason_of(str(kind))
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if not isinstance(window, int) or not isinstance(longest, int):
        return None
    unused = str(kind).startswith("qwen") and config.get("use_sliding_window") is not True
    return None if unused else _short_window(window, longest)


def refusal(settings: Any) -> str | None:
    """Why CTranslate2 would not compute a model of this transformers configuration exactly, or None."""
    kind = settings.model_type
    if kind not in FAMILIES:
        return reason_of(kind)
    if kind == "gemma3_text":
        return _gemma3_refusal(settings)
    rope = getattr(settings, "rope_parameters", None) or {}
    if (rope_type := rope.get("rope_type", "default")) not in EXACT_ROPE:
        why = "not exported in full, so answers would be silently wrong" if rope_type == "llama3" else "not proven"
        return f"its rope scaling {rope_type!r} is {why}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial_rotary_factor {rope['partial_rotary_factor']} is not exported"
    if kind in SILU_ONLY and settings.hidden_act != "silu":
        return f"CTranslate2 computes silu where config.json asks for {settings.hidden_act!r}"
    head_dim = getattr(settings, "head_dim", None)
    if kind in HEAD_DIM_NOT_EXPORTED and head_dim and head_dim * settings.num_attention_heads != settings.hidden_size:
        return f"CTranslate2 does not export head_dim {head_dim}, which is not hidden_size / num_attention_heads"
    if kind == "gemma":
        for name, value, fixed in (
            ("rope_theta", float(rope.get("rope_theta", GEMMA_ROPE_THETA)), GEMMA_ROPE_THETA),
            ("hidden_act", settings.hidden_act, "gelu_pytorch_tanh"),
            ("attention_bias", settings.attention_bias, False),
        ):
            if value != fixed:
                return f"CTranslate2 exports {name} {fixed} for Gemma, and config.json has {value}"
    if kind == "falcon" and settings.new_decoder_architecture and settings.multi_query:
        return "CTranslate2's converter takes Falcon's new architecture only with multi_query false"
    return _window_refusal(settings)


def _window_refusal(settings: Any) -> str | None:
    window = getattr(settings, "sliding_window", None)
    if window and (reason := _short_window(window, settings.max_position_embeddings)):
        return reason
    if window and settings.model_type.startswith("qwen") and getattr(settings, "use_sliding_window", False):
        return "CTranslate2 leaves its sliding window out"
    return None


def _short_window(window: int, longest: int) -> str | None:
    if 0 < window < min(SHORTEST_WINDOW, longest):
        return f"CTranslate2 fails on texts longer than its sliding window of {window} tokens"
    return None


def _gemma3_refusal(settings: Any) -> str | None:
    for layer_type, theta in GEMMA3_ROPE_THETA.items():
        rope = settings.rope_parameters.get(layer_type) or {}
        if rope.get("rope_type", "default") != "default" or float(rope.get("rope_theta", theta)) != theta:
            return f"CTranslate2 exports no rope settings of Gemma 3 but rope_theta {theta:g} for {layer_type}"
    if settings.query_pre_attn_scalar != settings.head_dim:
        return f"CTranslate2 ignores query_pre_attn_scalar {settings.query_pre_attn_scalar}"
    return _window_refusal(settings)
