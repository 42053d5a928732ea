"""Run batches through a decoder block in stages, while its weights change between stages.

Each batch runs in its own greenlet, so that any model code can stop before a layer and continue later with the layer's
new weights. A waiting batch's tensors are found through its stack frames. Offloading moves their storage to a file
until the batch continues.

The alternative, running the block again for each group of layers, gives the same bytes but is slower: gptq on the demo
model with 32 sequences took 213 seconds of one core instead of 133, at the same peak of 0.74 GB (AVX-512, one thread).
A block of 7B shapes has 202 million weights; its four groups would need products with 477 million, 2.4 times as many.
With 128 sequences of 512 tokens, waiting batches hold at most 2.4 GB, which can be offloaded to a file.
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

PAST = 1 << 30  # place of a batch that has left the block
SMALL = 1 << 14  # bytes; smaller tensors are not offloaded


class Batch:
    """A batch on its way through a block; it stops at numbered places, with the next layer's input in `x`.

    `at`: number of the current place; -1 before the start, PAST at the end, where `x` is the block's output. The
    batch's tensors go to `offload_file` if memory is short.
    """

    def __init__(self, number: int, run: Callable[[], torch.Tensor], offload_file: OffloadFile) -> None:
        self.at, self.x, self.number = -1, torch.empty(0), number
        self._greenlet, self._offload_file = greenlet(run), offload_file

    def go_to(self, at: int) -> None:
        """Run on to place `at`, or to the first later place that this batch reaches."""
        while self.at < at:
            self._offload_file.read_back(self)
            self.x = torch.empty(0)  # so that only its frames hold what it still needs
            got = self._greenlet.switch()
            self.at, self.x = (PAST, got) if self._greenlet.dead else got

    def wait(self) -> None:
        """Pause this batch while others run; its tensors, including `x`, may be offloaded."""
        self._offload_file.arrived(self)

    def take(self) -> torch.Tensor:
        """Return the block's output and drop this batch's reference to it."""
        out, self.x = self.x, torch.empty(0)
        return out

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages of the tensors in this batch's stack frames, by address."""
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
    """All batches of one block; tensors with storage addresses in `common` are shared by all of them."""

    def __init__(self, offload_file: OffloadFile, common: set[int]) -> None:
        self._offload_file, self._scheduler = offload_file, getcurrent()
        self._batches: list[Batch] = []
        offload_file.common = common

    def add(self, run: Callable[[], torch.Tensor]) -> Batch:
        self._batches.append(Batch(len(self._batches), run, self._offload_file))
        return self._batches[-1]

    def stop_at(self, at: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        """Return a forward pre-hook that stops the running batch at the place `at`."""

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if getcurrent() is not self._scheduler:
                self._scheduler.switch((at, args[0]))

        return hook

    def close(self) -> None:
        for batch in self._batches:
            batch.end()
        self._offload_file.clear()


def storages_in(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors in `values`, also of those nested in tuples, lists, dicts and stores."""
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
    """A temporary file for tensors of waiting batches beyond `room` bytes; it is removed even if the process is killed.

    Tensors with storage addresses in `common` are shared by all batches and stay in memory.
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
        """Count the bytes that `batch` holds; if all batches exceed the limit, offload the previous batch.

        Tensors that both batches share stay in memory.
        """
        held = {address: s for address, s in batch.storages().items() if address not in self.common}
        self._in_memory[batch.number] = sum(storage.nbytes() for storage in held.values())
        before, self._last = self._last, batch
        if before is not None and before.number not in self._offloaded and sum(self._in_memory.values()) > self.room:
            self._put_away(before, held)

    def read_back(self, batch: Batch) -> None:
        """Read the offloaded tensors of `batch` back into memory."""
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
