"""Ranks: several processes, started by torchrun, that share one conversion.

torchrun sets each process's rank in the environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT). Only commands that distribute work join; torch.distributed then communicates, with gloo between
CPUs and NCCL between GPUs. Rank 0 is the leader: only it writes and prints. A single process needs none of this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.errors import RankError, RecipeError
from quantkit.system.device import find_device

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")
PATIENCE = timedelta(days=7)  # a lost rank is detected by its connection, not by time
LEADER, OTHER = "quantkit-leader-error", "quantkit-other-error"
WAIT = timedelta(seconds=4)  # to wait for the leader's error, which is printed instead of this rank's


@dataclass(frozen=True)
class Shards:
    """The processes that share a model: this one is `rank` of `size`, and `local_rank` on its machine.

    A single process is rank 0 of 1. All ranks must make the same calls in the same order, and get the same results.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def rows(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """Return the range (start, stop) of `count` rows that belongs to this process, or to `rank`."""
        number = self.rank if rank is None else rank
        return number * count // self.size, (number + 1) * count // self.size

    def sequences(self, count: int, batch: int, rank: int | None = None) -> tuple[int, int]:
        """Return the range (start, stop) of `count` sequences for this process, or `rank`, in multiples of `batch`."""
        first, stop = self.rows(-(-count // batch), rank)
        return min(first * batch, count), min(stop * batch, count)

    def sum(self, *tensors: torch.Tensor) -> None:
        """Sum each tensor over all ranks, in place, with identical bits on every rank."""
        if self.size == 1:
            return
        import torch.distributed as dist

        with _together():
            for tensor in tensors:
                dist.all_reduce(tensor)

    def joined_rows(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Gather all `count` rows of a tensor (count, ...) from each rank's `part`, its `rows`."""
        if self.size == 1:
            return part
        import torch
        import torch.distributed as dist

        whole = torch.empty(count, *part.shape[1:], dtype=part.dtype, device=part.device)
        start, stop = self.rows(count)
        whole[start:stop] = part
        with _together():
            for rank in range(self.size):
                start, stop = self.rows(count, rank)
                dist.broadcast(whole[start:stop].view(torch.uint8), src=rank)
        return whole

    def by_rows(self, function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """Apply a row-wise `function` to all rows of `values`; each rank computes its share."""
        if self.size == 1:
            return function(values)
        start, stop = self.rows(len(values))
        return self.joined_rows(function(values[start:stop]).contiguous(), len(values))

    def from_leader(self, value: T) -> T:
        """Broadcast the leader's value, which must be picklable."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        values = [value]
        with _together():
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]


ALONE = Shards()


class _Joined:
    """The process group that this process joined, and the store that survives a lost rank."""

    shards = ALONE
    store: Any = None


def joined_shards() -> Shards:
    """Return the ranks that this process has joined; a single process if none."""
    return _Joined.shards


def shards_of_environment() -> Shards:
    """Return this process's rank from torchrun's environment, joined or not; raise RecipeError if it is invalid."""
    if any(not os.environ.get(name) for name in NEEDED):
        return ALONE
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    except ValueError:
        rank, size, local = -1, 0, (0, 0)
    if not (0 <= rank < size and 0 <= local[0] < local[1] <= size):
        values = ", ".join(f"{name}={os.environ.get(name)}" for name in (*NEEDED[:2], *LOCAL[:2]))
        raise RecipeError(f"invalid torchrun environment: {values}. Start the processes with torchrun.")
    return Shards(rank, size, *local)


def refuse_ranks(reason: str) -> None:
    """Raise RecipeError with `reason` if torchrun started several processes."""
    if (count := shards_of_environment().size) > 1:
        raise RecipeError(f"{count} processes cannot share this: {reason}. Start one, without torchrun.")


def device_of(device: str, here: Shards) -> str:
    """Return torch's device name for this rank: with GPUs, each rank on a machine has one of its own."""
    return f"cuda:{here.local_rank}" if here.size > 1 and _on_gpus(device) else device


def _on_gpus(device: str) -> bool:
    return find_device(device).startswith("cuda")


@contextmanager
def joined(device: str = "cpu") -> Iterator[Shards]:
    """Join the ranks that torchrun started while the context is open; a single process stays alone.

    `device` holds the tensors to be summed. Raises RankError if other ranks do not join.
    """
    there = shards_of_environment()
    if there.size == 1:
        yield there
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if not dist.is_available():
        raise RecipeError("this torch has no torch.distributed: several processes cannot share the work. Start one.")
    with _together():
        store, rank, count = next(rendezvous("env://", timeout=timedelta(minutes=5)))
        store.set_timeout(PATIENCE)
        on_gpus = _on_gpus(device)
        if on_gpus:
            torch.cuda.set_device(torch.device(f"cuda:{there.local_rank}"))
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    _Joined.shards, _Joined.store = there, store
    yield there
    # An error ends the process and the group; until then, other ranks must be able to reach it.
    there.sum(torch.zeros(1))
    dist.destroy_process_group()
    _Joined.shards, _Joined.store = ALONE, None


def prints_error(error: BaseException) -> bool:
    """Return whether this rank should print the error that ends it.

    The leader prints its error, unless a lost rank has printed the cause. Other ranks print if the leader has no error.
    """
    here, store = _Joined.shards, _Joined.store
    if store is None:
        return os.environ.get("RANK", "0") == "0" or shards_of_environment().size == 1
    lost = isinstance(error, RankError)
    try:
        if here.rank == 0:
            if lost:
                return not store.check([OTHER])
            store.set(LEADER, "printed")
            return True
        if lost:
            return False
        store.wait([LEADER], WAIT)
    except RuntimeError as gone:
        from torch.distributed import DistNetworkError

        if here.rank and isinstance(gone, DistNetworkError):  # the leader and its store have ended
            return False
        with suppress(RuntimeError):
            store.set(OTHER, "printed")
        return True
    return False


def without_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` without torchrun's, for a process that is not a rank."""
    ours = (*NEEDED, *LOCAL)
    return {
        name: value for name, value in variables.items() if name not in ours and not name.startswith("TORCHELASTIC")
    }


@contextmanager
def _together() -> Iterator[None]:
    """Raise RankError if communication with other ranks fails."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "another of the processes that share this work has ended, or never started. Run the same command to "
            "continue."
        ) from error
