"""What decoder blocks are called with beside the hidden states: recorded once, and given again for any sequences.

Most of it is the same for every text of one length and is kept as it was recorded for one sequence. Tensors that depend
on the text, such as embeddings for each block, are kept for all sequences. An empty mapping that all blocks are given
is where some put what others take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.activations import Activations
from quantkit.calibration.flow.shared import Shared, Shelf
from quantkit.calibration.flow.store import Store
from quantkit.errors import UnsupportedError
from quantkit.models.stand_in import Arguments, Recorder, is_shelf

Spot = tuple[Any, ...]  # a block's number, the name of its argument, and numbers in tuples


@dataclass(frozen=True)
class SharedPlace:
    """Stands in recorded arguments for the mapping that blocks share, the argument of that name."""

    name: str


class Calls:
    """Records the arguments of all blocks, sequence by sequence; `path` is a file for those that depend on the text."""

    def __init__(self, sequences: int, path: Path | None) -> None:
        self.stores: list[Store] = []
        self._sequences, self._path = sequences, path
        self._arguments: list[Arguments] = []
        self._first: dict[Spot, torch.Tensor] = {}
        self._of_text: dict[Spot, Store] = {}

    def add(self, number: int, recorders: Sequence[Recorder]) -> None:
        """What the blocks were called with for sequence `number`; raises UnsupportedError where it cannot be kept."""
        arguments = [(recorder.args, recorder.kwargs) for recorder in recorders]
        tensors = dict(_tensors(arguments))
        if not self._arguments:
            self._arguments, self._first = arguments, tensors
        if self._first.keys() != tensors.keys():
            raise _refusal("other arguments for each text")
        same: dict[tuple[int, int], bool] = {}  # blocks share many of them
        new: dict[tuple[int, int], list[Spot]] = {}
        for path, value in tensors.items():
            first = self._first[path]
            pair = id(first), id(value)
            if path not in self._of_text and pair not in same:
                same[pair] = same_values(first, value)
            if path not in self._of_text and not same[pair]:
                new.setdefault(pair, []).append(path)
        for paths in new.values():
            self._keep(number, paths, tensors[paths[0]])
        written: dict[int, torch.Tensor] = {}
        for path, store in self._of_text.items():
            value = tensors[path]
            if written.setdefault(id(store), value) is not value and not same_values(written[id(store)], value):
                raise _refusal("values that depend on the text in more than one way")
            if written[id(store)] is value:
                store.write(number, value)

    def refuse_following(self, recorders: Sequence[Recorder]) -> None:
        """Raise UnsupportedError where the blocks' arguments follow from what earlier blocks gave.

        The recorders were called for the first sequence once more, and passed on other hidden states.
        """
        again = dict(_tensors([(recorder.args, recorder.kwargs) for recorder in recorders]))
        if not all(same_values(self._first[path], value) for path, value in again.items()):
            raise _refusal("values that follow from what earlier blocks gave")

    def arguments(self) -> list[Arguments]:
        """Those of each block, with a store for what depends on the text."""
        found: list[Arguments] = []
        for index, (args, kwargs) in enumerate(self._arguments):
            inside = [self._put(value, (index, place)) for place, value in enumerate(args)]
            found.append((tuple(inside), {key: self._put(value, (index, key)) for key, value in kwargs.items()}))
        return found

    def _keep(self, number: int, paths: list[Spot], value: torch.Tensor) -> None:
        """Begin a store for a tensor in which sequence `number` is the first that differs."""
        first = self._first[paths[0]]
        if value.ndim < 2 or len(value) != 1 or first.shape != value.shape:
            raise _refusal("values that depend on the text, and not one for each")
        store = Store(self._sequences, (*value.shape[1:],), value.dtype, self._path)
        self.stores.append(store)
        for earlier in range(number):
            store.write(earlier, first)
        self._of_text |= dict.fromkeys(paths, store)

    def _put(self, value: Any, path: Spot) -> Any:
        if path in self._of_text:
            return self._of_text[path]
        if is_shelf(value):
            return SharedPlace(str(path[1]))
        if isinstance(value, tuple):
            return tuple(self._put(part, (*path, place)) for place, part in enumerate(value))
        return value


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, also where they are not a number."""
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the blocks of this architecture are called with {what}, beside what flows through them, so they cannot be "
        "computed one by one"
    )


def _tensors(arguments: list[Arguments]) -> Iterator[tuple[Spot, torch.Tensor]]:
    for index, (args, kwargs) in enumerate(arguments):
        named: Iterable[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            yield from _inside(value, (index, name))


def _inside(value: Any, path: Spot) -> Iterator[tuple[Spot, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _inside(part, (*path, place))


def call_block(
    module: Callable[..., Any],
    arguments: Arguments,
    hidden: torch.Tensor,
    of: Activations,
    sequences: Sequence[int],
    shelf: Callable[[Shared, str, Sequence[int], torch.device], Shelf] = Shelf,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """(B, T, D) -> (B, T, D) through a block, or something with the same arguments; as it returns it.

    `hidden` is that of some `sequences` of the activations `of`, on the block's device.
    """

    # No function in here that calls itself: it would hold `hidden` until the garbage collector comes by.
    given = partial(_given, of=of, sequences=sequences, shelf=shelf, device=hidden.device)
    args = [given(value) for value in arguments[0]]
    kwargs = {key: given(value, key) for key, value in arguments[1].items()}
    out: torch.Tensor | tuple[torch.Tensor, ...] = module(hidden, *args, **kwargs)
    return out


def _given(
    value: Any,
    key: str = "",
    *,
    of: Activations,
    sequences: Sequence[int],
    shelf: Callable[[Shared, str, Sequence[int], torch.device], Shelf],
    device: torch.device,
) -> Any:
    """What a recorded argument, `key` being its keyword, is for some sequences."""
    if isinstance(value, SharedPlace):
        return shelf(of.shared, value.name, sequences, device)
    if isinstance(value, Store):
        return value.select(_numbers(of.numbers, sequences)).to(device)
    if isinstance(value, tuple):
        return tuple(_given(part, of=of, sequences=sequences, shelf=shelf, device=device) for part in value)
    return for_batch(value, len(sequences), key)


def _numbers(numbers: Sequence[int], sequences: Sequence[int]) -> Sequence[int]:
    if isinstance(sequences, range):
        return numbers[sequences.start : sequences.stop]
    return [numbers[sequence] for sequence in sequences]


def hidden_of(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The hidden states among what a block returns."""
    return out[0] if isinstance(out, tuple) else out


def for_batch(value: Any, size: int, key: str = "") -> Any:
    """Spread an argument that was recorded for one sequence over a batch of `size`; `key` is its keyword."""
    if isinstance(value, torch.Tensor) and key == "alibi" and value.ndim == 3:
        return value.repeat(size, 1, 1)  # (batch * heads, 1, T)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1 and size > 1:
        return value.expand(size, *value.shape[1:])
    return value
