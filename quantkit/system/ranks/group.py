"""The ranks that share one piece of work, and what they say to each other; nothing of it in a single process.

torchrun tells each process its rank in the environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT). Only a command that shares its work joins; then torch.distributed carries tensors, by gloo between
processors and by NCCL between cards. Rank 0 leads: it alone writes and tells.
All ranks must come to the same calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
PATIENCE = timedelta(days=7)  # a lost rank is told by its connection, never by time
LEADER, OTHER = "quantkit-leader-error", "quantkit-other-error"
WAIT = timedelta(seconds=4)  # for the leader's error, which is told instead of the same one here


@dataclass(frozen=True)
class Place:
    """Which of `size` ranks this process is, and which of the `local_size` ones on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


class _Joined:
    """What this process has joined: its place, and the store that outlives a rank."""

    place = Place()
    store: Any = None


def told() -> Place:
    """The place that torchrun has told, whether or not it was joined; raises RecipeError for one that cannot be."""
    if any(not os.environ.get(name) for name in NEEDED):
        return Place()
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    except ValueError:
        rank, size, local = -1, 0, (0, 0)
    if not (0 <= rank < size and 0 <= local[0] < local[1] <= size):
        values = ", ".join(f"{name}={os.environ.get(name)}" for name in (*NEEDED[:2], *LOCAL[:2]))
        raise RecipeError(
            f"the environment tells no place among several processes: {values}. Start them with torchrun."
        )
    return Place(rank, size, *local)


def place() -> Place:
    """The place that was joined; of a single process, the first of one."""
    return _Joined.place


def size() -> int:
    """How many ranks share the work."""
    return _Joined.place.size


def leads() -> bool:
    """Whether this process writes and tells."""
    return _Joined.place.rank == 0


def refuse_ranks(reason: str) -> None:
    """Raise RecipeError with the `reason` where torchrun has started several processes."""
    if (count := told().size) > 1:
        raise RecipeError(f"{count} processes cannot share this: {reason}. Start one, without torchrun.")


def device_of(device: str, here: Place) -> str:
    """torch's name of what a rank computes on where the user gave this device: each rank has a GPU of its own."""
    if here.size == 1 or not _on_gpus(device):
        return device
    return f"cuda:{here.local_rank}"


def _on_gpus(device: str) -> bool:
    return find_device(device).startswith("cuda")


@contextmanager
def joined(device: str = "cpu") -> Iterator[Place]:
    """Be one of the ranks that torchrun has started, until the context ends; a single process stays alone.

    `device` is where tensors lie that are summed. Raises RankError where the others do not come.
    """
    there = told()
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
    _Joined.place, _Joined.store = there, store
    yield there
    # After an error the process ends, and with it the group: until then others have to know it.
    meet()
    dist.destroy_process_group()
    _Joined.place, _Joined.store = Place(), None


def share(count: int, rank: int | None = None) -> tuple[int, int]:
    """The part of `count` things that is this rank's (or `rank`'s): the first, and the one behind the last."""
    here = _Joined.place
    number = here.rank if rank is None else rank
    return number * count // here.size, (number + 1) * count // here.size


def sum_over(*tensors: torch.Tensor) -> None:
    """Add up each tensor over all ranks, in place; all ranks then hold the same bits."""
    if size() == 1:
        return
    import torch.distributed as dist

    with _together():
        for tensor in tensors:
            dist.all_reduce(tensor)


def every_row(part: torch.Tensor, rows: int) -> torch.Tensor:
    """All `rows` of a tensor (rows, ...) of which each rank has made its `share`, the `part` here."""
    if size() == 1:
        return part
    import torch
    import torch.distributed as dist

    whole = torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=part.device)
    start, stop = share(rows)
    whole[start:stop] = part
    with _together():
        for rank in range(size()):
            start, stop = share(rows, rank)
            dist.broadcast(whole[start:stop].view(torch.uint8), src=rank)
    return whole


def by_one_each(makes: Sequence[Callable[[], torch.Tensor]], likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each of `makes` makes, each by one rank and sent to all; each is like its one of `likes`."""
    if size() == 1:
        return [make() for make in makes]
    import torch
    import torch.distributed as dist

    made: list[torch.Tensor] = []
    for number, (make, like) in enumerate(zip(makes, likes, strict=True)):
        own = number % size() == _Joined.place.rank
        made.append(make().contiguous() if own else torch.empty_like(like, memory_format=torch.contiguous_format))
    with _together():
        for number, tensor in enumerate(made):
            dist.broadcast(tensor, src=number % size())
    return made


def from_leader(value: T) -> T:
    """The leader's value (any that can be pickled), to all."""
    if size() == 1:
        return value
    import torch
    import torch.distributed as dist

    values = [value]
    with _together():
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def meet() -> None:
    """Wait until all ranks have come here."""
    if size() == 1:
        return
    import torch

    sum_over(torch.zeros(1))


def tells(error: BaseException) -> bool:
    """Whether this process tells the user of an error that ends it.

    The leader does, but for the loss of a rank that has told why itself. Another rank does where the leader has none.
    """
    here, store = _Joined.place, _Joined.store
    if store is None:
        return os.environ.get("RANK", "0") == "0" or told().size == 1
    lost = isinstance(error, RankError)
    try:
        if here.rank == 0:
            if lost:
                return not store.check([OTHER])
            store.set(LEADER, "told")
            return True
        if lost:
            return False
        store.wait([LEADER], WAIT)
    except RuntimeError as gone:
        from torch.distributed import DistNetworkError

        if here.rank and isinstance(gone, DistNetworkError):  # the leader has ended, and the store with it
            return False
        with suppress(RuntimeError):
            store.set(OTHER, "told")
        return True
    return False


def without_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process that is no rank itself."""
    ours = (*NEEDED, *LOCAL)
    return {
        name: value for name, value in variables.items() if name not in ours and not name.startswith("TORCHELASTIC")
    }


@contextmanager
def _together() -> Iterator[None]:
    """Raise RankError where the others cannot be reached."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            "another of the processes that share this work has ended, or did not come. The same command goes on from "
            "what is finished."
        ) from error
