"""One pass from safetensors to a GGUF file: rows are read, reordered, packed by ggml, and written in order.

Memory holds a few slabs of rows, whatever the size of a tensor. Several threads pack; the bytes do not depend
on how many. Metadata keys are those of llama.cpp's own converter.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.core.ggml import WEIGHTED, quantize
from quantkit.core.spool import Spool
from quantkit.errors import SourceError
from quantkit.methods.gguf.architectures import permute
from quantkit.methods.gguf.plan import Plan, PlannedTensor, file_name, model_name, plan_of
from quantkit.methods.gguf.sizes import parse_size
from quantkit.methods.gguf.tokenizer import Vocabulary, read_vocabulary
from quantkit.registry import Job

SLAB_BYTES = 32 << 20  # of float32 rows
SILENT = 1e-6  # share of the mean importance that inputs count which never fire
Importance = Mapping[str, torch.Tensor]
Waiting = deque[tuple[PlannedTensor, Future[NDArray[np.uint8]], bool]]


def write_file(job: Job, importance: Importance, threads: int | None = None, spool: Spool | None = None) -> None:
    """Write the file into `job.folder`. Raises SourceError for weights or importance that ggml would spoil.

    `importance` maps names of the source's linear weights to float32 (in_features,) mean squared inputs;
    empty for plain rounding. The embedding is never weighted. What `spool` holds under a source's name are the rows of
    that tensor, packed already.
    """
    from gguf import GGUFWriter

    plan = plan_of(job)
    vocabulary = read_vocabulary(job, _embedding_rows(plan))
    weights = _weights(job, plan, importance)
    most = 0 if job.options.split_max_size is None else parse_size(job.options.split_max_size, "split_max_size")
    path = job.folder / file_name(job.source, job.bits)
    writer = GGUFWriter(path, plan.architecture.name, split_max_size=most)
    try:
        _add_keys(writer, job, plan)
        vocabulary.write(writer)
        _add_tensors(writer, plan)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        for file in writer.fout:
            writer.write_padding(file, file.tell())
        where = {name: file for file, names in zip(writer.fout, writer.tensors, strict=True) for name in names}
        with job.progress.step("quantize", len(plan.tensors)) as advance:
            for tensor, packed, done in _packed(job, plan, weights, threads or max(2, os.cpu_count() or 1), spool):
                file = where[tensor.name]
                file.write(packed.data)
                if done:
                    writer.write_padding(file, tensor.nbytes)
                    job.count(tensor.type)
                    advance(remark=tensor.name)
    finally:
        writer.close()


def metadata_bytes(plan: Plan, vocabulary: Vocabulary) -> int:
    """About the bytes of a file that are not weights."""
    return 4096 + vocabulary.nbytes + sum(64 + len(tensor.name) for tensor in plan.tensors)


def _embedding_rows(plan: Plan) -> int:
    return next(tensor.rows for tensor in plan.tensors if tensor.name == "token_embd.weight")


def _weights(job: Job, plan: Plan, importance: Importance) -> dict[str, NDArray[np.float32]]:
    """Importance by the tensor's name in the file; every weighted type inside the blocks must have one."""
    found: dict[str, NDArray[np.float32]] = {}
    for tensor in plan.tensors if importance else ():
        if tensor.type not in WEIGHTED or tensor.source is None or tensor.name == "token_embd.weight":
            continue
        if tensor.source in importance:
            values = importance[tensor.source].detach().to("cpu", torch.float32)
            found[tensor.name] = without_silent_runs(values).numpy()
        elif tensor.name.startswith("blk."):
            raise SourceError(f"{job.source.model}: the calibration gave no importance for {tensor.source}")
    return found


def without_silent_runs(importance: torch.Tensor) -> torch.Tensor:
    """(columns,) float32 importance, with a little where a whole run of 16 neighbouring columns never fires.

    ggml would turn the weights of such a run to zero, and they matter on other text.
    """
    runs = importance.clone().reshape(-1, 16) if len(importance) % 16 == 0 else importance.clone().reshape(1, -1)
    silent = runs.amax(1) == 0
    runs[silent] = max(float(importance.mean()) * SILENT, SILENT)
    return runs.reshape(-1).contiguous()


def _add_keys(writer: Any, job: Job, plan: Plan) -> None:
    import gguf

    shape = plan.shape
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model_name(job.source))
    writer.add_size_label(gguf.size_label(job.source.parameters, 0, 0, 0))
    writer.add_block_count(shape.blocks)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    if shape.rope_type == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(shape.rope["factor"]))
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{_file_type(job.bits, plan)}"])
    writer.add_vocab_size(_embedding_rows(plan))
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _file_type(bits: str, plan: Plan) -> str:
    """What the file calls itself: its mix or, where types were chosen, the mix of the type with the most weights."""
    if bits != "auto":
        return bits
    weights: dict[str, int] = {}
    for tensor in plan.tensors:
        weights[tensor.type] = weights.get(tensor.type, 0) + tensor.rows * tensor.shape[-1]
    most = max(weights, key=lambda kind: weights[kind])
    return {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "F32": "F16"}.get(most, most)


def _add_tensors(writer: Any, plan: Plan) -> None:
    from gguf import GGMLQuantizationType

    for tensor in plan.tensors:
        shape = (*tensor.shape[:-1], tensor.row_bytes)
        kind = GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)


def _packed(
    job: Job, plan: Plan, weights: dict[str, NDArray[np.float32]], threads: int, spool: Spool | None
) -> Iterator[tuple[PlannedTensor, NDArray[np.uint8], bool]]:
    """Yield (tensor, packed rows, whether they are its last) in the order of the file."""
    waiting: Waiting = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            ready = spool.names() if spool is not None else set()
            for tensor in plan.tensors:
                if spool is not None and tensor.source in ready:
                    stored = _stored(spool, plan, tensor)  # read here: a spool is not made for threads
                    yield from _drain(waiting)
                    yield tensor, stored, True
                    continue
                for rows, last in _slabs(job, plan, tensor):
                    waiting.append((tensor, pool.submit(_pack(job, tensor, rows, weights.get(tensor.name))), last))
                    if len(waiting) > threads:
                        first, future, done = waiting.popleft()
                        yield first, future.result(), done
            yield from _drain(waiting)
        finally:
            for _, future, _ in waiting:
                future.cancel()


def _drain(waiting: Waiting) -> Iterator[tuple[PlannedTensor, NDArray[np.uint8], bool]]:
    while waiting:
        first, future, done = waiting.popleft()
        yield first, future.result(), done


def _stored(spool: Spool, plan: Plan, tensor: PlannedTensor) -> NDArray[np.uint8]:
    assert tensor.source is not None
    rows: NDArray[np.uint8] = spool.get(tensor.source).numpy()
    return np.ascontiguousarray(permute(rows, plan.shape.head_dim)) if tensor.heads else rows


def _pack(
    job: Job, tensor: PlannedTensor, rows: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> Callable[[], NDArray[np.uint8]]:
    def run() -> NDArray[np.uint8]:
        try:
            return quantize(tensor.type, rows, importance)
        except ValueError as error:
            raise SourceError(
                f"{job.source.model}: the tensor {tensor.source} cannot be stored as {tensor.type}: {error}. "
                "Choose other bits, or mend the checkpoint or the calibration text."
            ) from None

    return run


def _slabs(job: Job, plan: Plan, tensor: PlannedTensor) -> Iterator[tuple[NDArray[np.float32], bool]]:
    """Yield (rows, columns) float32 slabs in the file's row order, and whether each is the last."""
    if tensor.source is None:
        assert tensor.values is not None
        yield tensor.values.reshape(1, -1), True
        return
    if len(tensor.shape) == 1:
        values = job.source.tensor(tensor.source).float().numpy()
        if tensor.heads:
            values = permute(values, plan.shape.head_dim)
        yield np.ascontiguousarray(values.reshape(1, -1)), True
        return
    unit = plan.shape.head_dim if tensor.heads else 1
    step = max(1, SLAB_BYTES // (4 * tensor.shape[-1]) // unit) * unit
    for start in range(0, tensor.rows, step):
        stop = min(start + step, tensor.rows)
        rows = job.source.rows(tensor.source, start, stop).float().numpy()
        if tensor.heads:
            rows = permute(rows, plan.shape.head_dim)
        yield np.ascontiguousarray(rows), stop == tensor.rows
