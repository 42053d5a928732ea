"""A transformers model in torch as a registry.Model: logits of windows, and greedy tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class TorchModel:
    """Wraps `model` (a causal language model of transformers)."""

    def __init__(self, model: Any, dtype: str, notes: tuple[str, ...] = ()) -> None:
        self._model = model
        self.dtype = dtype
        self.notes = notes

    def logits(self, ids: np.ndarray, first: int = 0) -> np.ndarray:
        """(B, T) int64 -> (B, T - first, V) float32 for the positions from `first` on."""
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.from_numpy(ids), use_cache=False, logits_to_keep=ids.shape[1] - first
            ).logits
            return out.to(torch.float32).numpy()

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt, never stopping early."""
        from transformers import DynamicCache

        with torch.inference_mode():
            cache = DynamicCache(config=self._model.config)
            step = torch.tensor([ids])
            for _ in range(count):
                out = self._model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                step = out[:, -1:].argmax(-1)
                yield int(step)
