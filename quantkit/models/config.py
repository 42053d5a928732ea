"""Load a checkpoint's configuration and tokenizer with transformers, after validating config.json.

Keys of config.json: https://huggingface.co/docs/transformers/main_classes/configuration
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.side_files import TOKENIZER_SETTINGS, copy_side_files, refuse_large_files
from quantkit.errors import SourceError, UnsupportedError
from quantkit.system.files import temporary_folder
from quantkit.system.modules import importing
from quantkit.system.untrusted import DEEPEST, depth_exceeds, read_object, reraise_as, shown, silenced, whole_number

CONTEXT = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
# Architectures with a position table of limited length.
TABLES = ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt", "opt")
ADD_ROWS = (
    "add the rows with transformers: model.resize_token_embeddings(max(tokenizer.get_vocab().values()) + 1); "
    "model.save_pretrained(folder)"
)
PROBE = "The 3 quick brown foxes\n  jumped: 12345, naïve — 你好."

Range = tuple[Callable[[float], bool], str]
# Limits of a config.json, far above published models. transformers accepts any value: a billion layers are an
# endless loop, a head size of zero is a division by zero.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_EXPERTS_OF_ALL = 100_000  # in all layers together
# Integers: minimum and maximum.
NUMBERS: Mapping[tuple[str, ...], tuple[int, int]] = {
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"): (1, 1 << 20),
    ("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"): (1, 1 << 24),
    ("n_inner", "vocab_size"): (1, 1 << 24),
    LAYERS: (1, 4096),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): (1, 1 << 16),
    ("num_key_value_heads", "num_kv_heads", "n_head_kv", "head_dim", "rotary_dim"): (1, 1 << 16),
    ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"): (1, 1 << 30),
    (*EXPERTS, "num_experts_per_tok"): (0, 4096),
}
ROPE = ("rope_parameters", "rope_scaling")
INFINITE = ("time_step_limit",)  # settings that may be infinite
# Numbers, or lists of them, by endings of their names. `IN_ROPE`: in RoPE settings.
POSITIVE: Range = (lambda number: number > 0, "a number above 0")
RANGES: Mapping[tuple[str, ...], Range] = {
    ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "original_max_position_embeddings"): POSITIVE,
    ("partial_rotary_factor", "rotary_pct"): (lambda number: 0 < number <= 1, "a number above 0 and at most 1"),
    ("_eps", "_epsilon"): (lambda number: 0 <= number < 1, "a number from 0 to 1"),
}
IN_ROPE: Mapping[tuple[str, ...], Range] = {**RANGES, ("factor", "beta_fast", "beta_slow"): POSITIVE}
LARGEST_ID = 1 << 24  # of a token, positive or negative: some published models have -1, or ids without a row


def torch_left_out() -> bool:
    """Return whether transformers was imported without torch, so that this process cannot build models."""
    if "transformers" not in sys.modules:
        return False
    from transformers.utils import is_torch_available

    return not is_torch_available()


def refuse_config(config: Mapping[str, Any], tensors: int | None = None) -> None:
    """Raise UnsupportedError for impossible values in config.json.

    `tensors` is the checkpoint's number of tensors; each decoder block needs at least one.
    """
    if depth_exceeds(config, DEEPEST):
        raise UnsupportedError(f"config.json is nested deeper than {DEEPEST} levels. Give the model's own config.json.")
    for where, value in _inside(config, "config.json"):
        if isinstance(value, float) and not math.isfinite(value) and not any(name in where for name in INFINITE):
            raise UnsupportedError(f"{where} is {value}, which is not a finite number. Fix the config.json.")
        if isinstance(value, dict):
            values = {str(key): inner for key, inner in value.items()}  # in memory, some keys are numbers
            _refuse_numbers(values, where)
            _refuse_ranges(values, where)
            refuse_token_ids(values, where)
    layers = max(_whole(config.get(name)) for name in LAYERS)
    if tensors is not None and layers > tensors:
        raise UnsupportedError(
            f"config.json counts {layers} decoder blocks, but the checkpoint has {tensors} tensors. "
            "Give the config.json that belongs to these weights."
        )


def refuse_token_ids(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError for an invalid special token id, with which transformers' generate() would fail."""
    for name, value in config.items():
        ids = value if isinstance(value, list) else [value]
        good = (number is None or (type(number) is int and abs(number) < LARGEST_ID) for number in ids)
        if name.endswith("_token_id") and not (ids and all(good)):
            raise UnsupportedError(f"{where}: {name} is {shown(value)}, not a token id. Fix it or remove it.")


def _refuse_ranges(config: Mapping[str, Any], where: str) -> None:
    for name, value in config.items():
        numbers = value if isinstance(value, list) else [value]  # one per layer or frequency
        if name == "layer_rope_theta":
            numbers = [base for base in numbers if base != 0]  # 0: that layer has no rotation
        for ends, (good, what) in (IN_ROPE if any(key in where for key in ROPE) else RANGES).items():
            if name.endswith(ends) and not all(n is None or (_is_number(n) and good(n)) for n in numbers):
                raise UnsupportedError(f"{where}: {name} is {shown(value)}, not {what}. Fix the config.json.")
    low, high = config.get("low_freq_factor"), config.get("high_freq_factor")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        raise UnsupportedError(f"{where}: low_freq_factor is {low}, not below high_freq_factor, {high}. Fix it.")


def _refuse_numbers(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedError for values in config.json that should be integers, names or mappings but are not."""
    for names, (least, most) in NUMBERS.items():
        for name in names:
            if not isinstance(config.get(name), list):  # some architectures have one per layer
                whole_number(config, name, least, most, where, UnsupportedError)
    layers = max(_whole(config.get(name)) for name in LAYERS)
    experts = max(_whole(config.get(name)) for name in EXPERTS)
    if layers * experts > MOST_EXPERTS_OF_ALL:
        raise UnsupportedError(f"{where}: {layers} layers of {experts} experts are more than quantkit supports")
    classes = config.get("architectures")
    if not isinstance(classes, list | None) or not all(isinstance(name, str) for name in classes or ()):
        raise UnsupportedError(f"{where}: architectures is {shown(classes)}, not a list of names")
    for name, kind, what in (("model_type", str, "a name"), *((name, dict, "keys and values") for name in ROPE)):
        if not isinstance(config.get(name), kind | None):
            raise UnsupportedError(f"{where}: {name} is {shown(config[name])}, not {what}")


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inside(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for `value` and everything nested in it."""
    yield where, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _inside(inner, f"{where}: {key}" if where == "config.json" else f"{where}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _inside(inner, where)


@importing()
def open_config(config: dict[str, Any]) -> Any:
    """Return the transformers configuration for a config.json's content; raise UnsupportedError.

    Custom code in the checkpoint (`auto_map`) never runs: the model type must be built into transformers.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    refuse_config(config)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"the model type {shown(config.get('model_type'))} needs its own code, which quantkit does not run, and "
            "transformers does not support it. Use an architecture of transformers."
        )
    with temporary_folder() as folder:
        plain = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
        (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        what = f"transformers cannot read the config.json of the architecture {shown(config.get('model_type'))}"
        with reraise_as(what, UnsupportedError):
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json leaves out: transformers' defaults, and the names that transformers 4 used.

    Other readers know only those names, and replace a missing value by a default of their own without a word.
    """
    from transformers import PreTrainedConfig

    settings = open_config(dict(config))
    every = {**{key: value for key, value in settings.to_dict().items() if value is not None}, **config}
    for other, name in settings.attribute_map.items():
        if name in every:
            every.setdefault(other, every[name])
    if {"hidden_size", "num_attention_heads"} <= every.keys():
        every.setdefault("head_dim", every["hidden_size"] // every["num_attention_heads"])
    if "full_attention" in (types := every.get("layer_types") or []):
        every.setdefault("sliding_window_pattern", types.index("full_attention") + 1)
    rope = every.get("rope_parameters") or {}
    if "full_attention" in rope:
        every.setdefault("rope_local_base_freq", rope.get("sliding_attention", {}).get("rope_theta"))
        rope = rope["full_attention"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            every.setdefault(key, rope[key])
    if rope:
        every.setdefault("rope_scaling", None if rope.get("rope_type", "default") == "default" else rope)
    known = {*config, *PreTrainedConfig().to_dict()}
    return {key: value for key, value in every.items() if key not in known}


def padding_fix(config: Mapping[str, Any]) -> str:
    """Return a fix for a padding token id outside the embedding, which torch refuses; empty if there is none."""
    pad, rows = _stated(config, ("pad_token_id",)), vocabulary_of(config)
    if pad is None or rows is None or pad < rows:
        return ""
    return f"config.json has pad_token_id = {pad}, but the embedding has {rows} rows: set it to null."


@importing()
def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in `folder`; raise SourceError if it cannot encode and decode."""
    from transformers import AutoTokenizer

    refuse_large_files(folder)
    what = f"{folder} has no tokenizer that transformers can load"
    # transformers mistakes a damaged SentencePiece model for one of tiktoken.
    bare = (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file()
    fix = "Its tokenizer.model may be damaged: fetch it again." if bare else ""
    with _without_code(folder) as place, reraise_as(what, SourceError, fix), silenced():
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    fix = "Fetch the tokenizer's files again."
    with reraise_as(f"the tokenizer in {folder} cannot encode and decode a text", SourceError, fix), silenced():
        ids = tokenizer(PROBE, verbose=False)["input_ids"]
        places = tokenizer.get_vocab().values()
        tokenizer.decode(ids)
        bad = next((i for i in (*ids, *places) if not isinstance(i, int) or i < 0), None)
    if bad is not None:
        raise SourceError(f"the tokenizer in {folder} has the token id {shown(bad)}. {fix}")
    _refuse_template(tokenizer.chat_template, folder)
    return tokenizer


@contextmanager
def _without_code(folder: Path) -> Iterator[Path]:
    """Yield `folder`, or a temporary copy of its small files without the custom code that its tokenizer names."""
    settings = folder / TOKENIZER_SETTINGS
    if not settings.is_file() or "auto_map" not in read_object(settings, SourceError, "Fetch the file again."):
        yield folder
        return
    with temporary_folder() as copy:
        copy_side_files(folder, copy)
        if (folder / "config.json").is_file():
            config = read_object(folder / "config.json", SourceError, "Fetch it again.")
            config.pop("auto_map", None)
            (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield copy


def keep_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save the tokenizer in `folder` if its files do not load without the model's config.json; raise SourceError."""
    if type(load_tokenizer(folder)) is not type(tokenizer):
        tokenizer.save_pretrained(folder)


def _refuse_template(template: Any, folder: Path) -> None:
    """Raise SourceError for a chat template that is not a string or not valid jinja."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """transformers' jinja tag `generation`, which marks an assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    templates = template.values() if isinstance(template, dict) else () if template is None else (template,)
    for text in templates:
        if not isinstance(text, str):
            raise SourceError(f"the tokenizer in {folder} has the chat template {shown(text)}, which is not a string")
        what = f"the chat template of the tokenizer in {folder} cannot be read"
        with reraise_as(what, SourceError, "Fix it, or remove it."):
            Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(text)  # parsed, never rendered


def context_of(config: Mapping[str, Any]) -> int:
    """Return the maximum context length in tokens, found as in lm-evaluation-harness; 2048 if not stated."""
    context = _stated(config, CONTEXT[:3])
    return 2048 if context is None else context


def note_beyond_context(config: Mapping[str, Any], length: int, what: str) -> str | None:
    """Return a note if `what`, of `length` tokens, exceeds the stated context length, else None.

    Raises UnsupportedError if the model has no position embeddings beyond it.
    """
    context = _stated(config, CONTEXT)
    if context is None or length <= context or config.get("alibi"):
        return None
    if config.get("model_type") in TABLES:
        raise UnsupportedError(
            f"{what} of {length} tokens are longer than the model's {context} positions. Give shorter ones."
        )
    return f"{what} of {length} tokens are longer than the model's context of {context} tokens"


def refuse_ids(config: Mapping[str, Any], ids: NDArray[np.int64], what: str) -> None:
    """Raise SourceError for token ids outside the embedding."""
    rows = vocabulary_of(config)
    if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise SourceError(
            f"the tokenizer gives {what} the token ids {ids.min()} to {ids.max()}, but the embedding has {rows} rows. "
            f"Use the model's own tokenizer, or {ADD_ROWS}"
        )


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return the embedding's number of rows as config.json states it, or None."""
    return _stated(config, ("vocab_size",))


def _stated(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    inner = config.get("text_config") or config
    return next((inner[name] for name in names if isinstance(inner.get(name), int)), None)


@dataclass(frozen=True)
class Beside:
    """Numbers of values per token that pass between blocks."""

    states: int = 1  # hidden states
    of_text: int = 0  # values that blocks are called with
    shared: int = 0  # values that blocks share with later ones


def beside_states(settings: Any) -> Beside:
    """Return these numbers for a configuration, from its settings of AltUp, per-layer inputs and KV sharing."""

    def number(name: str) -> int:
        return int(getattr(settings, name, 0) or 0)

    widths: dict[str, int] = {}
    if shared := number("num_kv_shared_layers"):
        for index, kind in enumerate(settings.layer_types[:-shared]):
            layer = settings.per_layer_config[index] if hasattr(settings, "per_layer_config") else settings
            widths[kind] = 2 * int(layer.num_key_value_heads) * int(layer.head_dim)
    return Beside(
        max(1, number("altup_num_inputs")),
        number("num_hidden_layers") * number("hidden_size_per_layer_input"),
        sum(widths.values()),
    )
