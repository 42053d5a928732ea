"""The way from a transformers model's last hidden states to logits, by the model's own code, some positions at a time.

The states are what goes into the output layer: behind the last norm, so that they fit into float16. What a model does
around its output layer (a bias, a soft cap, a scale) is its own code: the decoder is replaced by one that hands the
given states over.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

SLAB_ELEMENTS = 1 << 23  # of the output layer's weight that are in float32 at a time


class _Stop(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass at the output layer."""


class _Outputs(tuple[torch.Tensor]):
    """What a decoder returns: its last hidden states, and None for all else that architectures ask for."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _Decoder(nn.Module):
    """Stands for everything before the output layer: hands `states` (1, n, D) over, whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.empty(0)

    @property
    def decoder(self) -> _Decoder:
        """Some architectures call the decoder inside their base model."""
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> _Outputs:
        return _Outputs((self.states,))


class OutputHead:
    """The output side of `model`, a causal language model of transformers, which stays as it is."""

    def __init__(self, model: Any) -> None:
        self._decoder = _Decoder()
        self._model = copy.copy(model)
        self._model._modules = dict(model._modules) | {model.base_model_prefix: self._decoder}

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(n, D) states -> (n, V) logits in the model's dtype."""
        self._decoder.states = states[None]
        nothing = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        found: torch.Tensor = self._model(input_ids=nothing, use_cache=False).logits[0]
        return found


def last_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(B, T) ids -> (B, T, D): what goes into the output layer; the layer itself does not run."""
    seen: list[torch.Tensor] = []

    def keep(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0])
        raise _Stop

    handle: RemovableHandle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        model(input_ids=ids, use_cache=False)
    except _Stop:
        pass
    finally:
        handle.remove()
    return seen[0]


class Float32Output(nn.Module):
    """An output layer that computes in float32 from a weight (V, D) of any float dtype, some rows at a time."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., V) float32."""
        rows = max(1, SLAB_ELEMENTS // self.weight.shape[1])
        found = torch.empty(*states.shape[:-1], len(self.weight), dtype=torch.float32)
        flat, start = states.float().reshape(-1, states.shape[-1]), 0
        for part in self.weight.split(rows):
            found.view(-1, len(self.weight))[:, start : start + len(part)] = flat @ part.float().T
            start += len(part)
        return found if self.bias is None else found.add_(self.bias)
