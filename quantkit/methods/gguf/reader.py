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
from quantkit.methods.gguf.architectures import (
    KNOWN,
    Architecture,
    Shape,
    expected_tensors,
    name_map,
    unpermute,
)
from quantkit.methods.gguf.plan import ROPE_FACTORS

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
    rows = [row for row in KNOWN.values() if row.name == architecture]
    if not rows:
        raise ArtifactError(f"{path} has the architecture {architecture!r}, which is not read here")
    prefix = f"{architecture}."
    blocks = int(_value(reader, f"{prefix}block_count", path))
    head_dim = int(_value(reader, f"{prefix}attention.key_length", path))
    origins = _origins(rows[0], blocks)
    for part in parts:
        for tensor in (reader if part == path else _open(part)).tensors:
            if tensor.name == ROPE_FACTORS:
                continue
            if tensor.name not in origins:
                raise ArtifactError(f"{part} holds the tensor {tensor.name}, which {architecture} does not have")
            values, origin = _dense(part, tensor), origins[tensor.name]
            if rows[0].permuted and origin.rsplit(".", 1)[0].endswith(("q_proj", "k_proj")):
                values = unpermute(values, head_dim)
            yield origin, torch.from_numpy(np.ascontiguousarray(values))


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


def _origins(architecture: Architecture, blocks: int) -> dict[str, str]:
    """Names in the file -> names in transformers."""
    shape = Shape(blocks, 0, 0, 0, 0, 0, 0, 0.0, False, 0.0, "default", {})
    must, may = expected_tensors(architecture, shape)
    table = name_map(architecture.name, blocks)
    return {table.get_name(name, try_suffixes=(".weight", ".bias")): name for name in (*must, *may)}
