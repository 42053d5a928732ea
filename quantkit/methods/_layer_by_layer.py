"""Quantize layers independently, for methods without calibration."""

from __future__ import annotations

from collections.abc import Callable

from quantkit.calibration.kv_scales import add_kv_scales
from quantkit.contracts.format import Layout, Written
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.run import Run
from quantkit.records.recipe import Strict


def write_layers(
    job: CheckedJob[Strict, Layout], run: Run, what: str, of_block: Callable[[list[str]], Callable[[str], Written]]
) -> None:
    """Quantize and write every linear layer, block by block, resuming after the layers of an interrupted run.

    `of_block` maps a block's weight names to the function that quantizes one of them; `what` is the step's title.
    """
    linears = [name for name in job.skeleton.linears() if name not in job.checked.plan.dense]
    with (
        job.open_writer(run, job.checked.plan) as writer,
        run.progress.step(f"{job.method.name}: {what}", len(linears), work=True) as advance,
    ):
        for index in range(len(job.skeleton.blocks)):
            names = [name for name in linears if name.startswith(job.skeleton.block_prefix(index))]
            if index < writer.finished:
                advance(len(names))
                continue
            made = of_block(names)
            for name in names:
                writer.add(name, made(name))
                advance()
            writer.finish_block(index)
        add_kv_scales(job, run, writer)
