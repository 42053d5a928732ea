"""Compute logits from hidden states with the model's own code, a slab of positions at a time.

States enter after the decoder blocks, or right before the output layer (after the last norm, where they fit into
float16). The model's code from there on (norm, bias, soft cap, scale) runs unchanged: a module that returns the given
states replaces everything before. Positions are independent, so each is run as a sequence of its own.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantkit.models.architectures import running
from quantkit.models.skeleton import Skeleton, load, set_parameter, tables, weight_name
from quantkit.models.stand_in import StandsFor, StopForward
from quantkit.numerics.matmul import product

if TYPE_CHECKING:
    from quantkit.models.source import Source

SLAB_ELEMENTS = 1 << 23  # of the source's output layer in float32 at a time
NARROW_ELEMENTS = 1 << 21  # of the model's own output layer converted at a time
HEAD = "its output layer"


class _Outputs(tuple[torch.Tensor]):
    """A decoder's output object: its last hidden states; every other attribute is None."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _StateInput(StandsFor):
    """Replaces the blocks, or everything before the output layer; returns `out` for any arguments."""

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__(block)
        self.out: torch.Tensor | tuple[torch.Tensor] = torch.empty(0)

    @property
    def decoder(self) -> _StateInput:
        """Return self, because some architectures call `decoder` inside their base model."""
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor | tuple[torch.Tensor]:
        return self.out


class _ZeroEmbedding(nn.Module):
    """Replaces an embedding whose output is unused; returns zeros."""

    def __init__(self, width: int, entry: _StateInput) -> None:
        super().__init__()
        self.width, self.entry = width, entry

    @property
    def weight(self) -> torch.Tensor:
        """Return the input states, which have the right device and dtype."""
        out = self.entry.out
        return out[0] if isinstance(out, tuple) else out

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.new_zeros(*ids.shape, self.width)


class OutputHead:
    """The output side of a transformers causal language model; `model` itself is not changed.

    States enter right before the output layer `layer` (V, D), or after the decoder blocks if `blocks_path`, the dotted
    name of their list, is given. The weights of blocks and embeddings are not needed.
    """

    def __init__(self, model: Any, blocks_path: str = "") -> None:
        self.layer = model.get_output_embeddings()
        self._entry, self._behind_blocks = _StateInput(), bool(blocks_path)
        if blocks_path:
            blocks = list(model.get_submodule(blocks_path))
            self._entry = _StateInput(blocks[-1])
            self._model = _replaced(model, blocks_path, nn.ModuleList([self._entry] * len(blocks)))
            for name, table in tables(model).items():
                self._model = _replaced(self._model, name, _ZeroEmbedding(table.embedding_dim, self._entry))
        else:
            decoder = _decoder(model)
            # Some heads read a factor from the configuration.
            plain = {key: value for key, value in vars(model.get_submodule(decoder)).items() if type(value) is float}
            self._entry.__dict__.update(plain)
            self._model = _replaced(model, decoder, self._entry)
        of_layer = {id(parameter) for parameter in self.layer.parameters()}
        # Parts of a head before the output layer; their output is ignored, see `logits`.
        others = [parameter for parameter in self._model.parameters() if id(parameter) not in of_layer]
        self._without_weights = bool(others) and all(parameter.is_meta for parameter in others)
        self._width = int(getattr(model.config.get_text_config(), "hidden_size", 0))

    def logits(self, states: torch.Tensor, as_tuple: bool = False) -> torch.Tensor:
        """Return logits (n, V) for states (n, D) in the model's dtype; `as_tuple`: the model's blocks return tuples.

        If tokens have several states after the blocks (AltUp), `states` is (states, n, D).
        """
        each = states.unsqueeze(-2)
        count = states.shape[-2]
        logits: torch.Tensor
        if self._behind_blocks:
            self._entry.out = (each,) if as_tuple else each
            ids = torch.zeros(count, 1, dtype=torch.int64, device=states.device)
            with running(self._model.config, HEAD):
                logits = self._model(input_ids=ids, use_cache=False).logits
            return logits[:, 0]
        # Some heads change their width before the output layer.
        wide = each if each.shape[-1] == self._width else each.new_zeros(count, 1, self._width)
        self._entry.out = _Outputs((wide.to("meta") if self._without_weights else wide,))
        # The head's parts before the output layer have been applied to these states.
        given = self.layer.register_forward_pre_hook(lambda _layer, _args: (each,))
        with given, running(self._model.config, HEAD):
            logits = self._model(inputs_embeds=states.new_zeros(count, 1, 0), use_cache=False).logits
        return logits[:, 0]

    def last_states(self, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the output layer's inputs (B, T, D) for the last block's outputs; needs no output-layer weight."""
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        self._entry.out = (hidden,) if isinstance(outputs, tuple) else hidden
        return last_states(self._model, torch.zeros(hidden.shape[-3:-1], dtype=torch.int64, device=hidden.device))


def _decoder(model: Any) -> str:
    """Return the name of the module before the output layer; `base_model_prefix` is wrong in some models."""
    prefix = str(model.base_model_prefix)
    children = [name for name, child in model.named_children() if child is not model.get_output_embeddings()]
    return prefix if prefix in children else children[0]


def load_head(source: Source, skeleton: Skeleton, device: torch.device, dtype: torch.dtype) -> OutputHead:
    """Load the modules after the blocks from the source; the skeleton stays without weights."""
    model = copy.deepcopy(skeleton.model)
    head = OutputHead(model, skeleton.blocks_path)
    # Only an embedding's tensor that is tied to the output layer is needed.
    unused = {id(table.weight) for table in tables(model).values()} - {id(head.layer.weight)}
    inside = f"{skeleton.blocks_path}."
    for name, parameter in list(model.named_parameters()):
        if id(parameter) not in unused and not name.startswith(inside):
            set_parameter(model, name, load(source, skeleton, name).to(device, dtype))
    model.tie_weights()
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
    return head


def load_output_layer(source: Source, skeleton: Skeleton) -> OutputHead:
    """Load only the output layer, computing in float32; the skeleton stays without weights."""
    model = copy.deepcopy(skeleton.model)
    layer = model.get_output_embeddings()
    weight = load(source, skeleton, weight_name(model, layer))
    bias = None if layer.bias is None else load(source, skeleton, weight_name(model, layer, "bias"))
    model.set_output_embeddings(StoredOutput(weight, bias, torch.float32, SLAB_ELEMENTS))
    return OutputHead(model)


def _replaced(model: Any, path: str, module: nn.Module) -> Any:
    """Return a shallow copy of the model with the module at a dotted path replaced."""
    name, _, rest = path.partition(".")
    changed, own = copy.copy(model), model._modules[name]
    other = _replaced(own, rest, module) if rest else module
    changed._modules = model._modules | {name: other}
    # Code may also find the part by its former name (unfuse.py).
    vars(changed).update({key: other for key, value in vars(model).items() if value is own})
    return changed


def last_states(model: Any, inputs: torch.Tensor, name: str = "input_ids") -> torch.Tensor:
    """Return the output layer's inputs (B, T, D) for token ids (B, T), or for the model input called `name`."""
    seen: list[torch.Tensor] = []

    def take(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0])
        raise StopForward

    hook = model.get_output_embeddings().register_forward_pre_hook(take)
    with hook, suppress(StopForward), running(model.config, type(model).__name__):
        model(**{name: inputs}, use_cache=False)
    return seen[0]


class StoredOutput(nn.Module):
    """An output layer (V, D) that converts its stored weight in slabs of `slab` elements.

    It computes in `dtype`, or in its inputs' dtype.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None = None,
        slab: int = NARROW_ELEMENTS,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        self.dtype, self.rows = dtype, max(1, slab // weight.shape[1])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (..., D) to logits (..., V)."""
        x = states.to(self.dtype)
        if self.dtype is None and self.weight.dtype == x.dtype:
            return product(x, self.weight, self.bias)
        logits = x.new_empty(*x.shape[:-1], len(self.weight))
        for start in range(0, len(self.weight), self.rows):
            part = slice(start, start + self.rows)
            bias = None if self.bias is None else self.bias[part]
            logits[..., part] = product(x, self.weight[part].to(x.dtype), bias)
        return logits
