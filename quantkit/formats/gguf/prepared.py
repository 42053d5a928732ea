"""Adapt a source to GGUF: fold multipliers into weights, drop unused tensors, extend per-layer embeddings."""

from __future__ import annotations

from contextlib import suppress

from quantkit.checkpoints.rows import FLOATS
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.record import EMBEDDING, of_config
from quantkit.formats.gguf.plan import fill_slots
from quantkit.formats.gguf.slots import is_taken
from quantkit.models.source import Multipliers, OverriddenSource, Source, multiplied, padded, rows_times
from quantkit.system.untrusted import reraise_as

TABLE, ROWS = "model.embed_tokens_per_layer.weight", "vocab_size_per_layer_input"


def prepared(source: Source) -> Source:
    """Return the adapted source, or `source` itself if nothing changes; raise SourceError or UnsupportedError."""
    return _without_zero_biases(_fitted(_with_multipliers_inside(source)))


def _with_multipliers_inside(source: Source) -> Source:
    """Fold the architecture's multipliers into the weights; a tied head is untied if its factor differs."""
    row = KNOWN.get(source.architecture)
    if row is None or not row.multipliers:
        return source
    own = source.settings
    if all(of_config(own, name) == one for name, one in row.multiplied.items()):
        return source
    factors: dict[str, Multipliers] = {}
    copies: dict[str, str] = {}
    with reraise_as(f"{source.model}: config.json lacks the factors of its weights", SourceError):
        given = {part: of_config(own, setting) for part, setting in row.multipliers.items()}
    embedding = next((name for name in source.tensors if EMBEDDING.endswith(name)), None)
    if own.tie_word_embeddings and embedding is not None and given[EMBEDDING] != given[row.head]:
        copies[row.head] = embedding
    for name in (*source.tensors, *copies):
        _, part = row.block_and_part(name)
        number = given.get(part, given.get(row.prefix + part))
        if number is not None and number != 1.0:
            factors[name] = rows_times(source, copies.get(name, name), number)
    return multiplied(source, factors, {**row.multiplied, **({"tie_word_embeddings": False} if copies else {})}, copies)


def _fitted(source: Source) -> Source:
    """Drop unused key and value weights of KV-sharing blocks, and extend the per-layer embedding to all tokens.

    New rows are copies of the first one, which transformers uses for these tokens (models/gemma3n/modeling_gemma3n.py).
    """
    row = KNOWN.get(source.architecture)
    if row is None or not row.shares_keys:
        return source
    own = source.settings
    with reraise_as(f"{source.model}: config.json lacks settings of a GGUF file", SourceError):
        own_blocks = own.num_hidden_layers - own.num_kv_shared_layers
        tokens, rows = own.vocab_size, getattr(own, ROWS, 0)
    dropped = [name for name in source.tensors if is_taken(name, row, own_blocks)]
    tables = [name for name in source.tensors if TABLE.endswith(name) and source.info(name).shape[:1] == (rows,)]
    grown = tables if 0 < rows < tokens and own.hidden_size_per_layer_input else []
    if not dropped and not grown:
        return source
    notes = []
    if dropped:
        notes.append(
            f"{len(dropped)} tensors of blocks that reuse the keys and values of others are left out: "
            f"{source.published(dropped[0])} and so on"
        )
    if grown:
        notes.append(
            f"{tokens - rows:,} rows added to {source.published(grown[0])}, copies of its first row, as in transformers"
        )
    overrides = {name: padded(source, name, tokens) for name in grown}
    config = {ROWS: tokens} if grown else {}
    return OverriddenSource(source, overrides, config=config, dropped=dropped, notes=tuple(notes))


def _without_zero_biases(source: Source) -> Source:
    """Drop all-zero biases that GGUF has no place for; AutoGPTQ stored one per layer."""
    stored = source.tensors.items()
    biases = {name for name, info in stored if name.endswith(".bias") and len(info.shape) == 1 and info.dtype in FLOATS}
    extra: list[str] = []
    with suppress(SourceError, UnsupportedError):  # the plan of the file raises them again
        extra = fill_slots(source).unplaced if biases else []
    idle = [name for name in extra if name in biases and not source.floats(name).any()]
    if not idle:
        return source
    note = "zero biases are left out, since a GGUF file cannot store them"
    note = f"{note}: {len(idle)}, such as {source.published(idle[0])}"
    return OverriddenSource(source, dropped=idle, notes=(note,))
