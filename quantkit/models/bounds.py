"""Limits that a config.json is held within before a model is built of it.

transformers believes what stands there: a billion layers are a loop without an end, a head size of zero a division.
The limits are far beyond every published model. Keys: https://huggingface.co/docs/transformers/main_classes/configuration
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.errors import UnsupportedError
from quantkit.untrusted import DEEPEST, depth_exceeds, shown, whole_number

MOST_LAYERS = 4096
MOST_EXPERTS = 4096
MOST_EXPERTS_OF_ALL = 100_000  # of all layers together
# Whole numbers by their names in the configurations of transformers: least and most.
NUMBERS: Mapping[tuple[str, ...], tuple[int, int]] = {
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"): (1, 1 << 20),
    ("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"): (1, 1 << 24),
    ("n_inner",): (1, 1 << 24),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"): (1, MOST_LAYERS),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): (1, 1 << 16),
    ("num_key_value_heads", "num_kv_heads", "n_head_kv"): (1, 1 << 16),
    ("head_dim", "rotary_dim"): (1, 1 << 16),
    ("vocab_size",): (1, 1 << 24),
    ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"): (1, 1 << 30),
    ("num_experts", "num_local_experts", "n_routed_experts"): (0, MOST_EXPERTS),
    ("num_experts_per_tok",): (0, MOST_EXPERTS),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
INFINITE = ("time_step_limit",)  # settings that may hold infinity
# Endings of the names of numbers above 0: anywhere, and inside the settings of RoPE. Of SHARES none is above 1, either.
ABOVE_ZERO = ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "original_max_position_embeddings")
ROPE, ROPE_ABOVE_ZERO = ("rope_parameters", "rope_scaling"), ("factor", "beta_fast", "beta_slow")
SHARES = ("partial_rotary_factor", "rotary_pct")
LARGEST_ID = 1 << 24  # of a token, either way: published models have -1, and ids of tokens without a row


def refuse_config(config: Mapping[str, Any], tensors: int | None = None) -> None:
    """Raise UnsupportedError for a config.json whose values no model can have; names the key and its value.

    `tensors` is how many the checkpoint has: a decoder block has one at least.
    """
    if depth_exceeds(config, DEEPEST):
        raise UnsupportedError(f"config.json is nested deeper than {DEEPEST} levels. Give the model's own config.json.")
    for place, value in _scalars(config, "config.json"):
        if isinstance(value, float) and not math.isfinite(value) and not any(name in place for name in INFINITE):
            raise UnsupportedError(f"{place} is {value}, which is no finite number. Mend the config.json.")
    for where, inner in _mappings(config, "config.json"):
        _refuse_numbers(inner, where)
        _refuse_rope(inner, where)
        _refuse_kinds(inner, where)
        refuse_token_ids(inner, where)
    layers = max(_whole(config.get(name)) for name in LAYERS)
    if tensors is not None and layers > tensors:
        raise UnsupportedError(
            f"config.json counts {layers} decoder blocks, and the checkpoint has {tensors} tensors. "
            "Give the config.json that belongs to these weights."
        )


def refuse_token_ids(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError for an id of a special token that is none: transformers' generate() fails at it."""
    for name, value in config.items():
        ids = value if isinstance(value, list) else [value]
        good = (number is None or (type(number) is int and abs(number) < LARGEST_ID) for number in ids)
        if name.endswith("_token_id") and not (ids and all(good)):
            raise UnsupportedError(f"{where}: {name} is {shown(value)}, not the id of a token. Mend it, or remove it.")


def _refuse_rope(config: Mapping[str, Any], where: str) -> None:
    names = (*ABOVE_ZERO, *SHARES, *(ROPE_ABOVE_ZERO if any(name in where for name in ROPE) else ()))
    for name, value in config.items():
        most, limit = (1, " and at most 1") if name in SHARES else (math.inf, "")
        numbers = value if isinstance(value, list) else [value]  # one for each layer, or each frequency
        if name == "layer_rope_theta":
            numbers = [base for base in numbers if base != 0]  # 0: that layer has no rotation
        good = (number is None or (_is_number(number) and 0 < number <= most) for number in numbers)
        if name.endswith(names) and not all(good):
            raise UnsupportedError(f"{where}: {name} is {shown(value)}, not a number above 0{limit}. Mend it.")
    low, high = config.get("low_freq_factor"), config.get("high_freq_factor")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        raise UnsupportedError(f"{where}: low_freq_factor is {low}, not below high_freq_factor, {high}. Mend it.")


def _refuse_numbers(config: Mapping[str, Any], where: str) -> None:
    for names, (least, most) in NUMBERS.items():
        for name in names:
            if not isinstance(config.get(name), list):  # some architectures have one for each layer
                whole_number(config, name, least, most, where, UnsupportedError)
    layers = max(_whole(config.get(name)) for name in LAYERS)
    experts = max(_whole(config.get(name)) for name in EXPERTS)
    if layers * experts > MOST_EXPERTS_OF_ALL:
        raise UnsupportedError(f"{where}: {layers} layers of {experts} experts are more than quantkit takes")
    for name, value in config.items():
        if name.endswith(("_eps", "_epsilon")) and value is not None and not (_is_number(value) and 0 <= value < 1):
            raise UnsupportedError(
                f"{where}: {name} is {shown(value)}, not a number from 0 to 1. Mend the config.json."
            )


def _refuse_kinds(config: Mapping[str, Any], where: str) -> None:
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise UnsupportedError(f"{where}: architectures is {shown(classes)}, not a list of names")
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise UnsupportedError(f"{where}: model_type is {shown(kind)}, not a name")
    for name in ROPE:
        if not isinstance(config.get(name), dict | None):
            raise UnsupportedError(f"{where}: {name} is {shown(config[name])}, not keys and values")


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mappings(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping, `value` itself and those inside, with the path to it."""
    if isinstance(value, dict):
        yield place, {str(key): inner for key, inner in value.items()}  # in memory some keys are numbers
        for key, inner in value.items():
            yield from _mappings(inner, f"{place}: {key}" if place == "config.json" else f"{place}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _mappings(inner, place)


def _scalars(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no list or mapping, with the path to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _scalars(inner, f"{place}: {key}" if place == "config.json" else f"{place}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _scalars(inner, place)
    else:
        yield place, value
