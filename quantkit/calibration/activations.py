"""Hidden states between decoder blocks and the other arguments of blocks, in memory or in temporary files.

`Activations` are the hidden states. Some blocks also pass tensors to later blocks, such as keys and values that several
blocks use; transformers passes all blocks one shared mapping for them. Here each call of a block gets a `Shelf`
instead: a mapping backed by one `Store` per key, with a row for every sequence. All other arguments are recorded once
(`Calls`) and passed again for any sequences. Most of them are equal for all texts of one length, so one copy is stored.
Tensors that depend on the text, such as per-block embeddings, are stored for all sequences.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from quantkit.errors import UnsupportedError
from quantkit.models.architectures import block_of, running
from quantkit.models.stand_in import Arguments, Recorder, is_shelf

DTYPE = torch.bfloat16
Output = torch.Tensor | tuple[torch.Tensor, ...]  # return value of a block
Spot = tuple[Any, ...]  # a block's number, the name of its argument, and numbers in tuples
Key = tuple[str, Hashable]  # (name of the blocks' argument, key in it)
Tensors = tuple[torch.Tensor, ...]


class Store:
    """One tensor of shape `each` for each of S sequences, in memory or, if `path` is given, in a temporary file.

    `axis`: position of the sequence axis in the tensors that `read` returns and `write` takes.
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
        stop = self._count if stop is None else min(stop, self._count)
        if self._file is None:
            values = self.values[start:stop]
        else:
            values = torch.empty(stop - start, *self._each, dtype=self.dtype)
            transfer(self._file, "readinto", start * self._item_bytes, values)
        return values.movedim(0, self._axis).contiguous() if self._axis else values

    def select(self, sequences: Sequence[int]) -> torch.Tensor:
        if isinstance(sequences, range) and sequences.step == 1:
            return self.read(sequences.start, sequences.stop)
        return torch.cat([self.read(number, number + 1) for number in sequences], self._axis)

    def write(self, start: int, values: torch.Tensor) -> None:
        values = values.detach().movedim(self._axis, 0).to("cpu", self.dtype).contiguous()
        if self._file is None:
            self.values[start : start + len(values)] = values
        else:
            transfer(self._file, "write", start * self._item_bytes, values)

    def put(self, sequences: Sequence[int], values: torch.Tensor) -> None:
        if isinstance(sequences, range) and sequences.step == 1:
            self.write(sequences.start, values)
            return
        for number, value in zip(sequences, values.split(1, self._axis), strict=True):
            self.write(number, value)


def unlinked(path: Path) -> FileIO:
    """Create a file at `path` and remove its name: the data is freed on close, also if the process is killed."""
    file = FileIO(path, "w+")
    path.unlink()
    return file


def transfer(file: FileIO, action: Literal["readinto", "write"], place: int, data: torch.Tensor) -> None:
    """Read the contiguous CPU tensor `data` from byte offset `place` of the file, or write it; raises OSError."""
    # Not through numpy, which would fix the size of the tensor's storage.
    view = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")
    file.seek(place)
    done = 0
    while done < len(view):
        moved = getattr(file, action)(view[done:])
        if not moved:
            raise OSError("activations in a file could not be read back")
        done += moved


class Shared:
    """Tensors that blocks pass to later blocks, for S sequences, in memory or in files at `path`.

    Later blocks see what a block wrote; the block itself sees it only in the same call, since it may run repeatedly.
    """

    def __init__(self, sequences: int, path: Path | None) -> None:
        self._count, self._path = sequences, path
        self._earlier: dict[Key, tuple[Store, ...]] = {}
        self._made: dict[Key, tuple[Store, ...]] = {}

    def next_block(self) -> None:
        for key in self._made.keys() & self._earlier.keys():
            for store in self._earlier[key]:
                store.close()
        self._earlier |= self._made
        self._made = {}

    def keys(self, argument: str) -> list[Key]:
        """Return the keys that earlier blocks have written into the mapping that blocks take as `argument`."""
        return [key for key in self._earlier if key[0] == argument]

    def stores(self) -> list[Store]:
        return [store for stores in self._earlier.values() for store in stores]

    def read(self, key: Key, sequences: Sequence[int], own: bool = False) -> Tensors:
        return tuple(store.select(sequences) for store in (self._made if own else self._earlier)[key])

    def write(self, key: Key, sequences: Sequence[int], values: Tensors) -> None:
        """Store a block's tensors (sequences, ...) under `key`; raises UnsupportedError for any other values."""
        each = isinstance(values, tuple) and all(isinstance(v, torch.Tensor) and v.ndim > 1 for v in values)
        if not each or any(len(value) != len(sequences) for value in values):
            raise UnsupportedError(
                "the blocks of this architecture pass on other values than a tensor per sequence, so they cannot "
                "be computed one by one"
            )
        if key not in self._made:
            self._made[key] = tuple(Store(self._count, (*v.shape[1:],), v.dtype, self._path) for v in values)
        for store, value in zip(self._made[key], values, strict=True):
            store.put(sequences, value)

    def add(self, key: Key, sequences: Sequence[int], values: Tensors) -> None:
        """Add `values` to the float32 sums stored under `key` for some sequences; the sums start at zero."""
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
    """Shared tensors in one differentiated call: `taken` (read; graph leaves) and `made` (written; graph outputs)."""

    taken: dict[Key, Tensors] = field(default_factory=dict)
    made: dict[Key, Tensors] = field(default_factory=dict)


class Shelf(MutableMapping[Hashable, Tensors]):
    """The shared mapping that one call of a block gets as its argument named `argument`, for some sequences.

    With `traced`, the tensors are part of an autograd graph, and what the block writes goes to `traced` only.
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
        raise UnsupportedError("blocks of this architecture remove shared values, which is not supported")

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._own | {key for _, key in self._shared.keys(self._argument)})

    def __len__(self) -> int:
        return len(list(iter(self)))


class Activations(Store):
    """Hidden states (S, T, D) of S sequences of T tokens, in memory or in a file, and the `arguments` of each block.

    If a token has several hidden states, `states` is their number; n sequences are (states, n, T, D). `shared`: values
    that blocks pass to later ones; `numbers`: indices among the recorded sequences; `of_text`: text-dependent
    arguments; `settings`: transformers' configuration, for messages; `held_bytes`: bytes in memory.
    """

    def __init__(
        self,
        sequences: int,
        length: int,
        hidden: int,
        path: Path | None = None,
        dtype: torch.dtype = DTYPE,
        states: int = 0,
    ) -> None:
        self.shape, self.states = (sequences, length, hidden), states
        super().__init__(sequences, (*([states] if states else []), length, hidden), dtype, path, 1 if states else 0)
        self.shared = Shared(sequences, path)
        self.numbers: Sequence[int] = range(sequences)
        self.arguments: list[Arguments] = []
        self.of_text: dict[Spot, Store] = {}
        self.settings: Any = None
        self.held_bytes = 0

    def close(self) -> None:
        for store in self.of_text.values():
            store.close()
        self.shared.close()
        super().close()

    def like(self, path: Path | None = None, numbers: Sequence[int] | None = None) -> Activations:
        """Return empty activations with the same shape and arguments; `numbers` selects other recorded sequences."""
        numbers = self.numbers if numbers is None else numbers
        new = Activations(len(numbers), *self.shape[1:], path, self.dtype, self.states)
        new.numbers, new.arguments, new.settings = numbers, self.arguments, self.settings
        return new

    def chosen(self, sequences: Sequence[int]) -> Activations:
        """Return an in-memory copy of some sequences; valid only before any block has run on them."""
        copy = self.like(numbers=[self.numbers[sequence] for sequence in sequences])
        copy.write(0, self.select(sequences))
        return copy

    def batches(self, tokens: int, edge: int = 0) -> list[tuple[int, int]]:
        """Return (start, stop) of batches of at most `tokens` tokens, at least one sequence; none spans `edge`."""
        step = max(1, tokens // self.shape[1])
        return list(pairwise([*range(0, edge, step), *range(edge, len(self), step), len(self)]))

    def call(
        self,
        index: int,
        block: torch.nn.Module,
        sequences: Sequence[int],
        hidden: torch.Tensor,
        values: dict[str, torch.Tensor] | None = None,
        traced: Traced | None = None,
    ) -> Output:
        """Return block `index`'s output for the hidden states `hidden` (B, T, D) of some sequences.

        `hidden` is on the block's device. `values` replace parameters of the block by name; `traced`: see `Shelf`.
        """
        # No recursive inner function: it would keep `hidden` alive until garbage collection.
        args, kwargs = self.arguments[index]
        given = [self._given(value, "", sequences, hidden.device, traced) for value in args]
        named = {key: self._given(value, key, sequences, hidden.device, traced) for key, value in kwargs.items()}
        with running(self.settings, block_of(index, block)):
            out: Output = (
                block(hidden, *given, **named)
                if values is None
                else torch.func.functional_call(block, values, (hidden, *given), named)
            )
            return out

    def advance(
        self,
        index: int,
        block: torch.nn.Module,
        batches: Iterable[tuple[int, int]],
        outputs: Activations | None = None,
        after_each: Callable[[], None] = lambda: None,
    ) -> Output:
        """Run block `index` on each batch, write its outputs to `outputs` (default: in place), return the last."""
        out: Output = ()
        device = next(block.parameters()).device
        for start, stop in batches:
            hidden = self.read(start, stop).to(device)
            out = self.call(index, block, range(start, stop), hidden)
            (self if outputs is None else outputs).write(start, hidden_of(out))
            after_each()
        return out

    def _given(
        self, value: Any, key: str, sequences: Sequence[int], device: torch.device, traced: Traced | None
    ) -> Any:
        if isinstance(value, SharedPlace):
            return Shelf(self.shared, value.name, sequences, device, traced)
        if isinstance(value, Store):
            return value.select(_at(self.numbers, sequences)).to(device)
        if isinstance(value, tuple):
            return tuple(self._given(part, "", sequences, device, traced) for part in value)
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return value
        if key == "alibi" and value.ndim == 3:
            return value.repeat(len(sequences), 1, 1)  # (batch * heads, 1, T)
        return value.expand(len(sequences), *value.shape[1:]) if len(value) == 1 and len(sequences) > 1 else value


def hidden_of(out: Output) -> torch.Tensor:
    """Return the hidden states in a block's return value."""
    return out[0] if isinstance(out, tuple) else out


def _at(numbers: Sequence[int], sequences: Sequence[int]) -> Sequence[int]:
    if isinstance(sequences, range):
        return numbers[sequences.start : sequences.stop]
    return [numbers[sequence] for sequence in sequences]


@dataclass(frozen=True)
class SharedPlace:
    """Placeholder in recorded arguments: the argument `name` is the mapping that all blocks share."""

    name: str


class Calls:
    """Recorder of all blocks' arguments, sequence by sequence; text-dependent tensors go to `path` if it is given."""

    def __init__(self, sequences: int, path: Path | None) -> None:
        self._sequences, self._path = sequences, path
        self._arguments: list[Arguments] = []
        self._first: dict[Spot, torch.Tensor] = {}
        self.of_text: dict[Spot, Store] = {}

    def add(self, number: int, recorders: Sequence[Recorder]) -> None:
        """Record the blocks' arguments for sequence `number`; raises UnsupportedError if they cannot be stored."""
        tensors = dict(_tensors(recorders))
        if not self._arguments:
            self._arguments, self._first = [(recorder.args, recorder.kwargs) for recorder in recorders], tensors
        if self._first.keys() != tensors.keys():
            raise _refusal("other arguments for each text")
        for spot, value in tensors.items():
            first = self._first[spot]
            if spot not in self.of_text and not same_values(first, value):
                if value.ndim < 2 or len(value) != 1 or first.shape != value.shape:
                    raise _refusal("values that depend on the text, but not one per text")
                self.of_text[spot] = Store(self._sequences, (*value.shape[1:],), value.dtype, self._path)
                for earlier in range(number):
                    self.of_text[spot].write(earlier, first)
            if spot in self.of_text:
                self.of_text[spot].write(number, value)

    def refuse_following(self, recorders: Sequence[Recorder]) -> None:
        """Raise UnsupportedError if the blocks' arguments depend on outputs of earlier blocks.

        Call it after a second run of the first sequence in which the recorders returned different hidden states.
        """
        if not all(same_values(self._first[spot], value) for spot, value in _tensors(recorders)):
            raise _refusal("values that depend on outputs of earlier blocks")

    def arguments(self) -> list[Arguments]:
        return [
            (
                tuple(self._put(value, (index, place)) for place, value in enumerate(args)),
                {key: self._put(value, (index, key)) for key, value in kwargs.items()},
            )
            for index, (args, kwargs) in enumerate(self._arguments)
        ]

    def _put(self, value: Any, spot: Spot) -> Any:
        if spot in self.of_text:
            return self.of_text[spot]
        if is_shelf(value):
            return SharedPlace(str(spot[1]))
        if isinstance(value, tuple):
            return tuple(self._put(part, (*spot, place)) for place, part in enumerate(value))
        return value


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal shapes and values; NaN equals NaN."""
    if one is other or one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the blocks of this architecture are called with {what}, so they cannot be computed one by one"
    )


def _tensors(recorders: Sequence[Recorder]) -> Iterator[tuple[Spot, torch.Tensor]]:
    for index, recorder in enumerate(recorders):
        named: list[tuple[Any, Any]] = [*enumerate(recorder.args), *recorder.kwargs.items()]
        waiting: list[tuple[Spot, Any]] = [((index, name), value) for name, value in named]
        for spot, value in waiting:  # which grows during the loop
            if isinstance(value, torch.Tensor):
                yield spot, value
            elif isinstance(value, tuple):
                waiting += [((*spot, place), part) for place, part in enumerate(value)]
