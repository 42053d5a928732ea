"""A source whose tensors are those that the files of a format hold: some left out, and tables with rows added."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.formats._changed.changed import ChangedSource
from quantkit.models.source import Source
from quantkit.models.text_half import with_text


class FittedSource(ChangedSource):
    """`base` without the tensors `dropped`, and with `rows` of some: those behind the base's own are its first row.

    `config` are the settings that it has instead of the base's, `notes` what a user should know of it.
    """

    def __init__(
        self,
        base: Source,
        dropped: Collection[str],
        rows: Mapping[str, int],
        config: Mapping[str, Any],
        notes: tuple[str, ...],
    ) -> None:
        super().__init__(base)
        self._rows, self._notes = dict(rows), notes
        self.config = {**base.config, **config}
        self.tensors = {name: self._grown(name) for name in base.tensors if name not in dropped}
        if base.places is not None:
            self._whole = with_text(base.whole_config, config)

    def _grown(self, name: str) -> Any:
        info, rows = self._base.tensors[name], self._rows.get(name)
        if rows is None:
            return info
        return replace(info, shape=(rows, *info.shape[1:]), nbytes=info.nbytes // info.shape[0] * rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out and added."""
        return (*self._base.notes, *self._notes)

    def reads_as_stored(self, name: str) -> bool:
        """What the base says of a tensor without added rows."""
        return name not in self._rows and self._base.reads_as_stored(name)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor."""
        if name not in self._rows:
            return self._base.read_rows(name, start, stop)
        count = self._base.info(name).shape[0]
        parts = [self._base.read_rows(name, start, min(stop, count))] if start < count else []
        if (added := stop - max(start, count)) > 0:
            parts.append(np.tile(self._base.read_rows(name, 0, 1), added))
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)
