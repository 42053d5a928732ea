"""The texts that come with quantkit, written for it: which there are, and which half serves what.

`sample` is the mix that is taken where the hub cannot be reached: `sample_articles.txt` is in WikiText's layout, its
first twenty articles serve calibration, its last twenty evaluation; `sample_kinds.txt` serves calibration and holds
articles, conversations, prose, code, and other languages, one after the other. Each kind of `KINDS` can be had apart,
by the halves that `halves` names; `mixed` is all of them in turn. No passage of a half is in the other.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Literal

from quantkit.data.chat import Conversation, parse_plain

Split = Literal["calibration", "evaluation"]
Part = str | Conversation
KINDS = ("articles", "chat", "code", "languages")
NAMES = ("sample", *KINDS, "mixed")
# The first line of each section of sample_kinds.txt.
SECTIONS = {
    "articles": " = Aardvark = ",
    "chat": "User:",
    "prose": "The Clock Mender's Apprentice",
    "code": "# file: inventory.py",
    "languages": "Nach fünf Jahren fährt die Bergbahn wieder",
}
# Where a document of a kind begins; in other languages behind an empty line.
BEGINNINGS = {
    "articles": r"^(?= = [^=\n].* = $)",
    "code": r"^(?=(?:#|//|--|;|/\*|<!--) file: )",
    "languages": r"(?<=\n\n)(?=.)",
}


def sample(split: Split) -> str:
    """The mix for `split`."""
    first, second = _articles()
    return first + _read("sample_kinds.txt") if split == "calibration" else second


def parts_of(name: str, split: Split) -> tuple[Part, ...]:
    """The documents of one of `KINDS`, or of all in turn for ``mixed``."""
    if name == "mixed":
        return _in_turn([parts_of(kind, split) for kind in KINDS])
    if name == "articles":
        content = _articles()[0] + _section(name) if split == "calibration" else _articles()[1]
    elif split == "evaluation":
        content = _read(f"kinds/{name}_evaluation.txt")
    elif name == "chat":
        return parse_plain(_section(name)) + parse_plain(_read("kinds/chat_calibration.txt"))
    else:
        content = _section(name)
    if name == "chat":
        return parse_plain(content)
    return tuple(part for part in re.split(BEGINNINGS[name], content, flags=re.MULTILINE) if part.strip())


def _articles() -> tuple[str, str]:
    articles = _read("sample_articles.txt")
    starts = [m.start() for m in re.finditer(r"^ = [^=\n].* = $", articles, flags=re.MULTILINE)]
    middle = starts[len(starts) // 2]
    return articles[:middle], articles[middle:]


def _section(name: str) -> str:
    content = _read("sample_kinds.txt")
    starts = {kind: content.index(f"\n{line}\n") + 1 for kind, line in SECTIONS.items()}
    ends = dict(zip(starts, [*list(starts.values())[1:], len(content)], strict=True))
    return content[0 if name == "articles" else starts[name] : ends[name]]


def _in_turn(kinds: list[tuple[Part, ...]]) -> tuple[Part, ...]:
    """All documents, so that every stretch holds each kind in proportion to its size."""
    placed: list[tuple[float, Part]] = []
    for parts in kinds:
        sizes = [len(part) if isinstance(part, str) else len(part.plain) for part in parts]
        done = 0
        for part, size in zip(parts, sizes, strict=True):
            placed.append(((done + size / 2) / sum(sizes), part))
            done += size
    return tuple(part for _, part in sorted(placed, key=lambda one: one[0]))


def _read(name: str) -> str:
    return files("quantkit").joinpath("data", *name.split("/")).read_text(encoding="utf-8")
