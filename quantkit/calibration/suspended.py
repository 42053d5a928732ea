"""Batches that go through a decoder block from one place to the next, while its weights change behind them.

`SuspendedBatches` runs each batch in a greenlet of its own, so that any model code can be stopped before a layer and go
on later with that layer's new weights. What a waiting batch holds is found through its frames; put away, its tensors
keep their places and lose their storage until it goes on. `RepeatedBatches` is its slow reference, which keeps no
frames: for each place it runs the block again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from quantkit.calibration.flow.store import Store, transfer, unlinked
from quantkit.models.architectures import Signal

PAST = 1 << 30  # where a batch is that has come out of the block
SMALL = 1 << 14  # bytes; a smaller tensor is not put away

Hook = Callable[[nn.Module, tuple[torch.Tensor, ...]], None]


class Batch(ABC):
    """One batch on its way through a block. It stops at numbered places, with the input there in `x`.

    `at` is the number of the place, PAST at the end of the block, where `x` is what came out.
    """

    def __init__(self) -> None:
        self.at = -1
        self.x = torch.empty(0)

    @abstractmethod
    def go_to(self, at: int) -> None:
        """Run on to the place `at`, or to the first one after it that this batch passes."""

    @abstractmethod
    def wait(self) -> None:
        """Stay while others go on; `x` is of no use until this batch has gone on."""

    def take(self) -> torch.Tensor:
        """What came out of the block, which is then held here no more."""
        out, self.x = self.x, torch.empty(0)
        return out


class Batches(ABC):
    """The batches of one block."""

    @abstractmethod
    def add(self, run: Callable[[], torch.Tensor]) -> Batch:
        """A new batch, whose whole way is `run`; it has not set out."""

    @abstractmethod
    def stop_at(self, at: int) -> Hook:
        """A forward pre-hook that lets the batch that comes by stop at the place `at`."""

    @abstractmethod
    def close(self) -> None:
        """Let all batches leave the block wherever they are."""


class SuspendedBatch(Batch):
    """A batch in a greenlet; what it holds goes to `offload_file` where there is no room for it."""

    def __init__(self, number: int, run: Callable[[], torch.Tensor], offload_file: OffloadFile) -> None:
        super().__init__()
        self.number = number
        self._greenlet, self._offload_file = greenlet(run), offload_file

    def go_to(self, at: int) -> None:
        """Run on, with what was put away."""
        while self.at < at:
            self._offload_file.read_back(self)
            self.x = torch.empty(0)  # so that its frames alone hold what they still need
            got = self._greenlet.switch()
            self.at, self.x = (PAST, got) if self._greenlet.dead else got

    def wait(self) -> None:
        """Stay; what this batch holds may be put away."""
        self._offload_file.arrived(self)

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The storages of the tensors that its frames hold, by address."""
        storages: dict[int, torch.UntypedStorage] = {}
        frame = self._greenlet.gr_frame
        while frame is not None:
            seen = frame.f_locals
            for storage in storages_in(seen.values()):
                if storage.nbytes() >= SMALL:
                    storages[storage.data_ptr()] = storage
            if isinstance(seen, dict):  # before Python 3.13 a copy, which the frame would keep
                seen.clear()
            frame = frame.f_back
        return storages

    def end(self) -> None:
        """Leave the block wherever it is."""
        if self._greenlet:
            self._greenlet.throw(GreenletExit)


class SuspendedBatches(Batches):
    """Batches that keep their frames between two places. Tensors at the addresses `common` belong to all of them."""

    def __init__(self, offload_file: OffloadFile, common: set[int]) -> None:
        self._offload_file, self._scheduler = offload_file, getcurrent()
        self._batches: list[SuspendedBatch] = []
        offload_file.common = common

    def add(self, run: Callable[[], torch.Tensor]) -> SuspendedBatch:
        """A new batch in a greenlet of its own."""
        self._batches.append(SuspendedBatch(len(self._batches), run, self._offload_file))
        return self._batches[-1]

    def stop_at(self, at: int) -> Hook:
        """Hands over to the greenlet that made the batches, where another one comes by."""

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if getcurrent() is not self._scheduler:
                self._scheduler.switch((at, args[0]))

        return hook

    def close(self) -> None:
        """End all greenlets."""
        for batch in self._batches:
            batch.end()
        self._offload_file.clear()


class _Arrival(Signal):
    """Ends a forward pass at a place; has its number and the input there."""


class _RepeatedBatch(Batch):
    """A batch that runs the block again from its inputs each time that it goes on."""

    def __init__(self, run: Callable[[], torch.Tensor], batches: RepeatedBatches) -> None:
        super().__init__()
        self._run, self._batches = run, batches

    def go_to(self, at: int) -> None:
        if self.at > at:
            return
        self._batches.first = at
        try:
            self.at, self.x = PAST, self._run()
        except _Arrival as arrival:
            self.at, self.x = arrival.args
        finally:
            self._batches.first = PAST

    def wait(self) -> None:
        self.x = torch.empty(0)


class RepeatedBatches(Batches):
    """Batches that keep nothing between two places. The one that runs stops at the place `first` or after it."""

    def __init__(self) -> None:
        self.first = PAST

    def add(self, run: Callable[[], torch.Tensor]) -> _RepeatedBatch:
        """A new batch, which has nothing."""
        return _RepeatedBatch(run, self)

    def stop_at(self, at: int) -> Hook:
        """Ends the forward pass of the batch that runs."""

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if at >= self.first:
                raise _Arrival(at, args[0])

        return hook

    def close(self) -> None:
        """Nothing is held."""


def storages_in(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors among `values` and in the tuples, lists, dicts and stores there."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
        elif isinstance(value, Store):
            yield value.values.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from storages_in(value)
        elif isinstance(value, dict):
            yield from storages_in(value.values())


class OffloadFile:
    """A file for what waiting batches hold beyond `room` bytes. It is unlinked: a kill leaves nothing behind.

    Tensors whose storages' addresses are in `common` belong to all batches and stay where they are.
    """

    def __init__(self, path: Path, room: int) -> None:
        self.room = room
        self.common: set[int] = set()
        self._path = path
        self._file: FileIO | None = None
        self._end = 0
        self._slots: dict[int, tuple[int, int]] = {}  # offset and bytes, by the batch's number
        self._in_memory: dict[int, int] = {}  # bytes, by the batch's number
        self._offloaded: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        self._last: SuspendedBatch | None = None

    def close(self) -> None:
        """Let go of the file, which is gone then."""
        if self._file is not None:
            self._file.close()

    def clear(self) -> None:
        """Forget all batches."""
        self._in_memory.clear()
        self._offloaded.clear()
        self._last = None

    def arrived(self, batch: SuspendedBatch) -> None:
        """Count what `batch` holds now; beyond the room, put away what the one that arrived before it holds.

        What those two share was not made by either alone, and stays.
        """
        held = {address: s for address, s in batch.storages().items() if address not in self.common}
        self._in_memory[batch.number] = sum(storage.nbytes() for storage in held.values())
        before, self._last = self._last, batch
        if before is not None and before.number not in self._offloaded and sum(self._in_memory.values()) > self.room:
            self._put_away(before, held)

    def read_back(self, batch: SuspendedBatch) -> None:
        """Read what `batch` had put away into its tensors."""
        place, _ = self._slots.get(batch.number, (0, 0))
        for storage, size in self._offloaded.pop(batch.number, []):
            storage.resize_(size)
            view = _bytes_of(storage)
            data = view if view.device.type == "cpu" else torch.empty(size, dtype=torch.uint8)
            transfer(self._opened(), "readinto", place, data)
            if data is not view:
                view.copy_(data)
            place += size

    def _put_away(self, batch: SuspendedBatch, shared: Collection[int]) -> None:
        storages = [s for address, s in batch.storages().items() if address not in self.common | set(shared)]
        total = sum(storage.nbytes() for storage in storages)
        place, size = self._slots.get(batch.number, (0, 0))
        if total > size:
            place, size = self._slots[batch.number] = (self._end, total)
            self._end += total
        self._offloaded[batch.number] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            transfer(self._opened(), "write", place, _bytes_of(storage).cpu())
            place += storage.nbytes()
            storage.resize_(0)
        self._in_memory[batch.number] = 0

    def _opened(self) -> FileIO:
        if self._file is None:
            self._file = unlinked(self._path)
        return self._file


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as (n,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
