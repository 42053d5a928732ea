"""GPTQ: rounding column by column, each error fed forward into the columns that are still to come.

Paper: Frantar et al., GPTQ, arXiv:2210.17323, algorithm 1 (lazy block updates, Cholesky form).
Layout: core/gptq_layout.py; loaded by vLLM (symmetric, desc_act false), exllama, transformers with gptqmodel.
Differs from the paper: scales come from a search weighted by the Hessian's diagonal, not from min/max; columns are
taken in the order of their importance also where groups stay contiguous (static groups), so that g_idx stays plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import Field

from quantkit.calibration import walk
from quantkit.core.gptq_layout import check_layout, read_layout, write_layout
from quantkit.core.grid import Grid, encode, fit_grid
from quantkit.core.grouped import GroupedWeight, contiguous_groups
from quantkit.errors import UnsupportedError
from quantkit.recipe import Strict
from quantkit.registry import Job, Method
from quantkit.skeleton import open_skeleton, source_name

BLOCK_COLUMNS = 128
PARALLEL_ELEMENTS = 1 << 19


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
    true_sequential: bool = Field(True, description="calibrate each layer of a block on the quantized ones before it")


def inverse_factor(hessian: torch.Tensor, damp_percent: float) -> torch.Tensor:
    """Upper Cholesky factor U of the damped H^-1 = U^T U; (K, K) float32.

    Inputs that never fire get the mean diagonal. Damping grows tenfold until the factorization succeeds.
    """
    h = hessian.to(torch.float64).clone()
    diagonal = torch.diagonal(h)
    mean = diagonal.mean().clamp(min=1e-30)
    diagonal[diagonal <= 0] = mean
    damp = damp_percent
    while True:
        damped = h + torch.eye(len(h), dtype=h.dtype) * (damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper.to(torch.float32)
        damp *= 10


@contextmanager
def _threads_for(elements: int) -> Iterator[None]:
    """Take one thread while single columns of a small block are updated: starting more costs more than it gives."""
    before = torch.get_num_threads()
    if elements < PARALLEL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quantize_layer(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group_size: int,
    options: Options,
) -> GroupedWeight:
    """Quantize one weight (N, K) float32 against its inputs' H = E[x x^T] (K, K) float32.

    group_size is in columns, or -1 for the whole row.
    """
    rows, columns = weight.shape
    group = columns if group_size == -1 else group_size
    importance = torch.diagonal(hessian).clamp(min=0)
    by_importance = options.desc_act or (options.static_groups and group < columns)
    order = torch.argsort(importance, descending=True, stable=True) if by_importance else torch.arange(columns)
    factor = inverse_factor(hessian[order][:, order], options.damp_percent)
    fixed = options.static_groups or group == columns

    def fit(part: torch.Tensor, weights: torch.Tensor) -> Grid:
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
        g_idx = torch.empty(columns, dtype=torch.int64)
        g_idx[order] = contiguous_groups(columns, group)
    else:
        g_idx = contiguous_groups(columns, group)
    if fixed:
        # Regroup so that each group's columns lie side by side, whichever order the format keeps.
        beside = order if options.desc_act else torch.arange(columns)
        grid = fit(weight[:, beside], importance[beside])
        scales, zeros = grid.scales.to(torch.float32).T.clone(), grid.zeros.to(torch.float32).T.clone()
    else:
        scales, zeros = torch.empty(columns // group, rows), torch.empty(columns // group, rows)

    w = weight[:, order].T.contiguous()  # (K, N): a column of the paper is a row here
    codes = torch.empty(columns, rows, dtype=torch.uint8)
    top = (1 << bits) - 1
    step = BLOCK_COLUMNS if fixed else max(group, BLOCK_COLUMNS // group * group)
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        block, u = w[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        with _threads_for(block.numel()):
            for i in range(stop - start):
                column = start + i
                g = int(g_idx[order[column]])
                if not fixed and column % group == 0:
                    ahead = slice(column, column + group)
                    grid = fit(w[ahead].T, importance[order[ahead]])
                    scales[g], zeros[g] = grid.scales[:, 0].to(torch.float32), grid.zeros[:, 0].to(torch.float32)
                code = encode(block[i], scales[g], zeros[g], top)
                errors[i] = (block[i] - (code - zeros[g]) * scales[g]) / u[i, i]
                block[i + 1 :].addr_(u[i, i + 1 :], errors[i], alpha=-1)
                codes[column] = code.to(torch.uint8)
        w[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    natural = torch.empty_like(codes)
    natural[order] = codes
    return GroupedWeight(natural.T.contiguous(), scales.T.to(torch.float16), zeros.T.to(torch.uint8), g_idx, bits)


def _check(job: Job) -> int:
    options: Options = job.options
    if options.desc_act or not options.sym:
        job.tell("vLLM loads only symmetric GPTQ without desc_act; this artifact is for exllama and gptqmodel")
    if job.source.architecture in ("gpt2",):
        raise UnsupportedError(
            "GPT-2 keeps its weights transposed, which engines do not load from this layout. Use ctranslate2."
        )
    return check_layout(job, int(job.bits))


def _layers(job: Job) -> Iterator[tuple[str, GroupedWeight]]:
    bits, group_size = int(job.bits), job.resolved["group_size"]
    assert isinstance(group_size, int)
    skeleton = open_skeleton(job.source.config)
    for block in walk(job):
        stages = block.stages()
        rounds = [[stage] for stage in stages] if job.options.true_sequential else [stages]
        for together in rounds:
            hessians = block.hessians(together)
            for stage in together:
                for name in stage:
                    weight = job.source.tensor(source_name(job.source, skeleton, name)).to(torch.float32)
                    quantized = quantize_layer(weight, hessians[stage[0]], bits, group_size, job.options)
                    block.replace(name, quantized.dense())
                    yield name, quantized


def _write(job: Job) -> None:
    settings = {
        "sym": job.options.sym,
        "desc_act": job.options.desc_act,
        "static_groups": job.options.static_groups,
        "damp_percent": job.options.damp_percent,
        "true_sequential": job.options.true_sequential,
    }
    write_layout(job, int(job.bits), settings, lambda: _layers(job))


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
