"""Decoder blocks with random weights and recorded arguments, to test what a block's code does.

A stand-in is a whole block of a skeleton; a large block is replaced by one of the same config.json with narrower inner
layers and fewer experts. Blocks with the same code and settings share a stand-in.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from quantkit.errors import UnsupportedError
from quantkit.models.architectures import Signal, block_of, running
from quantkit.models.config import EXPERTS
from quantkit.models.skeleton import Skeleton, open_skeleton, set_parameter, tables
from quantkit.models.unfuse import EXPERT
from quantkit.system.untrusted import reraise_as

TOKENS = 16
LARGE_BLOCK = 1 << 25  # parameters; above this, the stand-in is narrower
INNER, LEAST_EXPERTS = 256, 4
INNER_SIZES = (
    *("intermediate_size", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
PERIOD = 1_000_003  # of the random numbers; a prime, so that no two rows of a weight are equal
STEP = 64  # norms are multiples of 1 / STEP: a power of two scales them without a rounding error
DIFFERING = ("layer_idx", "layer_id", "layer_number", "training")  # attributes in which equal blocks differ

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StopForward(Signal):
    """Ends a forward pass early."""


class StandsFor(nn.Module):
    """A module that replaces `block` and forwards attribute access to it."""

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)  # bypass nn.Module: its parameters are not parameters of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


class _Passed(tuple[Any, ...]):
    """A tuple of hidden states that also acts as a tensor, because models expect one or the other from blocks."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)[index] if isinstance(index, tuple) else super().__getitem__(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)


class _Second:
    """Placeholder for a block's second return value, which must not reach the next block; most models drop it."""


class Recorder(StandsFor):
    """Replaces a block: records its arguments and returns the hidden states plus `shift`; the last one ends the pass.

    The result is a tuple, since models use the first value, two, or all of them. Raises UnsupportedError if the
    next block receives the second value, or if the hidden states are not a positional argument.
    """

    def __init__(self, block: nn.Module, last: bool) -> None:
        super().__init__(block)
        self.last = last
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.hidden = torch.empty(0)
        self.shift = 0.0

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.hidden, self.args, self.kwargs = hidden[0] if isinstance(hidden, tuple) else hidden, args, kwargs
        if self.hidden is None:
            raise UnsupportedError(f"a {type(self._block).__name__} is called with its hidden states by name only")
        if any(isinstance(value, _Second) for value in (*args, *kwargs.values())):
            raise UnsupportedError(
                f"a {type(self._block).__name__} gets more from the previous block than hidden states, "
                "which calibration and perplexity do not support"
            )
        if self.last:
            raise StopForward
        return _Passed((self.hidden + self.shift if self.shift else self.hidden, _Second()))


def is_shelf(value: object) -> bool:
    """Return whether the argument is the empty mapping through which blocks pass values to later blocks."""
    return isinstance(value, MutableMapping) and not value


@contextmanager
def tables_by_rows(
    base: nn.Module, read: Callable[[str, list[int]], torch.Tensor], likely: Iterable[int] = ()
) -> Iterator[set[str]]:
    """Load only requested rows into the embeddings (`tables`) of `base`; yield their parameter names.

    `read(name, rows)` returns rows (rows, width) of a parameter. `likely` rows are read with the first request.
    """
    found = tables(base)
    whole = {name: module.get_parameter("weight") for name, module in found.items()}
    first = torch.tensor(sorted(set(likely)), dtype=torch.int64)
    with ExitStack() as stack:
        for name, module in found.items():
            module.padding_idx = None  # its row may be missing, and it only affects gradients
            hook = _Rows(partial(read, f"{name}.weight"), first[first < module.num_embeddings])
            stack.enter_context(module.register_forward_pre_hook(hook))
            set_parameter(module, "weight", torch.empty(0, module.embedding_dim))
        try:
            yield {f"{name}.weight" for name in found}
        finally:
            for name, module in found.items():
                module.register_parameter("weight", whole[name])


class _Rows:
    """An embedding's forward pre-hook that loads the requested rows and remaps the indices."""

    def __init__(self, read: Callable[[list[int]], torch.Tensor], likely: torch.Tensor) -> None:
        self._read, self._likely = read, likely
        self._there = torch.empty(0, dtype=torch.int64)

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        ids = args[0].to("cpu", torch.int64)
        if not bool(torch.isin(ids, self._there).all()):
            self._there = torch.unique(torch.cat([self._there, self._likely, ids.reshape(-1)]))
            set_parameter(module, "weight", self._read(self._there.tolist()))
        return (torch.searchsorted(self._there, ids).to(args[0].device),)


@dataclass
class Seen:
    """A recorded run of a block: modules in order of completion, their first inputs, and their outputs."""

    order: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record the first call of a module."""
        if name not in self.order:
            self.order[name] = len(self.order)
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self.inputs |= {name: tensors[0]} if tensors else {}
            self.outputs |= {name: out} if isinstance(out, torch.Tensor) else {}


@dataclass
class StandIn:
    """A float32 block with random weights, its arguments, and input hidden states (1, T, D)."""

    indices: list[int]  # of the blocks that it stands for
    module: nn.Module
    arguments: Arguments
    hidden: torch.Tensor
    linears: tuple[str, ...]  # names of its linear layers
    settings: Any
    shared: dict[Any, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # values shared by earlier blocks

    def run(self, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the block's outputs for these parameters: hidden states (1, T, D) and values shared with blocks."""
        out, made = self.outputs(values)
        return [out, *(part for parts in made.values() for part in parts)]

    def outputs(self, values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[Any, tuple[torch.Tensor, ...]]]:
        """Return the hidden states, and the values shared with other blocks, by key."""
        shelf = dict(self.shared)
        args = tuple(shelf if is_shelf(value) else value for value in self.arguments[0])
        kwargs = {key: shelf if is_shelf(value) else value for key, value in self.arguments[1].items()}
        what = block_of(self.indices[0], self.module)
        with torch.no_grad(), running(self.settings, what):
            out = torch.func.functional_call(self.module, values, (self.hidden, *args), kwargs)
        made = {key: value for key, value in shelf.items() if value is not self.shared.get(key)}
        return out[0] if isinstance(out, tuple) else out, made

    def watch(self) -> Seen:
        """Run the block; return the inputs and outputs of its modules."""
        seen = Seen()
        with ExitStack() as stack:
            for name, module in self.module.named_modules():
                hook: Any = lambda _module, *called, name=name: seen.note(name, *called)  # noqa: E731
                stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            self.run(dict(self.module.named_parameters()))
        return seen


def stand_ins(skeleton: Skeleton, config: dict[str, Any]) -> Iterator[StandIn]:
    """Yield a stand-in for each kind of block; raise UnsupportedError if blocks cannot be run one by one."""
    largest = max(sum(value.numel() for value in block.parameters()) for block in skeleton.blocks)
    tried = skeleton
    if largest > LARGE_BLOCK:
        with suppress(UnsupportedError):
            narrow = open_skeleton(narrowed(config))
            tried = narrow if _parts(narrow) == _parts(skeleton) else skeleton
    kinds: dict[str, list[int]] = {}
    for index, block in enumerate(tried.blocks):
        kinds.setdefault(_kind(block), []).append(index)
    what = f"{type(skeleton.model).__name__}: its blocks cannot be run one by one"
    with reraise_as(what, UnsupportedError):
        arguments, hidden = _arguments(tried)
    shared: dict[Any, tuple[torch.Tensor, ...]] = {}
    for indices in kinds.values():  # in the order of their first blocks, so that shared values exist
        first = indices[0]
        module = copy.deepcopy(tried.blocks[first])
        fill(module)
        linears = tuple(name.removeprefix(tried.block_prefix(first)) for name in tried.linears_of(first))
        settings = skeleton.model.config.get_text_config()
        names = tuple(name.removesuffix(".weight") for name in linears)
        stand_in = StandIn(indices, module, arguments[first], hidden, names, settings, dict(shared))
        if any(map(is_shelf, (*stand_in.arguments[0], *stand_in.arguments[1].values()))):
            with reraise_as(what, UnsupportedError):
                shared |= stand_in.outputs(dict(module.named_parameters()))[1]
        yield stand_in


def layers_of_one_input(skeleton: Skeleton, config: dict[str, Any]) -> list[list[str]]:
    """Group the linear layers that read the same input in a block, by weight name.

    All experts of a block form one group. Runs a block of each kind; raises UnsupportedError as `stand_ins`
    does.
    """
    units: dict[tuple[int, object], list[str]] = {}
    for block in stand_ins(skeleton, config):
        inputs = block.watch().inputs
        for index in block.indices:
            for name in skeleton.linears_of(index):
                inside = name.removeprefix(skeleton.block_prefix(index)).removesuffix(".weight")
                expert = EXPERT.match(name)
                key = expert.group(1) if expert else id(inputs[inside]) if inside in inputs else inside
                units.setdefault((index, key), []).append(name)
    return [units[key] for key in sorted(units, key=lambda key: key[0])]


def narrowed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of config.json with narrower inner layers and fewer experts."""
    small = dict(config)
    if isinstance(inner := config.get("text_config"), dict):
        small["text_config"] = narrowed(inner)
    numbers = {name: value for name, value in config.items() if isinstance(value, int) and value > 0}
    groups, chosen = (int(numbers.get(name, 1)) for name in ("n_group", "num_experts_per_tok"))
    least = -(-max(LEAST_EXPERTS, chosen, 2 * groups) // groups) * groups
    small |= {name: min(numbers[name], INNER) for name in INNER_SIZES if name in numbers}
    return small | {name: min(numbers[name], least) for name in EXPERTS if name in numbers}


def fill(module: nn.Module) -> None:
    """Give every parameter random values; norm weights are multiples of 1 / STEP around one."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(PERIOD, generator=generator)
    numbers = torch.cat([numbers, numbers])  # a full period from any start
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
    """Return each block's call arguments, and random hidden states."""
    base = copy.deepcopy(skeleton.model.base_model)
    path = skeleton.blocks_path.removeprefix(f"{skeleton.model.base_model_prefix}.")
    last = len(skeleton.blocks) - 1
    recorders = nn.ModuleList(Recorder(block, index == last) for index, block in enumerate(skeleton.blocks))
    base.set_submodule(path, recorders)
    generator = torch.Generator().manual_seed(1)

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        return torch.randn(len(numbers), base.get_parameter(name).shape[1], generator=generator)

    vocabulary = int(base.get_input_embeddings().num_embeddings)
    ids = torch.arange(TOKENS)[None] % vocabulary
    with tables_by_rows(base, rows) as by_rows, torch.no_grad(), suppress(StopForward):
        for name, parameter in list(base.named_parameters()):
            if name not in by_rows:
                set_parameter(base, name, torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        base(input_ids=ids, use_cache=False)
    seen = [recorder for recorder in recorders if isinstance(recorder, Recorder)]
    hidden = torch.randn(seen[0].hidden.shape, generator=torch.Generator().manual_seed(2))
    return [(recorder.args, recorder.kwargs) for recorder in seen], hidden


def _kind(block: nn.Module) -> str:
    """Return a string that identifies a block's function without its weights: classes, shapes, settings."""
    lines = [repr(block), str([(name, tuple(value.shape)) for name, value in block.named_parameters()])]
    for name, module in block.named_modules():
        plain = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and key not in DIFFERING and not key.startswith("_")
        )
        lines.append(f"{name}: {plain}")
    return "\n".join(lines)


def _parts(skeleton: Skeleton) -> list[set[str]]:
    """Return the parameter names of each block, without expert indices."""
    return [{re.sub(r"\.\d+\.", ".", name) for name, _ in block.named_parameters()} for block in skeleton.blocks]
