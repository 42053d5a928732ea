"""One pass from safetensors to a GGUF file: rows are read, reordered, packed by ggml, and written in order.

Memory holds a few slabs of rows, whatever the size of a tensor. Several threads pack; the bytes do not depend
on how many. Metadata keys are those of llama.cpp's own converter.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoints.floats import to_float32
from quantkit.contracts.run import Run
from quantkit.errors import SourceError
from quantkit.formats.gguf.architectures.hyperparameters import Value
from quantkit.formats.gguf.architectures.row_orders import gather
from quantkit.formats.gguf.ggml.library import WEIGHTED, quantize
from quantkit.formats.gguf.imatrix import Importance, without_silent_runs
from quantkit.formats.gguf.plan import Plan, PlannedTensor, file_name, make_plan, model_name
from quantkit.formats.gguf.tokenizer.vocabulary import Vocabulary, read_vocabulary
from quantkit.models.source import Source
from quantkit.system.processor import usable_cores

if TYPE_CHECKING:
    from quantkit.checkpoints.spool import Spool

SLAB_BYTES = 2 << 20  # of float32 rows
Waiting = deque[tuple[PlannedTensor, Future[NDArray[np.uint8]], bool]]


@dataclass(frozen=True)
class GgufFile:
    """What a file will hold: the `source` it is made from, its `plan` and its `vocabulary`.

    `file_type` is the name of its mix of types; `split_bytes`: it is split into files of at most so many bytes (0: it
    is one file).
    """

    source: Source
    file_type: str
    plan: Plan
    vocabulary: Vocabulary
    split_bytes: int = 0

    @property
    def metadata_bytes(self) -> int:
        """About the bytes that are not weights."""
        return 4096 + self.vocabulary.nbytes + sum(64 + len(tensor.name) for tensor in self.plan.tensors)

    def with_types(self, types: Mapping[str, str]) -> GgufFile:
        """The same file with other types of single tensors."""
        return replace(self, plan=make_plan(self.source, self.file_type, types))


def plan_file(source: Source, file_type: str, types: Mapping[str, str] | None = None, split_bytes: int = 0) -> GgufFile:
    """Plan a file from headers and the tokenizer alone; raises UnsupportedError, SourceError."""
    plan = make_plan(source, file_type, types)
    return GgufFile(source, file_type, plan, read_vocabulary(source, plan.embedding_rows), split_bytes)


def write_file(
    file: GgufFile, run: Run, importance: Importance, threads: int | None = None, spool: Spool | None = None
) -> None:
    """Write the file into `run.folder`. Raises SourceError for weights or importance that ggml would spoil.

    `importance` maps names of the source's linear weights to float32 (in_features,) mean squared inputs;
    empty for plain rounding. The embedding is never weighted. What `spool` holds under a source's name are the rows of
    that tensor, packed already.
    """
    weights = _weights(file, importance)
    tensors = file.plan.tensors
    with _begun(file, run.folder, file.file_type, tensors) as writer:
        for opened in writer.fout:
            writer.write_padding(opened, opened.tell())
        where = {name: opened for opened, names in zip(writer.fout, writer.tensors, strict=True) for name in names}
        with run.progress.step("gguf: packing tensors", len(tensors), work=True) as advance:
            for tensor, packed, done in _packed(file, weights, threads or _threads(), spool):
                opened = where[tensor.name]
                opened.write(packed.data)
                if done:
                    writer.write_padding(opened, tensor.nbytes)
                    run.findings.count(tensor.type)
                    advance(remark=tensor.name)


def write_vocabulary(file: GgufFile, run: Run) -> None:
    """Write ``NAME-vocab.gguf`` into `run.folder`: the model's keys and its tokenizer, no tensors."""
    with _begun(file, run.folder, "vocab"):
        pass


@contextmanager
def _begun(file: GgufFile, folder: Path, name: str, tensors: tuple[PlannedTensor, ...] = ()) -> Iterator[Any]:
    """A gguf.GGUFWriter whose file, or files, hold keys, tokenizer and the list of `tensors`."""
    from gguf import GGUFWriter

    path = folder / file_name(file.source, name)
    writer = GGUFWriter(path, file.plan.architecture.name, split_max_size=file.split_bytes if tensors else 0)
    try:
        _add_keys(writer, file)
        file.vocabulary.write(writer)
        _add_tensors(writer, tensors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        yield writer
    finally:
        writer.close()


def _weights(file: GgufFile, importance: Importance) -> dict[str, NDArray[np.float32]]:
    """Importance (parts, columns) by the tensor's name in the file; weighted types inside the blocks must have one."""
    found: dict[str, NDArray[np.float32]] = {}
    for tensor in file.plan.tensors if importance else ():
        if tensor.type not in WEIGHTED or not tensor.parts or tensor.name == "token_embd.weight":
            continue
        missing = [part for part in tensor.parts if part not in importance]
        if not missing:
            found[tensor.name] = np.stack([without_silent_runs(importance[part]) for part in tensor.parts])
        elif tensor.name.startswith("blk."):
            raise SourceError(f"{file.source.model}: the calibration gave no importance for {missing[0]}")
    return found


def _add_keys(writer: Any, file: GgufFile) -> None:
    import gguf

    plan, shape = file.plan, file.plan.shape
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model_name(file.source))
    writer.add_size_label(gguf.size_label(file.source.parameters, 0, 0, 0))
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
    writer.add_file_type(gguf.LlamaFileType[_file_type(file.file_type, plan)])
    writer.add_vocab_size(plan.embedding_rows)
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
    file: GgufFile, weights: dict[str, NDArray[np.float32]], threads: int, spool: Spool | None
) -> Iterator[tuple[PlannedTensor, NDArray[np.uint8], bool]]:
    """Yield (tensor, packed rows, whether they are its last) in the order of the file."""
    waiting: Waiting = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            ready = spool.names() if spool is not None else set()
            for tensor in file.plan.tensors:
                if spool is not None and tensor.parts and ready >= set(tensor.parts):
                    stored = _stored(spool, tensor)  # read here: a spool is not made for threads
                    yield from _drain(waiting)
                    yield tensor, stored, True
                    continue
                for rows, part, last in _slabs(file, tensor):
                    importance = weights[tensor.name][part] if tensor.name in weights else None
                    waiting.append((tensor, pool.submit(_pack(file.source, tensor, rows, importance)), last))
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
    source: Source, tensor: PlannedTensor, rows: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> Callable[[], NDArray[np.uint8]]:
    def run() -> NDArray[np.uint8]:
        try:
            return quantize(tensor.type, rows, importance)
        except ValueError as error:
            name = next(iter(tensor.parts), tensor.name)
            raise SourceError(
                f"{source.model}: the tensor {name} cannot be stored as {tensor.type}: {error}. "
                "Choose other bits, or mend the checkpoint or the calibration text."
            ) from None

    return run


def _slabs(file: GgufFile, tensor: PlannedTensor) -> Iterator[tuple[NDArray[np.float32], int, bool]]:
    """Yield (rows, columns) float32 slabs in the file's order, the number of its part, whether it is the last."""
    if tensor.values is not None:
        yield tensor.values.reshape(1, -1), 0, True
        return
    rows, columns = (1, tensor.shape[0]) if len(tensor.shape) == 1 else tensor.shape[-2:]
    unit = 1 if tensor.order is None else file.plan.shape.head_dim
    step = max(1, SLAB_BYTES // (4 * columns) // unit) * unit
    for part, name in enumerate(tensor.parts.values()):
        read = _rows_of(file.source, name, tensor)
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
