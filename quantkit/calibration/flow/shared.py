"""What decoder blocks hand to later ones beside the hidden states, such as keys and values that several blocks use.

transformers gives all blocks one mapping, into which some put tensors and from which others take them. Here each call
of a block gets a shelf in its place: what is put there goes into a store for all sequences, what is taken is read from
it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from pathlib import Path

import torch

from quantkit.calibration.flow.store import Store
from quantkit.errors import UnsupportedError

Key = tuple[str, Hashable]  # which of the blocks' arguments, and the key in it
Stores = tuple[Store, ...]


class Shared:
    """What was handed on for S sequences; in memory, or with `path` in files.

    What a block puts is seen by the blocks after it, and by itself in the same call: it may run again and again.
    """

    def __init__(self, sequences: int, path: Path | None) -> None:
        self._count, self._path = sequences, path
        self._earlier: dict[Key, Stores] = {}
        self._made: dict[Key, Stores] = {}

    def next_block(self) -> None:
        """What the block has put is there for the next ones."""
        for key in self._made.keys() & self._earlier.keys():
            _close(self._earlier[key])
        self._earlier |= self._made
        self._made = {}

    def keys(self, place: str) -> list[Key]:
        """Those of one of the blocks' arguments that earlier blocks have put there."""
        return [key for key in self._earlier if key[0] == place]

    def stores(self) -> list[Store]:
        """Where everything lies that earlier blocks have put."""
        return [store for stores in self._earlier.values() for store in stores]

    def read(self, key: Key, sequences: Sequence[int], own: bool = False) -> tuple[torch.Tensor, ...]:
        """What earlier blocks have put for some sequences, or the block itself (`own`)."""
        return tuple(store.select(sequences) for store in (self._made if own else self._earlier)[key])

    def write(self, key: Key, sequences: Sequence[int], values: tuple[torch.Tensor, ...]) -> None:
        """What a block puts for some sequences; raises UnsupportedError where it is not one for each of them."""
        each = isinstance(values, tuple) and all(isinstance(v, torch.Tensor) and v.ndim > 1 for v in values)
        if not each or any(len(value) != len(sequences) for value in values):
            raise UnsupportedError(
                "the blocks of this architecture hand on something else than tensors of each sequence, so they cannot "
                "be computed one by one"
            )
        if key not in self._made:
            self._made[key] = tuple(Store(self._count, (*v.shape[1:],), v.dtype, self._path) for v in values)
        for store, value in zip(self._made[key], values, strict=True):
            store.put(sequences, value)

    def add(self, key: Key, sequences: Sequence[int], values: tuple[torch.Tensor, ...]) -> None:
        """Add to what lies there in float32 for some sequences, zeros at first."""
        if key not in self._earlier:
            stores = tuple(Store(self._count, (*v.shape[1:],), torch.float32, self._path) for v in values)
            for store, value in zip(stores, values, strict=True):
                for number in range(self._count):
                    store.write(number, torch.zeros(1, *value.shape[1:]))
            self._earlier[key] = stores
        for store, value in zip(self._earlier[key], values, strict=True):
            store.put(sequences, store.select(sequences) + value.to("cpu", torch.float32))

    def close(self) -> None:
        """Let go of the files, which are gone then."""
        for stores in (*self._earlier.values(), *self._made.values()):
            _close(stores)


class Shelf(MutableMapping[Hashable, tuple[torch.Tensor, ...]]):
    """In one call of a block for some sequences, the mapping that all blocks share: its argument `place`."""

    def __init__(self, shared: Shared, place: str, sequences: Sequence[int], device: torch.device) -> None:
        self._shared, self._place, self._sequences, self._device = shared, place, sequences, device
        self._own: set[Hashable] = set()

    def __getitem__(self, key: Hashable) -> tuple[torch.Tensor, ...]:
        if key not in set(self):
            raise KeyError(key)
        return self.take((self._place, key), key in self._own)

    def __setitem__(self, key: Hashable, value: tuple[torch.Tensor, ...]) -> None:
        self._own.add(key)
        self.put((self._place, key), value)

    def __delitem__(self, key: Hashable) -> None:
        raise UnsupportedError("the blocks of this architecture take back what others shared, which is not kept")

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._own | {key for _, key in self._shared.keys(self._place)})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def take(self, key: Key, own: bool) -> tuple[torch.Tensor, ...]:
        """What lies there, on the block's device."""
        return tuple(value.to(self._device) for value in self._shared.read(key, self._sequences, own))

    def put(self, key: Key, values: tuple[torch.Tensor, ...]) -> None:
        """Keep it for the blocks that follow."""
        self._shared.write(key, self._sequences, values)


class _TracedShelf(Shelf):
    """One whose tensors are leaves of the graph of what is computed; it keeps what the block puts, with its graph."""

    def __init__(self, shared: Shared, place: str, sequences: Sequence[int], device: torch.device) -> None:
        super().__init__(shared, place, sequences, device)
        self.taken: dict[Key, tuple[torch.Tensor, ...]] = {}
        self.made: dict[Key, tuple[torch.Tensor, ...]] = {}

    def take(self, key: Key, own: bool) -> tuple[torch.Tensor, ...]:
        if own:
            return self.made[key]
        if key not in self.taken:
            self.taken[key] = tuple(value.detach().clone().requires_grad_() for value in super().take(key, own))
        return self.taken[key]

    def put(self, key: Key, values: tuple[torch.Tensor, ...]) -> None:
        self.made[key] = values


class Traced:
    """The shelves of one call of a block whose gradients are wanted; `slopes` has those by what is shared."""

    def __init__(self, sequences: Sequence[int], slopes: Shared) -> None:
        self._sequences, self._slopes = sequences, slopes
        self._shelves: list[_TracedShelf] = []

    def shelf(self, shared: Shared, place: str, sequences: Sequence[int], device: torch.device) -> Shelf:
        """A shelf for `call_block`."""
        self._shelves.append(_TracedShelf(shared, place, sequences, device))
        return self._shelves[-1]

    def made(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the block has put that later ones took, and the loss's gradients by it."""
        values: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for shelf in self._shelves:
            for key, tensors in shelf.made.items():
                if key in self._slopes.keys(key[0]):
                    values += tensors
                    given = self._slopes.read(key, self._sequences)
                    gradients += [slope.to(value) for slope, value in zip(given, tensors, strict=True)]
        return values, gradients

    def taken(self) -> list[torch.Tensor]:
        """What the block took."""
        return [value for shelf in self._shelves for values in shelf.taken.values() for value in values]

    def hand_back(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add the gradients by what the block took to those of the blocks after it."""
        left = iter(gradients)
        for shelf in self._shelves:
            for key, values in shelf.taken.items():
                self._slopes.add(key, self._sequences, tuple(next(left) for _ in values))


def _close(stores: Stores) -> None:
    for store in stores:
        store.close()
