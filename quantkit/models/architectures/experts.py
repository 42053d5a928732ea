"""Stacked experts taken apart: a list of experts with a linear layer for each matrix.

How a stack is laid out is told by transformers' classes (transformers/integrations/moe.py); names that differ are an
entry of `EXPERTS` (published_names.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quantkit.models.architectures.origins import Origin
from quantkit.models.architectures.published_names import ExpertNames

EXPERT = re.compile(r"(.*\.experts)\.\d+(?=\.)")


class Expert(nn.Module):
    """One expert; its linear layers bear the checkpoint's names."""

    def __init__(self, stack: Stack, names: ExpertNames) -> None:
        super().__init__()
        self.names, self.join, self.gated = names, stack.join, stack.gated
        shapes = {names.up: (stack.hidden, stack.inner), names.down: (stack.inner, stack.hidden)}
        for name, shape in (({names.gate: shapes[names.up]} if stack.gated else {}) | shapes).items():
            self.add_module(name, nn.Linear(*shape, bias=stack.biased, device="meta"))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, inner): everything before the last matrix."""
        gate = (getattr(self, self.names.gate)(x),) if self.gated else ()
        return self.join(*gate, getattr(self, self.names.up)(x))

    def down(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, inner) -> (tokens, hidden)."""
        out: torch.Tensor = getattr(self, self.names.down)(x)
        return out


class Experts(nn.ModuleList):
    """Experts one by one, in place of a stack; each is called with the tokens routed to it.

    Every expert is called, also with no tokens, and all experts do their first matrices before any does its last:
    so a walk sees all linear layers, in an order in which those of equal depth stand together. `first` names the
    matrices that read what comes in.
    """

    def __init__(self, stack: Stack, names: ExpertNames) -> None:
        super().__init__(Expert(stack, names) for _ in range(stack.count))
        self.first = (names.gate, names.up) if stack.gated else (names.up,)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden), chosen experts (tokens, k) int64 and their weights (tokens, k) -> (tokens, hidden)."""
        experts: list[Any] = list(self)
        routed = [torch.where(chosen == index) for index in range(len(experts))]
        inner = [expert.inner(hidden[token]) for expert, (token, _) in zip(experts, routed, strict=True)]
        out = torch.zeros_like(hidden)
        for expert, (token, place), x in zip(experts, routed, inner, strict=True):
            y = expert.down(x) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


class SentExperts(Experts):
    """Experts of a stack that gets (experts * tokens, hidden): for each expert all tokens, zero where it gets none."""

    def forward(self, sent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """(experts * tokens, hidden) -> (experts * tokens, hidden)."""
        experts: list[Any] = list(self)
        rows = sent.reshape(len(experts), -1, sent.shape[-1])
        used = [torch.where(mine.any(-1))[0] for mine in rows]
        inner = [expert.inner(mine[token]) for expert, mine, token in zip(experts, rows, used, strict=True)]
        out = torch.zeros_like(rows)
        for index, (expert, token, x) in enumerate(zip(experts, used, inner, strict=True)):
            out[index].index_copy_(0, token, expert.down(x))
        return out.reshape(sent.shape)


class Stack:
    """How one of transformers' stacks of experts is laid out, and what its code does between two matrices."""

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
        """What the last matrix gets, of the products of gate and up or of up alone."""
        own = getattr(type(self.module), "_apply_gate", None)
        if not self.gated:
            out: torch.Tensor = self.module.act_fn(parts[0])
        elif own is None or own.__name__ == "_default_apply_gate":
            out = self.module.act_fn(parts[0]) * parts[1]
        else:
            both = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
            out = self.module._apply_gate(both)
        return out

    def origins(self, place: str, index: int, names: ExpertNames, also: tuple[str, str]) -> dict[str, Origin]:
        """By its name in the expert, where each of its parameters lies in the stack at the dotted `place`."""
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


def beside_experts(block: nn.Module) -> set[str]:
    """Linear layers that choose or weigh experts, by their names in a block: those right beside the experts, and those
    near them with a row for each.

    They stay as they are: they have few rows, which no layout packs, and engines load them unquantized.
    """
    found = set()
    for path, module in block.named_modules():
        count = next((len(child) for child in module.children() if isinstance(child, Experts)), 0)
        for name, part in module.named_modules() if count else ():
            near = "." not in name or (part.out_features == count if isinstance(part, nn.Linear) else False)
            if isinstance(part, nn.Linear) and near and expert_of(f".{name}") is None:
                found.add(f"{path}.{name}" if path else name)
    return found


def expert_of(name: str) -> str | None:
    """The dotted path of the expert that a weight belongs to, or None."""
    expert = EXPERT.match(name)
    return expert.group() if expert else None


def same_of_every_expert(name: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are the same matrix as `name`, in any expert of its block."""
    expert = EXPERT.match(name)
    assert expert is not None
    return [
        other
        for other in names
        if (match := EXPERT.match(other))
        and match.group(1) == expert.group(1)
        and other[match.end() :] == name[expert.end() :]
    ]
