"""Where each tensor of a file comes from: the rows of `architectures.KNOWN` written out for a number of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.formats.gguf.architectures.known import Architecture, Setting


@dataclass(frozen=True)
class TensorSlot:
    """A tensor of the file: the source's tensors whose rows follow one another in it, and what is done to them.

    `order` names an order of rows (row_orders.py), `group` is the number of the alternative that the tensor belongs to,
    `setting` the one of config.json that says whether a model has it (none: every model).
    """

    name: str
    parts: tuple[str, ...]
    order: str | None = None
    transposed: bool = False
    shift: float = 0.0
    setting: Setting | None = None
    group: int | None = None


def tensor_slots(architecture: Architecture, blocks: int, experts: int, head: bool) -> list[TensorSlot]:
    """Every tensor that a file of this architecture may have, with the name that gguf gives it."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[architecture.name], blocks)

    def name_of(origin: str) -> str | None:
        for known in (origin, origin.removeprefix(architecture.prefix)):  # some names are known without it alone
            name: str | None = table.get_name(known, try_suffixes=(".weight", ".bias"))
            if name is not None:
                return name
        return None

    def slot(stem: str, part: str, **more: Any) -> TensorSlot:
        name = name_of(stem + part)
        if name is None:
            raise KeyError(f"gguf has no name for {stem}{part} in the architecture {architecture.name}")
        shift = architecture.norm_shift if part.endswith("norm.weight") else 0.0
        order = architecture.orders.get(part.rpartition(".")[0])
        return TensorSlot(name, (stem + part,), order, part in architecture.transposed, shift, **more)

    slots = [slot("", name) for name in architecture.outside]
    if head and name_of(architecture.head) is not None:  # llama.cpp ties some heads always
        slots.append(slot("", architecture.head))
    for block in range(blocks):
        stem = f"{architecture.blocks}.{block}."
        slots += [slot(stem, part) for part in architecture.parts]
        for part, name in architecture.experts.items() if experts else ():
            slots.append(TensorSlot(f"blk.{block}.{name}", tuple(stem + part.format(i) for i in range(experts))))
        slots += [slot(stem, part, setting=setting) for part, setting in architecture.optional.items()]
        for group, parts in enumerate(architecture.either):
            slots += [slot(stem, part, group=group) for part in parts]
    return slots
