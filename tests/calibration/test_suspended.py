"""Batches that wait in the middle of a block give what batches give that run the block again, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_llama import job_for

from quantkit.calibration import block as block_module
from quantkit.calibration import walk as walk_module
from quantkit.calibration.block import Block, LinearGroup
from quantkit.calibration.walk import walk

LENGTH = 16


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
