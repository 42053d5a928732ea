"""RTN: round every weight to the nearest point of its group's grid. No calibration; the plain yardstick.

Layout: GPTQ's (core/gptq_layout.py), so everything that loads a GPTQ checkpoint loads this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field

from quantkit.checkpoints.writer import CheckpointWriter
from quantkit.contracts.job import Job
from quantkit.contracts.method import Held, Method, Shapes
from quantkit.formats.gptq.layout import USAGE, check_layout, read_layout, write_layout
from quantkit.models.skeleton import load, open_skeleton
from quantkit.numerics.grid import fit_grid, round_to_grid
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups
from quantkit.recipe import Strict


class Options(Strict):
    """Options of round-to-nearest."""

    group_size: int | Literal["auto"] = Field(
        "auto",
        description="input columns that share a scale; -1: whole row; auto: largest of 128, 64, 32 that divides",
    )
    sym: bool = Field(True, description="symmetric grid; vLLM loads only symmetric ones")


def round_layer(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool) -> GroupedWeight:
    """Quantize one layer's weight (N, K) float32 by plain rounding."""
    group = weight.shape[1] if group_size == -1 else group_size
    grid = fit_grid(weight, group, bits, symmetric=symmetric, least_zero=1)
    codes = round_to_grid(weight, grid, group)
    return GroupedWeight(codes, grid.scales, grid.zeros, contiguous_groups(weight.shape[1], group), bits)


def _check(job: Job) -> int:
    return check_layout(job, int(job.bits))


def _layers(job: Job, writer: CheckpointWriter) -> Iterator[tuple[str, GroupedWeight]]:
    skeleton = open_skeleton(job.source.config)
    linears = list(skeleton.linears())
    group_size = job.resolved["group_size"]
    assert isinstance(group_size, int)
    with job.progress.step("rtn: rounding layers", len(linears)) as advance:
        for index in range(len(skeleton.blocks)):
            names = [name for name in linears if name.startswith(skeleton.block_prefix(index))]
            if index >= writer.finished:
                for name in names:
                    weight = load(job.source, skeleton, name).to(torch.float32)
                    yield name, round_layer(weight, int(job.bits), group_size, job.options.sym)
                    advance()
                writer.finish_block(index, job)
            else:
                advance(len(names))


def _held(_job: Job, shapes: Shapes) -> Held:
    # One layer: as stored, in float32, and what the grid and the codes are computed through.
    return Held(work=10 * 4 * max((rows * columns for rows, columns in shapes.layers), default=0))


def _write(job: Job) -> None:
    settings = {"sym": job.options.sym, "desc_act": False}
    write_layout(job, int(job.bits), settings, lambda writer: _layers(job, writer))


METHOD = Method(
    name="rtn",
    summary="round to nearest, the plain yardstick (GPTQ layout)",
    reference="core/gptq_layout.py",
    bits=("2", "3", "4", "8"),
    default_bits="4",
    Options=Options,
    check=_check,
    write=_write,
    read=read_layout,
    engines=("reference",),
    usage=USAGE,
    held=_held,
)
