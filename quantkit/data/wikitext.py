"""WikiText as lm-evaluation-harness's task `wikitext` reads it: its pages, its words, and its text made plain again.

Facts: https://github.com/EleutherAI/lm-evaluation-harness, lm_eval/tasks/wikitext, and the data set
EleutherAI/wikitext_document_level. The order of the steps of `clean` is theirs, and so is what does nothing.
"""

from __future__ import annotations

import re

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
    """Return the pages of a text, each from a line `= Title =` on; text before the first is a page unless blank."""
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
    """Count words by white space; a blank beginning and a blank end count as one more each."""
    return len(re.split(r"\s+", page))


def clean(page: str) -> str:
    """Remove the spaces that WikiText has around punctuation."""
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
