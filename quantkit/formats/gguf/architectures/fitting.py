"""The source with the tensors that a file holds: some are left out, and a table has a row for each token."""

from __future__ import annotations

from quantkit.errors import SourceError
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.tensor_map import is_taken
from quantkit.models.overrides import OverriddenSource, padded
from quantkit.models.source import Source
from quantkit.untrusted import told

TABLE, ROWS = "model.embed_tokens_per_layer.weight", "vocab_size_per_layer_input"


def fitted(source: Source) -> Source:
    """The source without keys and values of blocks that take those of others, or itself where nothing is to be done.

    Where the table of the inputs of each block has less rows than there are tokens, it gets copies of its first row:
    what transformers takes for a token behind it (models/gemma3n/modeling_gemma3n.py, `get_per_layer_inputs`). Raises
    SourceError for a config.json that does not say how many blocks there are.
    """
    row = KNOWN.get(source.architecture)
    if row is None or not row.shares_keys:
        return source
    own = source.settings
    with told(f"{source.model}: config.json lacks what a GGUF file tells", SourceError):
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
            f"{len(dropped)} tensors of blocks that take the keys and values of others are left out: "
            f"{source.published(dropped[0])} and so on"
        )
    if grown:
        notes.append(
            f"{tokens - rows:,} rows added to {source.published(grown[0])}, each its first: so are tokens computed"
        )
    overrides = {name: padded(source, name, tokens) for name in grown}
    config = {ROWS: tokens} if grown else {}
    return OverriddenSource(source, overrides, config=config, dropped=dropped, notes=tuple(notes))
