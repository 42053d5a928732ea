"""Where each tensor of a file comes from: the rows of `architectures.KNOWN` written out for a number of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.formats.gguf.architectures.known import Architecture


@dataclass(frozen=True)
class Place:
    """A tensor of the file: the source's tensors whose rows follow one another in it, and what is done to them.

    `order` names an order of rows (orders.py), `group` is the number of the alternative that the tensor belongs to.
    """

    name: str
    parts: tuple[str, ...]
    order: str | None = None
    transposed: bool = False
    shift: float = 0.0
    optional: bool = False
    group: int | None = None


def places(architecture: Architecture, blocks: int, experts: int, head: bool) -> list[Place]:
    """Every tensor that a file of this architecture may have, with the name that gguf gives it."""
    table = _name_map(architecture.name, blocks)
    found = [_place(architecture, table, name, name) for name in architecture.outside]
    if head and _name(table, architecture.head) is not None:  # llama.cpp ties some heads always
        found.append(_place(architecture, table, architecture.head, architecture.head))
    for block in range(blocks):
        stem = f"{architecture.blocks}.{block}."
        found += [_place(architecture, table, stem + part, part) for part in architecture.parts]
        for part, name in architecture.experts.items() if experts else ():
            found.append(Place(f"blk.{block}.{name}", tuple(stem + part.format(i) for i in range(experts))))
        for part in architecture.optional:
            found.append(_place(architecture, table, stem + part, part, optional=True))
        for group, parts in enumerate(architecture.either):
            found += [_place(architecture, table, stem + part, part, group=group) for part in parts]
    return found


def _place(architecture: Architecture, table: Any, origin: str, part: str, **more: Any) -> Place:
    name = _name(table, origin)
    if name is None:
        raise KeyError(f"gguf has no name for {origin} in the architecture {architecture.name}")
    shift = architecture.norm_shift if part.endswith("norm.weight") else 0.0
    order = architecture.orders.get(part.rpartition(".")[0])
    return Place(name, (origin,), order, part in architecture.transposed, shift, **more)


def _name(table: Any, origin: str) -> str | None:
    found: str | None = table.get_name(origin, try_suffixes=(".weight", ".bias"))
    return found


def _name_map(architecture_name: str, blocks: int) -> Any:
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[architecture_name], blocks)
