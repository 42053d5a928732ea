"""Write a GGUF file in one pass: read rows, reorder them, quantize, and write in file order.

Memory use is a few slabs of rows. The bytes do not depend on the number of threads. Keys match llama.cpp's converter.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.run import Run
from quantkit.errors import SourceError
from quantkit.formats.gguf.file_types import TABLES
from quantkit.formats.gguf.ggml.library import WEIGHTED, quantize
from quantkit.formats.gguf.imatrix import Importance, without_silent_runs
from quantkit.formats.gguf.plan import Plan, PlannedTensor, make_plan, model_name
from quantkit.formats.gguf.shapes import RowReader
from quantkit.formats.gguf.tokenizer.vocabulary import Vocabulary, read_vocabulary
from quantkit.models.source import Source
from quantkit.system.processor import usable_cores
from quantkit.system.threads import result_of

if TYPE_CHECKING:
    from quantkit.checkpoints.spool import Spool

SLAB_BYTES = 2 << 20  # of float32 rows
PACKING = "packing"  # prefix of the names of the threads that pack
Waiting = deque[tuple[PlannedTensor, Future[NDArray[np.uint8]]]]
Packed = Iterator[tuple[PlannedTensor, NDArray[np.uint8]]]


@dataclass(frozen=True)
class GgufFile:
    """A planned GGUF file with its tokenizer and options."""

    source: Source
    file_type: str  # the name of its mix of types
    plan: Plan
    vocabulary: Vocabulary
    split_bytes: int = 0  # most bytes per file; 0: do not split
    weighted: bool = False  # whether there is an importance matrix, which changes llama.cpp's mixes

    @property
    def metadata_bytes(self) -> int:
        """Return the approximate size of everything except weights, in bytes."""
        return 4096 + self.vocabulary.nbytes + sum(64 + len(tensor.name) for tensor in self.plan.tensors)

    def with_types(self, types: Mapping[str, str]) -> GgufFile:
        return replace(self, plan=make_plan(self.source, self.file_type, types, self.weighted))


def plan_file(
    source: Source, file_type: str, types: Mapping[str, str] | None = None, split_bytes: int = 0, weighted: bool = False
) -> GgufFile:
    """Plan a GGUF file from tensor headers and the tokenizer; raise UnsupportedError or SourceError."""
    plan = make_plan(source, file_type, types, weighted)
    return GgufFile(source, file_type, plan, read_vocabulary(source, plan.embedding_rows), split_bytes, weighted)


def write_file(
    file: GgufFile,
    run: Run,
    importance: Importance,
    threads: int | None = None,
    spool: Spool | None = None,
    partial: bool = False,
) -> None:
    """Write the GGUF file into `run.folder`; raise SourceError for weights or importance that ggml would corrupt.

    `importance` maps source weight names to arrays and may lack some if `partial`. `spool` holds already packed rows.
    """
    weights = _weights(file, importance, partial)
    tensors = file.plan.tensors
    with _begun(file, run.folder, file.file_type, tensors) as writer:
        for opened in writer.fout:
            writer.write_padding(opened, opened.tell())
        where = {name: opened for opened, names in zip(writer.fout, writer.tensors, strict=True) for name in names}
        with run.progress.step("gguf: packing tensors", len(tensors), work=True) as advance:
            written = 0
            for tensor, packed in _packed(file, weights, threads or _threads(), spool):
                opened = where[tensor.name]
                opened.write(packed.data)
                written += packed.nbytes
                if written == tensor.nbytes:
                    writer.write_padding(opened, written)
                    run.findings.count(tensor.type)
                    advance(remark=tensor.name)
                    written = 0


def write_vocabulary(file: GgufFile, run: Run) -> None:
    """Write ``NAME-vocab.gguf`` into `run.folder`: metadata keys and tokenizer, no tensors."""
    with _begun(file, run.folder, "vocab"):
        pass


@contextmanager
def _begun(file: GgufFile, folder: Path, name: str, tensors: tuple[PlannedTensor, ...] = ()) -> Iterator[Any]:
    """Yield a gguf.GGUFWriter that has already written keys, tokenizer and tensor infos."""
    import gguf

    path = folder / f"{model_name(file.source)}-{name}.gguf"
    writer = gguf.GGUFWriter(path, file.plan.architecture.name, split_max_size=file.split_bytes if tensors else 0)
    try:
        _add_keys(writer, file)
        file.vocabulary.write(writer)
        for tensor in tensors:
            shape, kind = (*tensor.shape[:-1], tensor.nbytes // tensor.rows), gguf.GGMLQuantizationType[tensor.type]
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        yield writer
    finally:
        writer.close()


def _weights(file: GgufFile, importance: Importance, partial: bool) -> dict[str, NDArray[np.float32]]:
    """Return importance (parts, columns) by GGUF tensor name; unless `partial`, raise SourceError if any is missing."""
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in file.plan.tensors if importance else ():
        if tensor.type not in WEIGHTED or not tensor.parts or tensor.name in TABLES:
            continue
        missing = [part for part in tensor.parts if part not in importance]
        if not missing:
            rows = np.stack([without_silent_runs(importance[part]) for part in tensor.parts])
            weights[tensor.name] = rows if tensor.columns is None else rows[:, tensor.columns]
        elif tensor.is_weighted and not partial:
            raise SourceError(f"{file.source.model}: calibration measured no importance for {missing[0]}")
    return weights


def _add_keys(writer: Any, file: GgufFile) -> None:
    import gguf

    plan = file.plan
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model_name(file.source))
    writer.add_size_label(gguf.size_label(file.source.parameters, 0, 0, 0))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in plan.shape.keys.items():
        add.get(type(value), writer.add_array)(f"{plan.architecture.name}.{name}", value)
    for key, names in plan.scalars.items():
        writer.add_array(key, [float(plan.source.floats(name).reshape(-1)[0]) for name in names])
    writer.add_file_type(gguf.LlamaFileType[_file_type(file.file_type, plan)])
    writer.add_vocab_size(plan.embedding_rows)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _file_type(bits: str, plan: Plan) -> str:
    """Return the LlamaFileType name to store; with user-chosen types, that of the type with the most weights."""
    if bits == "MXFP4":
        return "MOSTLY_MXFP4_MOE"
    if bits != "auto":
        return "ALL_F32" if bits == "F32" else f"MOSTLY_{bits}"
    weights: Counter[str] = Counter()
    for tensor in plan.tensors:
        weights[tensor.type] += math.prod(tensor.shape)
    [(main, _)] = weights.most_common(1)
    mixes = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "IQ2_S": "IQ2_M", "F32": "F16"}
    return "MOSTLY_" + mixes.get(main, main)


def _threads() -> int:
    number = os.environ.get("OMP_NUM_THREADS", "")
    return int(number) if number.isdigit() and int(number) else usable_cores()


def _packed(file: GgufFile, weights: dict[str, NDArray[np.float32]], threads: int, spool: Spool | None) -> Packed:
    """Yield (tensor, packed rows) in file order; slabs are quantized in a thread pool."""
    waiting: Waiting = deque()
    with ThreadPoolExecutor(threads, PACKING) as pool:
        try:
            ready = spool.names() if spool is not None else set()
            for tensor in file.plan.tensors:
                if spool is not None and tensor.parts and ready >= tensor.parts.keys():
                    yield from _drain(waiting)
                    yield tensor, _spooled(tensor, spool)
                    continue
                for slab, part in _slabs(file, tensor):
                    importance = weights[tensor.name][part] if tensor.name in weights else None
                    waiting.append((tensor, pool.submit(_pack, file.plan.source, tensor, slab, importance)))
                    yield from _drain(waiting, threads)
            yield from _drain(waiting)
        finally:
            for _, future in waiting:
                future.cancel()


def _spooled(tensor: PlannedTensor, spool: Spool) -> NDArray[np.uint8]:
    rows, slot = np.concatenate([spool.get(part).numpy() for part in tensor.parts]), tensor.slot
    assert slot is not None  # a tensor with parts has a slot
    if slot.transform.shift or slot.factor != 1:  # a norm, whose rows are one float32 each
        values = rows.view(np.float32) * np.float32(slot.factor)
        rows = (values + np.float32(slot.transform.shift)).view(np.uint8)
    return rows if slot.rows is None else rows[slot.rows]


def _drain(waiting: Waiting, left: int = 0) -> Packed:
    while len(waiting) > left:
        tensor, future = waiting.popleft()
        yield tensor, result_of(future, PACKING)


def _pack(
    source: Source, tensor: PlannedTensor, rows: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    try:
        return quantize(tensor.type, rows, importance)
    except ValueError as error:
        name = next(iter(tensor.parts), tensor.name)
        raise SourceError(
            f"{source.model}: the tensor {name} cannot be stored as {tensor.type}: {error}. "
            f"Choose other bits, or fix the checkpoint{'' if importance is None else ' or the importance'}."
        ) from None


def _slabs(file: GgufFile, tensor: PlannedTensor) -> Iterator[tuple[NDArray[np.float32], int]]:
    """Yield (float32 slab (rows, columns) in file order, index of the source part)."""
    rows, columns, slot, values = tensor.rows // max(1, len(tensor.parts)), tensor.shape[-1], tensor.slot, tensor.values
    unit = 1 if slot is None or slot.rows is None else file.plan.shape.heads.size
    step = max(1, SLAB_BYTES // (4 * columns) // unit) * unit
    readers: Iterable[RowReader] = [lambda start, stop: np.zeros((stop - start, columns), np.float32)]
    if values is not None:
        readers = [lambda _start, _stop: values.reshape(1, -1)]
    elif slot is not None and tensor.parts:
        readers = (slot.to_file(file.plan.source, name) for name in tensor.parts.values())
    for part, read in enumerate(readers):
        for start in range(0, rows, step):
            yield np.ascontiguousarray(read(start, min(start + step, rows))), part
