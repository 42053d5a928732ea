"""Perplexity protocols: which token windows are judged, and which positions of a window count.

llama.cpp: windows of n_ctx (512) without overlap; token 0 of each is replaced by BOS where the vocabulary adds one;
only targets in the second half count (n_ctx - n_ctx/2 - 1 of them); the rest of the text is dropped.
papers (GPTQ, AWQ): rows joined with a blank line; windows of 2048 without overlap; every target counts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from quantkit.errors import RecipeError, TextError, near_miss
from quantkit.recipe import Strict
from quantkit.text import Text, adds_bos, encode, papers_text


@dataclass(frozen=True)
class Protocol:
    """Name, default window in tokens, and whether only the second half of a window counts."""

    name: str
    n_ctx: int
    second_half: bool
    least_windows: int


PROTOCOLS = {
    "llama.cpp": Protocol("llama.cpp", 512, second_half=True, least_windows=2),
    "papers": Protocol("papers", 2048, second_half=False, least_windows=1),
}


class Windows(Strict):
    """How the windows were cut; the first scored logit position is `first`, the last one n_ctx - 2."""

    protocol: str
    n_ctx: int
    windows: int
    first: int
    tokens_sha256: str

    @property
    def scored(self) -> int:
        """Number of targets that count, over all windows."""
        return self.windows * (self.n_ctx - 1 - self.first)


def find_protocol(name: str) -> Protocol:
    """Look a protocol up; raises RecipeError."""
    if name not in PROTOCOLS:
        raise RecipeError(f"unknown protocol {name!r}.{near_miss(name, PROTOCOLS)} Known: {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


def cut(
    text: Text, tokenizer: object, name: str, n_ctx: int | None = None, limit: int | None = None
) -> tuple[np.ndarray, Windows]:
    """Tokenize `text` once and cut it: ((windows, n_ctx) int64 ids, their description).

    Raises TextError where the text is too short for the protocol or for the asked number of windows.
    """
    protocol = find_protocol(name)
    n_ctx = n_ctx or protocol.n_ctx
    ids = encode(tokenizer, text.content if protocol.second_half else papers_text(text.content))
    have = len(ids) // n_ctx
    if have < protocol.least_windows:
        raise TextError(
            f"the text {text.name} is too short: {len(ids)} tokens, but the protocol {name} needs at least "
            f"{protocol.least_windows} windows of {n_ctx}. Give a longer --text or a smaller --n-ctx."
        )
    count = min(have, limit) if limit else have
    tokens = ids[: count * n_ctx].reshape(count, n_ctx).copy()
    if protocol.second_half and adds_bos(tokenizer):
        tokens[:, 0] = tokenizer.bos_token_id  # type: ignore[attr-defined]
    first = n_ctx // 2 if protocol.second_half else 0
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    return tokens, Windows(protocol=name, n_ctx=n_ctx, windows=count, first=first, tokens_sha256=digest)
