"""The rotary embedding's keys and divisors in a file, of transformers' rope parameters (modeling_rope_utils.py)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.architectures.record import Architecture
from quantkit.formats.gguf.shapes import Factors, Value
from quantkit.models.source import Source
from quantkit.system.untrusted import shown

Keys = dict[str, Value]
MOST = (1 << 32) - 1  # a file's keys of whole numbers are uint32
FULL = "full_attention", "indexed_attention"  # blocks without a window
STILL = 1e30  # a divisor with which nothing turns, llama.cpp's own


def rope_of(
    source: Source, architecture: Architecture, config: Any, head_dim: int, context: int
) -> tuple[Keys, Factors]:
    """Return keys and divisors of the rotary embedding; raise UnsupportedError if llama.cpp computes another."""
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
            f"{source.model} has the rope parameters {given}, which are not converted to GGUF for "
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
    if kind == "dynamic" and rope.get("alpha") is not None:  # without it the rope changes beyond the context alone
        keys["rope.freq_base"] = theta * _real(source, rope, "alpha") ** (rotated / (rotated - 2))
    factors: Factors = {}
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            _real(source, rope, name)
        factors = {"rope_freqs.weight": llama3_factors(rope, theta, rotated)}
    if "proportional" in architecture.rope_types:  # llama.cpp always wants its divisors
        stretch = _real(source, rope, "factor", 1.0) if kind == "proportional" else 1.0
        factors = {"rope_freqs.weight": proportional_factors(share, stretch, rotated)}
    if kind == "longrope":
        long_keys, factors = _longrope(rope, rotated, context)
        keys |= long_keys
    scales = [value for key, value in keys.items() if key.endswith(("factor", "base_swa"))]
    if not all(bool(((values > 0) & np.isfinite(values)).all()) for values in (np.array(scales), *factors.values())):
        raise UnsupportedError(f"{source.model} has the rope parameters {shown(given)}, which give no finite divisors")
    return keys, factors


def _real(source: Source, rope: dict[str, Any], key: str, default: float | None = None) -> float:
    value = rope.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedError(f"{source.model}: config.json has the rope's {key} = {shown(value)}, which is no number")
    return float(value)


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default"))).lower()


def llama3_factors(rope: dict[str, Any], theta: float, rotated: int) -> NDArray[np.float32]:
    """Return llama.cpp's divisors (rotated / 2,) of the rope frequencies, for llama3 scaling.

    Frequencies with a wavelength above original / low tokens are divided by `factor`, those below original / high
    tokens are unchanged, and between them the inverse is interpolated (transformers, `_compute_llama3_parameters`).
    """
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    turns = original * theta**-exponents / (2 * math.pi)  # turns within the original context
    with np.errstate(all="ignore"):  # what is not finite is refused
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def proportional_factors(share: float, factor: float, rotated: int) -> NDArray[np.float32]:
    """Return llama.cpp's divisors (rotated / 2,) of the rope frequencies if only the first `share` turn."""
    turning = int(share * rotated // 2)
    return np.array([factor] * turning + [STILL] * (rotated // 2 - turning), np.float32)


def _yarn(source: Source, rope: dict[str, Any], context: int, scores: bool) -> Keys:
    """Return the keys of YaRN; raise UnsupportedError for settings that llama.cpp has otherwise.

    llama.cpp rotates by the frequencies that betas of 32 and 1 give, and scales by 1 + ln(factor) / 10 times a factor
    of the file (ggml-cpu/ops.cpp, `rope_yarn`; llama-context.cpp). In models with latent attention the scores are
    scaled, by one scale (models/deepseek2.cpp).
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
                f"{source.model} has the rope's mscale and mscale_all_dim = {scales}; llama.cpp computes equal ones"
            )
        return keys | {"rope.scaling.yarn_log_multiplier": 0.1 * _real(source, rope, "mscale_all_dim")}
    wide, all_wide = (1 + 0.1 * (scale or 0) * math.log(max(factor, 1)) for scale in scales)
    meant = rope.get("attention_factor") or (wide / all_wide if all(scales) else natural)
    if not math.isclose(meant, natural, rel_tol=1e-6):
        keys["rope.scaling.attn_factor"] = meant / natural
    return keys


def rounds_yarn(config: Any) -> bool:
    """Return whether llama.cpp rounds the range of YaRN's frequencies and the source does not."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return _kind(rope) == "yarn" and rope.get("truncate") is False


def _longrope(rope: dict[str, Any], rotated: int, context: int) -> tuple[Keys, Factors]:
    """Return two lists of divisors, of which llama.cpp takes one, and transformers' scale of the rotated values."""
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
