"""The writer of several ranks: the leader's writes, the others' take nothing and know what was finished earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from quantkit.contracts.format import TensorWriter, Written
from quantkit.system.ranks import Shards

if TYPE_CHECKING:
    import torch

    from quantkit.numerics.grouped_weight import GroupedWeight
    from quantkit.numerics.scaled_weight import ScaledWeight

    Values = Mapping[str, torch.Tensor | GroupedWeight | ScaledWeight]


class _Leading(TensorWriter):
    """The leader's: it reads finished blocks for all."""

    def __init__(self, writer: TensorWriter, shards: Shards) -> None:
        super().__init__(writer.checkpoint, writer.source, writer.run)
        self._writer, self._shards = writer, shards

    def add(self, name: str, value: Written) -> None:
        self._writer.add(name, value)

    def block(self, prefix: str) -> Values:
        return self._shards.from_leader(self._writer.block(prefix))

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        self._writer.replace_scales(name, scales)

    def finish_block(self, index: int) -> None:
        self._writer.finish_block(index)


class _Following(TensorWriter):
    """Another rank's."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._finished = shards, shards.from_leader(0)

    @property
    def finished(self) -> int:
        return self._finished

    def add(self, name: str, value: Written) -> None:
        """The leader has the same."""

    def block(self, _prefix: str) -> Values:
        return self._shards.from_leader({})

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        """The leader does."""

    def finish_block(self, index: int) -> None:
        """The leader does."""


@contextmanager
def leading(opened: AbstractContextManager[TensorWriter], shards: Shards) -> Iterator[TensorWriter]:
    """The leader's writer; in a single process the `opened` one as it is."""
    with opened as writer:
        if shards.size == 1:
            yield writer
            return
        shards.from_leader(writer.finished)
        yield _Leading(writer, shards)


@contextmanager
def following(shards: Shards) -> Iterator[TensorWriter]:
    """What another rank has in place of the leader's writer."""
    yield _Following(shards)
