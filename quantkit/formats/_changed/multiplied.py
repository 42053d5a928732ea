"""A source whose config.json multiplies what its layers take or give: the factors are put into the weights.

The function is the same, and the configuration of what is read has ones. For engines that know no such factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import UnsupportedError
from quantkit.formats._changed.changed import ChangedSource
from quantkit.models.source import Source
from quantkit.models.text_half import with_text
from quantkit.untrusted import shown

TIED = "tie_word_embeddings"
Multipliers = NDArray[np.float32]  # one, or one for each row


class MultipliedSource(ChangedSource):
    """`base` with its tensors times `factors`, by name, in float32, and `config` in its configuration.

    `copies` are tensors that the base has under another name: a head that was tied to an embedding with another factor.
    """

    def __init__(
        self, base: Source, factors: Mapping[str, Multipliers], config: Mapping[str, Any], copies: Mapping[str, str]
    ) -> None:
        super().__init__(base)
        self._factors, self._copies = dict(factors), dict(copies)
        self.config = {**base.config, **config}
        self.tensors = {name: self._changed(name, name) for name in base.tensors}
        self.tensors |= {name: self._changed(name, own) for name, own in copies.items()}
        if base.places is not None:
            self._whole = with_text(base.whole_config, config)

    def _changed(self, name: str, own: str) -> Any:
        info = self._base.tensors[own]
        return replace(info, dtype="F32", nbytes=4 * info.parameters) if name in self._factors else info

    @property
    def notes(self) -> tuple[str, ...]:
        """Into how many tensors factors went."""
        note = f"factors of config.json put into the weights of {len(self._factors)} tensors, since the format has none"
        apart = ("the head has weights of its own now: its factor is not the embedding's",) if self._copies else ()
        return (*self._base.notes, note, *apart, *self._notes)

    def reading_bytes(self, name: str) -> int:
        """The base's, and of a multiplied tensor its values before."""
        own = self._copies.get(name, name)
        return self._base.reading_bytes(own) + (self._base.info(own).nbytes if name in self._factors else 0)

    def reads_as_stored(self, name: str) -> bool:
        """What the base says of a tensor that is not multiplied."""
        return name not in self._factors and self._base.reads_as_stored(name)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor."""
        own = self._copies.get(name, name)
        if (factors := self._factors.get(name)) is None:
            return self._base.read_rows(own, start, stop)
        values = self._base.floats(own, start, stop)
        of_rows = factors if factors.size == 1 else factors[start:stop]
        scaled = values * of_rows.reshape(-1, *[1] * (values.ndim - 1))
        return np.ascontiguousarray(scaled, np.float32).reshape(-1).view(np.uint8)


def rows_times(source: Source, name: str, given: Any) -> Multipliers:
    """Factors of a tensor: a number, or (rows, number) pairs one after the other; raises UnsupportedError."""
    pairs = given if isinstance(given, list) else [(1, given)]
    for _, number in pairs:
        if not isinstance(number, int | float) or not math.isfinite(number) or not number:
            raise UnsupportedError(f"{source.model}: config.json multiplies {name} by {shown(number)}, no factor")
    factors = np.concatenate([np.full(count, number, np.float32) for count, number in pairs])
    if len(factors) not in (1, source.info(name).shape[0]):
        rows = source.info(name).shape[0]
        raise UnsupportedError(f"{source.model}: {name} has {rows} rows, and config.json factors for {len(factors)}")
    return factors
