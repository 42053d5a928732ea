"""One pass from safetensors to a GGUF file: rows are read, reordered, packed by ggml, and written in order.

Memory holds a few slabs of rows, whatever the size of a tensor. Several threads pack; the bytes do not depend
on how many. Metadata keys are those of llama.cpp's own converter.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.calibration.importance import Importance, without_silent_runs
from quantkit.checkpoints.floats import to_float32
from quantkit.contracts.job import Job
from quantkit.errors import SourceError
from quantkit.formats.gguf.architectures.hyperparameters import Value
from quantkit.formats.gguf.architectures.row_orders import gather
from quantkit.formats.gguf.ggml.library import WEIGHTED, quantize
from quantkit.formats.gguf.plan import Plan, PlannedTensor, file_name, model_name, plan_of
from quantkit.formats.gguf.tokenizer.vocabulary import Vocabulary, read_vocabulary
from quantkit.formats.source import Source
from quantkit.system.processor import usable_cores
from quantkit.system.sizes import parse_size

if TYPE_CHECKING:
    from quantkit.checkpoints.spool import Spool

SLAB_BYTES = 2 << 20  # of float32 rows
Waiting = deque[tuple[PlannedTensor, Future[NDArray[np.uint8]], bool]]


def write_file(job: Job, importance: Importance, threads: int | None = None, spool: Spool | None = None) -> None:
    """Write the file into `job.folder`. Raises SourceError for weights or importance that ggml would spoil.

    `importance` maps names of the source's linear weights to float32 (in_features,) mean squared inputs;
    empty for plain rounding. The embedding is never weighted. What `spool` holds under a source's name are the rows of
    that tensor, packed already.
    """
    plan = plan_of(job)
    weights = _weights(job, plan, importance)
    most = 0 if job.options.split_max_size is None else parse_size(job.options.split_max_size, "split_max_size")
    with _begun(job, plan, job.bits, plan.tensors, most) as writer:
        for file in writer.fout:
            writer.write_padding(file, file.tell())
        where = {name: file for file, names in zip(writer.fout, writer.tensors, strict=True) for name in names}
        with job.progress.step("quantize", len(plan.tensors)) as advance:
            for tensor, packed, done in _packed(job, plan, weights, threads or _threads(), spool):
                file = where[tensor.name]
                file.write(packed.data)
                if done:
                    writer.write_padding(file, tensor.nbytes)
                    job.count(tensor.type)
                    advance(remark=tensor.name)


def write_vocabulary(job: Job) -> None:
    """Write ``NAME-vocab.gguf`` into `job.folder`: the model's keys and its tokenizer, no tensors."""
    with _begun(job, plan_of(job), "vocab"):
        pass


@contextmanager
def _begun(
    job: Job, plan: Plan, file_type: str, tensors: tuple[PlannedTensor, ...] = (), most: int = 0
) -> Iterator[Any]:
    """A gguf.GGUFWriter whose file, or files of `most` bytes, hold keys, tokenizer and the list of `tensors`."""
    from gguf import GGUFWriter

    path = job.folder / file_name(job.source, file_type)
    writer = GGUFWriter(path, plan.architecture.name, split_max_size=most)
    try:
        _add_keys(writer, job, plan)
        vocabulary_of(job, plan).write(writer)
        del job.found["vocabulary"]  # it may be large, and is not needed any more
        _add_tensors(writer, tensors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        yield writer
    finally:
        writer.close()


def metadata_bytes(plan: Plan, vocabulary: Vocabulary) -> int:
    """About the bytes of a file that are not weights."""
    return 4096 + vocabulary.nbytes + sum(64 + len(tensor.name) for tensor in plan.tensors)


def vocabulary_of(job: Job, plan: Plan) -> Vocabulary:
    """The source's vocabulary, read once for the check and the work."""
    if "vocabulary" not in job.found:
        job.found["vocabulary"] = read_vocabulary(job, embedding_rows(plan))
    found: Vocabulary = job.found["vocabulary"]
    return found


def embedding_rows(plan: Plan) -> int:
    """Number of tokens that the model has rows for."""
    return next(tensor.rows for tensor in plan.tensors if tensor.name == "token_embd.weight")


def _weights(job: Job, plan: Plan, importance: Importance) -> dict[str, NDArray[np.float32]]:
    """Importance (parts, columns) by the tensor's name in the file; weighted types inside the blocks must have one."""
    found: dict[str, NDArray[np.float32]] = {}
    for tensor in plan.tensors if importance else ():
        if tensor.type not in WEIGHTED or not tensor.parts or tensor.name == "token_embd.weight":
            continue
        missing = [part for part in tensor.parts if part not in importance]
        if not missing:
            found[tensor.name] = np.stack([without_silent_runs(importance[part]) for part in tensor.parts])
        elif tensor.name.startswith("blk."):
            raise SourceError(f"{job.source.model}: the calibration gave no importance for {missing[0]}")
    return found


def _add_keys(writer: Any, job: Job, plan: Plan) -> None:
    import gguf

    shape = plan.shape
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model_name(job.source))
    writer.add_size_label(gguf.size_label(job.source.parameters, 0, 0, 0))
    writer.add_block_count(shape.blocks)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts)
    for name, value in shape.keys.items():
        _add_key(writer, f"{plan.architecture.name}.{name}", value)
    writer.add_file_type(gguf.LlamaFileType[_file_type(job.bits, plan)])
    writer.add_vocab_size(embedding_rows(plan))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_key(writer: Any, name: str, value: Value) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(name, value)


def _file_type(bits: str, plan: Plan) -> str:
    """What the file calls itself: its mix or, where types were chosen, the mix of the type with the most weights."""
    if bits != "auto":
        return "ALL_F32" if bits == "F32" else f"MOSTLY_{bits}"
    weights: dict[str, int] = {}
    for tensor in plan.tensors:
        weights[tensor.type] = weights.get(tensor.type, 0) + tensor.rows * tensor.shape[-1]
    most = max(weights, key=lambda kind: weights[kind])
    return "MOSTLY_" + {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "F32": "F16"}.get(most, most)


def _add_tensors(writer: Any, tensors: tuple[PlannedTensor, ...]) -> None:
    from gguf import GGMLQuantizationType

    for tensor in tensors:
        shape = (*tensor.shape[:-1], tensor.row_bytes)
        kind = GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)


def _threads() -> int:
    """As many as OpenMP would take."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else usable_cores()


def _packed(
    job: Job, plan: Plan, weights: dict[str, NDArray[np.float32]], threads: int, spool: Spool | None
) -> Iterator[tuple[PlannedTensor, NDArray[np.uint8], bool]]:
    """Yield (tensor, packed rows, whether they are its last) in the order of the file."""
    waiting: Waiting = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            ready = spool.names() if spool is not None else set()
            for tensor in plan.tensors:
                if spool is not None and tensor.parts and ready >= set(tensor.parts):
                    stored = _stored(spool, tensor)  # read here: a spool is not made for threads
                    yield from _drain(waiting)
                    yield tensor, stored, True
                    continue
                for rows, part, last in _slabs(job, plan, tensor):
                    importance = weights[tensor.name][part] if tensor.name in weights else None
                    waiting.append((tensor, pool.submit(_pack(job, tensor, rows, importance)), last))
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


def _stored(spool: Spool, tensor: PlannedTensor) -> NDArray[np.uint8]:
    rows: NDArray[np.uint8] = np.concatenate([spool.get(part).numpy() for part in tensor.parts])
    return rows if tensor.order is None else rows[tensor.order]


def _pack(
    job: Job, tensor: PlannedTensor, rows: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> Callable[[], NDArray[np.uint8]]:
    def run() -> NDArray[np.uint8]:
        try:
            return quantize(tensor.type, rows, importance)
        except ValueError as error:
            name = next(iter(tensor.parts), tensor.name)
            raise SourceError(
                f"{job.source.model}: the tensor {name} cannot be stored as {tensor.type}: {error}. "
                "Choose other bits, or mend the checkpoint or the calibration text."
            ) from None

    return run


def _slabs(job: Job, plan: Plan, tensor: PlannedTensor) -> Iterator[tuple[NDArray[np.float32], int, bool]]:
    """Yield (rows, columns) float32 slabs in the file's order, the number of its part, whether it is the last."""
    if tensor.values is not None:
        yield tensor.values.reshape(1, -1), 0, True
        return
    rows, columns = (1, tensor.shape[0]) if len(tensor.shape) == 1 else tensor.shape[-2:]
    unit = 1 if tensor.order is None else plan.shape.head_dim
    step = max(1, SLAB_BYTES // (4 * columns) // unit) * unit
    for part, name in enumerate(tensor.parts.values()):
        read = _rows_of(job.source, name, tensor)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            last = stop == rows and part == len(tensor.parts) - 1
            yield np.ascontiguousarray(read(start, stop)), part, last


def _rows_of(source: Source, name: str, tensor: PlannedTensor) -> Callable[[int, int], NDArray[np.float32]]:
    """A function (start, stop) -> rows of the file, float32, of the checkpoint's tensor `name`."""

    if len(tensor.shape) == 1:
        values = source.floats(name) + np.float32(tensor.shift)
        ordered = values if tensor.order is None else values[tensor.order]
        return lambda _start, _stop: ordered.reshape(1, -1)

    if tensor.transposed:
        whole, dtype = source.stored(name), source.tensors[name].dtype
        return lambda start, stop: to_float32(whole[:, start:stop].T, dtype)
    if tensor.order is None:
        return partial(source.floats, name)
    order = tensor.order
    return lambda start, stop: gather(partial(source.floats, name), order[start:stop])
