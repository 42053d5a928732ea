"""SentencePiece-like BPE as llama.cpp runs it: neighbours are joined by the score of the token they make.

transformers stores such a tokenizer as a list of merges; the score of a token is minus the place of the first
merge that makes it, so that the earlier merge is the better one (llama.cpp, src/llama-vocab.cpp, the
``llama`` model).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


def merge_pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of the ``model`` part of a tokenizer.json, the best first."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def gemma4_tokens(text: str, ids: Mapping[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """Tokenize `text` as llama.cpp's ``gemma4`` model does, without special tokens.

    Neighbours are joined by the merges, in lines by themselves; newlines in a row are one token where there is one
    (src/llama-vocab.cpp, `llm_tokenizer_bpe_session`). As slow as `spm_tokens`.
    """
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
