"""Unigram tokenizers as llama.cpp runs them (its ``t5`` model): the best sum of scores over the whole text.

Facts: src/llama-vocab.cpp, `llm_tokenizer_ugm_session`, of https://github.com/ggml-org/llama.cpp. A text is normalized
by the source's precompiled character map, blanks become U+2581, and a code point without a token counts as unknown.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from quantkit.formats.gguf.tokenizer.spm import SPACE

UNKNOWN_PENALTY = 10.0  # below the worst score


@dataclass(frozen=True)
class Unigram:
    """What a tokenizer.json says that llama.cpp has a key for; `pieces` are the token ids and scores by text."""

    pieces: dict[str, tuple[int, float]]
    unknown: int
    charsmap: bytes | None
    prefix: bool
    merges_blanks: bool

    @property
    def scores(self) -> dict[str, float]:
        """Scores by text."""
        return {text: score for text, (_, score) in self.pieces.items()}

    def tokens(self, text: str) -> list[int]:
        """Tokenize `text` without special tokens, slowly: meant for a probe of some hundred characters."""
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
        return [
            number
            for number, run in groupby(best[-1][1])
            for _ in ([0] if number == self.unknown else run)  # neighbouring unknown ones are one
        ]

    def _normalized(self, text: str) -> str:
        if self.charsmap is not None:
            from tokenizers.normalizers import Precompiled

            text = Precompiled(self.charsmap).normalize_str(text)
        if self.merges_blanks:
            text = " ".join(word for word in text.split(" ") if word)
            return (" " + text).replace(" ", SPACE)
        return (" " * self.prefix + text).replace(" ", SPACE)


def read_unigram(model: dict[str, Any], steps: list[dict[str, Any]]) -> Unigram | str:
    """Read the ``model`` part and the steps of a tokenizer.json, or say which step llama.cpp lacks."""
    if model.get("byte_fallback"):
        return "unigram with byte fallback"
    if model.get("unk_id") is None:
        return "unigram without an unknown token"
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
            return kind
    pieces = {text: (number, float(score)) for number, (text, score) in enumerate(model["vocab"])}
    return Unigram(pieces, int(model["unk_id"]), charsmap, prefix, merges)


def _merges_blanks(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("strip_right"))
    return step["type"] == "Replace" and step.get("pattern") == {"Regex": " {2,}"} and step["content"] in (" ", SPACE)
