"""Perplexity protocols: how a text is cut into windows of tokens, and which positions are scored.

llama.cpp: windows of n_ctx (512) without overlap; BOS replaces token 0 of each window if the tokenizer adds BOS; only
targets in the second half are scored (n_ctx - n_ctx/2 - 1 per window); an incomplete last window is dropped.

papers (GPTQ, AWQ): rows joined with blank lines; windows of 2048 without overlap; every target is scored.

lm-eval: the harness's task wikitext. Pages are cleaned by `data/texts.py` and scored one by one, in windows as long as
the model's context, with BOS (or EOS) before the first token; every token is scored once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.engine import Cut, Window
from quantkit.data.texts import Text, adds_bos, clean, count_words, encode, first_token, ids_of, pages, papers_text
from quantkit.errors import RecipeError, TextError, near_miss
from quantkit.models.config import context_of, note_beyond_context, refuse_ids
from quantkit.records.report import Windows

Cutter = Callable[[Text, Any, int, int | None], tuple[list[Window], list[tuple[int, int]]]]


@dataclass(frozen=True)
class Protocol:
    """A perplexity protocol: its name, default window length in tokens (None: the model's context), and cutter."""

    name: str
    n_ctx: int | None
    cut: Cutter


def _side_by_side(
    protocol: str, ids: NDArray[np.int64], name: str, n_ctx: int, limit: int | None, least: int, first: int
) -> list[Window]:
    have = len(ids) // n_ctx
    if have < least:
        raise TextError(
            f"the text {name} is too short: {len(ids)} tokens, but the protocol {protocol} needs at least "
            f"{least} windows of {n_ctx}. Give a longer --text or a smaller --n-ctx."
        )
    tokens = ids[: (min(have, limit) if limit else have) * n_ctx].reshape(-1, n_ctx).copy()
    return [Window(row, first, row[first + 1 :]) for row in tokens]


def _llama_cpp(text: Text, tokenizer: Any, n_ctx: int, limit: int | None) -> tuple[list[Window], list[Any]]:
    windows = _side_by_side("llama.cpp", ids_of(tokenizer, text), text.name, n_ctx, limit, 2, n_ctx // 2)
    if adds_bos(tokenizer):
        for window in windows:
            window.ids[0] = tokenizer.bos_token_id
    return windows, []


def _papers(text: Text, tokenizer: Any, n_ctx: int, limit: int | None) -> tuple[list[Window], list[Any]]:
    _refuse_conversations("papers", text)
    ids = encode(tokenizer, papers_text(text.content))
    return _side_by_side("papers", ids, text.name, n_ctx, limit, 1, 0), []


def _refuse_conversations(protocol: str, text: Text) -> None:
    if text.parts:
        raise TextError(
            f"the text {text.name} is made of conversations, and the protocol {protocol} would change the chat "
            "template's lines. Use --protocol llama.cpp, with --n-ctx for longer windows."
        )


def _lm_eval(text: Text, tokenizer: Any, n_ctx: int, limit: int | None) -> tuple[list[Window], list[Any]]:
    _refuse_conversations("lm-eval", text)
    start = first_token(tokenizer)
    if start is None:
        raise TextError("the protocol lm-eval begins each page with BOS or EOS, but the tokenizer has neither")
    windows, sizes = [], []
    for number, page in enumerate(pages(text.content)[:limit]):
        sizes.append((count_words(page), len(page.encode())))
        ids = encode(tokenizer, clean(page))
        whole = np.concatenate([[start], ids])
        for at in range(0, len(ids), n_ctx):
            # The last window overlaps the one before, and scores only new tokens.
            stop = min(at + n_ctx, len(ids))
            begin = max(0, stop - n_ctx)
            part = whole[begin:stop]
            windows.append(Window(part, at - begin, ids[at:stop], number))
    if not windows:
        raise TextError(f"the text {text.name} is empty. Give a longer --text.")
    return windows, sizes


PROTOCOLS = {
    p.name: p
    for p in (
        Protocol("llama.cpp", 512, _llama_cpp),
        Protocol("papers", 2048, _papers),
        Protocol("lm-eval", None, _lm_eval),
    )
}


def find_protocol(name: str) -> Protocol:
    """Return the protocol `name`; raises RecipeError for an unknown name and suggests a similar one."""
    if name not in PROTOCOLS:
        raise RecipeError(f"unknown protocol {name!r}.{near_miss(name, PROTOCOLS)} Known: {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


def cut(
    text: Text,
    tokenizer: Any,
    name: str,
    n_ctx: int | None = None,
    limit: int | None = None,
    config: dict[str, Any] | None = None,
) -> Cut:
    """Tokenize `text` and cut it into windows by the protocol `name`; `limit` windows at most (lm-eval: pages).

    If neither `n_ctx` nor the protocol sets a length, windows are as long as the context in `config`. Raises TextError
    for a text that is too short, SourceError or UnsupportedError for a token or position without an embedding.
    """
    protocol = find_protocol(name)
    n_ctx = n_ctx or protocol.n_ctx or context_of(config or {})
    note_beyond_context(config or {}, n_ctx, "windows")
    windows, sizes = protocol.cut(text, tokenizer, n_ctx, limit)
    for window in windows:
        refuse_ids(config or {}, window.ids, text.name)
        refuse_ids(config or {}, window.targets, text.name)
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.ids.tobytes())
        digest.update(window.targets.tobytes())
    counts = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    about = Windows(
        protocol=name,
        n_ctx=n_ctx,
        windows=len(windows),
        first=windows[0].first,
        scored=sum(len(window.targets) for window in windows),
        tokens_sha256=digest.hexdigest(),
        documents=len(sizes) or None,
        words=int(counts[:, 0].sum()) if sizes else None,
        bytes=int(counts[:, 1].sum()) if sizes else None,
    )
    return Cut(tuple(windows), about, counts)
