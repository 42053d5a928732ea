"""Batches that go through a decoder block from one place to the next, while its weights change behind them.

Each batch runs in a greenlet of its own, so that any model code can be stopped before a layer and go on later with that
layer's new weights. What a waiting batch holds is found through its frames; put away, its tensors keep their places and
lose their storage until it goes on.

What it buys, against running the block again for each group of layers, for the same bytes: converting the demo model
with gptq on 32 sequences took 133 seconds of one processor instead of 213, at the same peak of 0.74 GB (AVX-512, one
thread). A block of 7B shapes has 202 million weights, and its four groups would ask for products with 477 million, 2.4
times as many; on 128 sequences of 512 tokens waiting batches hold 2.4 GB at most, which go to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from quantkit.calibration.activations import Store, transfer, unlinked

PAST = 1 << 30  # where a batch is that has come out of the block
SMALL = 1 << 14  # bytes; a smaller tensor is not put away


class Batch:
    """One batch on its way through a block. It stops at numbered places, with the input there in `x`.

    `at` is the number of the place, PAST at the end of the block, where `x` is what came out. What it holds goes to
    `offload_file` where there is no room for it.
    """

    def __init__(self, number: int, run: Callable[[], torch.Tensor], offload_file: OffloadFile) -> None:
        self.at, self.x, self.number = -1, torch.empty(0), number
        self._greenlet, self._offload_file = greenlet(run), offload_file

    def go_to(self, at: int) -> None:
        """Run on to the place `at`, or to the first one after it that this batch passes."""
        while self.at < at:
            self._offload_file.read_back(self)
            self.x = torch.empty(0)  # so that its frames alone hold what they still need
            got = self._greenlet.switch()
            self.at, self.x = (PAST, got) if self._greenlet.dead else got

    def wait(self) -> None:
        """Stay while others go on; what this batch holds may be put away, `x` too."""
        self._offload_file.arrived(self)

    def take(self) -> torch.Tensor:
        """What came out of the block, which is then held here no more."""
        out, self.x = self.x, torch.empty(0)
        return out

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
        if self._greenlet:
            self._greenlet.throw(GreenletExit)


class Batches:
    """The batches of one block. Tensors at the addresses `common` belong to all of them."""

    def __init__(self, offload_file: OffloadFile, common: set[int]) -> None:
        self._offload_file, self._scheduler = offload_file, getcurrent()
        self._batches: list[Batch] = []
        offload_file.common = common

    def add(self, run: Callable[[], torch.Tensor]) -> Batch:
        self._batches.append(Batch(len(self._batches), run, self._offload_file))
        return self._batches[-1]

    def stop_at(self, at: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        """A forward pre-hook that lets the batch that comes by stop at the place `at`."""

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if getcurrent() is not self._scheduler:
                self._scheduler.switch((at, args[0]))

        return hook

    def close(self) -> None:
        for batch in self._batches:
            batch.end()
        self._offload_file.clear()


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
        self._last: Batch | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def clear(self) -> None:
        self._in_memory.clear()
        self._offloaded.clear()
        self._last = None

    def arrived(self, batch: Batch) -> None:
        """Count what `batch` holds now; beyond the room, put away what the one that arrived before it holds.

        What those two share was not made by either alone, and stays.
        """
        held = {address: s for address, s in batch.storages().items() if address not in self.common}
        self._in_memory[batch.number] = sum(storage.nbytes() for storage in held.values())
        before, self._last = self._last, batch
        if before is not None and before.number not in self._offloaded and sum(self._in_memory.values()) > self.room:
            self._put_away(before, held)

    def read_back(self, batch: Batch) -> None:
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

    def _put_away(self, batch: Batch, shared: Collection[int]) -> None:
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
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
