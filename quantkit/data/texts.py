"""Texts and their token ids: WikiText-2 by `datasets`, a user's file, or a bundled text.

The bundled texts were written for quantkit. Each has one half for calibration and one for evaluation, without common
passages. `sample` is used if the hub cannot be reached. Its calibration half is the first twenty articles of
`sample_articles.txt` (in WikiText's layout) and the files of `SECTIONS`; its evaluation half is the last twenty
articles. Each of `KINDS` is a text; `mixed` interleaves all of them. Pages, word counts and detokenization of WikiText
follow lm-evaluation-harness (lm_eval/tasks/wikitext, data set EleutherAI/wikitext_document_level). `clean` has the same
steps in the same order, even steps without effect.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Literal
from urllib.request import urlopen

import numpy as np

from quantkit.data.chat import Conversation, parse_lines, parse_plain, render
from quantkit.errors import TextError
from quantkit.system.untrusted import path_of, read_text, reraise_as

WARM_UP = "Name three rivers of Europe and the sea that each of them flows into."

PROMPTS = (
    # Code.
    "Write a Python function that returns the longest run of equal characters in a string, and explain each line.",
    "Here is a SQL table orders(id, customer, day, amount). Write a query that gives each customer's largest order of "
    "every month, and say which index would help.",
    "Explain what this C function does and where it can go wrong:\n\n"
    "int find(const int *a, int n, int x) {\n    int lo = 0, hi = n;\n    while (lo < hi) {\n"
    "        int mid = (lo + hi) / 2;\n        if (a[mid] < x) lo = mid + 1; else hi = mid;\n    }\n"
    "    return a[lo] == x ? lo : -1;\n}\n",
    # Literature.
    "Tell the story of a lighthouse keeper who finds a letter in a bottle, in the words of an old novel.",
    "Compare how Homer and Virgil let their heroes leave home, and what each journey says about duty.",
    "Write a short poem about the first snow in a harbour town, and then say in two sentences how its rhythm works.",
    # Arithmetic.
    "A train leaves at 9:40 and travels 156 km at 72 km/h, waits 25 minutes, and goes on for 90 km at 60 km/h. "
    "When does it arrive? Show every step.",
    "Divide 7,392 by 48 by hand and check the result by multiplication.",
    "A shop lowers a price by 20 percent and a week later raises it by 25 percent. Compare the last price with the "
    "first for a coat of 140 euros, and explain the result in general.",
)


Split = Literal["calibration", "evaluation"]
Part = str | Conversation
WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
HUB_SPLIT: dict[Split, str] = {"calibration": "train", "evaluation": "test"}
KINDS = ("articles", "chat", "code", "languages")
NAMES = ("sample", *KINDS, "mixed")
SECTIONS = ("articles", "chat", "prose", "code", "languages")  # of the sample for calibration, in this order
# Where a document of a kind begins; in other languages after an empty line.
BEGINNINGS = {
    "articles": r"^(?= = [^=\n].* = $)",
    "code": r"^(?=(?:#|//|--|;|/\*|<!--) file: )",
    "languages": r"(?<=\n\n)(?=.)",
}


@dataclass(frozen=True)
class Text:
    """A text with its name; `parts` holds conversations and plain texts if the text has conversations."""

    name: str  # in tables
    content: str
    bundled: bool = False
    parts: tuple[Part, ...] = ()  # of a text with conversations: conversations and plain texts, in order

    @property
    def sha256(self) -> str:
        """Return the hex sha256 of the content in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(path: str | None, split: Split) -> Text:
    """Load the bundled text named `path`, or the file at `path`; a JSON lines file may hold conversations.

    If `path` is None, load WikiText-2 (raw) if the hub is reachable, else the sample. Raises TextError.
    """
    if path is None:
        return _wikitext(split) or sample_text(split)
    if path in NAMES:
        return bundled_text(path, split)
    file = path_of(path, TextError)
    if not file.is_file():
        raise TextError(f"the text file {file} does not exist")
    text = read_text(file, TextError, "Save it as UTF-8.", most=math.inf)
    if file.suffix == ".jsonl":
        return _of_parts(file.name, parse_lines(text, file), text)
    return Text(file.name, text)


def sample_text(split: Split) -> Text:
    """Return the calibration or evaluation half of the bundled sample."""
    return bundled_text("sample", split)


def bundled_text(name: str, split: Split) -> Text:
    """Return the calibration or evaluation half of a bundled text."""
    if name == "sample":
        first, second = _articles()
        sections = (_bundled(f"kinds/{kind}_calibration.txt") for kind in SECTIONS)
        content = first + "".join(sections) if split == "calibration" else second
        return Text(f"quantkit's bundled sample, {split} part", content, bundled=True)
    title = f"quantkit's bundled text {name}, {split} part"
    parts = parts_of(name, split)
    said = "\n---\n\n".join(part if isinstance(part, str) else f"{part.plain}\n" for part in parts)
    return replace(_of_parts(title, parts, said), bundled=True)


def _of_parts(name: str, parts: tuple[Part, ...], content: str) -> Text:
    """Return a text made of parts; `content` is its content if it has conversations, else the joined parts."""
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
    with reraise_as("WikiText-2 could not be loaded from the hub", TextError, f"Give a file with {option}."):
        import datasets  # takes half a second, so imported only when needed

        rows = datasets.load_dataset(*WIKITEXT, split=HUB_SPLIT[split])
        content = "".join(row or "\n" for row in rows["text"])
    return Text(f"WikiText-2 raw {HUB_SPLIT[split]}", content)


def parts_of(name: str, split: Split) -> tuple[Part, ...]:
    """Return the documents of one of `KINDS`, or for ``mixed`` all of them, interleaved."""
    if name == "mixed":
        return _in_turn([parts_of(kind, split) for kind in KINDS])
    if name == "articles":
        first, second = _articles()
        content = first + _bundled("kinds/articles_calibration.txt") if split == "calibration" else second
    else:
        content = _bundled(f"kinds/{name}_{split}.txt")
    if name == "chat":
        further = parse_plain(_bundled("kinds/chat_calibration_further.txt")) if split == "calibration" else ()
        return parse_plain(content) + further
    return tuple(part for part in re.split(BEGINNINGS[name], content, flags=re.MULTILINE) if part.strip())


def _articles() -> tuple[str, str]:
    articles = _bundled("sample_articles.txt")
    starts = [m.start() for m in re.finditer(BEGINNINGS["articles"], articles, flags=re.MULTILINE)]
    middle = starts[len(starts) // 2]
    return articles[:middle], articles[middle:]


def _in_turn(kinds: list[tuple[Part, ...]]) -> tuple[Part, ...]:
    """Interleave documents so that every stretch holds each kind in proportion to its size."""
    placed: list[tuple[float, Part]] = []
    for parts in kinds:
        sizes = [len(part) if isinstance(part, str) else len(part.plain) for part in parts]
        done = 0
        for part, size in zip(parts, sizes, strict=True):
            placed.append(((done + size / 2) / sum(sizes), part))
            done += size
    return tuple(part for _, part in sorted(placed, key=lambda one: one[0]))


def _bundled(name: str) -> str:
    return files("quantkit").joinpath("data", *name.split("/")).read_text(encoding="utf-8")


def papers_text(content: str) -> str:
    """Join the rows with blank lines, as the GPTQ and AWQ papers join the data set's rows (blank rows are empty)."""
    rows = re.findall(r"[^\n]*\n|[^\n]+", content)  # lines of a file: no other mark ends one
    return "\n\n".join(row if row.strip() else "" for row in rows)


def ids_of(tokenizer: Any, text: Text) -> np.ndarray:
    """Return the (N,) int64 token ids of a text, with rendered conversations; raises TextError without a template."""
    if not text.parts:
        return encode(tokenizer, text.content)
    parts = [part if isinstance(part, str) else render(tokenizer, part) for part in text.parts]
    return encode(tokenizer, "".join(parts), add_special_tokens=False)


def encode(tokenizer: Any, content: str, **options: bool) -> np.ndarray:
    """Return the (N,) int64 token ids of a text, with special tokens that the tokenizer adds, such as BOS.

    `options` go to the tokenizer: `add_special_tokens=False` omits special tokens.
    """
    return np.asarray(tokenizer(content, verbose=False, **options)["input_ids"], dtype=np.int64)


def adds_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts its BOS token before a text."""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def first_token(tokenizer: Any) -> int | None:
    """Return the id of the token that lm-evaluation-harness puts before a text: BOS, else EOS, else None."""
    token: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return token


_NUMBERS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}
_ENDS = {f" {mark} ": f"{mark} " for mark in ":;.!?,"}
_REST = {
    "= = = =": "====",
    "= = =": "===",
    "= =": "==",
    " \u00b0 ": "\u00b0",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def pages(content: str) -> list[str]:
    """Split a text into pages at lines `= Title =`; text before the first title is a page unless blank."""
    complete: list[str] = []
    lines: list[str] = []
    for line in content.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "\n".join(lines).strip():
                complete.append("\n".join(lines))
            lines = []
        lines.append(line)
    return [*complete, "\n".join(lines)]


def count_words(page: str) -> int:
    """Count words as the harness does: split at white space; an empty part at either end counts as a word."""
    return len(re.split(r"\s+", page))


def clean(page: str) -> str:
    """Remove the spaces that WikiText puts around punctuation."""
    text = page.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for old, new in (_NUMBERS | _ENDS).items():
        text = text.replace(old, new)
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        start, end = re.escape(opening), re.escape(closing)
        text = re.sub(rf"{start}\s*([^{end}]*?)\s*{end}", rf"{opening}\1{closing}", text)
    for old, new in _REST.items():
        text = text.replace(old, new)
    return text
