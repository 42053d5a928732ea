"""Parts of a model registered under the names of published checkpoints, while transformers' code still finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quantkit.models.architectures.origins import Origin


class Wrapped(nn.Module):
    """A module one level deeper, as some checkpoints have it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module within gives."""
        return getattr(self, self.name)(*args, **kwargs)


class Joined(nn.Module):
    """Stands for a convolution of several parts, which stand beside it; their weights are one after the other."""

    def __init__(self, parts: Sequence[nn.Conv1d]) -> None:
        super().__init__()
        self.__dict__["parts"] = tuple(parts)  # past nn.Module: they have one place alone
        self.bias = None

    @property
    def weight(self) -> torch.Tensor:
        """(channels of all parts, 1, width)."""
        return torch.cat([part.weight for part in self.__dict__["parts"]])


def split(block: nn.Module, path: str, old: str, origins: dict[str, Origin]) -> None:
    """Put a convolution for each of queries, keys and values in place of one of all, if a block has it at `old`."""
    holder, _, name = old.rpartition(".")
    beside: Any = dict(block.named_modules()).get(holder)
    whole = getattr(beside, name, None)
    if whole is None:
        return
    shape, first, parts = tuple(whole.weight.shape), 0, []
    delattr(beside, name)
    for kind in ("q", "k", "v"):
        count = int(getattr(beside, f"{kind}_proj").out_features)
        part = nn.Conv1d(count, count, shape[2], groups=count, bias=False, device="meta")
        beside.add_module(f"{kind}_{name}", part)
        place = f"{path}{holder}.{kind}_{name}.weight"
        origins[place] = Origin(f"{path}{old}.weight", shape, rows=(first, first + count, 1))
        parts.append(part)
        first += count
    if first != shape[0]:
        raise ValueError(f"{path}{old} has {shape[0]} channels, and queries, keys and values have {first}")
    object.__setattr__(beside, name, Joined(parts))  # past nn.Module, which would register it


def rename(parent: nn.Module, path: str, old: str, new: str, origins: dict[str, Origin]) -> None:
    """Register a child under another name, perhaps a dotted one; its parent's code still finds it under the old one."""
    child = getattr(parent, old)
    for name, parameter in child.named_parameters():
        stored = origins.pop(f"{path}{old}.{name}", Origin(f"{path}{old}.{name}", tuple(parameter.shape)))
        origins.setdefault(f"{path}{new}.{name}", stored)
    delattr(parent, old)
    first, _, rest = new.partition(".")
    parent.add_module(first, Wrapped(rest, child) if rest else child)
    if first != old:
        object.__setattr__(parent, old, child)  # past nn.Module, which would register it a second time


def move(block: nn.Module, path: str, old: str, new: str, origins: dict[str, Origin]) -> None:
    """Register a part of a block elsewhere in it, if it has the part, both by dotted names; its code finds it still."""
    (holder, _, name), (place, _, leaf) = old.rpartition("."), new.rpartition(".")
    inner = dict(block.named_modules()).get(holder)
    child = getattr(inner, name, None)
    if inner is None or child is None:
        return
    outer = _part(block, place)
    if isinstance(child, nn.Parameter):
        origins[f"{path}{new}"] = Origin(f"{path}{old}", tuple(child.shape))
        _move_parameter(inner, name, outer, leaf)
        return
    for own, parameter in child.named_parameters():
        stored = origins.pop(f"{path}{old}.{own}", Origin(f"{path}{old}.{own}", tuple(parameter.shape)))
        origins[f"{path}{new}.{own}"] = stored
    delattr(inner, name)
    outer.add_module(leaf, child)
    _find_there(inner, name, outer, leaf)


def _part(block: nn.Module, place: str) -> Any:
    """The part of a block at a dotted place; empty ones where there are none."""
    for name in filter(None, place.split(".")):
        if not hasattr(block, name):
            block.add_module(name, nn.Module())
        block = getattr(block, name)
    return block


def _move_parameter(inner: Any, name: str, outer: Any, leaf: str) -> None:
    outer.register_parameter(leaf, inner._parameters.pop(name))
    _find_there(inner, name, outer, leaf)
    if name in (stored := getattr(inner, "stored_buffers", ())):
        inner.stored_buffers = tuple(other for other in stored if other != name)
        outer.__dict__["stored_buffers"] = (*getattr(outer, "stored_buffers", ()), leaf)


def _find_there(inner: Any, name: str, outer: Any, leaf: str) -> None:
    """Let `inner.name` be what stands at `outer.leaf` now: values and layers are replaced, so its class asks there."""
    kind = type(inner)
    if inner is outer:
        found = property(lambda part: getattr(part, leaf))
    else:
        found = property(lambda part: getattr(part.moved_to[name], leaf))
        inner.__dict__["moved_to"] = {**inner.__dict__.get("moved_to", {}), name: outer}  # past nn.Module: no circle
    inner.__class__ = type(kind.__name__, (kind,), {name: found})
