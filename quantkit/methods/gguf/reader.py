"""Reading a GGUF file back: dequantized by ggml, in the names and the row order of the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.artifact import Artifact
from quantkit.core.ggml import Floats, dequantize
from quantkit.errors import ArtifactError
from quantkit.methods.gguf.architectures import KNOWN, Place, places
from quantkit.methods.gguf.orders import Heads, order_of, restored

ROPE = "rope_"  # how names of tensors begin that are computed
EXPERT_DIMENSIONS = 3
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama.cpp names the files of a split model


def read(artifact: Artifact) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (tensor name of the source, dense float32 tensor), one at a time; raises ArtifactError."""
    yield from read_file(artifact.folder / artifact.manifest.weight_files[0])


def read_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (tensor name in transformers, dense float32 tensor in transformers' layout) of a GGUF file.

    Works from the file's own metadata; of a split model `path` is the first file. One tensor is dense at a time; a
    tied head is not yielded. Raises ArtifactError for a broken file or an architecture that is not known.
    """
    reader = _open(path)
    parts = parts_of(path, reader)
    architecture = str(_value(reader, "general.architecture", path))
    readers = [reader if part == path else _open(part) for part in parts]
    found = _places(readers, architecture, path)
    heads = _heads(reader, architecture, path)
    for part, opened in zip(parts, readers, strict=True):
        for tensor in opened.tensors:
            if tensor.name.startswith(ROPE):
                continue
            if tensor.name not in found:
                raise ArtifactError(f"{part} holds the tensor {tensor.name}, which {architecture} does not have")
            yield from _restored(_dense(part, tensor), found[tensor.name], heads)


def _restored(values: Floats, place: Place, heads: Heads) -> Iterator[tuple[str, torch.Tensor]]:
    if place.shift:
        values = values - np.float32(place.shift)
    if place.order is not None:
        values = restored(values, order_of(place.order, heads))
    if place.transposed:
        values = values.T
    stacked = values if values.ndim == EXPERT_DIMENSIONS else values[None]
    for origin, rows in zip(place.parts, stacked, strict=True):
        yield origin, torch.from_numpy(np.ascontiguousarray(rows))


def parts_of(path: Path, reader: Any) -> list[Path]:
    """All files of a model, of which `path` is the first or the only one; raises ArtifactError."""
    field = reader.get_field("split.count")
    count = 1 if field is None else int(field.contents())
    if count == 1:
        return [path]
    found = SPLIT.fullmatch(path.name)
    if found is None or int(found[2]) != 1 or int(found[3]) != count:
        raise ArtifactError(f"{path} is not the first of its {count} files. Give NAME-00001-of-{count:05d}.gguf.")
    parts = [path.with_name(f"{found[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise ArtifactError(f"{missing[0]} is missing; the model has {count} files. Convert again.")
    return parts


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path, "r")
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise ArtifactError(f"{path} is no GGUF file that can be read: {error}. Convert again.") from None


def _dense(path: Path, tensor: Any) -> Floats:
    """The values of a tensor, in its shape. They are read, not mapped: a mapped file's pages would count as memory."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    stored = np.fromfile(path, np.uint8, tensor.n_bytes, offset=tensor.data_offset)
    if len(stored) != tensor.n_bytes:
        raise ArtifactError(f"{path} ends inside the tensor {tensor.name}. Convert again.")
    packed = stored.reshape(-1, tensor.n_bytes // _rows(shape))
    return dequantize(tensor.tensor_type.name, packed, shape[-1]).reshape(shape)


def _rows(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[:-1], dtype=np.int64))


def _value(reader: Any, key: str, path: Path) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ArtifactError(f"{path} lacks the key {key}")
    return field.contents()


def _places(readers: list[Any], architecture: str, path: Path) -> dict[str, Place]:
    """By name in the file, of all architectures of transformers that llama.cpp calls so."""
    rows = [row for row in KNOWN.values() if row.name == architecture]
    if not rows:
        raise ArtifactError(f"{path} has the architecture {architecture!r}, which is not read here")
    blocks = int(_value(readers[0], f"{architecture}.block_count", path))
    experts = readers[0].get_field(f"{architecture}.expert_count")
    count = 0 if experts is None else int(experts.contents())
    everything = [place for row in rows for place in places(row, blocks, count, head=True)]
    there = {tensor.name for reader in readers for tensor in reader.tensors}
    # Of alternatives the one that the file has wholly; a later one may hold all names of an earlier.
    groups = {place.group for place in everything if place.group is not None}
    whole = groups - {place.group for place in everything if place.name not in there}
    group = max(whole, default=None)
    return {place.name: place for place in everything if place.group in (None, group)}


def _heads(reader: Any, architecture: str, path: Path) -> Heads:
    query = int(_value(reader, f"{architecture}.attention.head_count", path))
    key = reader.get_field(f"{architecture}.attention.head_count_kv")
    size = reader.get_field(f"{architecture}.attention.key_length")
    hidden = int(_value(reader, f"{architecture}.embedding_length", path))
    return Heads(query, int(key.contents()) if key else query, int(size.contents()) if size else hidden // query)
