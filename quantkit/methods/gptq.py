"""GPTQ: rounding column by column, each error fed forward into the columns that are still to come.

Paper: Frantar et al., GPTQ, arXiv:2210.17323, algorithm 1 (lazy block updates, Cholesky form).
Layout: core/gptq_layout.py; loaded by vLLM (symmetric, desc_act false), exllama, transformers with gptqmodel.
Differs from the paper: scales come from a search weighted by the Hessian's diagonal, not from min/max; columns are
taken in the order of their importance also where groups stay contiguous (static groups), so that g_idx stays plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from pydantic import Field

from quantkit.calibration import Block, Stage, walk
from quantkit.core.checkpoint import CheckpointWriter
from quantkit.core.feedback import corrected_target, feedback_factor, round_columns
from quantkit.core.gptq_layout import check_layout, finished_block, read_layout, write_layout
from quantkit.core.grid import Grid, fit_grid
from quantkit.core.grouped import GroupedWeight
from quantkit.core.refit import refit_scales
from quantkit.recipe import Strict
from quantkit.refine import Training, refine, refuse_few_sequences
from quantkit.registry import Job, Method
from quantkit.skeleton import load


class Options(Strict):
    """Options of GPTQ."""

    group_size: int | Literal["auto"] = Field(
        "auto",
        description="input columns that share a scale; -1: whole row; auto: largest of 128, 64, 32 that divides",
    )
    sym: bool = Field(True, description="symmetric grid; vLLM loads only symmetric ones")
    desc_act: bool = Field(False, description="form groups along the activation order (g_idx); vLLM refuses it")
    static_groups: bool = Field(
        True, description="fix all scales first and take columns by importance while groups stay contiguous"
    )
    damp_percent: float = Field(0.01, gt=0, lt=1, description="share of the mean diagonal added to the Hessian")
    scale_search: bool = Field(True, description="search scales weighted by the Hessian diagonal; false: min/max")
    refit: bool = Field(True, description="fit the scales to the layer's outputs once more after rounding")
    asymmetric: bool = Field(True, description="let each layer make good the errors of the quantized layers before it")
    refine: bool = Field(False, description="then learn each block's rounding and scales together; slower, better")
    refine_steps: int = Field(60, ge=1, le=10_000, description="most training steps of a block")
    true_sequential: bool = Field(True, description="calibrate each layer of a block on the quantized ones before it")


def quantize_layer(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group_size: int,
    options: Options,
    cross: torch.Tensor | None = None,
) -> GroupedWeight:
    """Quantize one weight (N, K) float32 against its inputs' H = E[x x^T] (K, K) float32.

    group_size is in columns, or -1 for the whole row. With `cross` = E[(exact - x) x^T] (K, K) float32 the outputs
    come near those of the exact inputs, so that errors of earlier layers are made good.
    """
    rows, columns = weight.shape
    group = columns if group_size == -1 else group_size
    importance = torch.diagonal(hessian).clamp(min=0)
    by_importance = options.desc_act or (options.static_groups and group < columns)
    natural = torch.arange(columns, device=weight.device)
    order = torch.argsort(importance, descending=True, stable=True) if by_importance else natural
    factor = feedback_factor(hessian[order][:, order], options.damp_percent)
    if cross is not None:
        target = torch.empty_like(weight)
        target[:, order] = corrected_target(weight[:, order], cross[order][:, order], factor)
        weight = target

    def fit_groups(part: torch.Tensor, members: torch.Tensor) -> Grid:
        weights = importance[members]
        return fit_grid(
            part,
            min(group, part.shape[1]),
            bits,
            symmetric=options.sym,
            importance=weights + 1e-6 * weights.mean() + 1e-30,
            search=options.scale_search,
            least_zero=1,
        )

    if options.desc_act:
        g_idx = torch.empty_like(natural)
        g_idx[order] = natural // group
    else:
        g_idx = natural // group
    scales = torch.empty(columns // group, rows, device=weight.device)
    zeros = torch.empty_like(scales)

    def fit(column: int, ahead: torch.Tensor) -> None:
        members = order[column : column + group]
        grid, g = fit_groups(ahead.T, members), int(g_idx[members[0]])
        scales[g], zeros[g] = grid.scales[:, 0].to(torch.float32), grid.zeros[:, 0].to(torch.float32)

    fixed = options.static_groups or group == columns
    if fixed:
        # Regroup so that each group's columns lie side by side, whichever order the format keeps.
        beside = order if options.desc_act else natural
        grid = fit_groups(weight[:, beside], beside)
        scales, zeros = grid.scales.to(torch.float32).T.contiguous(), grid.zeros.to(torch.float32).T.contiguous()
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    codes[order] = round_columns(
        weight[:, order].T.contiguous(),
        factor,
        scales,
        zeros,
        g_idx[order],
        (1 << bits) - 1,
        *(() if fixed else (fit, group)),
    )
    layer = GroupedWeight(codes.T.contiguous(), scales.T.to(torch.float16), zeros.T.to(torch.uint8), g_idx, bits)
    if not options.refit:
        return layer
    damped = hessian + torch.eye(columns, device=hessian.device) * (options.damp_percent * importance.mean())
    return refit_scales(weight, damped, layer)


def _check(job: Job) -> int:
    options: Options = job.options
    if options.desc_act or not options.sym:
        job.tell("vLLM loads only symmetric GPTQ without desc_act; this artifact is for exllama and gptqmodel")
    if options.refine:
        refuse_few_sequences(job.recipe.calibration.sequences)
    return check_layout(job, int(job.bits))


def _quantize_stage(job: Job, block: Block, done: dict[str, GroupedWeight], stage: Stage) -> None:
    """Quantize the layers of a stage, which share their Hessian, as one; put them into the block and into `done`."""
    group_size = job.resolved["group_size"]
    assert isinstance(group_size, int)
    weights = [load(job.source, block.skeleton, name).to(block.device, torch.float32) for name in stage.names]
    cross = stage.cross if job.options.asymmetric else None
    whole = quantize_layer(torch.cat(weights), stage.hessian, int(job.bits), group_size, job.options, cross)
    for name, part in zip(stage.names, whole.split([len(w) for w in weights]), strict=True):
        done[name] = part
        block.replace(name, part.dense())


def _layers(job: Job, writer: CheckpointWriter) -> Iterator[tuple[str, GroupedWeight]]:
    options: Options = job.options
    exact = options.refine or (options.asymmetric and options.true_sequential)
    for block in walk(job, exact=exact, restore=partial(finished_block, writer, bits=int(job.bits))):
        done: dict[str, GroupedWeight] = {}
        if options.true_sequential:
            block.visit(partial(_quantize_stage, job, block, done), keep_outputs=not options.refine)
        else:
            stages = block.stages()
            hessians = block.hessians(stages)
            for names in stages:
                _quantize_stage(job, block, done, Stage(names, hessians[names[0]], None, 0))
        if options.refine:
            weights = {name: load(job.source, block.skeleton, name).to(block.device, torch.float32) for name in done}
            done = refine(block, done, weights, Training(options.refine_steps), job.recipe.seed)
        for name, layer in done.items():
            yield name, layer.cpu()
        writer.finish_block(block.index, job)


def _write(job: Job) -> None:
    settings = {
        "sym": job.options.sym,
        "desc_act": job.options.desc_act,
        "static_groups": job.options.static_groups,
        "damp_percent": job.options.damp_percent,
        "true_sequential": job.options.true_sequential,
    }
    write_layout(job, int(job.bits), settings, lambda writer: _layers(job, writer))


METHOD = Method(
    name="gptq",
    summary="error feedback through the inputs' Hessian (GPTQ layout: vLLM, exllama, transformers)",
    reference="arXiv:2210.17323",
    bits=("2", "3", "4", "8"),
    default_bits="4",
    Options=Options,
    check=_check,
    write=_write,
    read=read_layout,
    runtimes=("reference",),
    calibrated=lambda _options: True,
)
