"""Decoder blocks with random weights, and what they are called with: to try out what a block's code computes.

The blocks are those of a skeleton, whole, with their classes and settings. Where they are large, the skeleton is one of
the same config.json with narrower inner layers and fewer experts. Blocks whose code and settings are alike have one
stand-in.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.errors import UnsupportedError
from quantkit.models.bounds import EXPERTS
from quantkit.models.skeleton import Skeleton, open_skeleton, set_parameter
from quantkit.untrusted import shown, told

TOKENS = 16
LARGE_BLOCK = 1 << 25  # parameters; beyond, inner layers and experts of the stand-in are fewer
INNER, LEAST_EXPERTS = 256, 4
INNER_SIZES = (
    "intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
PERIOD = 1_000_003  # of the random numbers; a prime, so that no two rows of a weight are alike
STEP = 64  # norms are multiples of one part in so many: a power of two scales them without a rounding error
NOT_TOLD_BY = ("layer_idx", "layer_id", "layer_number", "training")  # attributes in which equal blocks differ

# Settings, not zero, of models whose blocks need more than what the block before gave, and what that is.
NOT_ALONE = {
    "altup_num_inputs": "carry several hidden states of a token side by side",
    "hidden_size_per_layer_input": "are called with values that depend on the text beside what flows through them",
    "num_kv_shared_layers": "take the keys and values of earlier blocks",
}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StopForward(Exception):  # noqa: N818 - a signal, not an error
    """Ends a forward pass early: what it was for has been seen."""


class Recorder(nn.Module):
    """Stands for a block: keeps the arguments it is called with and passes the hidden states through.

    They are passed on in a tuple: some models take the first of what a block returns, some all of it. The last block
    ends the forward pass. What a model asks the block for, it gets.
    """

    def __init__(self, block: nn.Module, last: bool) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)  # past nn.Module: its parameters are none of the recorder's
        self.last = last
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden: torch.Tensor | tuple[torch.Tensor], *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        """Note everything."""
        self.hidden, self.args, self.kwargs = hidden[0] if isinstance(hidden, tuple) else hidden, args, kwargs
        if self.last:
            raise StopForward
        return (self.hidden,)


@dataclass
class StandIn:
    """A block with random weights in float32, its arguments, and hidden states (1, T, D) that go into it.

    `indices` are the blocks of the skeleton that it stands for, `linears` their linear layers by name in the block.
    """

    indices: list[int]
    module: nn.Module
    arguments: Arguments
    hidden: torch.Tensor
    linears: tuple[str, ...]
    settings: Any

    def run(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """(T, D): what comes out of the block with other values of its parameters."""
        args, kwargs = self.arguments
        with torch.no_grad():
            out = torch.func.functional_call(self.module, values, (self.hidden, *args), kwargs)
        return (out[0] if isinstance(out, tuple) else out)[0]


def refuse_apart(skeleton: Skeleton) -> None:
    """Raise UnsupportedError where blocks cannot be computed one by one, by what the configuration tells."""
    config = skeleton.model.config.get_text_config()
    for name, what in NOT_ALONE.items():
        if value := getattr(config, name, 0):
            raise UnsupportedError(
                f"the blocks of the architecture {config.model_type!r} {what} ({name} = {shown(value)}), so they "
                "cannot be computed one by one, as calibration does"
            )


def stand_ins(skeleton: Skeleton, config: dict[str, Any]) -> Iterator[StandIn]:
    """One for each kind of block of the skeleton of `config`; raises UnsupportedError where blocks cannot be tried."""
    refuse_apart(skeleton)
    largest = max(sum(value.numel() for value in block.parameters()) for block in skeleton.blocks)
    tried = skeleton
    if largest > LARGE_BLOCK:
        with suppress(UnsupportedError):
            narrow = open_skeleton(narrowed(config))
            tried = narrow if _parts(narrow) == _parts(skeleton) else skeleton
    kinds: dict[str, list[int]] = {}
    for index, block in enumerate(tried.blocks):
        kinds.setdefault(_kind(block), []).append(index)
    what = f"{type(skeleton.model).__name__}: its blocks cannot be tried out one by one"
    with told(what, UnsupportedError):
        arguments, hidden = _arguments(tried)
    for indices in kinds.values():
        first = indices[0]
        module = copy.deepcopy(tried.blocks[first])
        fill(module)
        linears = tuple(name.removeprefix(tried.block_prefix(first)) for name in tried.linears_of(first))
        settings = skeleton.model.config.get_text_config()
        yield StandIn(
            indices, module, arguments[first], hidden, tuple(n.removesuffix(".weight") for n in linears), settings
        )


def narrowed(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with narrower inner layers and fewer experts, and else the same."""
    small = dict(config)
    if isinstance(inner := config.get("text_config"), dict):
        small["text_config"] = narrowed(inner)
    numbers = {name: value for name, value in config.items() if isinstance(value, int) and value > 0}
    groups, chosen = (int(numbers.get(name, 1)) for name in ("n_group", "num_experts_per_tok"))
    least = -(-max(LEAST_EXPERTS, chosen, 2 * groups) // groups) * groups
    small |= {name: min(numbers[name], INNER) for name in INNER_SIZES if name in numbers}
    return small | {name: min(numbers[name], least) for name in EXPERTS if name in numbers}


def fill(module: nn.Module) -> None:
    """Give every parameter random values: those of norms around one, in steps that are scaled without a loss."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(PERIOD, generator=generator)
    numbers = torch.cat([numbers, numbers])  # so that a start anywhere has a whole period after it
    for name, parameter in list(module.named_parameters()):
        count = parameter.numel()
        start = int(torch.randint(PERIOD, (1,), generator=generator))
        period = numbers[start : start + min(count, PERIOD)]
        values = period.repeat(-(-count // PERIOD))[:count].reshape(parameter.shape)
        if name.endswith("weight") and parameter.ndim == 1:
            values = (values.clamp(-2, 2) * STEP / 4).round() / STEP + 1
        elif parameter.ndim > 1:
            values = values / parameter.shape[-1] ** 0.5
        set_parameter(module, name, values)


def _arguments(skeleton: Skeleton) -> tuple[list[Arguments], torch.Tensor]:
    """What each block is called with beside random hidden states, which are returned, too."""
    base = copy.deepcopy(skeleton.model.base_model)
    embedding = base.get_input_embeddings()
    path = skeleton.blocks_path.removeprefix(f"{skeleton.model.base_model_prefix}.")
    last = len(skeleton.blocks) - 1
    recorders = nn.ModuleList(Recorder(block, index == last) for index, block in enumerate(skeleton.blocks))
    base.set_submodule(path, recorders)
    for name, parameter in list(base.named_parameters()):
        if parameter is not embedding.weight:
            set_parameter(base, name, torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    width = int(embedding.embedding_dim)
    inputs = torch.randn(1, TOKENS, width, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), suppress(StopForward):
        base(inputs_embeds=inputs, use_cache=False)
    seen = [recorder for recorder in recorders if isinstance(recorder, Recorder)]
    return [(recorder.args, recorder.kwargs) for recorder in seen], seen[0].hidden


def _kind(block: nn.Module) -> str:
    """What decides what a block computes, but for its weights: classes, shapes, settings."""
    told = [repr(block), str([(name, tuple(value.shape)) for name, value in block.named_parameters()])]
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and not key.startswith("_")
        }
        told.append(f"{name}: {sorted((key, value) for key, value in plain.items() if key not in NOT_TOLD_BY)}")
    return "\n".join(told)


def _parts(skeleton: Skeleton) -> list[set[str]]:
    """Names of each block's parameters, experts taken for one."""
    return [{re.sub(r"\.\d+\.", ".", name) for name, _ in block.named_parameters()} for block in skeleton.blocks]
