"""Where each tensor of a file comes from: the rows of `known.KNOWN` written out for a number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.formats.gguf.architectures.record import OWN_KEYS, Architecture, Blocks, Setting

Values = NDArray[np.float32]


def _minus_exp(values: Values) -> Values:
    """The decay of a gated delta rule, whose logarithm is learned."""
    return -np.exp(values)


def _log_of_minus(values: Values) -> Values:
    with np.errstate(invalid="ignore", divide="ignore"):  # what is not finite is refused by whoever reads it
        return np.log(-values)


def _exp(values: Values) -> Values:
    """The same decay where what it is taken times is below zero."""
    return np.exp(values)


def _log(values: Values) -> Values:
    return _log_of_minus(-values)


# What a file holds instead of a tensor's values, and the way back.
FUNCTIONS: dict[str, tuple[Callable[[Values], Values], Callable[[Values], Values]]] = {
    "minus exp": (_minus_exp, _log_of_minus),
    "exp": (_exp, _log),
}


@dataclass(frozen=True)
class TensorSlot:
    """A tensor of the file: the source's tensors whose rows follow one another in it, and what is done to them.

    `order` and `columns` name an order of rows or columns (row_orders.py), `function` what is made of the values
    (`FUNCTIONS`), `group` is the number of the alternative that the tensor belongs to, `setting` the one of
    config.json that says whether a model has it (none: every model). `stacked`: the parts lie in a further dimension.
    `split`: the rows of its part are in several tensors. `form` is the source's shape of a vector, -1 for its length.
    `root` names two lengths: the file has the vector times the root of the first over the second.
    """

    name: str
    parts: tuple[str, ...]
    order: str | None = None
    columns: str | None = None
    transposed: bool = False
    shift: float = 0.0
    function: str | None = None
    setting: Setting | None = None
    group: int | None = None
    stacked: bool = False
    split: bool = False
    form: tuple[int, ...] = (-1,)
    root: tuple[str, str] | None = None


def tensor_slots(
    architecture: Architecture, blocks: int, experts: int, heads: Sequence[int], head: bool
) -> list[TensorSlot]:
    """Every tensor that a file of this architecture may have, with the name that gguf gives it.

    `heads` are those of each block that may have matrices of their own.
    """
    import gguf

    named = architecture.named if experts else {**architecture.named, **architecture.named_without_experts}
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[architecture.names_like or architecture.name], blocks)

    def name_of(origin: str) -> str | None:
        for known in (origin, origin.removeprefix(architecture.prefix)):  # some names are known without it alone
            name: str | None = table.get_name(known, try_suffixes=(".weight", ".bias"))
            if name is not None:
                return name
        return None

    def slot(
        stem: str, part: str, block: int | None = None, called: str | None = None, **more: Any
    ) -> list[TensorSlot]:
        own = f"blk.{block}."
        if part in architecture.splits:
            pairs = architecture.splits[part]
            return [TensorSlot(own + name, (stem + part,), order, split=True, **more) for name, order in pairs]
        called = called or named.get(part)
        name = own + called if called else name_of(stem + part)
        if name is None:
            raise KeyError(f"gguf has no name for {stem}{part} in the architecture {architecture.name}")
        shifted = part.endswith("norm.weight") and part not in architecture.unshifted
        key = part.removesuffix(".weight").removesuffix(".bias")
        return [TensorSlot(
            name, (stem + part,), architecture.orders.get(key), architecture.columns.get(key),
            part in architecture.transposed, architecture.norm_shift if shifted else 0.0,
            architecture.functions.get(part), form=architecture.forms.get(part, (-1,)),
            root=architecture.roots.get(part), **more,
        )]  # fmt: skip

    slots = [each for name in architecture.outside for each in slot("", name)]
    for name, needs in architecture.outside_optional.items():
        slots += slot("", name, setting=needs)
    slots += [TensorSlot(name, parts, stacked=True) for name, parts in architecture.outside_stacks.items()]
    if head and name_of(architecture.head) is not None:  # llama.cpp ties some heads always
        slots += slot("", architecture.head)
    for block in range(blocks):
        stem = f"{architecture.blocks}.{block}."
        slots += [each for part in architecture.parts for each in slot(stem, part, block)]
        for pieces, count, rule in (
            (architecture.experts, experts, architecture.experts_in),
            (architecture.heads, heads[block] if architecture.heads else 0, architecture.heads_in),
        ):
            for part, name in pieces.items() if count else ():
                parts = tuple(stem + part.format(index) for index in range(count))
                turned, setting = part in architecture.transposed, None if rule is None else partial(_in, rule, block)
                slots.append(TensorSlot(f"blk.{block}.{name}", parts, transposed=turned, setting=setting, stacked=True))
        for part, needs in architecture.optional.items():
            slots += slot(stem, part, block, setting=needs)
        for rule, some in architecture.some:
            names, setting = some if isinstance(some, Mapping) else {}, partial(_in, rule, block)
            slots += [each for part in some for each in slot(stem, part, block, names.get(part), setting=setting)]
        for group, alternative in enumerate(architecture.either):
            slots += [each for part in alternative for each in slot(stem, part, block, group=group)]
    return slots


def is_taken(name: str, architecture: Architecture, own_blocks: int) -> bool:
    """Whether a tensor is of keys or values in a block behind the first `own_blocks`, which takes those of another.

    `name` is transformers', with or without the base model's prefix.
    """
    if not architecture.shares_keys:
        return False
    stem = architecture.blocks.removeprefix(architecture.prefix)
    block, _, part = name.removeprefix(architecture.prefix).removeprefix(f"{stem}.").partition(".")
    return block.isdigit() and int(block) >= own_blocks and part.startswith(tuple(f"{own}." for own in OWN_KEYS))


def _in(rule: Blocks, block: int, config: Any) -> bool:
    return rule(config, block)
