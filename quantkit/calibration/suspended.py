"""Batches that stop on their way through a decoder block and wait there, in memory or in a file.

Each batch runs in a greenlet of its own, so that any model code can be stopped before a layer and go on later with
that layer's new weights. What a waiting batch holds is found through its frames; put away, its tensors keep their
places and lose their storage until it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from quantkit.calibration.activations import transfer, unlinked

PAST = 1 << 30  # where a batch is that has come out of the block
SMALL = 1 << 14  # bytes; a smaller tensor is not put away


class SuspendedBatch:
    """One batch on its way through a block. It stops at numbered places, with the input there in `x`.

    `at` is the number of the place, PAST at the end of the block, where `x` is what came out.
    """

    def __init__(self, number: int, run: Callable[[], torch.Tensor]) -> None:
        self.number = number
        self._greenlet = greenlet(run)
        self.at = -1
        self.x = torch.empty(0)

    def go_to(self, at: int, shelf: OffloadFile) -> None:
        """Run on to the place `at`, or to the first one after it that this batch passes."""
        while self.at < at:
            shelf.give_back(self)
            self.x = torch.empty(0)  # so that its frames alone hold what they still need
            got = self._greenlet.switch()
            self.at, self.x = (PAST, got) if self._greenlet.dead else got

    def take(self) -> torch.Tensor:
        """What came out of the block, which is then held here no more."""
        out, self.x = self.x, torch.empty(0)
        return out

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The storages of the tensors that its frames hold, by address."""
        found: dict[int, torch.UntypedStorage] = {}
        frame = self._greenlet.gr_frame
        while frame is not None:
            seen = frame.f_locals
            for storage in storages_in(seen.values()):
                if storage.nbytes() >= SMALL:
                    found[storage.data_ptr()] = storage
            if isinstance(seen, dict):  # before Python 3.13 a copy, which the frame would keep
                seen.clear()
            frame = frame.f_back
        return found

    def end(self) -> None:
        """Leave the block wherever it is."""
        if self._greenlet:
            self._greenlet.throw(GreenletExit)


def storages_in(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors among `values` and in the tuples, lists and dicts there."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from storages_in(value)
        elif isinstance(value, dict):
            yield from storages_in(value.values())


def stop_here(at: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    """A forward pre-hook that lets the batch that comes by wait at the place `at`."""
    scheduler = getcurrent()

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if getcurrent() is not scheduler:
            scheduler.switch((at, args[0]))

    return hook


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
        self._kept: dict[int, int] = {}  # bytes in memory
        self._away: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}
        self._last: SuspendedBatch | None = None

    def close(self) -> None:
        """Let go of the file, which is gone then."""
        if self._file is not None:
            self._file.close()

    def clear(self) -> None:
        """Forget all batches."""
        self._kept.clear()
        self._away.clear()
        self._last = None

    def arrived(self, batch: SuspendedBatch) -> None:
        """Count what `batch` holds now; beyond the room, put away what the one that arrived before it holds.

        What those two share was not made by either alone, and stays.
        """
        held = {address: s for address, s in batch.storages().items() if address not in self.common}
        self._kept[batch.number] = sum(storage.nbytes() for storage in held.values())
        before, self._last = self._last, batch
        if before is not None and before.number not in self._away and sum(self._kept.values()) > self.room:
            self._put_away(before, held)

    def give_back(self, batch: SuspendedBatch) -> None:
        """Read what `batch` had put away into its tensors."""
        place, _ = self._slots.get(batch.number, (0, 0))
        for storage, size in self._away.pop(batch.number, []):
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
        self._away[batch.number] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            transfer(self._opened(), "write", place, _bytes_of(storage).cpu())
            place += storage.nbytes()
            storage.resize_(0)
        self._kept[batch.number] = 0

    def _opened(self) -> FileIO:
        if self._file is None:
            self._file = unlinked(self._path)
        return self._file


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as (n,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
