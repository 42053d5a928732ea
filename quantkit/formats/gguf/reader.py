"""Reading a GGUF file back: dequantized by ggml, in the names and the row order of the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoints.rows import Rows, rows_of_array
from quantkit.errors import ArtifactError
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.row_orders import ORDERS, Heads, RowReader, in_order
from quantkit.formats.gguf.architectures.tensor_map import TensorSlot, tensor_slots
from quantkit.formats.gguf.ggml.kquants import Floats
from quantkit.formats.gguf.ggml.library import dequantize
from quantkit.formats.gguf.header import Header, Stored, read_header

ROPE = "rope_"  # how names of tensors begin that are computed
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama.cpp names the files of a split model


def read_file(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield (tensor name in transformers, its values in transformers' layout) of a GGUF file.

    Works from the file's own metadata; of a split model `path` is the first file. A tied head is not yielded. Raises
    ArtifactError for a broken file or an architecture that is not known.
    """
    headers = headers_of(path)
    architecture = str(_key(headers[0], "general.architecture"))
    slots = _slots(headers, architecture)
    heads = _heads(headers[0], architecture)
    for header in headers:
        for tensor in header.tensors:
            if tensor.name.startswith(ROPE):
                continue
            if tensor.name not in slots:
                raise ArtifactError(f"{header.path} holds the tensor {tensor.name}, which {architecture} does not have")
            yield from _values(header.path, tensor, slots[tensor.name], heads)


def rope_divisors(path: Path) -> dict[str, Floats]:
    """The computed tensors of a GGUF file, which are divisors of the rope, by their names."""
    return {
        tensor.name: _rows(header.path, tensor, 0, 0, 1)[0]
        for header in headers_of(path)
        for tensor in header.tensors
        if tensor.name.startswith(ROPE)
    }


def _values(path: Path, tensor: Stored, slot: TensorSlot, heads: Heads) -> Iterator[tuple[str, Rows]]:
    back = None if slot.order is None else np.argsort(ORDERS[slot.order](heads))
    if len(tensor.shape) == 1:
        values = _rows(path, tensor, 0, 0, 1)[0] - np.float32(slot.shift)
        yield slot.parts[0], rows_of_array(values if back is None else values[back])
        return
    rows, columns = tensor.shape[-2:]
    for number, part in enumerate(slot.parts):
        read = in_order(partial(_rows, path, tensor, number * rows), back)
        yield part, _transposed(read, rows, columns) if slot.transposed else Rows((rows, columns), read)


def _transposed(read: RowReader, rows: int, columns: int) -> Rows:
    """What `read` reads, turned; all of it is read once, when it is first asked for."""
    whole = cache(lambda: np.ascontiguousarray(read(0, rows).T))
    return Rows((columns, rows), lambda start, stop: whole()[start:stop])


def _rows(path: Path, tensor: Stored, first: int, start: int, stop: int) -> Floats:
    """Rows from `first + start` on of a tensor. They are read, not mapped: mapped pages would count as memory."""
    row = tensor.nbytes // tensor.rows
    stored = np.fromfile(path, np.uint8, (stop - start) * row, offset=tensor.start + (first + start) * row)
    return dequantize(tensor.type, stored.reshape(stop - start, row), tensor.shape[-1])


def headers_of(path: Path) -> list[Header]:
    """The headers of all files of a model, of which `path` is the first or the only one; raises ArtifactError."""
    header = read_header(path)
    count = int(header.keys.get("split.count", 1))
    if count == 1:
        return [header]
    name = SPLIT.fullmatch(path.name)
    if name is None or int(name[2]) != 1 or int(name[3]) != count:
        raise ArtifactError(f"{path} is not the first of its {count} files. Give NAME-00001-of-{count:05d}.gguf.")
    parts = [path.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise ArtifactError(f"{missing[0]} is missing; the model has {count} files. Convert again.")
    return [header, *(read_header(part) for part in parts)]


def _key(header: Header, name: str) -> Any:
    if name not in header.keys:
        raise ArtifactError(f"{header.path} lacks the key {name}")
    return header.keys[name]


def _slots(headers: list[Header], architecture: str) -> dict[str, TensorSlot]:
    """By name in the file, of all architectures of transformers that llama.cpp calls so."""
    rows = [row for row in KNOWN.values() if row.name == architecture]
    if not rows:
        raise ArtifactError(f"{headers[0].path} has the architecture {architecture!r}, which is not read here")
    blocks = int(_key(headers[0], f"{architecture}.block_count"))
    experts = int(headers[0].keys.get(f"{architecture}.expert_count", 0))
    slots = [slot for row in rows for slot in tensor_slots(row, blocks, experts, head=True)]
    there = {tensor.name for header in headers for tensor in header.tensors}
    # Of alternatives the one that the file has wholly; a later one may hold all names of an earlier.
    groups = {slot.group for slot in slots if slot.group is not None}
    whole = groups - {slot.group for slot in slots if slot.name not in there}
    group = max(whole, default=None)
    return {slot.name: slot for slot in slots if slot.group in (None, group)}


def _heads(header: Header, architecture: str) -> Heads:
    query = int(_key(header, f"{architecture}.attention.head_count"))
    key = int(header.keys.get(f"{architecture}.attention.head_count_kv", query))
    hidden = int(_key(header, f"{architecture}.embedding_length"))
    return Heads(query, key, int(header.keys.get(f"{architecture}.attention.key_length", hidden // query)))
