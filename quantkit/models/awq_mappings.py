"""Find the layers that AWQ can scale, and where the inverse is folded: from a table, or by running a block.

AWQ multiplies input columns of linear layers by a scale. The model is unchanged if the layer before (a norm or a linear
layer) divides its output, and all readers of that output are scaled. `MAPPINGS` lists such layers for some
architectures. For all others, candidates are a norm with the readers of its output, and a linear layer with
layers that ran before it in the same submodule. A candidate is valid if a block with random weights gives the same
outputs after folding random scales, even with weights so large that clipping would show, and if its outputs
depend on the scaled layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn

from quantkit.models.skeleton import Skeleton
from quantkit.models.stand_in import Seen, StandIn, stand_ins
from quantkit.models.unfuse import EXPERT, Experts

Fused = Literal["", "qkv", "qkv_by_group", "kv_by_head", "gate_up"]
FUSED: tuple[Fused, ...] = get_args(Fused)
MAGNITUDE = 1024.0  # of the weights in the second trial
TOLERANCE = 1e-5  # of the largest output; powers of two are folded without rounding errors
OFFSETS = (0.0, 1.0)  # constants that norms add to their weights


@dataclass(frozen=True)
class Scaling:
    """Linear layers whose input channels can be scaled, because the inverse can be folded into `before`.

    Names are relative to the block; `*` stands for every expert. `fused`: only some rows of `before` take the inverse:
    the values of a stacked `qkv`, of `qkv_by_group` (q, k, v per group of heads), or of `kv_by_head` (k, v per head);
    or the second half of `gate_up`.
    """

    before: str  # a norm or a linear layer
    layers: tuple[str, ...]
    follow: tuple[str, ...] = ()  # other unquantized readers of the same output, such as a router
    fused: Fused = ""
    offset: float = 0.0  # the norm multiplies by weight + offset


_ATTENTION = (
    Scaling("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Scaling("self_attn.v_proj", ("self_attn.o_proj",)),
)
_MLP = (
    Scaling("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Scaling("mlp.up_proj", ("mlp.down_proj",)),
)
_EXPERTS = (
    Scaling("post_attention_layernorm", ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"), ("mlp.gate",)),
    Scaling("mlp.experts.*.up_proj", ("mlp.experts.*.down_proj",)),
)
# By model type, in search order; no setting of these types changes them.
MAPPINGS: dict[str, tuple[Scaling, ...]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "smollm3"), _ATTENTION + _MLP),
    "qwen3_moe": _ATTENTION + _EXPERTS + _MLP,  # some of its blocks may have no experts
    "mixtral": (
        *_ATTENTION,
        Scaling(
            "post_attention_layernorm",
            ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
            ("block_sparse_moe.gate",),
        ),
        Scaling("block_sparse_moe.experts.*.w3", ("block_sparse_moe.experts.*.w2",)),
    ),
    "phi3": (
        Scaling("input_layernorm", ("self_attn.qkv_proj",)),
        Scaling("self_attn.qkv_proj", ("self_attn.o_proj",), fused="qkv"),
        Scaling("post_attention_layernorm", ("mlp.gate_up_proj",)),
        Scaling("mlp.gate_up_proj", ("mlp.down_proj",), fused="gate_up"),
    ),
}


def written_out(scaling: Scaling, stems: set[str]) -> Iterator[Scaling]:
    """Expand `*` to the experts of a block whose weights are named `stems`; yield one scaling per expert."""

    def named(name: str) -> Iterator[str]:
        if "*" not in name:
            return iter([name] if name in stems else [])
        return takewhile(stems.__contains__, (name.replace("*", str(number)) for number in count()))

    for number, before in enumerate(named(scaling.before)):
        own = [name.replace("*", str(number)) if "*" in scaling.before else name for name in scaling.layers]
        layers = tuple(found for name in own for found in named(name))
        follow = tuple(found for name in scaling.follow for found in named(name))
        if layers:
            yield replace(scaling, before=before, layers=layers, follow=follow)


def rows_before(fused: Fused, rows: int, columns: int, heads: int) -> torch.Tensor:
    """Return which of the `rows` output rows of the layer before become the `columns` inputs of the next layer.

    There are fewer than `columns` if several of the `heads` query heads share a value head.
    """
    if fused == "gate_up":
        return torch.arange(rows // 2, rows)
    if fused == "qkv":
        return torch.arange(rows - (rows - columns) // 2, rows)
    if fused == "qkv_by_group":
        size = columns // heads
        groups = (rows - columns) // (2 * size)
        return torch.arange(rows).reshape(groups, -1, size)[:, -1].reshape(-1)
    if fused == "kv_by_head":
        return torch.arange(rows).reshape(heads, -1)[:, -(columns // heads) :].reshape(-1)
    return torch.arange(rows)


def fits(fused: Fused, rows: int, columns: int, heads: int) -> bool:
    """Return whether a layer before with this shape can be `fused` in this way; arguments as in `rows_before`."""
    if fused == "gate_up" or rows == columns:
        return (rows == columns) == (fused == "") and rows in (columns, 2 * columns)
    size = columns // heads
    if columns % heads:
        return False
    if fused == "kv_by_head":
        return rows % heads == 0 and rows // heads > size
    values = rows if fused == "" else (rows - columns) // 2
    shared = values // size
    if values <= 0 or values % size or heads % shared or (fused != "" and (rows - columns) % 2):
        return False
    return fused != "qkv_by_group" or rows % (shared * size) == 0


def heads_of(scaling: Scaling, values: dict[str, torch.Tensor], prefix: str, config: Any) -> tuple[int, int]:
    """Return (query heads, key-value heads) whose channels must share scales; (1, 1) if channels are independent."""
    before = values[f"{prefix}{scaling.before}.weight"]
    if before.ndim == 1:
        return 1, 1
    columns = values[f"{prefix}{scaling.layers[0]}.weight"].shape[1]
    heads = query_heads(config)
    rows = len(rows_before(scaling.fused, before.shape[0], columns, heads))
    if scaling.fused in ("", "gate_up") and rows == columns:
        return 1, 1
    return heads, rows // (columns // heads)


def query_heads(config: Any) -> int:
    """Return the number of attention heads; 1 without attention, or if blocks differ."""
    if "num_attention_heads" in (getattr(config, "per_layer_attributes", None) or ()):
        return 1
    heads = getattr(config, "num_attention_heads", 1)
    return heads if isinstance(heads, int) else 1


def fold(
    scaling: Scaling, values: dict[str, torch.Tensor], prefix: str, scale: torch.Tensor, heads: tuple[int, int]
) -> None:
    """Multiply the layers' columns in `values` (float32, by full name) by `scale` (K,), and divide the layer before.

    `heads` as from `heads_of`; query heads that share a value head have equal scales.
    """
    for name in scaling.layers + scaling.follow:
        values[f"{prefix}{name}.weight"] = values[f"{prefix}{name}.weight"] * scale
    stem = f"{prefix}{scaling.before}."
    weight, bias = values[stem + "weight"], values.get(stem + "bias")
    if weight.ndim == 1:
        values[stem + "weight"] = (weight + scaling.offset) / scale - scaling.offset
        if bias is not None:
            values[stem + "bias"] = bias / scale
        return
    total, shared = heads
    divisor = scale.reshape(shared, total // shared, -1)[:, 0].reshape(-1)
    per_row = torch.ones(weight.shape[0], device=weight.device)
    per_row[rows_before(scaling.fused, weight.shape[0], len(scale), total).to(weight.device)] = divisor
    values[stem + "weight"] = weight / per_row[:, None]
    if bias is not None:
        values[stem + "bias"] = bias / per_row


_found: WeakKeyDictionary[nn.Module, list[list[Scaling]]] = WeakKeyDictionary()


def provable_scalings(skeleton: Skeleton, config: dict[str, Any]) -> list[list[Scaling]]:
    """Return each block's valid scalings, in search order.

    Runs the skeleton's blocks once. Raises UnsupportedError if they cannot be run one by one.
    """
    if skeleton.model not in _found:
        blocks: list[list[Scaling]] = [[] for _ in skeleton.blocks]
        known = MAPPINGS.get(str(config.get("model_type")))
        kinds: Iterable[tuple[Iterable[int], Iterable[Scaling]]] = [(range(len(blocks)), known or ())]
        if known is None:
            kinds = ((block.indices, _tested_scalings(block)) for block in stand_ins(skeleton, config))
        for indices, scalings in kinds:
            for index in indices:
                stems = {name.removesuffix(".weight") for name, _ in skeleton.blocks[index].named_parameters()}
                blocks[index] = [one for scaling in scalings for one in written_out(scaling, stems)]
        _found[skeleton.model] = blocks
    return _found[skeleton.model]


def unscaled(skeleton: Skeleton, scalings: list[list[Scaling]]) -> tuple[int, int, list[str]]:
    """Return (number of linear layers, number of unscaled ones, the unscaled layers' names within a block)."""
    total, left = 0, []
    for index, block in enumerate(scalings):
        scaled = {layer for scaling in block for layer in scaling.layers}
        prefix = skeleton.block_prefix(index)
        names = [name.removeprefix(prefix).removesuffix(".weight") for name in skeleton.linears_of(index)]
        total += len(names)
        left += [re.sub(r"\.\d+\.", ".*.", name) for name in names if name not in scaled]
    return total, len(left), sorted(set(left))


class _Trial:
    """Checks whether a change of weights preserves a block's outputs and shared values."""

    def __init__(self, block: StandIn) -> None:
        self._block = block
        self._values: dict[str, torch.Tensor] = dict(block.module.named_parameters())
        self._stems = {name.removesuffix(".weight") for name in self._values}
        self._outputs = block.run(self._values)

    def same_after(self, scalings: list[Scaling]) -> bool:
        """Return whether folding random scales preserves the outputs."""
        changed = dict(self._values)
        for scaling in scalings:
            for one in written_out(scaling, self._stems):
                heads = heads_of(one, changed, "", self._block.settings)
                fold(one, changed, "", _random_scale(changed[f"{one.layers[0]}.weight"].shape[1], heads), heads)
        return self._same(changed)

    def depends_on(self, scaling: Scaling) -> bool:
        """Return whether the outputs depend on the scaled layers; false for an indexer on few tokens."""
        changed = dict(self._values)
        for one in written_out(scaling, self._stems):
            for layer in one.layers:
                weight = self._values[f"{layer}.weight"]
                changed[f"{layer}.weight"] = weight * _random_scale(weight.shape[1], (1, 1))
        return not self._same(changed)

    def _same(self, values: dict[str, torch.Tensor]) -> bool:
        """Return whether the block has the same outputs with these weights; false if any output is NaN."""
        pairs = zip(self._block.run(values), self._outputs, strict=True)
        return all(bool((ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()) for ours, theirs in pairs)


def _tested_scalings(block: StandIn) -> list[Scaling]:
    found: list[Scaling] = []
    trial = _Trial(block)
    for choice in _candidates(block, block.watch()):
        found += islice((one for one in choice if trial.same_after([one]) and trial.depends_on(one)), 1)
    for name, value in block.module.named_parameters():
        if name.rpartition(".")[0] in block.linears:
            value.data *= MAGNITUDE
    trial = _Trial(block)
    found = [one for one in found if trial.same_after([one])]
    # Fold all together, as the method will.
    return found if trial.same_after(found) else []


def _random_scale(columns: int, heads: tuple[int, int]) -> torch.Tensor:
    """Return random powers of two from 1/4 to 4, equal for query heads that share a value head."""
    total, shared = heads
    drawn = torch.randint(-2, 3, (shared, 1, columns // total), generator=torch.Generator().manual_seed(columns))
    return torch.pow(2.0, drawn).expand(shared, total // shared, -1).reshape(-1)


def _candidates(block: StandIn, seen: Seen) -> list[list[Scaling]]:
    """Return lists of candidate scalings in search order; of each list the first valid one is used."""
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


def _readers(block: StandIn, seen: Seen, norm: str, width: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (linear layers, other modules with a weight) that read a norm's output; experts' layers come first."""
    out, experts, layers, follow = seen.outputs[norm], [], [], []
    for name in seen.order:
        given, module = seen.inputs.get(name), block.module.get_submodule(name)
        if given is None or given.data_ptr() != out.data_ptr() or given.shape[-1] != width:
            continue
        weight = getattr(module, "weight", None)
        for inside, part in module.named_modules(prefix=name):  # experts may scale inputs first
            if isinstance(part, Experts):
                first = [f"{inside}.*.{matrix}" for matrix in part.first]
                experts += [] if first[0] in experts else first
        if name in block.linears:
            layers.append(name)
        elif isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1] == width:
            follow.append(name)
    return (*experts, *layers), tuple(follow)


def _linears_before(block: StandIn, seen: Seen, name: str) -> list[Scaling]:
    """Return scalings that fold the inverse into a sibling linear layer that ran earlier, latest first."""
    sizes = {layer: tuple(block.module.get_parameter(f"{layer}.weight").shape) for layer in block.linears}
    place = name.rpartition(".")[0]
    siblings = [other for other in block.linears if other.rpartition(".")[0] == place and other in seen.order]
    earlier = sorted((one for one in siblings if seen.order[one] < seen.order[name]), key=seen.order.__getitem__)
    heads = query_heads(block.settings)
    return [
        Scaling(_starred(other), (_starred(name),), fused=fused)
        for other in reversed(earlier)
        for fused in FUSED
        if fits(fused, sizes[other][0], sizes[name][1], heads)
    ]


def _starred(name: str) -> str:
    """Replace an expert's index in a name by `*`."""
    expert = EXPERT.match(name)
    return name if expert is None else f"{expert.group(1)}.*{name[expert.end() :]}"
