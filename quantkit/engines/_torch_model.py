"""A transformers model in torch as a LoadedModel: logits of windows, and greedy tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from quantkit.contracts.windows import Window, alike
from quantkit.engines._linears import generating
from quantkit.models.architectures import running
from quantkit.models.output_head import OutputHead, last_states
from quantkit.numerics.matmul import products_everywhere

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

ROWS = 256  # positions that go through the output layer together
PIECE_ROWS = 32  # positions of a piece, which fits in the processor's cache


class TorchModel:
    """Wraps a causal language model of transformers."""

    def __init__(self, model: PreTrainedModel, dtype: str, notes: tuple[str, ...] = ()) -> None:
        self._model, self.dtype, self.notes = model, dtype, notes

    def hidden(self, windows: Sequence[Window]) -> Iterator[tuple[list[Window], torch.Tensor]]:
        """Yield batches of windows in order, each with (B, T, D): what goes into the output layer."""
        for batch in alike(windows):
            with torch.inference_mode(), products_everywhere():
                hidden = last_states(self._model, self._here(np.stack([w.ids for w in batch])))
            yield batch, hidden

    def states(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield (n, D) of each window in order: what goes into the output layer at its scored positions."""
        for batch, hidden in self.hidden(windows):
            for window, states in zip(batch, hidden, strict=True):
                yield states[window.scored]

    def head(self) -> OutputHead:
        """Return the output side of the model."""
        return OutputHead(self._model)

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of the scored positions in order, (n, V) with at most `PIECE_ROWS` positions each.

        The output layer is loaded when the first windows have gone through all blocks.
        """
        head: OutputHead | None = None
        for states in self.states(windows):
            head = head or self.head()
            for part in states.split(ROWS):
                with torch.inference_mode(), products_everywhere():
                    logits = head.logits(part)
                for piece in logits.split(PIECE_ROWS):
                    yield piece.to("cpu", torch.float32).numpy()
                del logits, piece  # before the next ones are made

    def _here(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids).to(self._model.device)

    def set_threads(self, threads: int) -> None:
        """Have torch compute on so many threads from now on."""
        torch.set_num_threads(threads)

    def to(self, dtype: str) -> None:
        """Change the type that the model computes in."""
        self._model.to(getattr(torch, dtype))
        self.dtype = dtype

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt, never stopping early, by the model's own code alone."""
        from transformers import DynamicCache

        with torch.inference_mode(), generating(self._model):
            cache = DynamicCache(config=self._model.config)
            step = self._here(np.array([ids]))
            for _ in range(count):
                with running(self._model.config, "the generation of tokens"):
                    out = self._model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                step = out[:, -1:].argmax(-1)
                yield int(step)
