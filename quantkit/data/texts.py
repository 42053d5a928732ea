"""Texts: WikiText-2 through `datasets`, any file of the user, or a bundled text; and the token ids of a text.

Conversations, of a bundled text or of a user's JSON lines, get their tokens by the chat template of the model: `Text`
holds what is said, and `ids_of` renders it for a tokenizer. Tables that were measured on a bundled text say so.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib.util import find_spec
from typing import Any
from urllib.request import urlopen

import numpy as np

from quantkit.data.bundled import NAMES, Part, Split, parts_of, sample
from quantkit.data.chat import Conversation, parse_lines, rendered
from quantkit.errors import TextError
from quantkit.untrusted import path_of, told

WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
HUB_SPLIT: dict[Split, str] = {"calibration": "train", "evaluation": "test"}
LONG_TEXT = 1 << 16  # characters from which the ids of a text are kept
KEPT_TEXTS = 4
_kept: dict[bytes, np.ndarray] = {}


@dataclass(frozen=True)
class Text:
    """A text, the name that tables print for it, and the sha256 of its UTF-8 bytes.

    Of a text with conversations `parts` has these and the plain texts between them, in order.
    """

    name: str
    content: str
    bundled: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def sha256(self) -> str:
        """Hex digest of the content."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(path: str | None, split: Split) -> Text:
    """Load the bundled text of that name, or the file at `path`; a file of JSON lines may hold conversations.

    Without a path, WikiText-2 (raw) where the hub can be reached, else the sample. Raises TextError.
    """
    if path is None:
        return _wikitext(split) or sample_text(split)
    if path in NAMES:
        return bundled_text(path, split)
    file = path_of(path, TextError)
    if not file.is_file():
        raise TextError(f"the text file {file} does not exist")
    with told(f"the text file {file} cannot be read", TextError):
        content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    if file.suffix == ".jsonl":
        return _of_parts(file.name, parse_lines(text, file), text)
    return Text(file.name, text)


def sample_text(split: Split) -> Text:
    """The bundled sample's part for `split`."""
    return bundled_text("sample", split)


def bundled_text(name: str, split: Split) -> Text:
    """The part for `split` of the bundled text of that name."""
    if name == "sample":
        return Text(f"quantkit's bundled sample, {split} part", sample(split), bundled=True)
    title = f"quantkit's bundled text {name}, {split} part"
    parts = parts_of(name, split)
    said = "\n---\n\n".join(part if isinstance(part, str) else f"{part.plain}\n" for part in parts)
    return replace(_of_parts(title, parts, said), bundled=True)


def _of_parts(name: str, parts: tuple[Part, ...], content: str) -> Text:
    """A text of these parts; one of plain texts alone is their sum, and `content` is hashed of others."""
    if any(isinstance(part, Conversation) for part in parts):
        return Text(name, content, parts=parts)
    return Text(name, "".join(map(str, parts)))


def _wikitext(split: Split) -> Text | None:
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    if find_spec("datasets") is None:
        return None
    try:
        with urlopen(constants.ENDPOINT, timeout=10):
            pass
    except (OSError, ValueError, HTTPException):
        return None
    option = "--text" if split == "evaluation" else "--calibration-text"
    with told("WikiText-2 could not be loaded from the hub", TextError, f"Give a file with {option}."):
        import datasets  # takes half a second, so only where there is something to load

        rows = datasets.load_dataset(*WIKITEXT, split=HUB_SPLIT[split])
        content = "".join(row or "\n" for row in rows["text"])
    return Text(f"WikiText-2 raw {HUB_SPLIT[split]}", content)


def papers_text(content: str) -> str:
    """Join the rows with a blank line, as the GPTQ and AWQ papers do with the dataset's rows (blank ones empty)."""
    rows = re.findall(r"[^\n]*\n|[^\n]+", content)  # lines of a file: no other mark ends one
    return "\n\n".join(row if row.strip() else "" for row in rows)


def ids_of(tokenizer: Any, text: Text) -> np.ndarray:
    """Text -> (N,) int64 token ids; conversations by the tokenizer's chat template, which gives all special tokens.

    Raises TextError where there is no template for conversations.
    """
    if not text.parts:
        return encode(tokenizer, text.content)
    return encode(tokenizer, "".join(rendered(tokenizer, text.parts)), adds_special=False)


def encode(tokenizer: Any, content: str, *, adds_special: bool = True) -> np.ndarray:
    """Text -> (N,) int64 token ids, with what the tokenizer adds by itself (such as BOS) unless it shall not.

    The ids of the last long texts are kept: the variants of a comparison have them from one pass of the tokenizer.
    """
    options = {} if adds_special else {"add_special_tokens": False}
    key = _kept_under(tokenizer, content, options) if len(content) >= LONG_TEXT else None
    if key is not None and key in _kept:
        return _kept[key].astype(np.int64)
    ids = np.asarray(tokenizer(content, verbose=False, **options)["input_ids"], dtype=np.int64)
    if key is not None:
        while len(_kept) >= KEPT_TEXTS:
            del _kept[next(iter(_kept))]
        _kept[key] = ids.astype(np.int32)
    return ids


def _kept_under(tokenizer: Any, content: str, options: dict[str, bool]) -> bytes | None:
    """A digest of all that decides the ids; None where the tokenizer's state cannot be had as text."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    split = getattr(tokenizer, "split_special_tokens", None)
    state = (type(tokenizer).__qualname__, split, options, backend.to_str(), content)
    return hashlib.sha256(repr(state).encode("utf-8", "surrogatepass")).digest()


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS token before a text by itself."""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def first_token(tokenizer: Any) -> int | None:
    """What lm-evaluation-harness puts before a text: BOS, else EOS."""
    token: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return token
