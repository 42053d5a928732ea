"""Batches that wait: what they hold goes to a file and comes back, what they share stays, and the slow way agrees."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_llama import job_for
from torch import nn

from quantkit.calibration import block as block_module
from quantkit.calibration import walk as walk_module
from quantkit.calibration.block import Block, LinearGroup
from quantkit.calibration.suspended import (
    PAST,
    Batch,
    Batches,
    OffloadFile,
    RepeatedBatches,
    SuspendedBatches,
)
from quantkit.calibration.walk import walk

LENGTH = 16
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
def new_file(tmp_path: Path) -> Iterator[Callable[[int], OffloadFile]]:
    made: list[OffloadFile] = []

    def new(room: int) -> OffloadFile:
        made.append(OffloadFile(tmp_path / "waiting", room))
        return made[-1]

    yield new
    for file in made:
        file.close()


def set_out(batches: Batches, model: Model, count: int) -> tuple[list[Batch], list[torch.Tensor]]:
    """Batches before their way through a model in which they stop at one place."""
    model.layer.register_forward_pre_hook(batches.stop_at(0))
    inputs = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return [batches.add(partial(model, x.clone())) for x in inputs], inputs


@pytest.mark.parametrize("room", [0, 3 * 5 * BYTES, 1 << 30])
def test_batches_go_on_with_what_they_held(room: int, new_file: Callable[[int], OffloadFile], tmp_path: Path) -> None:
    model = Model()
    waiting, inputs = set_out(SuspendedBatches(new_file(room), set()), model, 6)
    for batch in waiting:
        batch.go_to(0)
        batch.wait()
        assert batch.at == 0
    emptied = [batch.x.untyped_storage().nbytes() == 0 for batch in waiting]
    # Each holds its input and three values, and is seen to hold the shared cache.
    assert emptied.count(False) == {0: 1, 1 << 30: 6}.get(room, 3)
    assert not emptied[-1]
    assert model.cached is not None
    assert model.cached.untyped_storage().nbytes() == BYTES
    assert list(tmp_path.iterdir()) == []
    for batch, x in zip(waiting, inputs, strict=True):
        batch.go_to(PAST)
        assert torch.equal(batch.take(), x * 3 + (x + 1) + x * 2 + model.cached)
        assert batch.x.numel() == 0


@pytest.mark.parametrize("suspend", [True, False])
def test_a_batch_stops_at_the_first_place_it_passes(suspend: bool, new_file: Callable[[int], OffloadFile]) -> None:
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    batches = SuspendedBatches(new_file(1 << 30), set()) if suspend else RepeatedBatches()
    for at, layer in enumerate(layers):
        nn.init.eye_(layer.weight)
        layer.register_forward_pre_hook(batches.stop_at(at))
    passed = layers[0], layers[2]
    batch = batches.add(lambda: passed[1](passed[0](torch.ones(1, 2))))
    with torch.no_grad():
        batch.go_to(0)
        assert (batch.at, batch.x.tolist()) == (0, [[1.0, 1.0]])
        batch.wait()
        layers[0].weight.mul_(2)
        for at in (1, 2):  # at place 1 it is past it already, and still there at place 2
            batch.go_to(at)
            assert batch.at == 2
            if at == 1:
                batch.wait()
        assert batch.x.tolist() == [[2.0, 2.0]]
        layers[2].weight.mul_(5)
        batch.go_to(PAST)
        assert (batch.at, batch.take().tolist()) == (PAST, [[10.0, 10.0]])
        # Whatever else runs the layers is not stopped.
        assert passed[1](passed[0](torch.ones(1, 2))).tolist() == [[10.0, 10.0]]
    batches.close()


def walked(folder: Path, out: Path, suspend: bool, offload_bytes: int, exact: float, ample: int) -> list[torch.Tensor]:
    """All that a walk gives, while each weight is replaced by a coarser one once its group is seen."""
    trial, seen = job_for(folder, "gptq", out, length=LENGTH), []
    job = trial.job.changed(offload_bytes=offload_bytes)
    for block in walk(job, trial.run, exact=exact, ample=ample, suspend=suspend):
        seen.append(block.inputs.read().clone())

        def see(group: LinearGroup, block: Block = block) -> None:
            seen.extend(x.clone() for x in (group.hessian, group.cross, group.paired) if x is not None)
            for name in group.names:
                block.replace(name, (block.linears[name].weight.float() * 16).round() / 16)

        block.for_each_group(see)
        seen.append(block.inputs.read().clone())
        if exact:
            seen.append(block.targets().read().clone())
    assert not [path for path in out.iterdir() if path.suffix == ".offload"]
    return seen


@pytest.mark.parametrize(
    ("name", "exact", "offload_bytes"),
    [("llama", 0.3, 0), ("mixtral", 1.0, 0), ("gemma4", 0.3, 1 << 31), ("gemma3n", 0.0, 0)],
)
def test_suspended_batches_equal_batches_that_run_the_block_again(
    name: str,
    exact: float,
    offload_bytes: int,
    architecture: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: the same operations on the same batches with the same weights, in one thread."""
    monkeypatch.setattr(block_module, "BATCH_TOKENS", 4 * LENGTH)
    monkeypatch.setattr(walk_module, "LEAST_TOKENS", 0)
    want, got = (walked(architecture(name), tmp_path, suspend, offload_bytes, exact, 4) for suspend in (False, True))
    assert len(got) == len(want) > 9
    assert any(bool(x.any()) for x in want[1:])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
