"""Token windows, which engines compute and evaluations score, and the cut of a text into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.records.report import Windows

Ids = NDArray[np.int64]
BATCH_TOKENS = 2048  # of windows of one length that are computed together


@dataclass(frozen=True)
class Window:
    """Token ids (T,) that are computed at once; the logits at `first`, `first` + 1, ... are scored by `targets`."""

    ids: Ids
    first: int
    targets: Ids
    document: int = 0

    @property
    def scored(self) -> slice:
        """The positions whose logits are scored."""
        return slice(self.first, self.first + len(self.targets))

    def pairs(self, pieces: Iterator[NDArray[np.float32]]) -> Iterator[tuple[NDArray[np.float32], Ids]]:
        """Take this window's (n, V) logits from an engine's `pieces`, each with the targets that score it."""
        done = 0
        while done < len(self.targets):
            logits = next(pieces)
            yield logits, self.targets[done : done + len(logits)]
            done += len(logits)


def tokens_in(windows: Iterable[Window]) -> int:
    """Return the number of tokens that are computed."""
    return sum(len(window.ids) for window in windows)


def longest_in(windows: Iterable[Window]) -> int:
    """Return the number of tokens of the longest window."""
    return max(len(window.ids) for window in windows)


def positions_in(windows: Iterable[Window]) -> int:
    """Return the number of positions that are scored."""
    return sum(len(window.targets) for window in windows)


@dataclass(frozen=True)
class Cut:
    """The windows in order, their entry in a report, and the words and bytes of each document (documents, 2)."""

    windows: tuple[Window, ...]
    about: Windows
    sizes: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write the windows for another process, as plain arrays."""
        np.savez(
            path,
            ids=np.concatenate([w.ids for w in self.windows]),
            targets=np.concatenate([w.targets for w in self.windows]),
            shape=np.array([[len(w.ids), w.first, len(w.targets), w.document] for w in self.windows]),
            sizes=self.sizes,
            about=np.array(self.about.model_dump_json()),
        )


def load_cut(path: Path) -> Cut:
    """Read what `Cut.save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        shape, sizes, about = stored["shape"], stored["sizes"], str(stored["about"])
        ids = np.split(stored["ids"], np.cumsum(shape[:-1, 0]))
        targets = np.split(stored["targets"], np.cumsum(shape[:-1, 2]))
    windows = (
        Window(i, int(first), t, int(document))
        for i, t, (_, first, _, document) in zip(ids, targets, shape, strict=True)
    )
    return Cut(tuple(windows), Windows.model_validate_json(about), sizes)


def alike(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Yield batches: neighbours of one length, at most `BATCH_TOKENS` together.

    Windows of a batch are computed together, and the last digits of logits depend on it. So work that was interrupted
    goes on at the edge of a batch.
    """
    batch: list[Window] = []
    for window in windows:
        if batch and (len(window.ids) != len(batch[0].ids) or (len(batch) + 1) * len(window.ids) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
