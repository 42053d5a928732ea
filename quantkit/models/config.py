"""The configuration and the tokenizer that transformers makes of a checkpoint's files, and what texts these allow."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.side_files import TOKENIZER_SETTINGS, copy_side_files, refuse_large_files
from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.bounds import refuse_config
from quantkit.system.modules import importing
from quantkit.system.temporary import temporary_folder
from quantkit.untrusted import read_object, shown, silenced, told

CONTEXT = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
# Architectures that have a table with a row for each position: there is nothing beyond its end.
TABLES = ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt", "opt")
ADD_ROWS = (
    "add the rows with transformers: model.resize_token_embeddings(max(tokenizer.get_vocab().values()) + 1); "
    "model.save_pretrained(folder)"
)
PROBE = "The 3 quick brown foxes\n  jumped: 12345, naïve — 你好."


def leave_torch_out() -> None:
    """Let transformers come without torch and without models, where neither is loaded yet.

    A process that only asks it for settings and tokenizers then starts sooner and holds 300 MB less. Our own modules
    can load torch afterwards.
    """
    if sys.modules.keys() & {"torch", "transformers"}:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python takes for "cannot be imported"
    try:
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def torch_left_out() -> bool:
    """Whether transformers came without torch, so that this process cannot build its models."""
    if "transformers" not in sys.modules:
        return False
    from transformers.utils import is_torch_available

    return not is_torch_available()


@importing()
def open_config(config: dict[str, Any]) -> Any:
    """The transformers configuration of a config.json's content; raises UnsupportedError.

    Code that the checkpoint brings (`auto_map`) is never run: the model type must be one of transformers' own.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    refuse_config(config)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"the model type {shown(config.get('model_type'))} brings its own code, which quantkit does not run, and "
            "transformers has none for it. Use an architecture that transformers knows."
        )
    with temporary_folder() as folder:
        plain = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
        (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        what = f"transformers cannot read the config.json of the architecture {shown(config.get('model_type'))}"
        with told(what, UnsupportedError):
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@importing()
def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies in `folder`; raises SourceError where there is none that encodes and decodes."""
    from transformers import AutoTokenizer

    refuse_large_files(folder)
    what = f"{folder} holds no tokenizer that transformers can load"
    # transformers takes a damaged model of SentencePiece for one of tiktoken.
    bare = (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file()
    fix = "If its tokenizer.model should be a SentencePiece model, it is damaged: fetch it again." if bare else ""
    with _without_code(folder) as place, told(what, SourceError, fix), silenced():
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    fix = "Fetch the tokenizer's files again."
    with told(f"the tokenizer in {folder} cannot encode and decode a text", SourceError, fix), silenced():
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
    """`folder`, or where its tokenizer names code of its own a copy of its small files that does not.

    That copy is what an artifact gets: transformers chooses some classes by whether the key is there.
    """
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
    """Let `folder` give this tokenizer, also where its files alone do not: transformers asks the model's config.json.

    Raises SourceError.
    """
    if type(load_tokenizer(folder)) is not type(tokenizer):
        tokenizer.save_pretrained(folder)


def _refuse_template(template: Any, folder: Path) -> None:
    """Raise SourceError for a chat template that no text can be, or that jinja cannot parse."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """transformers' own tag, which marks what an assistant says."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    templates = template.values() if isinstance(template, dict) else () if template is None else (template,)
    for text in templates:
        if not isinstance(text, str):
            raise SourceError(f"the tokenizer in {folder} has the chat template {shown(text)}, which is no text")
        with told(
            f"the chat template of the tokenizer in {folder} cannot be read", SourceError, "Mend it, or take it out."
        ):
            Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(text)  # parsed, never rendered


def context_of(config: dict[str, Any]) -> int:
    """The longest context of a config.json in tokens, found as lm-evaluation-harness finds it; 2048 if it says none."""
    inner = config.get("text_config") or config
    for key in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(inner.get(key), int):
            return int(inner[key])
    return 2048


def note_beyond_context(config: Mapping[str, Any], length: int, what: str) -> str | None:
    """A note where `what` of `length` tokens is longer than the context that config.json tells, else None.

    Raises UnsupportedError where the model has no positions beyond it.
    """
    context = _stated(config, CONTEXT)
    if context is None or length <= context or config.get("alibi"):
        return None
    if config.get("model_type") in TABLES:
        raise UnsupportedError(
            f"{what} of {length} tokens are longer than the {context} positions that the model has. Give shorter ones."
        )
    return f"{what} of {length} tokens are longer than the context of {context} tokens that the model was made for"


def refuse_ids(config: Mapping[str, Any], ids: NDArray[np.int64], what: str) -> None:
    """Raise SourceError where a token id has no row in the embedding that config.json tells."""
    rows = vocabulary_of(config)
    if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise SourceError(
            f"the tokenizer gives {what} the token ids {ids.min()} to {ids.max()}, and the embedding has {rows} rows. "
            f"Give the tokenizer that belongs to the model, or {ADD_ROWS}"
        )


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding that config.json tells, if it does."""
    return _stated(config, ("vocab_size",))


def _stated(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    inner = config.get("text_config") or config
    return next((inner[name] for name in names if isinstance(inner.get(name), int)), None)


@dataclass(frozen=True)
class Beside:
    """What of each token goes from block to block beside a hidden state: so many values.

    `states` hidden states side by side (most have one), values `of_text` that blocks are called with, and what some
    blocks `shared` with later ones.
    """

    states: int = 1
    of_text: int = 0
    shared: int = 0


def beside_states(settings: Any) -> Beside:
    """By what the configuration of transformers says of AltUp, inputs of each block, and shared keys and values."""

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
