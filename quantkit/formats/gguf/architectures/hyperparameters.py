"""A model's numbers from config.json: counts, sizes, rope, and the keys that its file tells them under."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.expected_shapes import Sizes
from quantkit.formats.gguf.architectures.known import KNOWN, LACKING
from quantkit.formats.gguf.architectures.record import EMBEDDING, Architecture, Setting
from quantkit.formats.gguf.architectures.rope import MOST, Factors, rope_of
from quantkit.formats.gguf.architectures.row_orders import Heads
from quantkit.models.overrides import Multipliers, multiplied, rows_times
from quantkit.models.source import Source
from quantkit.untrusted import shown, told, whole_number

Value = bool | int | float | str | list[Any]
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
    "gate": lambda _config: 1,
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
ROTATED = "rope.dimension_count"  # given where only some values of a head can turn
SHARED = "attention.shared_kv_layers"
GROUPS, GROUPS_USED = "expert_group_count", "expert_group_used_count"
MOST_BLOCKS = MOST_EXPERTS = 512  # llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS
# How the names of keys end whose values are float32.
REAL = (
    "epsilon",
    "softcapping",
    "clamp_kqv",
    "alibi_bias",
    "freq_base",
    "freq_base_swa",
    "factor",
    "scale",
    "multiplier",
    "lower_bound",
)


@dataclass(frozen=True)
class Shape:
    """The numbers of a model: counts, sizes in values, `keys` of the file that depend on the architecture.

    `factors` are the rope's divisors by the tensor's name in the file, (rotated / 2,) float32; `gate` is as in `Sizes`.
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
    gate: int = 1

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
        whole = {key: value for key, value in self.all_keys.items() if isinstance(value, int)}
        lists = {key: value for key, value in self.keys.items() if isinstance(value, list)}
        own = self.vocabulary, self.context, self.hidden, self.inner, self.head_rows, self.experts
        return Sizes(*own, whole, lists, self.gate)

    @property
    def shared(self) -> int:
        """Blocks that take the keys and values of earlier ones, the last of all."""
        count = self.keys.get(SHARED, 0)
        return count if isinstance(count, int) else 0

    @property
    def head_rows(self) -> Heads:
        """What orders of rows ask for."""
        turned = self.keys.get(ROTATED, 0)
        return Heads(self.heads, self.kv_heads, self.head_dim, turned if isinstance(turned, int) else 0)


def find_architecture(source: Source) -> Architecture:
    """Look the source's architecture up; raises UnsupportedError."""
    if source.architecture not in KNOWN:
        why = LACKING.get(source.architecture)
        reason = f" ({why})" if why else ""
        raise UnsupportedError(
            f"{source.model} has the architecture {source.architecture!r}, which is not converted to GGUF{reason}. "
            f"Known: {', '.join(KNOWN)}."
        )
    row = KNOWN[source.architecture]
    if row.name_with_experts and of_config(source.settings, row.fields["experts"]):
        return replace(row, name=row.name_with_experts)
    return row


def with_multipliers_inside(source: Source) -> Source:
    """The source with its architecture's multipliers in the weights, or itself where it has none but ones.

    A tied head that is multiplied by another number than the embedding gets weights of its own. Raises
    UnsupportedError for a multiplier that is no number, or one that a file could not say: 0, NaN, infinity.
    """
    row = KNOWN.get(source.architecture)
    if row is None or not row.multipliers:
        return source
    own = source.settings
    if all(of_config(own, name) == one for name, one in row.multiplied.items()):
        return source
    factors: dict[str, Multipliers] = {}
    copies: dict[str, str] = {}
    with told(f"{source.model}: config.json lacks what multiplies its weights", SourceError):
        given = {part: of_config(own, setting) for part, setting in row.multipliers.items()}
    embedding = next((name for name in source.tensors if EMBEDDING.endswith(name)), None)
    if own.tie_word_embeddings and embedding is not None and given[EMBEDDING] != given[row.head]:
        copies[row.head] = embedding
    of_block = re.compile(rf"^({re.escape(row.prefix)})?{re.escape(row.blocks.removeprefix(row.prefix))}\.\d+\.")
    for name in (*source.tensors, *copies):
        number = given.get(of_block.sub("", name), given.get(row.prefix + name))
        if number is not None and number != 1.0:
            factors[name] = rows_times(source, copies.get(name, name), number)
    return multiplied(source, factors, {**row.multiplied, **({"tie_word_embeddings": False} if copies else {})}, copies)


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
        turned = keys.get(ROTATED) or numbers["head_dim"]
        rope_keys, factors = rope_of(source, architecture, config, turned, numbers["context"])
        stored = {
            name: _stored_value(source, name, value)
            for name, value in (rope_keys | keys).items()
            if value is not None
        }  # fmt: skip
    used, experts = stored.get("expert_used_count"), numbers["experts"]
    if isinstance(used, int) and not 1 <= used <= experts:
        raise UnsupportedError(f"{source.model}: config.json lets each token use {used} of {experts} experts")
    stored |= _expert_groups(source, experts, stored)
    return Shape(**numbers, tied=bool(config.tie_word_embeddings), keys=stored, factors=factors)


def _expert_groups(source: Source, experts: int, keys: dict[str, Value]) -> dict[str, Value]:
    """The keys of groups of experts: one group where none is left out, for which llama.cpp ends the program.

    So it does for groups of one expert or of unequal size, which raise UnsupportedError.
    """
    count, used = keys.get(GROUPS, 1), keys.get(GROUPS_USED)
    if not isinstance(count, int) or count <= 1:
        return {}
    if not isinstance(used, int) or not 0 < used <= count or experts % count or experts < 2 * count:
        raise UnsupportedError(
            f"{source.model}: config.json has {experts} experts in {count} groups, of which each token uses "
            f"{shown(used)}, and llama.cpp has equal groups of two or more experts, and uses one or more of them"
        )
    return {GROUPS: 1, GROUPS_USED: 1} if used == count else {}


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
    single = architecture.experts and not architecture.stacks and architecture.experts_in is None
    blocks, experts = numbers["blocks"], numbers["experts"] if single else 0
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
        most = float(np.finfo(np.float32).max)
        if not real or not (-most if key.endswith("lower_bound") else 0) <= value <= most:
            raise UnsupportedError(f"{source.model}: config.json has {shown(value)} for {key}, no number of float32")
        return float(value)
    if not isinstance(value, int) or not 0 <= value <= MOST:
        raise UnsupportedError(f"{source.model}: config.json has {shown(value)} for {key}, not one from 0 to {MOST:,}")
    return value


def of_config(config: Any, setting: Setting) -> Any:
    """What a setting of an architecture's row is in a configuration of transformers."""
    return reduce(getattr, setting.split("."), config) if isinstance(setting, str) else setting(config)


def ignored_window(source: Source, shape: Shape) -> int | None:
    """The attention window in tokens that llama.cpp ignores; None where it follows it or it changes nothing."""
    window = whole_number(source.config, "sliding_window", 0, MOST, source.model, UnsupportedError)
    used = source.config.get("use_sliding_window", source.architecture not in ("qwen2", "qwen3", "qwen3_moe"))
    if find_architecture(source).follows_window or not used or not window or window >= shape.context:
        return None
    return window
