"""Makes the decoder blocks of a transformers model hold nothing but `nn.Linear` where a weight can be quantized.

Conv1D layers (GPT-2) become linear layers; stacked experts (mixtures of experts, whose weights transformers keeps as
3-D parameters) become a list of experts with a linear layer for each matrix; stored buffers become parameters. The
maths stays the same, and the modules get the names that published checkpoints and engines give their tensors. `Origin`
says where in a checkpoint the value of such a parameter lies.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from quantkit.models.architectures.experts import Experts, SentExperts, Stack
from quantkit.models.architectures.origins import Origin
from quantkit.models.architectures.published_names import (
    EXPERTS,
    LEFT_ALONE,
    MOVED,
    MOVED_BESIDE,
    RENAMED,
    SPLIT,
    WRITTEN,
    ExpertNames,
)
from quantkit.models.architectures.renaming import move, rename, split

# Linear layers whose weights the code around them reads itself, past the layer: with codes in them nothing runs.
READ_OUTSIDE = ("dt_proj",)


def mixing_states(block: nn.Module, count: int) -> set[str]:
    """Linear layers that mix `count` hidden states of a token side by side (AltUp), by their names in a block: those
    with a row or a column for each.

    They stay as they are: no layout packs so few, and engines load them unquantized.
    """
    return {
        name
        for name, part in block.named_modules()
        if count > 1 and isinstance(part, nn.Linear) and count in (part.in_features, part.out_features)
    }


def left_alone(model: Any, block: nn.Module) -> set[str]:
    """Linear layers that transformers keeps in float32 where a model is loaded in 16 bits, and those of `LEFT_ALONE`.

    By their names in a block. They stay as they are: what computes with them is sensitive, and engines load them
    unquantized. transformers' class names them by parts of a dotted name, in `_keep_in_fp32_modules` and
    `_keep_in_fp32_modules_strict`.
    """
    further = LEFT_ALONE.get(model.config.model_type)
    own = (model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict, further)
    kept = [re.compile(rf"(?:^|\.){re.escape(part)}(?:\.|$)") for names in own for part in names or ()]
    return {
        name
        for name, part in block.named_modules()
        if isinstance(part, nn.Linear) and any(pattern.search(f"{name}.weight") for pattern in kept)
    }


def hold_linears(model: Any, blocks_path: str, kind: str) -> dict[str, Origin]:
    """Rebuild `model` (on the meta device) in place; return the origins of the parameters that this made."""
    origins: dict[str, Origin] = {}
    blocks = model.get_submodule(blocks_path)
    for path, module in list(blocks.named_modules(prefix=blocks_path)):
        if type(module).__name__ == "Conv1D":
            _replace_conv(model, path, module, origins)
        _take_buffers(module)
    names = EXPERTS.get(kind, ExpertNames())
    for index, block in enumerate(blocks):
        for place, module in [(name, part) for name, part in block.named_modules() if _is_stack(part, names)]:
            _replace_stack(block, f"{blocks_path}.{index}.", place, Stack(module, names.sent), names, origins)
        if kind in SPLIT:
            split(block, f"{blocks_path}.{index}.", SPLIT[kind], origins)
        part, further = MOVED_BESIDE.get(kind, ("", ()))
        for old, new in (*MOVED.get(kind, ()), *(further if hasattr(block, part) else ())):
            move(block, f"{blocks_path}.{index}.", old, new, origins)
        for name, written in WRITTEN.get(kind, ()):
            _also_written(block, f"{blocks_path}.{index}.", name, written, origins)
    if kind in RENAMED:
        old, new = RENAMED[kind]
        place, _, leaf = old.rpartition(".")
        rename(model.get_submodule(place), place and f"{place}.", leaf, new.removeprefix(f"{place}."), origins)
        _tell_base(model, old, new)
    return origins


def _also_written(block: nn.Module, path: str, name: str, written: str, origins: dict[str, Origin]) -> None:
    """Let the parameters of a block's part, if it has it, be found under the name that transformers writes, too."""
    for own, parameter in block.named_parameters():
        if own.startswith(f"{name}."):
            other = f"{path}{written}{own.removeprefix(name)}"
            origins.setdefault(f"{path}{own}", Origin(other, tuple(parameter.shape)))


def _tell_base(model: Any, old: str, new: str) -> None:
    """Let a model know the new name where it is that of all before its head."""
    if model.base_model_prefix == old:
        model.base_model_prefix = new
        ties = model._tied_weights_keys or {}
        model._tied_weights_keys = {name: re.sub(rf"^{old}\.", f"{new}.", other) for name, other in ties.items()}


def renamed(kind: str, path: str) -> str:
    """The dotted path that a module of the model has after `hold_linears`."""
    old, new = RENAMED.get(kind, ("", ""))
    for here, there in MOVED.get(kind, ()):
        path = re.sub(rf"(\.\d+\.){re.escape(here)}(?=\.|$)", rf"\g<1>{there}", path, count=1)
    return new + path.removeprefix(old) if old and path.startswith(f"{old}.") else path


def _take_buffers(module: Any) -> None:
    """Make parameters of a module's stored buffers: they have learned values, such as the biases of some routers."""
    stored = [name for name, _ in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set]
    module.stored_buffers = tuple(name for name in stored if getattr(module, name).is_floating_point())
    for name in module.stored_buffers:
        value = torch.empty_like(getattr(module, name), device="meta")
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _replace_conv(model: nn.Module, path: str, conv: Any, origins: dict[str, Origin]) -> None:
    k, n = (int(size) for size in conv.weight.shape)
    linear = nn.Linear(k, n, device="meta")
    linear.bias = conv.bias
    model.set_submodule(path, linear)
    origins[f"{path}.weight"] = Origin(f"{path}.weight", (k, n), transposed=True)


def _is_stack(module: Any, names: ExpertNames) -> bool:
    """Whether a module is a stack whose layout is known: by what transformers says of it, or by its architecture."""
    if names.sent:
        return getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3
    return hasattr(module, "is_concatenated") and not getattr(module, "has_post_expert_norm", False)


def _replace_stack(
    block: Any, prefix: str, place: str, stack: Stack, names: ExpertNames, origins: dict[str, Origin]
) -> None:
    """Put experts one by one at the dotted `place` in a block whose parameters begin with `prefix`."""
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
