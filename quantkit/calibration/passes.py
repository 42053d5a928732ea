"""Ways through a model's decoder blocks beside the walk: in, through, and back.

In: token ids become the first block's inputs, with the arguments of every block. Through and back: blocks run one by
one on what flows into them, and once more for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.contracts.method import Job
from quantkit.models.skeleton import Skeleton, load_block, set_parameter, source_name
from quantkit.models.source import Source
from quantkit.models.stand_in import Arguments, Recorder, StopForward


def embed(
    source: Source, skeleton: Skeleton, ids: torch.Tensor, device: torch.device, offload: Callable[[int], Path | None]
) -> tuple[Activations, list[Arguments]]:
    """Embed (S, T) ids -> hidden states (S, T, D), and record each block's arguments.

    Of the token embedding only the rows of tokens that occur are loaded. `offload` tells the file for so many bytes of
    hidden states, or None to keep them in memory.
    """
    model, blocks = skeleton.model, skeleton.blocks
    real_blocks = list(blocks)
    recorders = [Recorder(block, last=block is real_blocks[-1]) for block in real_blocks]
    base = model.base_model
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # a row that is perhaps not loaded; it only matters to gradients
    table = embedding.weight
    used, compact = torch.unique(ids, return_inverse=True)
    empty: list[tuple[str, nn.Parameter]] = []
    store: Activations | None = None
    try:
        for i, recorder in enumerate(recorders):
            blocks[i] = recorder
        for name, parameter in list(base.named_parameters()):
            empty.append((name, parameter))
            full = source_name(source, skeleton, f"{model.base_model_prefix}.{name}")
            value = source.select_rows(full, used.tolist()) if parameter is table else source.tensor(full)
            set_parameter(base, name, value.to(device, DTYPE))
        base.to(device)
        with torch.no_grad():
            for i, row in enumerate(compact.to(device)):
                with suppress(StopForward):
                    base(input_ids=row[None], use_cache=False)
                hidden = recorders[0].hidden
                if store is None:
                    size = len(ids) * hidden.numel() * DTYPE.itemsize
                    store = Activations(len(ids), hidden.shape[1], hidden.shape[2], offload(size))
                store.write(i, hidden)
    finally:
        for i, block in enumerate(real_blocks):
            blocks[i] = block
        for name, parameter in empty:
            # The parameter itself, not its value: a head that is tied to the embedding stays so.
            path, _, leaf = name.rpartition(".")
            base.get_submodule(path).register_parameter(leaf, parameter)
    assert store is not None
    return store, [(recorder.args, recorder.kwargs) for recorder in recorders]


class Passes:
    """Passes through the blocks, forward and back, with one block's weights in memory and a batch of some tokens.

    `as_tuple` says whether the block that ran last returns a tuple.
    """

    def __init__(self, job: Job, arguments: list[Arguments], tokens: int) -> None:
        self.as_tuple = False
        self.device = torch.device(job.device)
        self._job, self._arguments, self._tokens = job, arguments, tokens

    def block(
        self, index: int, instead: Callable[[str], torch.Tensor | None] = lambda _name: None
    ) -> AbstractContextManager[nn.Module]:
        """Block `index` with its weights, the source's or those that `instead(full name)` gives."""
        return load_block(self._job.source, self._job.skeleton, index, self.device, DTYPE, instead)

    def forward(self, index: int, inputs: Activations, outputs: Activations) -> None:
        """Run block `index`, which has its weights; `outputs` may be its inputs' own store."""
        with torch.no_grad():
            for start, stop in inputs.batches(self._tokens):
                outputs.write(start, self._run(index, inputs.read(start, stop).to(self.device)))

    def backward(
        self, index: int, inputs: Activations, slopes: Activations, others: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Run block `index` once more; a loss's gradients in `slopes`, by its outputs, become those by its inputs.

        Yields of each batch the gradients by `others`, in which the batch's tensors need only be once it ran.
        """
        for start, stop in inputs.batches(self._tokens):
            hidden = inputs.read(start, stop).to(self.device).detach().requires_grad_()
            with torch.enable_grad():
                out = self._run(index, hidden)
            slope = slopes.read(start, stop).to(self.device)
            before, *gradients = torch.autograd.grad(out, [hidden, *others], slope)
            slopes.write(start, before)
            yield tuple(gradients)

    def _run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        out = call_block(self._job.skeleton.blocks[index], self._arguments[index], hidden)
        self.as_tuple = isinstance(out, tuple)
        return hidden_of(out)


def call_block(
    module: Callable[..., Any], arguments: Arguments, hidden: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """(B, T, D) -> (B, T, D) through a block, or something with the same arguments; as it returns it."""
    args = (for_batch(value, len(hidden)) for value in arguments[0])
    kwargs = {key: for_batch(value, len(hidden), key) for key, value in arguments[1].items()}
    out: torch.Tensor | tuple[torch.Tensor, ...] = module(hidden, *args, **kwargs)
    return out


def hidden_of(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The hidden states among what a block returns."""
    return out[0] if isinstance(out, tuple) else out


def for_batch(value: Any, size: int, key: str = "") -> Any:
    """Spread an argument that was recorded for one sequence over a batch of `size`; `key` is its keyword."""
    if isinstance(value, torch.Tensor) and key == "alibi" and value.ndim == 3:
        return value.repeat(size, 1, 1)  # (batch * heads, 1, T)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1 and size > 1:
        return value.expand(size, *value.shape[1:])
    if isinstance(value, tuple):
        return tuple(for_batch(part, size) for part in value)
    return value
