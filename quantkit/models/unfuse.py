"""Makes the decoder blocks of a transformers model hold nothing but `nn.Linear` where a weight can be quantized.

Conv1D layers (GPT-2) become linear layers; stacked experts (mixtures of experts, whose weights transformers keeps as
one 3-D parameter) become a list of experts with a linear layer for each matrix. The maths stays the same, and the
modules get the names that published checkpoints and engines give their tensors. `Origin` says where in a checkpoint
the value of such a parameter lies. An architecture with stacked experts is an entry of `EXPERTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Origin:
    """Where the value of a parameter lies when it is not simply the tensor of its own name.

    `name` and `shape` are the checkpoint's tensor; `transposed`: it is (in, out); `expert` and its `rows` (first, end)
    cut one matrix out of a stack (experts, out, in).
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ExpertNames:
    """What published checkpoints call an expert's three matrices and, where it is another name, the experts' block."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = "mlp"


# By model_type. transformers' own name of the block is always `mlp`, of the stacks `gate_up_proj` and `down_proj`.
EXPERTS = {
    "mixtral": ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
    "qwen2_moe": ExpertNames(),
    "qwen3_moe": ExpertNames(),
    "olmoe": ExpertNames(),
}
# By model_type: parts that published checkpoints call by another name than transformers does.
RENAMED = {"gpt_neox": ("lm_head", "embed_out")}
# Linear layers that stay as they are: a gate of one row, which no layout packs and engines load unquantized.
PLAIN = ("shared_expert_gate",)
EXPERT = re.compile(r"(.*\.experts)\.\d+(?=\.)")


class Expert(nn.Module):
    """One gated expert; its linear layers bear the checkpoint's names."""

    def __init__(self, hidden: int, inner: int, names: ExpertNames, activation: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.names, self.activation = names, activation
        for name, shape in ((names.gate, (hidden, inner)), (names.up, (hidden, inner)), (names.down, (inner, hidden))):
            self.add_module(name, nn.Linear(*shape, bias=False, device="meta"))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, inner): everything before the last matrix."""
        gate: torch.Tensor = getattr(self, self.names.gate)(x)
        return self.activation(gate) * getattr(self, self.names.up)(x)

    def down(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, inner) -> (tokens, hidden)."""
        out: torch.Tensor = getattr(self, self.names.down)(x)
        return out


class Experts(nn.ModuleList):
    """Experts one by one, in place of a stack; each is called with the tokens routed to it.

    Every expert is called, also with no tokens, and all experts do their first matrices before any does its last:
    so a walk sees all linear layers, in an order in which those of equal depth stand together.
    """

    def __init__(self, stack: Any, names: ExpertNames) -> None:
        count, double, hidden = (int(size) for size in stack.gate_up_proj.shape)
        super().__init__(Expert(hidden, double // 2, names, stack.act_fn) for _ in range(count))

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


def hold_linears(model: Any, blocks_path: str, kind: str) -> dict[str, Origin]:
    """Rebuild `model` (on the meta device) in place; return the origins of the parameters that this made."""
    origins: dict[str, Origin] = {}
    blocks = model.get_submodule(blocks_path)
    for path, module in list(blocks.named_modules(prefix=blocks_path)):
        if type(module).__name__ == "Conv1D":
            _replace_conv(model, path, module, origins)
    for index, block in enumerate(blocks) if kind in EXPERTS else ():
        stack = getattr(block.mlp, "experts", None)
        if stack is not None:
            _replace_stack(block, f"{blocks_path}.{index}", stack, EXPERTS[kind], origins)
    if kind in RENAMED:
        _rename(model, "", *RENAMED[kind], origins)
    return origins


def _replace_conv(model: nn.Module, path: str, conv: Any, origins: dict[str, Origin]) -> None:
    k, n = (int(size) for size in conv.weight.shape)
    linear = nn.Linear(k, n, device="meta")
    linear.bias = conv.bias
    model.set_submodule(path, linear)
    origins[f"{path}.weight"] = Origin(f"{path}.weight", (k, n), transposed=True)


def _replace_stack(block: Any, path: str, stack: Any, names: ExpertNames, origins: dict[str, Origin]) -> None:
    experts = Experts(stack, names)
    gate_up, down = (tuple(int(n) for n in p.shape) for p in (stack.gate_up_proj, stack.down_proj))
    half = gate_up[1] // 2
    for index in range(len(experts)):
        stem, source = f"{path}.{names.block}.experts.{index}.", f"{path}.mlp.experts."
        origins[f"{stem}{names.gate}.weight"] = Origin(f"{source}gate_up_proj", gate_up, False, index, (0, half))
        origins[f"{stem}{names.up}.weight"] = Origin(f"{source}gate_up_proj", gate_up, False, index, (half, 2 * half))
        origins[f"{stem}{names.down}.weight"] = Origin(f"{source}down_proj", down, False, index, (0, down[1]))
    block.mlp.experts = experts
    if names.block != "mlp":
        _rename(block, f"{path}.", "mlp", names.block, origins)


def _rename(parent: nn.Module, path: str, old: str, new: str, origins: dict[str, Origin]) -> None:
    """Register a child under another name; the code of its parent still finds it under the old one."""
    child = getattr(parent, old)
    for name, parameter in child.named_parameters():
        origins.setdefault(f"{path}{new}.{name}", Origin(f"{path}{old}.{name}", tuple(parameter.shape)))
    delattr(parent, old)
    parent.add_module(new, child)
    object.__setattr__(parent, old, child)  # past nn.Module, which would register it a second time


def cut(origin: Origin, rows: Callable[[str, int, int], torch.Tensor]) -> torch.Tensor:
    """The parameter's value (out, in) by way of `rows(name, start, stop)`, which reads rows of a stored tensor."""
    if origin.expert is not None:
        return rows(origin.name, origin.expert, origin.expert + 1)[0][slice(*origin.rows)].contiguous()
    whole = rows(origin.name, 0, origin.shape[0])
    return whole.T.contiguous() if origin.transposed else whole
