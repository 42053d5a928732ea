"""Rewrite decoder blocks of a transformers model so that every weight to quantize is in an `nn.Linear`.

GPT-2's Conv1D becomes a linear layer; stacked experts (3-D parameters, transformers/integrations/moe.py) become a list
of experts with a linear layer per matrix; stored buffers become parameters. The computed function is unchanged. Modules
get the names of published checkpoints (architectures.py), and transformers' code still finds them under its own names.
`Origin` records where such a parameter is stored in a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.models.architectures import ExpertNames, published_names

# Linear layers whose weights other code reads directly, so they cannot contain codes.
READ_OUTSIDE = ("dt_proj",)
EXPERT = re.compile(r"(.*\.experts)\.\d+(?=\.)")


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint stores a parameter's value, if not in the tensor of the same name."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False  # whether it is (in, out)
    expert: int | None = None  # index in a stack (experts, out, in)
    rows: tuple[int, int, int] = (0, 0, 1)  # first, end, step: of the expert's matrix, or of a joined tensor
    also: str = ""  # another name of the tensor


def cut(origin: Origin, rows: Callable[[str, int, int], torch.Tensor]) -> torch.Tensor:
    """Return the parameter's value (out, in); `rows(name, start, stop)` reads rows of a stored tensor."""
    if origin.expert is not None:
        one = rows(origin.name, origin.expert, origin.expert + 1)[0]
        return (one.T if origin.transposed else one)[slice(*origin.rows)].contiguous()
    first, end, _ = origin.rows
    whole = rows(origin.name, first, end or origin.shape[0])
    return whole.T.contiguous() if origin.transposed else whole


def left_alone(model: Any, block: nn.Module) -> set[str]:
    """Return the names of a block's linear layers that stay unquantized because engines expect them so.

    transformers' class keeps them in float32 in a 16-bit model, or published checkpoints do not quantize them. Both
    lists match parts of dotted names.
    """
    alone = published_names(model.config.model_type).left_alone
    own = (model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict, alone)
    parts = "|".join(re.escape(part) for names in own for part in names or ())
    pattern = re.compile(rf"(?:^|\.)(?:{parts})(?:\.|$)")
    return {name for name, _ in _linears(block) if parts and pattern.search(f"{name}.weight")}


def too_small(block: nn.Module, states: int) -> set[str]:
    """Return the names of a block's linear layers that are too small to pack; engines load them unquantized.

    These are routers (next to experts, or near them with a row per expert), and layers that mix a token's `states`
    hidden states (AltUp).
    """
    found = {name for name, part in _linears(block) if states > 1 and states in (part.in_features, part.out_features)}
    for path, module in block.named_modules():
        count = next((len(child) for child in module.children() if isinstance(child, Experts)), 0)
        for name, part in _linears(module) if count else ():
            if ("." not in name or part.out_features == count) and expert_of(f".{name}") is None:
                found.add(f"{path}.{name}" if path else name)
    return found


def _linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear))


def hold_linears(model: Any, blocks_path: str, kind: str) -> dict[str, Origin]:
    """Rewrite `model` (on the meta device) in place; return the new parameters' origins."""
    origins: dict[str, Origin] = {}
    blocks = model.get_submodule(blocks_path)
    for path, module in list(blocks.named_modules(prefix=blocks_path)):
        if type(module).__name__ == "Conv1D":
            k, n = (int(size) for size in module.weight.shape)
            linear = nn.Linear(k, n, device="meta")
            linear.bias = module.bias
            model.set_submodule(path, linear)
            origins[f"{path}.weight"] = Origin(f"{path}.weight", (k, n), transposed=True)
    take_buffers(blocks)
    row = published_names(kind)
    names = row.experts
    for index, block in enumerate(blocks):
        path = f"{blocks_path}.{index}."
        for place, module in [(name, part) for name, part in block.named_modules() if _is_stack(part, names)]:
            _replace_stack(block, path, place, Stack(module, names.sent), names, origins)
        if row.split:
            split(block, path, row.split, origins)
        moved = dict(row.moved)
        if row.moved_beside is not None and hasattr(block, row.moved_beside[0]):
            moved |= row.moved_beside[1]
        for old, new in moved.items():
            move(block, path, old, new, origins)
        for name, written in row.written.items():  # also found by the name that transformers writes
            for own, parameter in block.named_parameters():
                if own.startswith(f"{name}."):
                    other = f"{path}{written}{own.removeprefix(name)}"
                    origins.setdefault(f"{path}{own}", Origin(other, tuple(parameter.shape)))
    old, new = row.renamed
    if old:
        place, _, leaf = old.rpartition(".")
        rename(model.get_submodule(place), place and f"{place}.", leaf, new.removeprefix(f"{place}."), origins)
        if model.base_model_prefix == old:
            model.base_model_prefix = new
            ties = model._tied_weights_keys or {}
            model._tied_weights_keys = {name: re.sub(rf"^{old}\.", f"{new}.", other) for name, other in ties.items()}
    return origins


def renamed(kind: str, path: str) -> str:
    """Return a module's dotted path after `hold_linears`."""
    old, new = published_names(kind).renamed
    for here, there in published_names(kind).moved.items():
        path = re.sub(rf"(\.\d+\.){re.escape(here)}(?=\.|$)", rf"\g<1>{there}", path, count=1)
    return new + path.removeprefix(old) if old and path.startswith(f"{old}.") else path


def take_buffers(blocks: Any) -> None:
    """Turn the stored buffers of all modules into parameters, as some are learned, such as router biases."""
    for module in blocks.modules():
        own, left_out = dict(module.named_buffers(recurse=False)), module._non_persistent_buffers_set
        stored = [name for name, value in own.items() if name not in left_out and value.is_floating_point()]
        module.stored_buffers = tuple(stored)
        for name in stored:
            delattr(module, name)
            value = torch.empty_like(own[name], device="meta")
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _is_stack(module: Any, names: ExpertNames) -> bool:
    """Return whether the module is an expert stack with a known layout."""
    if names.sent:
        return getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3
    return hasattr(module, "is_concatenated") and not getattr(module, "has_post_expert_norm", False)


def _replace_stack(
    block: Any, prefix: str, place: str, stack: Stack, names: ExpertNames, origins: dict[str, Origin]
) -> None:
    """Replace the expert stack at the dotted `place` in a block by single experts; `prefix` is the block's."""
    parent, _, leaf = place.rpartition(".")
    called = names.block or parent
    inside = f"{prefix}{called}." if called else prefix
    also = tuple(stacked and inside + stacked for stacked in names.stacks)
    for index in range(stack.count):
        for name, origin in stack.origins(prefix + place, index, names, (also[0], also[1])).items():
            origins[f"{inside}{leaf}.{index}.{name}"] = origin
    block.set_submodule(place, (SentExperts if names.sent else Experts)(stack, names))
    if names.router[0]:
        rename(block.get_submodule(parent), f"{prefix}{parent}.", *names.router, origins)
    if called != parent:
        rename(block, prefix, parent, called, origins)


class Expert(nn.Module):
    """One expert, with linear layers named as in the checkpoint."""

    def __init__(self, stack: Stack, names: ExpertNames) -> None:
        super().__init__()
        self.names, self.join, self.gated = names, stack.join, stack.gated
        shapes = {names.up: (stack.hidden, stack.inner), names.down: (stack.inner, stack.hidden)}
        for name, shape in (({names.gate: shapes[names.up]} if stack.gated else {}) | shapes).items():
            self.add_module(name, nn.Linear(*shape, bias=stack.biased, device="meta"))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Compute everything before the last matrix: (tokens, hidden) to (tokens, inner)."""
        gate = (getattr(self, self.names.gate)(x),) if self.gated else ()
        return self.join(*gate, getattr(self, self.names.up)(x))

    def down(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self, self.names.down)(x)
        return out


class Experts(nn.ModuleList):
    """A list of experts that replaces a stack; each expert is called with the tokens routed to it.

    Every expert is called, even without tokens, and all first matrices run before any last one, so that the walk sees
    all linear layers in order of depth. `first` names the matrices that read the input.
    """

    def __init__(self, stack: Stack, names: ExpertNames) -> None:
        super().__init__(Expert(stack, names) for _ in range(stack.count))
        self.first = (names.gate, names.up) if stack.gated else (names.up,)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map tokens (tokens, hidden), their chosen experts int64 (tokens, k) and weights (tokens, k) to outputs."""
        experts: list[Any] = list(self)
        routed = [torch.where(chosen == index) for index in range(len(experts))]
        inner = [expert.inner(hidden[token]) for expert, (token, _) in zip(experts, routed, strict=True)]
        out = torch.zeros_like(hidden)
        for expert, (token, place), x in zip(experts, routed, inner, strict=True):
            y = expert.down(x) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


class SentExperts(Experts):
    """Experts whose input is (experts * tokens, hidden): every token per expert, zeroed unless routed to it."""

    def forward(self, sent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Map (experts * tokens, hidden) to the same shape."""
        experts: list[Any] = list(self)
        rows = sent.reshape(len(experts), -1, sent.shape[-1])
        used = [torch.where(mine.any(-1))[0] for mine in rows]
        inner = [expert.inner(mine[token]) for expert, mine, token in zip(experts, rows, used, strict=True)]
        out = torch.zeros_like(rows)
        for index, (expert, token, x) in enumerate(zip(experts, used, inner, strict=True)):
            out[index].index_copy_(0, token, expert.down(x))
        return out.reshape(sent.shape)


class Stack:
    """Layout of one of transformers' expert stacks, and its code between the two matrices."""

    def __init__(self, module: Any, sent: bool) -> None:
        self.module, self.transposed = module, sent or bool(module.is_transposed)
        self.gated = sent or bool(module.has_gate)
        self.biased = not sent and bool(module.has_bias)
        self.interleaved = not sent and self.gated and not module.is_concatenated
        self.first = "gate_up_proj" if self.gated else "up_proj"
        self.count, *sides = (int(size) for size in getattr(module, self.first).shape)
        wide, self.hidden = reversed(sides) if self.transposed else sides
        self.inner = wide // 2 if self.gated else wide

    def join(self, *parts: torch.Tensor) -> torch.Tensor:
        """Return the last matrix's input, from the outputs of gate and up, or of up alone."""
        own = getattr(type(self.module), "_apply_gate", None)
        if self.gated and own is not None and own.__name__ != "_default_apply_gate":
            both = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
            out: torch.Tensor = self.module._apply_gate(both)
        else:
            out = self.module.act_fn(parts[0]) * parts[1] if self.gated else self.module.act_fn(parts[0])
        return out

    def origins(self, place: str, index: int, names: ExpertNames, also: tuple[str, str]) -> dict[str, Origin]:
        """Return each parameter's origin for one expert, by name; the stack is at the dotted `place`."""
        halves = {names.up: (0, self.inner, 1)}
        if self.interleaved:
            halves = {names.gate: (0, 2 * self.inner, 2), names.up: (1, 2 * self.inner, 2)}
        elif self.gated:
            halves = {names.gate: (0, self.inner, 1), names.up: (self.inner, 2 * self.inner, 1)}
        cuts = [(name, self.first, rows, also[0]) for name, rows in halves.items()]
        found = {}
        for name, stacked, rows, other in [*cuts, (names.down, "down_proj", (0, self.hidden, 1), also[1])]:
            shape = tuple(getattr(self.module, stacked).shape)
            found[f"{name}.weight"] = Origin(f"{place}.{stacked}", shape, self.transposed, index, rows, other)
            if self.biased:
                shape = tuple(getattr(self.module, f"{stacked}_bias").shape)
                found[f"{name}.bias"] = Origin(f"{place}.{stacked}_bias", shape, False, index, rows)
        return found


def expert_of(name: str) -> str | None:
    """Return the dotted path of the expert that a weight belongs to, or None."""
    expert = EXPERT.match(name)
    return expert.group() if expert else None


def same_of_every_expert(name: str, names: Iterable[str]) -> list[str]:
    """Return the `names` of the same matrix in all experts of the same block."""

    def place(weight: str) -> tuple[str, str] | None:
        return (expert[1], weight[expert.end() :]) if (expert := EXPERT.match(weight)) else None

    return [other for other in names if place(other) == place(name)]


class Wrapped(nn.Module):
    """A module nested one level deeper, as some checkpoints name it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.name)(*args, **kwargs)


class Joined(nn.Module):
    """Replaces a convolution that was split into parts; its weight concatenates theirs."""

    def __init__(self, parts: Sequence[nn.Conv1d]) -> None:
        super().__init__()
        self.__dict__["parts"] = tuple(parts)  # bypass nn.Module: the parts are registered elsewhere
        self.bias = None

    @property
    def weight(self) -> torch.Tensor:
        """Return the concatenated weight (channels of all parts, 1, width)."""
        return torch.cat([part.weight for part in self.__dict__["parts"]])


def split(block: nn.Module, path: str, old: str, origins: dict[str, Origin]) -> None:
    """Split the convolution at `old`, if the block has it, into three for queries, keys and values."""
    holder, _, name = old.rpartition(".")
    parent: Any = dict(block.named_modules()).get(holder)
    whole = getattr(parent, name, None)
    if whole is None:
        return
    shape, first, parts = tuple(whole.weight.shape), 0, []
    delattr(parent, name)
    for kind in ("q", "k", "v"):
        count = int(getattr(parent, f"{kind}_proj").out_features)
        part = nn.Conv1d(count, count, shape[2], groups=count, bias=False, device="meta")
        parent.add_module(f"{kind}_{name}", part)
        place = f"{path}{holder}.{kind}_{name}.weight"
        origins[place] = Origin(f"{path}{old}.weight", shape, rows=(first, first + count, 1))
        parts.append(part)
        first += count
    if first != shape[0]:
        raise ValueError(f"{path}{old} has {shape[0]} channels, but queries, keys and values have {first}")
    object.__setattr__(parent, name, Joined(parts))  # bypass nn.Module, which would register it


def rename(parent: nn.Module, path: str, old: str, new: str, origins: dict[str, Origin]) -> None:
    """Register a child module under a new name, perhaps dotted; its parent's code still finds it as `old`."""
    child = getattr(parent, old)
    for name, parameter in child.named_parameters():
        stored = origins.pop(f"{path}{old}.{name}", Origin(f"{path}{old}.{name}", tuple(parameter.shape)))
        origins.setdefault(f"{path}{new}.{name}", stored)
    delattr(parent, old)
    first, _, rest = new.partition(".")
    parent.add_module(first, Wrapped(rest, child) if rest else child)
    if first != old:
        object.__setattr__(parent, old, child)  # bypass nn.Module, which would register it a second time


def move(block: nn.Module, path: str, old: str, new: str, origins: dict[str, Origin]) -> None:
    """Register a module of a block, if present, under a new dotted name; the block's code still finds it."""
    (holder, _, name), (place, _, leaf) = old.rpartition("."), new.rpartition(".")
    inner: Any = dict(block.named_modules()).get(holder)
    child = getattr(inner, name, None)
    if inner is None or child is None:
        return
    outer: Any = block
    for part in filter(None, place.split(".")):
        if not hasattr(outer, part):
            outer.add_module(part, nn.Module())
        outer = getattr(outer, part)
    if isinstance(child, nn.Parameter):
        origins[f"{path}{new}"] = Origin(f"{path}{old}", tuple(child.shape))
        outer.register_parameter(leaf, inner._parameters.pop(name))
        if name in (stored := getattr(inner, "stored_buffers", ())):
            inner.stored_buffers = tuple(other for other in stored if other != name)
            outer.__dict__["stored_buffers"] = (*getattr(outer, "stored_buffers", ()), leaf)
    else:
        for own, parameter in child.named_parameters():
            stored = origins.pop(f"{path}{old}.{own}", Origin(f"{path}{old}.{own}", tuple(parameter.shape)))
            origins[f"{path}{new}.{own}"] = stored
        delattr(inner, name)
        outer.add_module(leaf, child)
    _find_there(inner, name, outer, leaf)


def _find_there(inner: Any, name: str, outer: Any, leaf: str) -> None:
    """Define a property so that `inner.name` returns the current `outer.leaf`."""
    kind = type(inner)
    if inner is outer:
        found = property(lambda part: getattr(part, leaf))
    else:
        found = property(lambda part: getattr(part.moved_to[name], leaf))
        inner.__dict__["moved_to"] = {**inner.__dict__.get("moved_to", {}), name: outer}  # past nn.Module: no cycle
    inner.__class__ = type(kind.__name__, (kind,), {name: found})
