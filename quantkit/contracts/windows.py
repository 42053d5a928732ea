"""What engines compute and probes judge: token windows, and the cut of a text into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.report.records import Windows

Ids = NDArray[np.int64]
BATCH_TOKENS = 2048  # of windows of one length that are computed together


@dataclass(frozen=True)
class Window:
    """What an engine computes at once: `ids` (T,); the logits at `first`, `first` + 1, ... are judged by `targets`."""

    ids: Ids
    first: int
    targets: Ids
    document: int = 0

    def judged(self, pieces: Iterator[NDArray[np.float32]]) -> Iterator[tuple[NDArray[np.float32], Ids]]:
        """Take this window's (n, V) logits from an engine's `pieces`, each with the targets that judge it."""
        done = 0
        while done < len(self.targets):
            logits = next(pieces)
            yield logits, self.targets[done : done + len(logits)]
            done += len(logits)


@dataclass(frozen=True)
class Cut:
    """The windows in order, what a report says of them, and of each document its words and bytes (documents, 2)."""

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
        )


def load_cut(path: Path, about: Windows) -> Cut:
    """Read what `Cut.save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        shape, sizes = stored["shape"], stored["sizes"]
        ids = np.split(stored["ids"], np.cumsum(shape[:-1, 0]))
        targets = np.split(stored["targets"], np.cumsum(shape[:-1, 2]))
    windows = (
        Window(i, int(first), t, int(document))
        for i, t, (_, first, _, document) in zip(ids, targets, shape, strict=True)
    )
    return Cut(tuple(windows), about, sizes)


def batch_edge(windows: Sequence[Window], index: int) -> int:
    """The first window of the batch that window `index` is computed in: from there on all are computed as ever."""
    return max(edge for edge in _edges(windows) if edge <= index)


def batch_end(windows: Sequence[Window], index: int) -> int:
    """Behind the last window of the batch that window `index` is computed in: up to there all are computed as ever."""
    return min(edge for edge in _edges(windows) if edge > index)


def _edges(windows: Sequence[Window]) -> list[int]:
    """The first window of each batch, and the number of all."""
    return [0, *accumulate(len(batch) for batch in alike(windows))]


def alike(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Neighbours of one length, at most `BATCH_TOKENS` together."""
    batch: list[Window] = []
    for window in windows:
        if batch and (len(window.ids) != len(batch[0].ids) or (len(batch) + 1) * len(window.ids) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
