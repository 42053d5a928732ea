"""The ways into and out of the decoder blocks.

In: token ids become the first block's inputs, with the arguments of every block. Out: what comes out of the last block
becomes logits, some positions at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.calibration.activations import DTYPE, Activations
from quantkit.models.skeleton import Skeleton, load, set_parameter, source_name
from quantkit.models.source import Source

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StopForward(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass early: what was wanted of it has been seen."""


class _Recorder(nn.Module):
    """Stands for a block: keeps the arguments it is called with and passes the hidden states through.

    They are passed on in a tuple: some models take the first of what a block returns, some all of it. The last block
    ends the forward pass.
    """

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.hidden = torch.empty(0)

    def forward(self, hidden: torch.Tensor | tuple[torch.Tensor], *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        self.hidden, self.args, self.kwargs = hidden[0] if isinstance(hidden, tuple) else hidden, args, kwargs
        if self.last:
            raise StopForward
        return (self.hidden,)


def embed(
    source: Source, skeleton: Skeleton, ids: torch.Tensor, device: torch.device, offload: Callable[[int], Path | None]
) -> tuple[Activations, list[Arguments]]:
    """Embed (S, T) ids -> hidden states (S, T, D), and record each block's arguments.

    Of the token embedding only the rows of tokens that occur are loaded. `offload` tells the file for so many bytes of
    hidden states, or None to keep them in memory.
    """
    recorders = [_Recorder(last=i + 1 == len(skeleton.blocks)) for i in range(len(skeleton.blocks))]
    kept = list(skeleton.blocks)
    blocks = skeleton.blocks
    base = skeleton.model.base_model
    for i, recorder in enumerate(recorders):
        blocks[i] = recorder
    embedding = skeleton.model.get_input_embeddings()
    embedding.padding_idx = None  # a row that is perhaps not loaded; it only matters to gradients
    table = embedding.weight
    used, compact = torch.unique(ids, return_inverse=True)
    loaded: list[tuple[str, torch.Tensor]] = []
    for name, parameter in list(base.named_parameters()):
        loaded.append((name, parameter))
        full = source_name(source, skeleton, f"{skeleton.model.base_model_prefix}.{name}")
        value = source.select_rows(full, used.tolist()) if parameter is table else source.tensor(full)
        set_parameter(base, name, value.to(device, DTYPE))
    base.to(device)
    store: Activations | None = None
    with torch.no_grad():
        for i, row in enumerate(compact.to(device)):
            with suppress(StopForward):
                base(input_ids=row[None], use_cache=False)
            hidden = recorders[0].hidden
            if store is None:
                size = len(ids) * hidden.numel() * DTYPE.itemsize
                store = Activations(len(ids), hidden.shape[1], hidden.shape[2], offload(size))
            store.write(i, hidden)
    assert store is not None
    for i, block in enumerate(kept):
        blocks[i] = block
    for name, parameter in loaded:
        # The parameter itself, not its value: a head that is tied to the embedding stays so.
        path, _, leaf = name.rpartition(".")
        base.get_submodule(path).register_parameter(leaf, parameter)
    return store, [(recorder.args, recorder.kwargs) for recorder in recorders]


class _Injector(nn.Module):
    """Stands for a block: gives `hidden`, whatever it is called with, in the way in which the block returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | tuple[torch.Tensor] = torch.empty(0)

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor | tuple[torch.Tensor]:
        return self.hidden


class Head:
    """From the last block's outputs to logits: whatever the model does after its blocks, its own code.

    Positions do not depend on each other there, so any number of them can be computed at a time.
    """

    def __init__(self, source: Source, skeleton: Skeleton, device: torch.device) -> None:
        """Load what stands around the blocks."""
        self._model, self._injector = copy.deepcopy(skeleton.model), _Injector()
        blocks = self._model.get_submodule(skeleton.blocks_path)
        for i in range(len(blocks)):
            blocks[i] = self._injector
        # Hidden states are put in behind the embedding, which is only needed where it is the head, too.
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        self._width = int(embedding.embedding_dim)
        unused = embedding.weight if head is not None and head.weight is not embedding.weight else None
        for name, parameter in list(self._model.named_parameters()):
            if parameter is unused:
                continue
            set_parameter(self._model, name, load(source, skeleton, name).to(device, DTYPE))
        self._model.tie_weights()
        for module in self._model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, buffer.to(device))

    @property
    def output(self) -> Any:
        """The layer whose outputs are the logits, or become them: weight (V, D)."""
        return self._model.get_output_embeddings()

    def logits(self, hidden: torch.Tensor, as_tuple: bool) -> torch.Tensor:
        """(n, D) -> (n, V); `as_tuple` says that the model's blocks return tuples."""
        self._injector.hidden = (hidden[None],) if as_tuple else hidden[None]
        nothing = torch.zeros(1, len(hidden), self._width, dtype=DTYPE, device=hidden.device)
        found: torch.Tensor = self._model(inputs_embeds=nothing, use_cache=False).logits[0]
        return found


def call_block(
    module: Callable[..., Any], arguments: Arguments, hidden: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """(B, T, D) -> (B, T, D) through a block, or something with the same arguments; as it returns it."""
    args = (for_batch(value, len(hidden)) for value in arguments[0])
    kwargs = {key: for_batch(value, len(hidden), key) for key, value in arguments[1].items()}
    found: torch.Tensor | tuple[torch.Tensor, ...] = module(hidden, *args, **kwargs)
    return found


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
