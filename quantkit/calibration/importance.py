"""The importance of a layer's inputs, as ggml's quantizers want it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quantkit.contracts.job import Job

SILENT = 1e-6  # share of the mean importance that inputs count which never fire
Importance = Mapping[str, NDArray[np.float32]]  # by name of the source's weight, (columns,)


def measured(job: Job) -> Importance:
    """The importance of all weights on the job's calibration text."""
    from quantkit.calibration.walk import importance

    return {name: value.detach().float().cpu().numpy() for name, value in importance(job).items()}


def without_silent_runs(importance: NDArray[np.float32]) -> NDArray[np.float32]:
    """(columns,) float32 importance, with a little where a whole run of 16 neighbouring columns never fires.

    ggml would turn the weights of such a run to zero, and they matter on other text.
    """
    runs = importance.copy().reshape(-1, 16) if len(importance) % 16 == 0 else importance.copy().reshape(1, -1)
    runs[runs.max(axis=1) == 0] = max(float(importance.mean()) * SILENT, SILENT)
    return runs.reshape(-1)
