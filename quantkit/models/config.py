"""The configuration and the tokenizer that transformers makes of a checkpoint's files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.checkpoints.side_files import TOKENIZER_SETTINGS, copy_side_files, refuse_large_files
from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.bounds import refuse_config
from quantkit.system.temporary import temporary_folder
from quantkit.untrusted import read_object, shown, silenced, told

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


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies in `folder`; raises SourceError where there is none that encodes and decodes."""
    from transformers import AutoTokenizer

    refuse_large_files(folder)
    what = f"{folder} holds no tokenizer that transformers can load"
    with _without_code(folder) as place, told(what, SourceError), silenced():
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
        with told(f"the chat template of the tokenizer in {folder} cannot be read", SourceError, "Fetch it again."):
            Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(text)  # parsed, never rendered


def context_of(config: dict[str, Any]) -> int:
    """The longest context of a config.json in tokens, found as lm-evaluation-harness finds it; 2048 if it says none."""
    inner = config.get("text_config") or config
    for key in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(inner.get(key), int):
            return int(inner[key])
    return 2048
