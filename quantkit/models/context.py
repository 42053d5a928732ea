"""What a model's embeddings can take: how many positions a text may have, and which token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError, UnsupportedError

CONTEXT = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
# Architectures that have a table with a row for each position: there is nothing beyond its end.
TABLES = ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt", "opt")


def note_beyond_context(config: Mapping[str, Any], length: int, what: str) -> str | None:
    """A note where `what` of `length` tokens is longer than the context that config.json tells, else None.

    Raises UnsupportedError where the model has no positions beyond it.
    """
    context = _stated(config, CONTEXT)
    if context is None or length <= context or config.get("alibi"):
        return None
    if config.get("model_type") in TABLES:
        raise UnsupportedError(
            f"{what} of {length} tokens are longer than the {context} positions that the model has. Give shorter ones."
        )
    return f"{what} of {length} tokens are longer than the context of {context} tokens that the model was made for"


def refuse_ids(config: Mapping[str, Any], ids: NDArray[np.int64], what: str) -> None:
    """Raise SourceError where a token id has no row in the embedding that config.json tells."""
    rows = vocabulary_of(config)
    if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise SourceError(
            f"the tokenizer gives {what} the token ids {ids.min()} to {ids.max()}, and the embedding has {rows} rows. "
            "Give the tokenizer that belongs to the model."
        )


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding that config.json tells, if it does."""
    return _stated(config, ("vocab_size",))


def _stated(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    inner = config.get("text_config") or config
    return next((inner[name] for name in names if isinstance(inner.get(name), int)), None)
