"""Convert config.json to GGUF metadata keys.

RoPE keys and frequency divisors come from transformers' rope parameters (modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf import shapes
from quantkit.formats.gguf.architectures.known import KNOWN, LACKING
from quantkit.formats.gguf.architectures.record import Architecture, Setting, of_config
from quantkit.formats.gguf.shapes import Factors, ModelShape, Value
from quantkit.models.source import Source
from quantkit.system.untrusted import reraise_as, shown, whole_number

Keys = dict[str, Value]
MOST = (1 << 32) - 1  # integer keys in a file are uint32
FULL = "full_attention", "indexed_attention"  # blocks without a window
STILL = 1e30  # llama.cpp's divisor for values that do not rotate


def rope_of(
    source: Source, architecture: Architecture, config: Any, head_dim: int, context: int
) -> tuple[Keys, Factors]:
    """Return RoPE's GGUF keys and frequency divisors; raise UnsupportedError if llama.cpp lacks this RoPE."""
    if not architecture.rope_types:
        return {}, {}
    given = dict(config.rope_parameters or {})
    local = given.get("sliding_attention")
    rope = dict(next((given[kind] for kind in FULL if kind in given), given))
    kind = _kind(rope)
    share = 1.0 if architecture.rotated_apart else _real(source, rope, "partial_rotary_factor", 1.0)
    if (
        kind not in architecture.rope_types
        or (share != 1.0 and not architecture.partial_rotary and kind != "proportional")
        or (local is not None and _kind(local) != "default")
    ):
        raise UnsupportedError(
            f"{source.model} has the rope parameters {given}, which quantkit cannot convert to GGUF for "
            f"{source.architecture}. Known rope types: {', '.join(architecture.rope_types)}."
        )
    rotated = head_dim if kind == "proportional" else int(head_dim * share)
    theta = _real(source, rope, "rope_theta", 10000.0)
    if not 0 < rotated <= head_dim or rotated % 2 or not np.float32(min(theta, MOST)) > 0:
        raise UnsupportedError(f"{source.model} has the rope parameters {shown(given)}, which rotate nothing")
    keys: Keys = {"rope.dimension_count": rotated, "rope.freq_base": theta}
    if local is not None:
        keys["rope.freq_base_swa"] = _real(source, local, "rope_theta")
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": _real(source, rope, "factor")}
    if kind == "yarn":
        keys |= _yarn(source, rope, context, architecture.yarn_scores)
    if kind == "dynamic" and rope.get("alpha") is not None:  # without alpha, the rope changes only beyond the context
        keys["rope.freq_base"] = theta * _real(source, rope, "alpha") ** (rotated / (rotated - 2))
    factors: Factors = {}
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            _real(source, rope, name)
        factors = {"rope_freqs.weight": llama3_factors(rope, theta, rotated)}
    if "proportional" in architecture.rope_types:  # llama.cpp always needs its divisors
        stretch = _real(source, rope, "factor", 1.0) if kind == "proportional" else 1.0
        factors = {"rope_freqs.weight": proportional_factors(share, stretch, rotated)}
    if kind == "longrope":
        long_keys, factors = _longrope(rope, rotated, context)
        keys |= long_keys
    scales = [value for key, value in keys.items() if key.endswith(("factor", "base_swa"))]
    if not all(bool(((values > 0) & np.isfinite(values)).all()) for values in (np.array(scales), *factors.values())):
        raise UnsupportedError(f"{source.model} has the rope parameters {shown(given)}, whose divisors are not finite")
    return keys, factors


def _real(source: Source, rope: dict[str, Any], key: str, default: float | None = None) -> float:
    value = rope.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = f"config.json has the rope's {key} = {shown(value)}"
        raise UnsupportedError(f"{source.model}: {what}, which is not a number")
    return float(value)


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default"))).lower()


def llama3_factors(rope: dict[str, Any], theta: float, rotated: int) -> NDArray[np.float32]:
    """Return Llama 3's RoPE frequency divisors, float32 (rotated / 2,), in llama.cpp's form.

    Wavelengths above original / low_freq_factor are divided by `factor`, those below original / high_freq_factor are
    unchanged, and the inverse divisor is interpolated in between (transformers' `_compute_llama3_parameters`).
    """
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    turns = original * theta**-exponents / (2 * math.pi)  # rotations within the original context
    with np.errstate(all="ignore"):  # values that are not finite are refused later
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def proportional_factors(share: float, factor: float, rotated: int) -> NDArray[np.float32]:
    """Return RoPE divisors, float32 (rotated / 2,), if only the first `share` of the dimensions rotates."""
    turning = int(share * rotated // 2)
    return np.array([factor] * turning + [STILL] * (rotated // 2 - turning), np.float32)


def _yarn(source: Source, rope: dict[str, Any], context: int, scores: bool) -> Keys:
    """Return the GGUF keys of YaRN scaling; raise UnsupportedError for settings that llama.cpp hard-codes differently.

    llama.cpp fixes beta_fast = 32 and beta_slow = 1, and scales by (1 + ln(factor) / 10) * attn_factor, where only
    attn_factor is in the file (`rope_yarn` in ggml-cpu/ops.cpp; llama-context.cpp). With latent attention it
    scales the attention scores instead (models/deepseek2.cpp).
    """
    original = rope["original_max_position_embeddings"]
    factor = context / original if rope.get("factor") is None else _real(source, rope, "factor")
    natural = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
    for name, fixed in (("beta_fast", 32), ("beta_slow", 1)):
        if (rope.get(name) or fixed) != fixed:
            raise UnsupportedError(f"{source.model} has the rope's {name} = {rope[name]}; llama.cpp computes {fixed}")
    keys: Keys = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": factor, "rope.scaling.original_context_length": original,
    }  # fmt: skip
    scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
    if scores:
        if not scales[0] or scales[0] != scales[1] or rope.get("attention_factor") is not None:
            raise UnsupportedError(
                f"{source.model} has the rope's mscale and mscale_all_dim = {scales}; llama.cpp needs equal ones"
            )
        return keys | {"rope.scaling.yarn_log_multiplier": 0.1 * _real(source, rope, "mscale_all_dim")}
    wide, all_wide = (1 + 0.1 * (scale or 0) * math.log(max(factor, 1)) for scale in scales)
    meant = rope.get("attention_factor") or (wide / all_wide if all(scales) else natural)
    if not math.isclose(meant, natural, rel_tol=1e-6):
        keys["rope.scaling.attn_factor"] = meant / natural
    return keys


def rounds_yarn(config: Any) -> bool:
    """Return whether llama.cpp rounds YaRN's frequency range although the source disables it (``truncate: false``)."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return _kind(rope) == "yarn" and rope.get("truncate") is False


def _longrope(rope: dict[str, Any], rotated: int, context: int) -> tuple[Keys, Factors]:
    """Return LongRoPE's keys (attention factor, original context) and its long and short frequency divisors."""
    original = int(rope["original_max_position_embeddings"])
    scale = context / original
    attention = rope.get("attention_factor") or (
        1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    )
    factors = {
        f"rope_factors_{name}.weight": np.asarray(rope[f"{name}_factor"], dtype=np.float32)
        for name in ("long", "short")
    }
    if any(values.shape != (rotated // 2,) for values in factors.values()):
        raise ValueError(f"long_factor and short_factor must have {rotated // 2} values each")
    keys: Keys = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(attention),
    }
    return keys, factors


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# Fields of the common numbers in a transformers configuration; architectures may override them.
COMMON: dict[str, Setting] = {
    shapes.BLOCKS: "num_hidden_layers",
    shapes.CONTEXT: "max_position_embeddings",
    shapes.HIDDEN: "hidden_size",
    shapes.INNER: "intermediate_size",
    shapes.QUERY_HEADS: "num_attention_heads",
    shapes.KEY_HEADS: lambda config: getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    shapes.KEY_LENGTH: _head_size,
    shapes.EXPERTS: 0,
}
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
MOST_BLOCKS = MOST_EXPERTS = 512  # llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS
# Endings of keys with float32 values.
REAL = (
    *("epsilon", "softcapping", "clamp_kqv", "alibi_bias", "freq_base", "freq_base_swa"),
    *("factor", "scale", "multiplier", "lower_bound"),
)


def find_architecture(source: Source) -> Architecture:
    """Return the GGUF architecture of the source's `model_type`; raise UnsupportedError if there is none."""
    if source.architecture not in KNOWN:
        why = LACKING.get(source.architecture)
        reason = f" ({why})" if why else ""
        raise UnsupportedError(
            f"{source.model} has the architecture {source.architecture!r}, which has no GGUF conversion{reason}. "
            f"Known: {', '.join(KNOWN)}."
        )
    row = KNOWN[source.architecture]
    if row.name_with_experts and of_config(source.settings, row.keys[shapes.EXPERTS]):
        return replace(row, name=row.name_with_experts)
    return row


def read_shape(source: Source) -> ModelShape:
    """Read the model's dimensions and GGUF keys from config.json; raise SourceError or UnsupportedError."""
    row, config = find_architecture(source), source.settings
    with reraise_as(f"{source.model}: config.json lacks settings of a GGUF file", SourceError):
        for name, known in row.required_config.items():
            allowed = known(config) if callable(known) else known
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            value = of_config(config, name)
            of_blocks = list(value)[: config.num_hidden_layers] if isinstance(value, list | tuple) else value
            if value not in allowed and of_blocks not in allowed:
                given = f"config.json has {name} = {shown(value)}"
                raise UnsupportedError(f"{source.model}: {given}, but llama.cpp has {allowed[0]!r}")
        for check in row.checks:
            if (reason := check(config)) is not None:
                raise UnsupportedError(f"{source.model} has {reason}")
        settings = COMMON | {shapes.VALUE_LENGTH: row.keys.get(shapes.KEY_LENGTH, _head_size)} | dict(row.keys)
        numbers: dict[str, Value] = {key: _number(source, key, settings[key]) for key in shapes.NUMBERS}
        shape = ModelShape(
            numbers, _count(source, "vocab_size", config.vocab_size, 1, MOST), of_config(config, row.gate),
            bool(config.tie_word_embeddings),
        )  # fmt: skip
        _refuse_counts(source, row, shape)
        keys = {key: of_config(config, setting) for key, setting in row.keys.items() if key not in shapes.NUMBERS}
        turned = keys.get(shapes.ROTATED) or shape.heads.size
        rope_keys, factors = rope_of(source, row, config, turned, shape.number(shapes.CONTEXT))
        stored = {
            key: _stored_value(source, key, value) for key, value in (rope_keys | keys).items() if value is not None
        }
    used = stored.get("expert_used_count")
    if isinstance(used, int) and not 1 <= used <= shape.experts:
        raise UnsupportedError(f"{source.model}: config.json lets each token use {used} of {shape.experts} experts")
    if not shape.experts:
        del numbers[shapes.EXPERTS]
    groups = _expert_groups(source, shape.experts, stored)
    return replace(shape, keys=numbers | stored | groups, factors=factors)


def _number(source: Source, key: str, setting: Setting) -> int | list[int]:
    """Evaluate `setting` to an integer, or to a per-block list; raise UnsupportedError for invalid numbers."""
    called = setting if isinstance(setting, str) else key
    most = {shapes.BLOCKS: MOST_BLOCKS, shapes.EXPERTS: MOST_EXPERTS}.get(key, MOST)
    given = of_config(source.settings, setting)
    if isinstance(given, list):
        return [_count(source, called, one, 0, most) for one in given]
    return _count(source, called, given, 0 if key == shapes.EXPERTS else 1, most)


def _count(source: Source, called: str, value: Any, least: int, most: int) -> int:
    number = whole_number({called: value}, called, least, most, source.model, UnsupportedError)
    if number is None:
        raise UnsupportedError(f"{source.model}: config.json has no {called}")
    return number


def _refuse_counts(source: Source, row: Architecture, shape: ModelShape) -> None:
    """Raise SourceError for more blocks or experts than the tensors allow, UnsupportedError for invalid heads."""
    single = not row.stacks and any("{expert}" in part for part in row.parts)
    experts = shape.experts if single else 0
    if shape.blocks * max(experts, 1) > len(source.tensors):
        raise SourceError(
            f"{source.model}: config.json counts {shape.blocks} blocks{f' of {experts} experts' * bool(experts)}, but "
            f"the checkpoint has {len(source.tensors)} tensors. Give the config.json that belongs to these weights."
        )
    heads = shape.heads
    if heads.query % max(heads.key, 1) or (row.rope_types and heads.size % 2):
        raise UnsupportedError(
            f"{source.model}: config.json has {heads.query} query heads, {heads.key} key heads and a head of "
            f"{heads.size}, which llama.cpp cannot compute"
        )


def _expert_groups(source: Source, experts: int, keys: dict[str, Value]) -> dict[str, Value]:
    """Return changed keys of expert groups (all used: one group); raise UnsupportedError for groups llama.cpp lacks."""
    count, used = keys.get(GROUPS, 1), keys.get(GROUPS_USED)
    if not isinstance(count, int) or count <= 1:
        return {}
    if not isinstance(used, int) or not 0 < used <= count or experts % count or experts < 2 * count:
        raise UnsupportedError(
            f"{source.model}: config.json has {experts} experts in {count} groups, of which each token uses "
            f"{shown(used)}, but llama.cpp has equal groups of two or more experts, and uses one or more of them"
        )
    return {GROUPS: 1, GROUPS_USED: 1} if used == count else {}


def _stored_value(source: Source, key: str, value: Any) -> Value:
    """Check that a key's value fits GGUF's float32 or uint32 and return it; raise UnsupportedError if it does not."""
    if isinstance(value, str | list) or (isinstance(value, bool) and not key.endswith(REAL)):
        return value
    if key.endswith(REAL):
        real = isinstance(value, int | float) and not isinstance(value, bool)
        most = float(np.finfo(np.float32).max)
        if not real or not (-most if key.endswith("lower_bound") else 0) <= value <= most:
            raise UnsupportedError(f"{source.model}: config.json has {shown(value)} for {key}, which is not a float32")
        return float(value)
    if not isinstance(value, int) or not 0 <= value <= MOST:
        raise UnsupportedError(f"{source.model}: config.json has {shown(value)} for {key}, not 0 to {MOST:,}")
    return value


def ignored_window(source: Source, shape: ModelShape) -> int | None:
    """Return the sliding-window size in tokens if llama.cpp ignores it for this model, else None."""
    window = whole_number(source.config, "sliding_window", 0, MOST, source.model, UnsupportedError)
    used = source.config.get("use_sliding_window", source.architecture not in ("qwen2", "qwen3", "qwen3_moe"))
    if find_architecture(source).follows_window or not used or not window or window >= shape.number(shapes.CONTEXT):
        return None
    return window
