"""llama.cpp's SentencePiece-like BPE, Gemma 4's BPE and unigram, without special tokens (src/llama-vocab.cpp).

All are quadratic in the length of the text, meant for a probe of some hundred characters.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

SPACE = "\u2581"
UNKNOWN_PENALTY = 10.0  # below the worst score
LACKING = "the step {}, which llama.cpp lacks"


def spm_scores(model: dict[str, Any]) -> dict[str, float]:
    """Return scores by text: minus the place of the first merge that makes the token, the lowest for no merge."""
    first: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        first.setdefault(left + right, -float(rank))
    last = -float(len(model["merges"]))
    return {text: first.get(text, last) for text in model["vocab"]}


def spm_tokens(text: str, ids: dict[str, int], scores: dict[str, float], prefix: bool) -> list[int]:
    """Tokenize `text` as the ``llama`` model does; characters without a token become their UTF-8 bytes."""
    symbols = list(((" " if prefix else "") + text).replace(" ", SPACE))
    while found := [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]:
        at = -max(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    tokens: list[int] = []
    for symbol in symbols:
        tokens += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return tokens


def merge_pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of the ``model`` part of a tokenizer.json, the best first."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def gemma4_tokens(text: str, ids: Mapping[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """Tokenize `text` as the ``gemma4`` model does: merges within lines; newlines in a row may be one token."""
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    tokens: list[int] = []
    for word in re.findall(r"[^\n]+|\n+", text.replace(" ", SPACE)):
        symbols = [word] if word[0] == "\n" and word in ids else list(word)
        while found := [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]:
            at = min(found)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            pieces = [symbol] if symbol in ids else [f"<0x{byte:02X}>" for byte in symbol.encode()]
            tokens += [ids[piece] for piece in pieces if piece in ids]
    return tokens


@dataclass(frozen=True)
class Unigram:
    """A unigram tokenizer, llama.cpp's ``t5`` model: the best sum of scores over the whole text."""

    pieces: dict[str, tuple[int, float]]  # token ids and scores by text, with U+2581 for blanks
    unknown: int  # the id of a code point without a token
    charsmap: bytes | None  # the source's precompiled normalizer
    prefix: bool
    merges_blanks: bool

    def tokens(self, text: str) -> list[int]:
        text = self._normalized(text)
        lowest = min(score for _, score in self.pieces.values()) - UNKNOWN_PENALTY
        best: list[tuple[float, list[int]]] = [(0.0, [])]
        for end in range(1, len(text) + 1):
            endings = []
            for start in range(end):
                before, ids = best[start]
                number, score = self.pieces.get(text[start:end], (self.unknown, lowest))
                if end - start == 1 or number != self.unknown:
                    endings.append((before + score, [*ids, number]))
            best.append(max(endings, key=lambda item: item[0]))
        tokens: list[int] = []
        for number, run in groupby(best[-1][1]):
            tokens += [number] if number == self.unknown else run  # neighbouring unknown ones are one
        return tokens

    def _normalized(self, text: str) -> str:
        if self.charsmap is not None:
            from tokenizers.normalizers import Precompiled

            text = Precompiled(self.charsmap).normalize_str(text)
        if self.merges_blanks:
            text = " ".join(word for word in text.split(" ") if word)
            return (" " + text).replace(" ", SPACE)
        return (" " * self.prefix + text).replace(" ", SPACE)


def read_unigram(model: dict[str, Any], steps: list[dict[str, Any]]) -> Unigram:
    """Read the ``model`` part and the steps of a tokenizer.json; raise ValueError for one that llama.cpp lacks."""
    if model.get("byte_fallback"):
        raise ValueError(LACKING.format("unigram with byte fallback"))
    if model.get("unk_id") is None:
        raise ValueError(LACKING.format("unigram without an unknown token"))
    charsmap, prefix, merges = None, False, False
    for step in steps:
        kind = step["type"]
        if kind == "Precompiled" and charsmap is None:
            charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif kind == "Metaspace" and step.get("replacement") == SPACE:
            prefix = step.get("prepend_scheme", "always") != "never"
        elif _merges_blanks(step):
            merges = True
        elif kind != "WhitespaceSplit":
            raise ValueError(LACKING.format(kind))
    pieces = {text: (number, float(score)) for number, (text, score) in enumerate(model["vocab"])}
    return Unigram(pieces, int(model["unk_id"]), charsmap, prefix, merges)


def _merges_blanks(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("strip_right"))
    return step["type"] == "Replace" and step.get("pattern") == {"Regex": " {2,}"} and step["content"] in (" ", SPACE)
