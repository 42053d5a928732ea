"""The importance of a layer's inputs, as ggml's quantizers want it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

SILENT = 1e-6  # share of the mean importance that inputs count which never fire
Importance = Mapping[str, torch.Tensor]  # by name of the source's weight, (columns,)


def without_silent_runs(importance: torch.Tensor) -> torch.Tensor:
    """(columns,) float32 importance, with a little where a whole run of 16 neighbouring columns never fires.

    ggml would turn the weights of such a run to zero, and they matter on other text.
    """
    runs = importance.clone().reshape(-1, 16) if len(importance) % 16 == 0 else importance.clone().reshape(1, -1)
    silent = runs.amax(1) == 0
    runs[silent] = max(float(importance.mean()) * SILENT, SILENT)
    return runs.reshape(-1).contiguous()
