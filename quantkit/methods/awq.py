"""AWQ: scale up the input channels that carry large activations, fold the inverse into the layer before, then round.

Paper: Lin et al., AWQ, arXiv:2306.00978 (section 3.2; clipping as in its code release).
Layout: GEMM version, 4 bits with zero points; loaded by vLLM, transformers with gptqmodel, TGI.
Per linear layer with weight (N, K): `qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` float16 [K/g, N].
Differs from the paper: the output error of a trial is computed exactly from the inputs' Hessian, tr(D H D^T), so
that no activations are kept; channel sizes are root mean squares; clipping is weighted by the Hessian's diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

import torch
from pydantic import Field

from quantkit.artifact import Artifact
from quantkit.calibration.block import Block, Stage
from quantkit.calibration.learned_rounding import Learned, Training, refine, refuse_few_sequences
from quantkit.calibration.scale_tuning import tune_scales, tuning_bytes
from quantkit.calibration.walk import walk
from quantkit.checkpoints.writer import CheckpointWriter, checkpoint, stored_tensors
from quantkit.contracts.job import Job
from quantkit.contracts.method import Held, Method, Shapes
from quantkit.conversion.alternatives import instead
from quantkit.errors import UnsupportedError
from quantkit.formats._packing import pack_awq, unpack_awq
from quantkit.formats.gptq.layout import add_others, resolve_group_size, tell_engines, to_float16
from quantkit.methods import gptq
from quantkit.models.awq_mappings import SCALINGS, fold, heads_of, scalings_of
from quantkit.models.skeleton import load, open_skeleton, refuse_shapes
from quantkit.numerics.grid import fit_grid, round_to_grid
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups

BITS = 4
SAMPLED_ROWS = 512  # of the layers that share their scales, spread evenly, in the trials


class Options(Learned):
    """Options of AWQ."""

    group_size: int | Literal["auto"] = Field(
        "auto",
        description="input columns that share a scale; -1: whole row; auto: largest of 128, 64, 32 that divides",
    )
    clip: bool = Field(True, description="search a clipped range for each group")
    then: Literal["round", "gptq"] = Field("round", description="how to round the scaled weights: plainly, or by GPTQ")
    grid_points: int = Field(20, ge=2, le=100, description="number of exponents tried between 0 and 1")


def output_error(change: torch.Tensor, hessian: torch.Tensor) -> float:
    """E |change x|^2 = tr(change H change^T) for change (N, K) and H = E[x x^T] (K, K)."""
    return float(((change @ hessian) * change).sum())


def share_heads(values: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Mean of (heads * d,) values over the query heads that read one key-value head: (kv_heads * d,)."""
    return values.reshape(kv_heads, heads // kv_heads, -1).mean(1).reshape(-1)


def repeat_heads(values: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """(kv_heads * d,) -> (heads * d,): each key-value head's values for every query head that reads it."""
    return values.reshape(kv_heads, 1, -1).expand(kv_heads, heads // kv_heads, -1).reshape(-1)


def search_scale(
    weights: list[torch.Tensor], hessian: torch.Tensor, group_size: int, points: int, heads: tuple[int, int]
) -> torch.Tensor:
    """The channel scales (K,) float32 with the least summed output error of `weights` [(N, K)] after rounding.

    Trials are no scaling, and rms(x)^a and rms(x)^a / mean|w|^(1-a) for a in (0, 1]. `heads` (query, key-value) keeps
    the scales of query heads that read one value head equal; (1, 1) where channels are free.
    """
    rms = torch.diagonal(hessian).clamp(min=0).sqrt()
    rms = repeat_heads(share_heads(rms, *heads), *heads)
    rms = rms.clamp(min=float(rms.max()) * 1e-4 + 1e-12)
    size = repeat_heads(share_heads(torch.cat(weights).abs().mean(0), *heads), *heads)
    size = size.clamp(min=float(size.max()) * 1e-4 + 1e-12)
    trials = [torch.ones_like(rms)]
    for i in range(1, points + 1):
        a = i / points
        trials += [rms**a, rms**a / size ** (1 - a)]
    every = -(-sum(map(len, weights)) // SAMPLED_ROWS)
    weights = [weight[::every] for weight in weights]
    best, least = trials[0], float("inf")
    for trial in trials:
        scale = trial / (trial.max() * trial.min()).sqrt()
        error = sum(
            output_error(round_plainly(weight * scale, group_size).dense() / scale - weight, hessian)
            for weight in weights
        )
        if error < least:
            best, least = scale, error
    return best


def round_plainly(weight: torch.Tensor, group_size: int, importance: torch.Tensor | None = None) -> GroupedWeight:
    """Round (N, K) to a 4-bit grid with zero points; with `importance` (K,), clip each group where that pays."""
    grid = fit_grid(weight, group_size, BITS, symmetric=False, importance=importance, search=importance is not None)
    codes = round_to_grid(weight, grid, group_size)
    return GroupedWeight(codes, grid.scales, grid.zeros, contiguous_groups(weight.shape[1], group_size), BITS)


def _group_size(job: Job, columns: int) -> int:
    size = job.resolved["group_size"]
    assert isinstance(size, int)
    return columns if size == -1 else size


def _check(job: Job) -> int:
    source = job.source
    if job.options.refine:
        refuse_few_sequences(job.recipe.calibration.sequences)
    if source.architecture not in SCALINGS:
        raise UnsupportedError(
            f"AWQ does not know which layers of {source.architecture!r} can be scaled; it knows "
            f"{', '.join(SCALINGS)}. {instead(source)}"
        )
    skeleton = open_skeleton(source.config)
    refuse_shapes(source, skeleton)
    linears = skeleton.linears()
    job.resolved["group_size"] = size = resolve_group_size(job.options.group_size, linears)
    for name, (n, _) in linears.items():
        if n % 8:
            raise UnsupportedError(f"{name} has {n} rows; AWQ's packing needs a multiple of 8. {instead(source)}")
    tell_engines(job, linears, size)
    quantized = sum(n * k for n, k in linears.values())
    group = _group_size(job, min(k for _, k in linears.values()))
    return int(quantized * (4 + 20 / group) / 8 + (source.parameters - quantized) * 2 + 50_000_000)


def _held(job: Job, shapes: Shapes) -> Held:
    squares = 4 * sum(columns**2 for _, columns in shapes.stages)
    layer = 4 * max((rows * columns for rows, columns in shapes.layers), default=0)
    # All Hessians of the block and its weights in float32 at once; then the search over one group of layers.
    follows = job.options.then == "gptq"
    squares = max(2 * squares, 9 * 4 * shapes.widest**2) if follows else 2 * squares
    work = squares + 4 * shapes.block_parameters + 10 * layer
    if job.options.tuned:
        work = max(work, tuning_bytes(shapes))
    return Held(streams=gptq.streams(job, shapes, _exact_share(job.options)), paused=follows, work=work)


def _exact_share(options: Options) -> float:
    """The share of the calibration sequences that also go through the unquantized model."""
    if options.refine:
        return 1.0
    return gptq.exact_share(gptq.Options()) if options.then == "gptq" else 0.0


def _mean_hessian(hessians: dict[str, torch.Tensor], tokens: dict[str, int]) -> torch.Tensor:
    """The Hessian of layers that share their scale: experts weigh by the tokens that they saw."""
    first, *others = hessians
    if not others:
        return hessians[first]
    total = sum(tokens[name] for name in hessians)
    mean = hessians[first] * (tokens[first] / total)
    for name in others:
        mean += hessians[name] * (tokens[name] / total)
    return mean


def _scale_block(job: Job, block: Block, values: dict[str, torch.Tensor], hessians: dict[str, torch.Tensor]) -> None:
    """Scale the block's weights in `values` (float32, by full name) and the Hessians of their inputs to match."""
    inside = [name.removeprefix(block.prefix) for name in values]
    for scaling in scalings_of(job.source.architecture, block.skeleton.model.config, inside):
        names = [f"{block.prefix}{layer}.weight" for layer in scaling.layers]
        heads = heads_of(scaling, values, block.prefix, block.skeleton.model.config)
        seen = {name: hessians[name] for name in names if name in hessians}
        scale = search_scale(
            [values[name] for name in names],
            _mean_hessian(seen, block.tokens),
            _group_size(job, values[names[0]].shape[1]),
            job.options.grid_points,
            heads,
        )
        for hessian in seen.values():
            hessian /= scale[:, None] * scale[None, :]
        fold(scaling, values, block.prefix, scale, heads)


def _quantize_stage(
    job: Job, block: Block, values: dict[str, torch.Tensor], done: dict[str, GroupedWeight], stage: Stage
) -> None:
    """Round the layers of a stage: plainly within clipped ranges, or with GPTQ's error feedback."""
    size = _group_size(job, values[stage.names[0]].shape[1])
    if job.options.then == "gptq":
        rounding = gptq.Options(group_size=size, sym=False, scale_search=job.options.clip)
        solver = gptq.Solver(stage.hessian, BITS, size, rounding, stage.cross, stage.paired)
        done |= solver.quantize_each({name: values[name].numel() for name in stage.names}, values.pop)
    else:
        importance = torch.diagonal(stage.hessian) if job.options.clip else None
        done |= {name: round_plainly(values.pop(name), size, importance) for name in stage.names}
    for name in stage.names:
        block.replace(name, done[name].dense())


def _finished_block(writer: CheckpointWriter, index: int, prefix: str) -> dict[str, torch.Tensor] | None:
    """The values of block `index` as an earlier, interrupted run has written them, or None."""
    if index >= writer.finished:
        return None
    found = _block_values(writer, prefix)
    return {name: value if isinstance(value, torch.Tensor) else value.dense() for name, value in found.items()}


def _block_values(writer: CheckpointWriter, prefix: str) -> dict[str, torch.Tensor | GroupedWeight]:
    """The parameters of the block with that prefix as they are in `writer`, by full name."""
    return dict(_stored([name for name in writer.names() if name.startswith(prefix)], writer.get))


def _quantize_blocks(job: Job, writer: CheckpointWriter) -> None:
    """Scale and quantize block by block into `writer`."""
    options: Options = job.options
    gptq_follows = options.then == "gptq"
    for block in walk(
        job,
        exact=_exact_share(options),
        ample=gptq.Options().ample_tokens,
        restore=partial(_finished_block, writer),
        then=partial(tune_scales, job, writer, partial(_block_values, writer), options.tune_steps)
        if options.tuned
        else None,
    ):
        values = {
            block.prefix + name: load(job.source, block.skeleton, block.prefix + name).to(block.device, torch.float32)
            for name, _ in block.module.named_parameters()
        }
        stages = block.stages()
        hessians = block.hessians(stages)
        _scale_block(job, block, values, hessians)
        for name, value in values.items():
            if name not in block.linears:
                values[name] = to_float16(job, name, value.cpu())
            block.replace(name, values[name])
        scaled = {name: values[name] for names in stages for name in names}
        done: dict[str, GroupedWeight] = {}
        if gptq_follows:
            hessians.clear()
            block.visit(partial(_quantize_stage, job, block, values, done), keep_outputs=not options.learned)
        for names in stages if not gptq_follows else ():
            _quantize_stage(job, block, values, done, Stage(names, hessians.pop(names[0])))
        for name, value in values.items():
            writer.add(name, value)
            job.count("float16")
        if options.learned:
            done = refine(block, done, scaled, Training(options.refine_steps), job.recipe.seed)
        for name, layer in done.items():
            _add_layer(writer, name, layer.cpu())
            job.count("int4")
        writer.finish_block(block.index, job)


def _add_layer(writer: CheckpointWriter, name: str, weight: GroupedWeight) -> None:
    stem = name.removesuffix("weight")
    writer.add(stem + "qweight", pack_awq(weight.codes.T))
    writer.add(stem + "qzeros", pack_awq(weight.zeros.T))
    writer.add(stem + "scales", weight.scales.T.to(torch.float16))


def _write(job: Job) -> None:
    quantization = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": job.resolved["group_size"],
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    skeleton = open_skeleton(job.source.config)
    with checkpoint(job.folder, job.source, quantization, "float16") as writer:
        _quantize_blocks(job, writer)
        add_others(job, writer, skeleton)


def _stored(
    names: Iterable[str], get: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
    for name in sorted(names):
        stem, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            codes = unpack_awq(get(name)).T.contiguous()
            scales = get(stem + ".scales").T.contiguous()
            zeros = unpack_awq(get(stem + ".qzeros")).T.contiguous()
            g_idx = contiguous_groups(codes.shape[1], codes.shape[1] // scales.shape[1])
            yield stem + ".weight", GroupedWeight(codes, scales, zeros, g_idx, BITS)
        elif leaf not in ("qzeros", "scales"):
            yield name, get(name)


def _read(artifact: Artifact) -> Iterator[tuple[str, torch.Tensor | GroupedWeight]]:
    return _stored(*stored_tensors(artifact))


METHOD = Method(
    name="awq",
    summary="activation-aware channel scaling (AWQ GEMM layout: vLLM, transformers)",
    reference="arXiv:2306.00978",
    bits=("4",),
    default_bits="4",
    Options=Options,
    check=_check,
    write=_write,
    read=_read,
    engines=("reference",),
    keeps_values=False,
    calibrated=lambda _options: True,
    usage="vLLM:\n\n```bash\nvllm serve FOLDER\n```\n\n"
    "transformers, with `pip install optimum gptqmodel`:\n\n{transformers}",
    held=_held,
)
