"""A source whose tokenizer has more tokens than its embedding has rows, with rows added for the others.

They are added to the embedding and to the output head, tied or not, and to the head's bias: each is the mean of the
rows that were there, computed in float64 and rounded to the tensor's type. transformers' `resize_token_embeddings`
draws its rows around the same mean, with a billionth of the rows' covariance; here equal models give equal bytes.
All other tensors, and the rows that were there, are read through.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.checkpoints.floats import FLOATS
from quantkit.checkpoints.safetensors import DTYPES
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats._changed.changed import ChangedSource
from quantkit.models.skeleton import open_skeleton
from quantkit.models.source import Source
from quantkit.models.text_half import with_text
from quantkit.untrusted import told

PIECE = 1 << 20  # values that are added up at a time
KEY = "vocab_size"


def pad(base: Source) -> Source:
    """`base` with a row for each token of its tokenizer, itself where none lacks.

    Raises UnsupportedError where embedding and head are not found or no floats, SourceError where more rows would be
    added than there are: then the tokenizer is another model's.
    """
    wanted = 1 + max(base.tokenizer().get_vocab().values(), default=-1)
    names = _ends(base)
    rows = {base.tensors[name].shape[0] for name in names}
    if len(rows) != 1:
        counts = ", ".join(f"{base.tensors[name].shape[0]} of {name}" for name in names)
        raise UnsupportedError(
            f"--pad-vocab: {base.model} has other numbers of rows at its ends ({counts or 'no embedding'})"
        )
    count = rows.pop()
    if wanted <= count:
        return base
    if wanted > 2 * count:
        raise SourceError(
            f"--pad-vocab: the tokenizer of {base.model} has {wanted:,} tokens and the embedding {count:,} rows: most "
            "would mean nothing. Give the tokenizer that belongs to the model."
        )
    if other := next((name for name in names if base.tensors[name].dtype not in FLOATS), None):
        raise UnsupportedError(f"--pad-vocab: {other} of {base.model} is stored as {base.tensors[other].dtype}")
    return PaddedSource(base, names, count, wanted)


def _ends(base: Source) -> list[str]:
    """Names of the stored tensors with a row for each token, the embedding's first."""

    def stored(path: str, leaf: str) -> Iterator[str]:
        plain = f"{path}.{leaf}"
        return (name for name in (plain, plain.removeprefix(prefix), prefix + plain) if name in base.tensors)

    model = open_skeleton(base.config, settings=base.settings).model
    prefix = f"{model.base_model_prefix}."
    paths = {id(module): path for path, module in model.named_modules()}
    what = f"--pad-vocab: transformers does not tell the embedding of {base.architecture!r}"
    with told(what, UnsupportedError):
        ends = [paths[id(end)] for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end]
    return list(dict.fromkeys(name for path in ends for leaf in ("weight", "bias") for name in stored(path, leaf)))


class PaddedSource(ChangedSource):
    """`base` with its tensors `names` of `count` rows grown to `rows`."""

    def __init__(self, base: Source, names: list[str], count: int, rows: int) -> None:
        super().__init__(base)
        self._names, self._count, self._rows = tuple(names), count, rows
        self.config = {**base.config, KEY: rows}
        self.tensors = {name: self._grown(name) if name in names else info for name, info in base.tensors.items()}
        if base.places is not None:
            own = {KEY: rows} if KEY in base.whole_config else {}
            self._whole = with_text(base.whole_config, {KEY: rows}) | own
        self._means: dict[str, NDArray[np.uint8]] = {}

    def _grown(self, name: str) -> Any:
        info = self._base.tensors[name]
        return replace(info, shape=(self._rows, *info.shape[1:]), nbytes=info.nbytes // self._count * self._rows)

    @property
    def padded_rows(self) -> int:
        """How many rows embedding and head were given."""
        return self._rows - self._count

    @property
    def notes(self) -> tuple[str, ...]:
        """How many rows were added, and where."""
        rows, mean = ("row", "it is") if self.padded_rows == 1 else ("rows", "each is")
        note = (
            f"{self.padded_rows:,} {rows} added to {' and '.join(self._names)}, which had {self._count:,}, for tokens "
            f"of the tokenizer without one (--pad-vocab): {mean} the mean of the others"
        )
        return (*self._base.notes, note)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Of the model's files, and one of the number of added rows."""
        number = hashlib.sha256(str(self.padded_rows).encode()).hexdigest()
        return self._base.hashes | {f"added rows: {self.padded_rows}": number}

    def reading_bytes(self, name: str) -> int:
        """Of a grown tensor, the rows that were there, beside a piece of them in two types for their mean."""
        own = self._base.reading_bytes(name)
        return own if name not in self._names else own + self._base.tensors[name].nbytes + 3 * 4 * PIECE

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor."""
        if name not in self._names:
            return self._base.read_rows(name, start, stop)
        own = (
            self._base.read_rows(name, start, min(stop, self._count)) if start < self._count else np.empty(0, np.uint8)
        )
        added = max(0, stop - max(start, self._count))
        return np.concatenate([own, np.tile(self._mean(name), added)]) if added else own

    def _mean(self, name: str) -> NDArray[np.uint8]:
        """The bytes of an added row."""
        if name not in self._means:
            total = sum(piece.sum(0, np.float64) for _, piece in self._base.in_rows(name).pieces(PIECE))
            kind = getattr(torch, DTYPES[self._base.tensors[name].dtype])
            row = torch.from_numpy(np.atleast_1d(total / self._count)).to(kind)
            self._means[name] = row.view(torch.uint8).numpy()
        return self._means[name]
