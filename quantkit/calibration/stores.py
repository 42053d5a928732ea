"""What flows from decoder block to decoder block: tensors of many sequences, in memory or in files without names.

Some blocks hand tensors to later ones beside the hidden states, such as keys and values that several blocks use:
transformers gives all blocks one mapping, into which some put tensors and from which others take them. Here each call
of a block gets a `Shelf` in its place, which writes into stores of all sequences and reads from them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Literal

import torch

from quantkit.errors import UnsupportedError

Key = tuple[str, Hashable]  # which of the blocks' arguments, and the key in it
Tensors = tuple[torch.Tensor, ...]


class Store:
    """A tensor of the shape `each` for every one of S sequences, in memory or in the file `path`.

    In one tensor of several sequences, these are the axis `axis`.
    """

    def __init__(
        self, sequences: int, each: tuple[int, ...], dtype: torch.dtype, path: Path | None = None, axis: int = 0
    ) -> None:
        self.dtype, self.path = dtype, path
        self._count, self._each, self._axis = sequences, each, axis
        self._item_bytes = math.prod(each) * dtype.itemsize
        self._file = None if path is None else unlinked(path)
        self.values = torch.empty(sequences if path is None else 0, *each, dtype=dtype)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return self._count

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The sequences `start:stop`."""
        stop = self._count if stop is None else min(stop, self._count)
        if self._file is None:
            values = self.values[start:stop]
        else:
            values = torch.empty(stop - start, *self._each, dtype=self.dtype)
            transfer(self._file, "readinto", start * self._item_bytes, values)
        return values.movedim(0, self._axis).contiguous() if self._axis else values

    def select(self, sequences: Sequence[int]) -> torch.Tensor:
        """Some sequences, in their order."""
        if isinstance(sequences, range) and sequences.step == 1:
            return self.read(sequences.start, sequences.stop)
        return torch.cat([self.read(number, number + 1) for number in sequences], self._axis)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the sequences from `start` on."""
        values = values.detach().movedim(self._axis, 0).to("cpu", self.dtype).contiguous()
        if self._file is None:
            self.values[start : start + len(values)] = values
        else:
            transfer(self._file, "write", start * self._item_bytes, values)

    def put(self, sequences: Sequence[int], values: torch.Tensor) -> None:
        """Replace some sequences."""
        if isinstance(sequences, range) and sequences.step == 1:
            self.write(sequences.start, values)
            return
        for number, value in zip(sequences, values.split(1, self._axis), strict=True):
            self.write(number, value)


def unlinked(path: Path) -> FileIO:
    """Open a new file without a name: it lives until it is closed, and a kill leaves nothing behind."""
    file = FileIO(path, "w+")
    path.unlink()
    return file


def transfer(file: FileIO, action: Literal["readinto", "write"], place: int, data: torch.Tensor) -> None:
    """Read a contiguous tensor of the processor's memory from `place` of the file, or write it there."""
    # Not through numpy, which would fix the size of the tensor's storage for good.
    view = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")
    file.seek(place)
    done = 0
    while done < len(view):
        moved = getattr(file, action)(view[done:])
        if not moved:
            raise OSError("activations that were put into a file could not be read back")
        done += moved


class Shared:
    """What blocks hand to later ones for S sequences, in memory or in files at `path`.

    What a block puts is seen by the blocks after it, and by itself in the same call: it may run again and again.
    """

    def __init__(self, sequences: int, path: Path | None) -> None:
        self._count, self._path = sequences, path
        self._earlier: dict[Key, tuple[Store, ...]] = {}
        self._made: dict[Key, tuple[Store, ...]] = {}

    def next_block(self) -> None:
        """Give what the block has put to the next ones."""
        for key in self._made.keys() & self._earlier.keys():
            for store in self._earlier[key]:
                store.close()
        self._earlier |= self._made
        self._made = {}

    def keys(self, argument: str) -> list[Key]:
        """What earlier blocks have put into one of the blocks' arguments."""
        return [key for key in self._earlier if key[0] == argument]

    def stores(self) -> list[Store]:
        """All that earlier blocks have put."""
        return [store for stores in self._earlier.values() for store in stores]

    def read(self, key: Key, sequences: Sequence[int], own: bool = False) -> Tensors:
        """What earlier blocks have put for some sequences, or the block itself (`own`)."""
        return tuple(store.select(sequences) for store in (self._made if own else self._earlier)[key])

    def write(self, key: Key, sequences: Sequence[int], values: Tensors) -> None:
        """What a block puts for some sequences; raises UnsupportedError where it is not one tensor for each of them."""
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

    def add(self, key: Key, sequences: Sequence[int], values: Tensors) -> None:
        """Add to what is stored in float32 for some sequences, zeros at first."""
        if key not in self._earlier:
            stores = tuple(Store(self._count, (*v.shape[1:],), torch.float32, self._path) for v in values)
            for store, value in zip(stores, values, strict=True):
                for number in range(self._count):
                    store.write(number, torch.zeros(1, *value.shape[1:]))
            self._earlier[key] = stores
        for store, value in zip(self._earlier[key], values, strict=True):
            store.put(sequences, store.select(sequences) + value.to("cpu", torch.float32))

    def close(self) -> None:
        for stores in (*self._earlier.values(), *self._made.values()):
            for store in stores:
                store.close()


@dataclass
class Traced:
    """What one call of a block takes from others, as leaves of its graph, and what it puts, with its graph."""

    taken: dict[Key, Tensors] = field(default_factory=dict)
    made: dict[Key, Tensors] = field(default_factory=dict)


class Shelf(MutableMapping[Hashable, Tensors]):
    """The mapping that all blocks share, their argument `argument`, in one call of a block for some sequences.

    With `traced`, tensors have a graph and what the block puts is not stored.
    """

    def __init__(
        self, shared: Shared, argument: str, sequences: Sequence[int], device: torch.device, traced: Traced | None
    ) -> None:
        self._shared, self._argument, self._sequences, self._device = shared, argument, sequences, device
        self._traced = traced
        self._own: set[Hashable] = set()

    def __getitem__(self, key: Hashable) -> Tensors:
        if key not in set(self):
            raise KeyError(key)
        place, own, traced = (self._argument, key), key in self._own, self._traced
        if traced is not None and own:
            return traced.made[place]
        if traced is not None and place in traced.taken:
            return traced.taken[place]
        values = tuple(value.to(self._device) for value in self._shared.read(place, self._sequences, own))
        if traced is not None:
            traced.taken[place] = values = tuple(value.clone().requires_grad_() for value in values)
        return values

    def __setitem__(self, key: Hashable, value: Tensors) -> None:
        self._own.add(key)
        if self._traced is None:
            self._shared.write((self._argument, key), self._sequences, value)
        else:
            self._traced.made[self._argument, key] = value

    def __delitem__(self, key: Hashable) -> None:
        raise UnsupportedError("the blocks of this architecture take back what others shared, which is not kept")

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._own | {key for _, key in self._shared.keys(self._argument)})

    def __len__(self) -> int:
        return len(list(iter(self)))
