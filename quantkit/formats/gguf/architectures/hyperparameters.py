"""A model's numbers from config.json: counts, sizes, rope, and the keys that its file tells them under."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.expected_shapes import Sizes
from quantkit.formats.gguf.architectures.known import KNOWN, LACKING, Architecture, Setting
from quantkit.formats.gguf.architectures.row_orders import Heads
from quantkit.models.source import Source
from quantkit.untrusted import shown, told, whole_number

Value = bool | int | float | str | list[bool]
Factors = dict[str, NDArray[np.float32]]
# Where the common numbers stand in a configuration of transformers; an architecture may say otherwise.
FIELDS: dict[str, Setting] = {
    "blocks": "num_hidden_layers",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": lambda config: getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    "head_dim": lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    "context": "max_position_embeddings",
    "vocabulary": "vocab_size",
    "experts": lambda _config: 0,
}


# Keys of the file behind the architecture's name, and the number that each one is.
NUMBERS = {
    "block_count": "blocks",
    "context_length": "context",
    "embedding_length": "hidden",
    "feed_forward_length": "inner",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "expert_count": "experts",
}
MOST_BLOCKS = MOST_EXPERTS = 512  # llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS
MOST = (1 << 32) - 1  # a file's keys of whole numbers are uint32
# How the names of keys end whose values are float32.
REAL = ("epsilon", "softcapping", "clamp_kqv", "alibi_bias", "freq_base", "freq_base_swa", "factor", "scale")


@dataclass(frozen=True)
class Shape:
    """The numbers of a model: counts, sizes in values, `keys` of the file that depend on the architecture.

    `factors` are the rope's divisors by the tensor's name in the file, (rotated / 2,) float32.
    """

    blocks: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    vocabulary: int
    experts: int
    tied: bool
    keys: dict[str, Value]
    factors: Factors

    @property
    def all_keys(self) -> dict[str, Value]:
        """`keys`, and before them those of the numbers."""
        numbers: dict[str, Value] = {key: getattr(self, number) for key, number in NUMBERS.items()}
        if not self.experts:
            del numbers["expert_count"]
        return numbers | self.keys

    @property
    def sizes(self) -> Sizes:
        """What the shapes of tensors depend on."""
        wide = self.keys.get("expert_feed_forward_length", self.inner)
        return Sizes(
            self.vocabulary, self.context, self.hidden, self.inner, self.head_rows, self.experts,
            wide if isinstance(wide, int) else self.inner,
        )  # fmt: skip

    @property
    def head_rows(self) -> Heads:
        """What orders of rows ask for."""
        return Heads(self.heads, self.kv_heads, self.head_dim)


def find_architecture(source: Source) -> Architecture:
    """Look the source's architecture up; raises UnsupportedError."""
    if source.architecture not in KNOWN:
        why = "which llama.cpp does not have" if source.architecture in LACKING else "which is not converted to GGUF"
        raise UnsupportedError(
            f"{source.model} has the architecture {source.architecture!r}, {why}. Known: {', '.join(KNOWN)}."
        )
    return KNOWN[source.architecture]


def read_shape(source: Source) -> Shape:
    """Read config.json with the defaults of transformers; raises SourceError, UnsupportedError.

    What would load but compute something else is refused: other activations, rope types, rotary dimensions.
    """
    architecture = find_architecture(source)
    config = source.settings
    with told(f"{source.model}: config.json lacks what a GGUF file tells", SourceError):
        fields = FIELDS | dict(architecture.fields)
        numbers = {name: _number(source, name, setting) for name, setting in fields.items()}
        _refuse_counts(source, architecture, numbers)
        for name, allowed in architecture.fixed.items():
            if (value := of_config(config, name)) not in allowed:
                computed = f"llama.cpp computes {allowed[0]!r} for {architecture.name}"
                raise UnsupportedError(f"{source.model} has {name} = {shown(value)}; {computed}")
        for check in architecture.checks:
            if (reason := check(config)) is not None:
                raise UnsupportedError(f"{source.model} has {reason}")
        keys = {name: of_config(config, setting) for name, setting in architecture.keys.items()}
        rope_keys, factors = _rope(source, architecture, config, numbers["head_dim"], numbers["context"])
        stored = {
            name: _stored_value(source, name, value)
            for name, value in (keys | rope_keys).items()
            if value is not None
        }  # fmt: skip
    used, experts = stored.get("expert_used_count"), numbers["experts"]
    if isinstance(used, int) and not 1 <= used <= experts:
        raise UnsupportedError(f"{source.model}: config.json lets each token use {used} of {experts} experts")
    return Shape(**numbers, tied=bool(config.tie_word_embeddings), keys=stored, factors=factors)


def _number(source: Source, name: str, setting: Setting) -> int:
    """A count or size, as far as a file can hold it; raises UnsupportedError."""
    called = setting if isinstance(setting, str) else name
    most = {"blocks": MOST_BLOCKS, "experts": MOST_EXPERTS}.get(name, MOST)
    values = {called: of_config(source.settings, setting)}
    number = whole_number(values, called, 0 if name == "experts" else 1, most, source.model, UnsupportedError)
    if number is None:
        raise UnsupportedError(f"{source.model}: config.json says no {called}")
    return number


def _refuse_counts(source: Source, architecture: Architecture, numbers: dict[str, int]) -> None:
    """Raise SourceError for more blocks or experts than there are tensors, UnsupportedError for unequal heads."""
    blocks, experts = numbers["blocks"], numbers["experts"] if architecture.experts else 0
    if blocks * max(experts, 1) > len(source.tensors):
        raise SourceError(
            f"{source.model}: config.json counts {blocks} blocks{f' of {experts} experts' * bool(experts)}, and the "
            f"checkpoint has {len(source.tensors)} tensors. Give the config.json that belongs to these weights."
        )
    heads, kv_heads, size = numbers["heads"], numbers["kv_heads"], numbers["head_dim"]
    if heads % kv_heads or (architecture.rope_types and size % 2):
        raise UnsupportedError(
            f"{source.model}: config.json has {heads} query heads, {kv_heads} key heads and a head of {size}, which "
            "llama.cpp cannot compute"
        )


def _stored_value(source: Source, key: str, value: Any) -> Value:
    """The value as a file holds it, float32 or uint32 for a number; raises UnsupportedError where it cannot."""
    if isinstance(value, str | list) or (isinstance(value, bool) and not key.endswith(REAL)):
        return value
    if key.endswith(REAL):
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 <= value <= float(np.finfo(np.float32).max):
            raise UnsupportedError(f"{source.model}: config.json has {shown(value)} for {key}, no number of float32")
        return float(value)
    if not isinstance(value, int) or not 0 <= value <= MOST:
        raise UnsupportedError(f"{source.model}: config.json has {shown(value)} for {key}, not one from 0 to {MOST:,}")
    return value


def of_config(config: Any, setting: Setting) -> Any:
    """What a setting of an architecture's row is in a configuration of transformers."""
    return reduce(getattr, setting.split("."), config) if isinstance(setting, str) else setting(config)


def _rope(
    source: Source, architecture: Architecture, config: Any, head_dim: int, context: int
) -> tuple[dict[str, Value], Factors]:
    """Keys and divisors of the rotary embedding; raises UnsupportedError for one that llama.cpp computes otherwise."""
    if not architecture.rope_types:
        return {}, {}
    given = dict(config.rope_parameters or {})
    local = given.get("sliding_attention")
    rope = dict(given.get("full_attention", given))
    kind = _kind(rope)
    share = _real(source, rope, "partial_rotary_factor", 1.0)
    if (
        kind not in architecture.rope_types
        or (share != 1.0 and not architecture.partial_rotary)
        or (local is not None and _kind(local) != "default")
    ):
        raise UnsupportedError(
            f"{source.model} has the rope parameters {given}, which are not converted to GGUF for "
            f"{source.architecture}. Known rope types: {', '.join(architecture.rope_types)}."
        )
    rotated = int(head_dim * share)
    theta = _real(source, rope, "rope_theta", 10000.0)
    if not 0 < rotated <= head_dim or rotated % 2 or not np.float32(min(theta, MOST)) > 0:
        raise UnsupportedError(f"{source.model} has the rope parameters {shown(given)}, which rotate nothing")
    keys: dict[str, Value] = {"rope.dimension_count": rotated, "rope.freq_base": theta}
    if local is not None:
        keys["rope.freq_base_swa"] = _real(source, local, "rope_theta")
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": _real(source, rope, "factor")}
    factors: Factors = {}
    if kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            _real(source, rope, name)
        factors = {"rope_freqs.weight": llama3_factors(rope, theta, rotated)}
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
    """What llama.cpp divides each rope frequency by, (rotated / 2,) float32, for llama3 scaling.

    Frequencies with a wavelength of more than original / low tokens are divided by `factor`, those of less
    than original / high tokens are kept, and between the two the inverse is interpolated (transformers,
    modeling_rope_utils, `_compute_llama3_parameters`).
    """
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    turns = original * theta**-exponents / (2 * math.pi)  # turns within the original context
    with np.errstate(all="ignore"):  # what is not finite is refused
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)


def _longrope(rope: dict[str, Any], rotated: int, context: int) -> tuple[dict[str, Value], Factors]:
    """Two lists of divisors, of which llama.cpp takes one by the context, and the scale of the rotated values.

    The scale is that of transformers (modeling_rope_utils, `_compute_longrope_parameters`).
    """
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
    keys: dict[str, Value] = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(attention),
    }
    return keys, factors


def ignored_window(source: Source, shape: Shape) -> int | None:
    """The attention window in tokens that llama.cpp ignores; None where it follows it or it changes nothing."""
    window = whole_number(source.config, "sliding_window", 0, MOST, source.model, UnsupportedError)
    used = source.config.get("use_sliding_window", source.architecture not in ("qwen2", "qwen3", "qwen3_moe"))
    if find_architecture(source).follows_window or not used or not window or window >= shape.context:
        return None
    return window
