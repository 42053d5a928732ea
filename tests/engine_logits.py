"""The logits of a model, whatever engine loaded it."""

import numpy as np

from quantkit.contracts.engine import LoadedModel
from quantkit.contracts.windows import Window


def engine_logits(loaded: LoadedModel, ids: np.ndarray, first: int = 0) -> np.ndarray:
    """(B, T) int64 ids -> (B, T - first, V) float32 logits of the positions from `first` on."""
    targets = np.zeros(ids.shape[1] - first, np.int64)
    pieces = np.concatenate(list(loaded.pieces([Window(row, first, targets) for row in ids])))
    return pieces.reshape(len(ids), len(targets), -1)
