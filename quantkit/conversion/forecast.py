"""Forecast of a conversion's peak memory from the model's shapes.

Peak resident memory is the process's memory after its checks plus the largest of these phases: embedding the
calibration text, work on a decoder block, the largest tensor outside the blocks, and reading source and artifact.
`Method.peak_memory` gives what a method needs in addition to a block and its activations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil

from quantkit.checkpoints.safetensors import ITEM_BYTES, SLAB_BYTES
from quantkit.contracts.method import BATCH_TOKENS, CheckedJob, Job, PeakMemory, Shapes
from quantkit.conversion.verify import PIECE
from quantkit.errors import ResourceError
from quantkit.system.device import CPU, memory_of
from quantkit.system.memory import GROWTH, MemoryEstimate, available_memory, free_memory
from quantkit.system.sizes import in_one_unit

MB = 1_000_000
LOADED = 8 * MB  # libraries and constants that the work loads
LOADED_BY_FORWARD = 40 * MB  # the same with forward passes and their kernels
BFLOAT16 = 2
GPU_BATCH_TOKENS = 16 * BATCH_TOKENS  # a GPU computes small batches at a part of its speed


@dataclass(frozen=True)
class Forecast(MemoryEstimate):
    """Forecast of the process's peak resident memory, in bytes.

    `on_device`: peak on a device other than the CPU; `offloaded`: activations in a file instead of memory.
    """

    on_device: int = 0
    offloaded: int = 0


def shapes_of(job: Job) -> Shapes:
    """Return the model's sizes, from its skeleton and the checkpoint's headers."""
    from torch import nn

    from quantkit.models.config import beside_states
    from quantkit.models.skeleton import source_name

    source, skeleton = job.source, job.skeleton
    largest: nn.Module = max(skeleton.blocks, key=lambda block: sum(p.numel() for p in block.parameters()))
    linears = {name: m for name, m in largest.named_modules() if isinstance(m, nn.Linear)}
    layers = [(m.out_features, m.in_features) for m in linears.values()]
    stages: list[tuple[int, int]] = []
    before = ""
    for name, (rows, columns) in zip(linears, layers, strict=True):
        # An expert is a stage of its own; in a plain block only neighbours in one module share their input.
        parent = name.rpartition(".")[0]
        if stages and stages[-1][1] == columns and parent == before and len(layers) < 16:
            stages[-1] = (stages[-1][0] + rows, columns)
        else:
            stages.append((rows, columns))
        before = parent
    inside = f"{skeleton.blocks_path}."
    outside = [name for name in skeleton.parameter_names() if not name.startswith(inside)]
    around = {source_name(source, skeleton, name) for name in outside}
    infos = [source.tensors[name] for name in around]
    reading = {name: source.reading_bytes(name) for name in source.tensors}
    embedding = skeleton.model.get_input_embeddings()
    extra = beside_states(skeleton.model.config.get_text_config())
    return Shapes(
        block_parameters=sum(p.numel() for p in largest.parameters()),
        stages=tuple(stages),
        layers=tuple(layers),
        hidden=int(embedding.embedding_dim),
        vocabulary=int(embedding.num_embeddings),
        largest_outside=max((info.parameters for info in infos), default=0),
        blocks=len(skeleton.blocks),
        states=extra.states,
        of_text=extra.of_text,
        shared=extra.shared,
        reading=max((reading[name] for name in reading.keys() - around), default=0),
        reading_outside=max((reading[name] for name in around), default=0),
        item_bytes=max((ITEM_BYTES[info.dtype] for info in source.tensors.values()), default=2),
    )


def forecast(job: CheckedJob, shapes: Shapes, peak: PeakMemory) -> Forecast:
    """Return the memory forecast of a checked job; `peak` is the method's estimate for a decoder block."""
    spec = job.recipe.calibration
    drawn = spec.sequences * spec.length if job.calibration is None else int(job.calibration.ids.size)
    tokens = drawn if peak.streams else 0
    flowing = peak.streams * (shapes.states * shapes.hidden + shapes.shared) + shapes.of_text
    streams = int(tokens * flowing * BFLOAT16)
    batch = min(tokens, job.batch_tokens)
    activations = streams if streams <= job.offload_bytes else 0
    # Residual, normed input, and what attention or the widest layer takes; beyond the limit batches wait in a file.
    wide = max(3 * shapes.hidden, shapes.widest) + shapes.of_text // shapes.blocks
    each = int(peak.streams * (2 * shapes.states * shapes.hidden + wide) * BFLOAT16)
    suspended = tokens * each if peak.suspended else 0
    waiting = min(suspended, max(job.offload_bytes - activations, 2 * batch * each))
    forward = batch * (4 * shapes.tallest + 8 * shapes.states * shapes.hidden + 4 * shapes.widest)
    block = shapes.block_parameters * BFLOAT16 * math.ceil(peak.streams)
    rows = min(shapes.vocabulary, tokens) * (shapes.hidden + shapes.of_text)
    outside = shapes.largest_outside
    # Freed, but the CPU's allocator keeps the pieces (measured).
    retained = peak.work // 2 if job.device == CPU else 0
    computing = waiting + block + max(forward, peak.work) + min(forward, peak.work) // 2
    on_device, in_memory = 0, computing + (GROWTH // 2 if peak.streams else 0)  # freed, not yet returned
    if job.device != CPU:
        on_device, in_memory = computing, shapes.largest_layer * (shapes.item_bytes + BFLOAT16)
    phases = {
        "embedding the text": activations + rows * (2 * shapes.item_bytes + BFLOAT16) if tokens else 0,
        "a decoder block": activations + in_memory,
        "the largest tensor": outside * (shapes.item_bytes + BFLOAT16) + retained,
        "reading back": max(
            outside * (shapes.item_bytes + BFLOAT16) + shapes.reading_outside,
            shapes.largest_layer * 12 + shapes.reading,
        )
        + 14 * min(PIECE, max(outside, shapes.largest_layer))
        + retained,
        "reading the source": 7 * min(SLAB_BYTES, outside * shapes.item_bytes) // 2,
    }
    if shapes.reading or shapes.reading_outside:
        phases["making a tensor of the source"] = max(shapes.reading_outside, activations + block + shapes.reading)
    phases |= peak.further
    if job.method.bit_search is not None:
        phases |= job.method.bit_search.memory(job, shapes)
    process = psutil.Process().memory_info().rss + (LOADED_BY_FORWARD if peak.streams else LOADED)
    return Forecast(process, phases, on_device=on_device, offloaded=streams - activations + suspended - waiting)


def _with_larger_batches(
    job: CheckedJob, predict: Callable[[CheckedJob], Forecast], free: int
) -> tuple[CheckedJob, Forecast]:
    """Return the job with batches of up to `GPU_BATCH_TOKENS` that fit into `free` bytes, and its forecast."""
    job = replace(job, batch_tokens=GPU_BATCH_TOKENS)
    while (predicted := predict(job)).on_device > free and job.batch_tokens > BATCH_TOKENS:
        job = replace(job, batch_tokens=job.batch_tokens // 2)
    return job, predicted


def fit_memory(job: CheckedJob) -> tuple[CheckedJob, Forecast | None]:
    """Return the job with batches and an offload limit that fit the memory, and its forecast (None if it has none).

    The memory is `job.max_memory`, or the free memory if that is None. If the job does not fit, all activations are
    offloaded. Raises ResourceError with the figures if it still does not fit.
    """
    peak_memory = job.method.peak_memory
    if peak_memory is None or not job.method.needs_torch(job.options):
        return job, None
    shapes, limit = shapes_of(job), job.max_memory

    def predict(job: CheckedJob) -> Forecast:
        return forecast(job, shapes, peak_memory(job, shapes))

    predicted = predict(job)
    limit_bytes = limit if limit is not None else available_memory() + psutil.Process().memory_info().rss
    free = sys.maxsize
    if job.device != CPU:
        free = free_memory(job.device)
        job, predicted = _with_larger_batches(job, predict, free)
    if predicted.memory > limit_bytes or predicted.on_device > free:
        offloading = replace(job, offload_bytes=0)
        other = predict(offloading)
        if other.memory < predicted.memory or other.on_device < predicted.on_device:
            job, predicted = offloading, other
    if predicted.on_device > free:
        needed, limited = in_one_unit(predicted.on_device, free)
        raise ResourceError(
            f"{job.recipe.label} of {job.source.name} would need {needed} of {memory_of(job.device)} for a decoder "
            f"block, but only {limited} are free. Give fewer or shorter calibration sequences, or --device cpu."
        )
    if predicted.memory > limit_bytes:
        where = "the limit" if limit is not None else "the free memory"
        fix = (
            "Give fewer or shorter calibration sequences, or use a machine with more memory."
            if predicted.peak_phase in ("embedding the text", "a decoder block")
            else "Use a machine with more memory."
        )
        needed, limited = predicted.compared_with(limit_bytes)
        raise ResourceError(
            f"{job.recipe.label} of {job.source.name} would need {needed}, and {where} is {limited}. {fix}"
        )
    return job, predicted
