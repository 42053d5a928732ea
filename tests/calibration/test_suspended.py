"""Batches that wait: what they hold goes to a file and comes back, and what they share stays."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from quantkit.calibration.suspended import PAST, SMALL, OffloadFile, SuspendedBatch, stop_here

ROWS, WIDTH = 64, 128  # a tensor of a batch is 32 KB in float32
BYTES = ROWS * WIDTH * 4


class Model(nn.Module):
    """Holds a residual, a cache of its own that all batches share, and a value in a list over the stop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self.cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cached is None:
            self.cached = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
        cached, residual, listed = self.cached, x + 1, [x * 2]
        y = self.layer(x * 3)
        return y + residual + listed[0] + cached


@pytest.fixture
def model() -> Model:
    made = Model()
    made.layer.register_forward_pre_hook(stop_here(0))
    return made


@pytest.fixture
def new_shelf(tmp_path: Path) -> Iterator[Callable[[int], OffloadFile]]:
    made: list[OffloadFile] = []

    def new(room: int) -> OffloadFile:
        made.append(OffloadFile(tmp_path / "waiting", room))
        return made[-1]

    yield new
    for shelf in made:
        shelf.close()


def batches(model: Model, count: int) -> tuple[list[SuspendedBatch], list[torch.Tensor]]:
    inputs = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return [SuspendedBatch(i, partial(model, x.clone())) for i, x in enumerate(inputs)], inputs


@pytest.mark.parametrize("room", [0, 3 * 5 * BYTES, 1 << 30])
def test_batches_go_on_with_what_they_held(
    model: Model, room: int, new_shelf: Callable[[int], OffloadFile], tmp_path: Path
) -> None:
    waiting, inputs = batches(model, 6)
    shelf = new_shelf(room)
    for batch in waiting:
        batch.go_to(0, shelf)
        shelf.arrived(batch)
        assert batch.at == 0
    emptied = [batch.x.untyped_storage().nbytes() == 0 for batch in waiting]
    # Each holds its input and three values, and is seen to hold the shared cache.
    assert emptied.count(False) == {0: 1, 1 << 30: 6}.get(room, 3)
    assert not emptied[-1]
    assert model.cached is not None
    assert model.cached.untyped_storage().nbytes() == BYTES
    assert list(tmp_path.iterdir()) == []
    for batch, x in zip(waiting, inputs, strict=True):
        batch.go_to(PAST, shelf)
        assert torch.equal(batch.take(), x * 3 + (x + 1) + x * 2 + model.cached)
        assert batch.x.numel() == 0


def test_what_is_common_stays_in_memory(model: Model, new_shelf: Callable[[int], OffloadFile]) -> None:
    waiting, _ = batches(model, 2)
    shelf = new_shelf(0)
    waiting[0].go_to(0, shelf)
    own = waiting[0].x.untyped_storage()
    shelf.common = {own.data_ptr()}
    shelf.arrived(waiting[0])
    waiting[1].go_to(0, shelf)
    shelf.arrived(waiting[1])
    assert own.nbytes() == BYTES
    for batch in waiting:
        batch.end()


def test_a_batch_that_ends_early_leaves_no_frame(model: Model, new_shelf: Callable[[int], OffloadFile]) -> None:
    waiting, _ = batches(model, 1)
    waiting[0].go_to(0, new_shelf(0))
    assert waiting[0].storages()
    waiting[0].end()
    assert waiting[0].storages() == {}


def test_small_tensors_are_left_alone(new_shelf: Callable[[int], OffloadFile]) -> None:
    layer = nn.Identity()
    layer.register_forward_pre_hook(stop_here(0))
    waiting = [SuspendedBatch(i, lambda: layer(torch.ones(SMALL // 4 - 1))) for i in range(2)]
    shelf = new_shelf(0)
    for batch in waiting:
        batch.go_to(0, shelf)
        shelf.arrived(batch)
    assert all(batch.x.untyped_storage().nbytes() > 0 for batch in waiting)
    for batch in waiting:
        batch.end()
