"""Texts: WikiText-2 through `datasets`, any file of the user, or the bundled sample; and their cut into tokens.

The bundled sample was written for quantkit. `data/sample_articles.txt` is in WikiText's layout: its first twenty
articles serve calibration, its last twenty evaluation. `data/sample_kinds.txt` serves calibration: more articles,
conversations, prose, code, and other languages. Tables that were measured on the sample say so.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from http.client import HTTPException
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Literal
from urllib.request import urlopen

import numpy as np

from quantkit.errors import TextError
from quantkit.untrusted import path_of, told

Split = Literal["calibration", "evaluation"]
WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
HUB_SPLIT: dict[Split, str] = {"calibration": "train", "evaluation": "test"}
LONG_TEXT = 1 << 16  # characters from which the ids of a text are kept
KEPT_TEXTS = 4
_kept: dict[bytes, np.ndarray] = {}


@dataclass(frozen=True)
class Text:
    """A text, the name that tables print for it, and the sha256 of its UTF-8 bytes."""

    name: str
    content: str
    bundled: bool = False

    @property
    def sha256(self) -> str:
        """Hex digest of the content."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(path: str | None, split: Split) -> Text:
    """Load the file at `path`; without one, WikiText-2 (raw) where the hub can be reached, else the sample."""
    if path is None:
        return _wikitext(split) or sample_text(split)
    file = path_of(path, TextError)
    if not file.is_file():
        raise TextError(f"the text file {file} does not exist")
    with told(f"the text file {file} cannot be read", TextError):
        content = file.read_bytes()
    try:
        return Text(file.name, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None


def sample_text(split: Split) -> Text:
    """The bundled sample's part for `split`."""
    articles = _bundled("sample_articles.txt")
    starts = [m.start() for m in re.finditer(r"^ = [^=\n].* = $", articles, flags=re.MULTILINE)]
    middle = starts[len(starts) // 2]
    content = articles[:middle] + _bundled("sample_kinds.txt") if split == "calibration" else articles[middle:]
    return Text(f"quantkit's bundled sample, {split} part", content, bundled=True)


def _bundled(name: str) -> str:
    return files("quantkit").joinpath("data", name).read_text(encoding="utf-8")


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
    with told("WikiText-2 could not be loaded from the hub", TextError, "Give a file with --text."):
        import datasets  # takes half a second, so only where there is something to load

        rows = datasets.load_dataset(*WIKITEXT, split=HUB_SPLIT[split])
        content = "".join(row or "\n" for row in rows["text"])
    return Text(f"WikiText-2 raw {HUB_SPLIT[split]}", content)


def papers_text(content: str) -> str:
    """Join the rows with a blank line, as the GPTQ and AWQ papers do with the dataset's rows (blank ones empty)."""
    rows = re.findall(r"[^\n]*\n|[^\n]+", content)  # lines of a file: no other mark ends one
    return "\n\n".join(row if row.strip() else "" for row in rows)


def encode(tokenizer: Any, content: str) -> np.ndarray:
    """Text -> (N,) int64 token ids, with what the tokenizer adds by itself (such as BOS).

    The ids of the last long texts are kept: the variants of a comparison have them from one pass of the tokenizer.
    """
    key = _kept_under(tokenizer, content) if len(content) >= LONG_TEXT else None
    if key is not None and key in _kept:
        return _kept[key].astype(np.int64)
    ids = np.asarray(tokenizer(content, verbose=False)["input_ids"], dtype=np.int64)
    if key is not None:
        while len(_kept) >= KEPT_TEXTS:
            del _kept[next(iter(_kept))]
        _kept[key] = ids.astype(np.int32)
    return ids


def _kept_under(tokenizer: Any, content: str) -> bytes | None:
    """A digest of all that decides the ids; None where the tokenizer's state cannot be had as text."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    state = (type(tokenizer).__qualname__, getattr(tokenizer, "split_special_tokens", None), backend.to_str(), content)
    return hashlib.sha256(repr(state).encode("utf-8", "surrogatepass")).digest()


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS token before a text by itself."""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def first_token(tokenizer: Any) -> int | None:
    """What lm-evaluation-harness puts before a text: BOS, else EOS."""
    token: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return token
