"""Which input channels of which layers AWQ may scale: found by running a block, and proven on it.

A model's function does not change when the inputs of some linear layers are divided by a scale that their columns are
multiplied with, as long as the layer before them (a norm or a linear layer) divides its output, and everything that
reads this output is scaled along. Candidates are found by what flows where: a norm and all that reads its output, a
linear layer and those that ran before it in the same part of the block. A candidate counts where a block with random
weights gives the same outputs after random scales were folded, also with weights so large that values would be cut
off wherever a model cuts them. What the outputs do not depend on is left out. Nothing is known of architectures.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from quantkit.models.awq_mappings import FUSED, Scaling, fits, fold, heads_of, query_heads, written_out
from quantkit.models.skeleton import Skeleton
from quantkit.models.stand_in import StandIn, stand_ins
from quantkit.models.unfuse import EXPERT, Experts

MAGNITUDE = 1024.0  # of the weights in the second trial
TOLERANCE = 1e-5  # of the largest output: powers of two are folded without a rounding error
OFFSETS = (0.0, 1.0)  # what norms add to their weights

_found: WeakKeyDictionary[nn.Module, list[list[Scaling]]] = WeakKeyDictionary()


def provable_scalings(skeleton: Skeleton, config: dict[str, Any]) -> list[list[Scaling]]:
    """The scalings of each block of the skeleton of `config`, in the order in which they are to be searched.

    A skeleton is tried out once. Raises UnsupportedError where its blocks cannot be tried out.
    """
    if skeleton.model not in _found:
        _found[skeleton.model] = _scalings(skeleton, config)
    return _found[skeleton.model]


def _scalings(skeleton: Skeleton, config: dict[str, Any]) -> list[list[Scaling]]:
    blocks: list[list[Scaling]] = [[] for _ in skeleton.blocks]
    for stand_in in stand_ins(skeleton, config):
        proven = _proven(stand_in)
        for index in stand_in.indices:
            names = {name.removesuffix(".weight") for name, _ in skeleton.blocks[index].named_parameters()}
            blocks[index] = [one for scaling in proven for one in written_out(scaling, names)]
    return blocks


def unscaled(skeleton: Skeleton, scalings: list[list[Scaling]]) -> tuple[int, int, list[str]]:
    """(linear layers of the skeleton, those whose inputs none of `scalings` scales, their names in a block)."""
    count, left = 0, []
    for index, block in enumerate(scalings):
        scaled = {layer for scaling in block for layer in scaling.layers}
        prefix = skeleton.block_prefix(index)
        names = [name.removeprefix(prefix).removesuffix(".weight") for name in skeleton.linears_of(index)]
        count += len(names)
        left += [re.sub(r"\.\d+\.", ".*.", name) for name in names if name not in scaled]
    return count, len(left), sorted(set(left))


@dataclass
class _Seen:
    """What a run of a block showed: modules in the order of their calls, what they got, what norms returned."""

    order: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


def _proven(block: StandIn) -> list[Scaling]:
    values: dict[str, torch.Tensor] = dict(block.module.named_parameters())
    want = block.run(values)
    seen = _watch(block, values)
    proven = []
    for choice in _candidates(block, seen):
        proven += [one for one in choice if _same(block, values, [one], want) and _reach(block, values, one, want)][:1]
    for name, value in values.items():
        if name.rpartition(".")[0] in block.linears:
            value.data *= MAGNITUDE
    want = block.run(values)
    proven = [one for one in proven if _same(block, values, [one], want)]
    # Together, as they will be folded.
    return proven if _same(block, values, proven, want) else []


def _same(block: StandIn, values: dict[str, torch.Tensor], scalings: list[Scaling], want: list[torch.Tensor]) -> bool:
    """Whether the block's outputs, and what it shares, stay `want` when random scales are folded."""
    changed: dict[str, torch.Tensor] = dict(values)
    for scaling in scalings:
        for one in written_out(scaling, {name.removesuffix(".weight") for name in values}):
            heads = heads_of(one, changed, "", block.settings)
            fold(one, changed, "", _random_scale(changed[f"{one.layers[0]}.weight"].shape[1], heads), heads)
    return all(_near(ours, theirs) for ours, theirs in zip(block.run(changed), want, strict=True))


def _reach(block: StandIn, values: dict[str, torch.Tensor], scaling: Scaling, want: list[torch.Tensor]) -> bool:
    """Whether the block's outputs depend on what the scaled layers compute; of others nothing is proven.

    Not so of an indexer that chooses among fewer tokens than it may keep.
    """
    changed: dict[str, torch.Tensor] = dict(values)
    for one in written_out(scaling, {name.removesuffix(".weight") for name in values}):
        for layer in one.layers:
            weight = values[f"{layer}.weight"]
            changed[f"{layer}.weight"] = weight * _random_scale(weight.shape[1], (1, 1))
    return not all(_near(ours, theirs) for ours, theirs in zip(block.run(changed), want, strict=True))


def _near(value: torch.Tensor, want: torch.Tensor) -> bool:
    difference = (value - want).abs().max()
    return bool(difference <= TOLERANCE * want.abs().max())  # False for NaN, too


def _random_scale(columns: int, heads: tuple[int, int]) -> torch.Tensor:
    """Powers of two from 1/4 to 4, equal for query heads that read one value head."""
    total, shared = heads
    drawn = torch.randint(-2, 3, (shared, 1, columns // total), generator=torch.Generator().manual_seed(columns))
    return torch.pow(2.0, drawn).expand(shared, total // shared, -1).reshape(-1)


def _watch(block: StandIn, values: dict[str, torch.Tensor]) -> _Seen:
    seen = _Seen()

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if name not in seen.order:
            seen.order[name] = len(seen.order)
            seen.inputs |= {name: tensors[0]} if tensors else {}

    def after(name: str, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            seen.outputs.setdefault(name, out)

    with ExitStack() as stack:
        for name, module in block.module.named_modules():
            stack.enter_context(
                module.register_forward_pre_hook(
                    lambda _m, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
                )
            )
            stack.enter_context(module.register_forward_hook(lambda _m, _args, out, name=name: after(name, out)))
        block.run(values)
    return seen


def _candidates(block: StandIn, seen: _Seen) -> list[list[Scaling]]:
    """Scalings to be tried, in the order in which they are searched; of each list the first that holds is taken.

    Experts are one, written with `*`.
    """
    choices: list[tuple[int, list[Scaling]]] = []
    fed: set[str] = set()
    for name, module in block.module.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or name not in seen.outputs:
            continue
        layers, follow = _readers(block, seen, name, len(weight))
        if layers:
            fed |= set(layers)
            offsets = [Scaling(name, layers, follow, offset=offset) for offset in OFFSETS]
            choices.append((seen.order[name], offsets))
    families = {_starred(name): name for name in reversed(block.linears) if name in seen.order}
    for starred, name in families.items():
        if starred not in fed:
            choices.append((seen.order[name], _linears_before(block, seen, name)))
    return [choice for _, choice in sorted(choices, key=lambda one: one[0])]


def _readers(block: StandIn, seen: _Seen, norm: str, width: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The linear layers that read what a norm returns, those of experts first, and what else has a weight for it."""
    out, experts, layers, follow = seen.outputs[norm], [], [], []
    for name in seen.order:
        given, module = seen.inputs.get(name), block.module.get_submodule(name)
        if given is None or given.data_ptr() != out.data_ptr() or given.shape[-1] != width:
            continue
        weight = getattr(module, "weight", None)
        for inside, part in module.named_modules(prefix=name):  # what experts get is perhaps scaled before
            if isinstance(part, Experts):
                first = [f"{inside}.*.{matrix}" for matrix in part.first]
                experts += [] if first[0] in experts else first
        if name in block.linears:
            layers.append(name)
        elif isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1] == width:
            follow.append(name)
    return (*experts, *layers), tuple(follow)


def _linears_before(block: StandIn, seen: _Seen, name: str) -> list[Scaling]:
    """What may take the inverse of a layer's scale: linear layers beside it that ran before, the latest first."""
    columns = _weight(block, name).shape[1]
    place = name.rpartition(".")[0]
    beside = [other for other in block.linears if other.rpartition(".")[0] == place and other in seen.order]
    earlier = sorted((other for other in beside if seen.order[other] < seen.order[name]), key=seen.order.__getitem__)
    heads = query_heads(block.settings)
    return [
        Scaling(_starred(other), (_starred(name),), fused=fused)
        for other in reversed(earlier)
        for fused in FUSED
        if fits(fused, _weight(block, other).shape[0], columns, heads)
    ]


def _weight(block: StandIn, layer: str) -> torch.Tensor:
    return block.module.get_parameter(f"{layer}.weight")


def _starred(name: str) -> str:
    """The name with every expert taken for one."""
    expert = EXPERT.match(name)
    return name if expert is None else f"{expert.group(1)}.*{name[expert.end() :]}"
