"""SentencePiece-like BPE as llama.cpp runs it: neighbours are joined by the score of the token they make.

transformers stores such a tokenizer as a list of merges; the score of a token is minus the place of the first
merge that makes it, so that the earlier merge is the better one (llama.cpp, src/llama-vocab.cpp, the
``llama`` model).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

SPACE = "\u2581"


def spm_scores(model: dict[str, Any]) -> dict[str, float]:
    """Scores by text, from the ``model`` part of a tokenizer.json; tokens that no merge makes come last."""
    first: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        first.setdefault(left + right, -float(rank))
    last = -float(len(model["merges"]))
    return {text: first.get(text, last) for text in model["vocab"]}


def spm_tokens(text: str, ids: dict[str, int], scores: dict[str, float], prefix: bool) -> list[int]:
    """Tokenize `text` without special tokens; characters that have no token become their UTF-8 bytes.

    Slow (quadratic in the length): meant for a probe of some hundred characters.
    """
    symbols = list(((" " if prefix else "") + text).replace(" ", SPACE))
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        joinable = [(scores[pair], -at) for at, pair in enumerate(pairs) if pair in ids]
        if not joinable:
            break
        at = -max(joinable)[1]
        symbols[at : at + 2] = [pairs[at]]
    tokens: list[int] = []
    for symbol in symbols:
        tokens += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return tokens
