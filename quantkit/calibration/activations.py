"""The hidden states between two decoder blocks, and what blocks are called with beside them.

The arguments of blocks are recorded once, and given again for any sequences. Most are the same for every text of one
length and are kept as they were recorded for one sequence. Tensors that depend on the text, such as embeddings for each
block, are kept for all sequences. In place of an empty mapping that all blocks are given, each call gets a shelf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.stores import Shared, Shelf, Store, Traced
from quantkit.errors import UnsupportedError
from quantkit.models.architectures.foreign import block_of, running
from quantkit.models.stand_in import Arguments, Recorder, is_shelf

DTYPE = torch.bfloat16
Output = torch.Tensor | tuple[torch.Tensor, ...]  # of a block, as it returns it
Spot = tuple[Any, ...]  # a block's number, the name of its argument, and numbers in tuples


class Activations(Store):
    """Hidden states (S, T, D) of S sequences of T tokens, in memory or in a file, and the `arguments` of each block.

    Where a token has several `states` side by side, those of n sequences are (states, n, T, D). `shared` is what blocks
    hand to later ones. `numbers` are those of the recorded sequences, `of_text` what was recorded of each text, and
    `settings` transformers' configuration, for messages.
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
        self.of_text: list[Store] = []
        self.settings: Any = None

    def close(self) -> None:
        for store in self.of_text:
            store.close()
        self.shared.close()
        super().close()

    def like(self, path: Path | None = None, numbers: Sequence[int] | None = None) -> Activations:
        """New ones of the same shape and arguments, for the same sequences or for others of the recorded ones."""
        numbers = self.numbers if numbers is None else numbers
        new = Activations(len(numbers), *self.shape[1:], path, self.dtype, self.states)
        new.numbers, new.arguments, new.settings = numbers, self.arguments, self.settings
        return new

    def chosen(self, sequences: Sequence[int]) -> Activations:
        """A copy of some sequences, in memory, before any block has run on it."""
        copy = self.like(numbers=[self.numbers[sequence] for sequence in sequences])
        copy.write(0, self.select(sequences))
        return copy

    def batches(self, tokens: int, edge: int = 0) -> list[tuple[int, int]]:
        """Return (start, stop) of batches of whole sequences: at most `tokens` or one sequence, none across `edge`."""
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
        """What block `index` makes of the states `hidden` (B, T, D) of some sequences, on the block's device.

        `values` are other values of its parameters; `traced` is that of a shelf.
        """
        # No function in here that calls itself: it would hold `hidden` until the garbage collector comes by.
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

    def _given(
        self, value: Any, key: str, sequences: Sequence[int], device: torch.device, traced: Traced | None
    ) -> Any:
        """What a recorded argument, `key` being its keyword, is for some sequences."""
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
    """The hidden states among what a block returns."""
    return out[0] if isinstance(out, tuple) else out


def _at(numbers: Sequence[int], sequences: Sequence[int]) -> Sequence[int]:
    if isinstance(sequences, range):
        return numbers[sequences.start : sequences.stop]
    return [numbers[sequence] for sequence in sequences]


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
        for spot, value in tensors.items():
            first = self._first[spot]
            pair = id(first), id(value)
            if spot in self._of_text:
                continue
            if pair not in same:
                same[pair] = same_values(first, value)
            if not same[pair]:
                new.setdefault(pair, []).append(spot)
        for spots in new.values():
            self._keep(number, spots, tensors[spots[0]])
        written: dict[int, torch.Tensor] = {}
        for spot, store in self._of_text.items():
            value = tensors[spot]
            if written.setdefault(id(store), value) is value:
                store.write(number, value)
            elif not same_values(written[id(store)], value):
                raise _refusal("values that depend on the text in more than one way")

    def refuse_following(self, recorders: Sequence[Recorder]) -> None:
        """Raise UnsupportedError where the blocks' arguments follow from what earlier blocks gave.

        The recorders were called for the first sequence once more, and passed on other hidden states.
        """
        again = dict(_tensors([(recorder.args, recorder.kwargs) for recorder in recorders]))
        if not all(same_values(self._first[spot], value) for spot, value in again.items()):
            raise _refusal("values that follow from what earlier blocks gave")

    def arguments(self) -> list[Arguments]:
        """Those of each block, with a store for what depends on the text."""
        return [
            (
                tuple(self._put(value, (index, place)) for place, value in enumerate(args)),
                {key: self._put(value, (index, key)) for key, value in kwargs.items()},
            )
            for index, (args, kwargs) in enumerate(self._arguments)
        ]

    def _keep(self, number: int, spots: list[Spot], value: torch.Tensor) -> None:
        """Begin a store for a tensor in which sequence `number` is the first that differs."""
        first = self._first[spots[0]]
        if value.ndim < 2 or len(value) != 1 or first.shape != value.shape:
            raise _refusal("values that depend on the text, and not one for each")
        store = Store(self._sequences, (*value.shape[1:],), value.dtype, self._path)
        self.stores.append(store)
        for earlier in range(number):
            store.write(earlier, first)
        self._of_text |= dict.fromkeys(spots, store)

    def _put(self, value: Any, spot: Spot) -> Any:
        if spot in self._of_text:
            return self._of_text[spot]
        if is_shelf(value):
            return SharedPlace(str(spot[1]))
        if isinstance(value, tuple):
            return tuple(self._put(part, (*spot, place)) for place, part in enumerate(value))
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
    """All tensors in the arguments, also in tuples."""
    for index, (args, kwargs) in enumerate(arguments):
        named: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        waiting: list[tuple[Spot, Any]] = [((index, name), value) for name, value in named]
        for spot, value in waiting:  # which grows
            if isinstance(value, torch.Tensor):
                yield spot, value
            elif isinstance(value, tuple):
                waiting += [((*spot, place), part) for place, part in enumerate(value)]
