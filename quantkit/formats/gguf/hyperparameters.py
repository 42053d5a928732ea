"""A model's numbers from config.json, as the keys of its file tell them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf import shapes
from quantkit.formats.gguf.architectures.known import KNOWN, LACKING
from quantkit.formats.gguf.architectures.record import Architecture, Setting, of_config
from quantkit.formats.gguf.rope import MOST, rope_of
from quantkit.formats.gguf.shapes import ModelShape, Value
from quantkit.models.source import Source
from quantkit.system.untrusted import reraise_as, shown, whole_number


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# Where the common numbers stand in a configuration of transformers; an architecture may say otherwise.
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
# How the names of keys end whose values are float32.
REAL = (
    *("epsilon", "softcapping", "clamp_kqv", "alibi_bias", "freq_base", "freq_base_swa"),
    *("factor", "scale", "multiplier", "lower_bound"),
)


def find_architecture(source: Source) -> Architecture:
    """Look the source's architecture up; raise UnsupportedError."""
    if source.architecture not in KNOWN:
        why = LACKING.get(source.architecture)
        reason = f" ({why})" if why else ""
        raise UnsupportedError(
            f"{source.model} has the architecture {source.architecture!r}, which is not converted to GGUF{reason}. "
            f"Known: {', '.join(KNOWN)}."
        )
    row = KNOWN[source.architecture]
    if row.name_with_experts and of_config(source.settings, row.keys[shapes.EXPERTS]):
        return replace(row, name=row.name_with_experts)
    return row


def read_shape(source: Source) -> ModelShape:
    """Read config.json; raise SourceError, UnsupportedError, also for what would load but compute something else."""
    row, config = find_architecture(source), source.settings
    with reraise_as(f"{source.model}: config.json lacks what a GGUF file tells", SourceError):
        for name, known in row.required_config.items():
            allowed = known(config) if callable(known) else known
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            value = of_config(config, name)
            of_blocks = list(value)[: config.num_hidden_layers] if isinstance(value, list | tuple) else value
            if value not in allowed and of_blocks not in allowed:
                given = f"config.json has {name} = {shown(value)}"
                raise UnsupportedError(f"{source.model}: {given}, and llama.cpp has {allowed[0]!r}")
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
    """Return a count or size, or the list of each block's; raise UnsupportedError."""
    called = setting if isinstance(setting, str) else key
    most = {shapes.BLOCKS: MOST_BLOCKS, shapes.EXPERTS: MOST_EXPERTS}.get(key, MOST)
    given = of_config(source.settings, setting)
    if isinstance(given, list):
        return [_count(source, called, one, 0, most) for one in given]
    return _count(source, called, given, 0 if key == shapes.EXPERTS else 1, most)


def _count(source: Source, called: str, value: Any, least: int, most: int) -> int:
    number = whole_number({called: value}, called, least, most, source.model, UnsupportedError)
    if number is None:
        raise UnsupportedError(f"{source.model}: config.json says no {called}")
    return number


def _refuse_counts(source: Source, row: Architecture, shape: ModelShape) -> None:
    """Raise SourceError for more blocks or experts than there are tensors, UnsupportedError for unequal heads."""
    single = not row.stacks and any("{expert}" in part for part in row.parts)
    experts = shape.experts if single else 0
    if shape.blocks * max(experts, 1) > len(source.tensors):
        raise SourceError(
            f"{source.model}: config.json counts {shape.blocks} blocks{f' of {experts} experts' * bool(experts)}, and "
            f"the checkpoint has {len(source.tensors)} tensors. Give the config.json that belongs to these weights."
        )
    heads = shape.heads
    if heads.query % max(heads.key, 1) or (row.rope_types and heads.size % 2):
        raise UnsupportedError(
            f"{source.model}: config.json has {heads.query} query heads, {heads.key} key heads and a head of "
            f"{heads.size}, which llama.cpp cannot compute"
        )


def _expert_groups(source: Source, experts: int, keys: dict[str, Value]) -> dict[str, Value]:
    """Return the keys of expert groups, one group if all are used: llama.cpp aborts at that; raise UnsupportedError."""
    count, used = keys.get(GROUPS, 1), keys.get(GROUPS_USED)
    if not isinstance(count, int) or count <= 1:
        return {}
    if not isinstance(used, int) or not 0 < used <= count or experts % count or experts < 2 * count:
        raise UnsupportedError(
            f"{source.model}: config.json has {experts} experts in {count} groups, of which each token uses "
            f"{shown(used)}, and llama.cpp has equal groups of two or more experts, and uses one or more of them"
        )
    return {GROUPS: 1, GROUPS_USED: 1} if used == count else {}


def _stored_value(source: Source, key: str, value: Any) -> Value:
    """Return the value as a file holds it, float32 or uint32 for a number; raise UnsupportedError."""
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


def ignored_window(source: Source, shape: ModelShape) -> int | None:
    """Return the attention window in tokens that llama.cpp ignores; None if there is none that matters."""
    window = whole_number(source.config, "sliding_window", 0, MOST, source.model, UnsupportedError)
    used = source.config.get("use_sliding_window", source.architecture not in ("qwen2", "qwen3", "qwen3_moe"))
    if find_architecture(source).follows_window or not used or not window or window >= shape.number(shapes.CONTEXT):
        return None
    return window
