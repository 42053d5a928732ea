"""llama.cpp's importance files: read, and written for llama-quantize.

The GGUF kind holds, for each weight NAME of a block, `NAME.in_sum2`, the sums of squared inputs of each column, and
`NAME.counts`, the number of tokens, both F32; their quotient is the mean square. The older kind (.dat) is a plain list:
number of entries; for each the length of its name, the name, calls, number of values, float32 means times calls
(tools/imatrix/imatrix.cpp of https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.method import CalibrationTokens
from quantkit.errors import ArtifactError, RecipeError
from quantkit.formats.gguf.file_types import stays_float
from quantkit.formats.gguf.header import read_header
from quantkit.formats.gguf.plan import Plan

SUMS, COUNTS = ".in_sum2", ".counts"
LARGEST_NAME = 1 << 12  # bytes; a longer one in an old file is no name

SILENT = 1e-6  # share of the mean importance that inputs count which never fire
Values = dict[str, NDArray[np.float32]]
Importance = Mapping[str, NDArray[np.float32]]  # by name of the source's weight, (columns,)


def without_silent_runs(importance: NDArray[np.float32]) -> NDArray[np.float32]:
    """(columns,) float32 importance, with a little where a whole run of 16 neighbouring columns never fires.

    ggml would turn the weights of such a run to zero, and they matter on other text.
    """
    runs = importance.copy().reshape(-1, 16) if len(importance) % 16 == 0 else importance.copy().reshape(1, -1)
    runs[runs.max(axis=1) == 0] = max(float(importance.mean()) * SILENT, SILENT)
    return runs.reshape(-1)


def write_imatrix(path: Path, importance: Importance, plan: Plan, tokens: CalibrationTokens) -> None:
    """Write the mean squared inputs (columns,) float32, by the source's weight names, as the GGUF kind."""
    import gguf

    sequences, length = tokens.ids.shape
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [tokens.entry.sentence])
    writer.add_uint32("imatrix.chunk_count", sequences)
    writer.add_uint32("imatrix.chunk_size", length)
    counts = np.full((1, 1), sequences * length, np.float32)
    for tensor in plan.tensors:
        if tensor.parts and importance.keys() >= tensor.parts.keys():
            mean = np.stack([importance[part] for part in tensor.parts])
            writer.add_tensor(tensor.name + SUMS, (mean * counts).astype(np.float32))
            writer.add_tensor(tensor.name + COUNTS, counts.repeat(len(mean), axis=0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_imatrix(path: Path) -> Values:
    """Mean squared inputs (experts or 1, columns) float32 by tensor name, of a file of either kind; raises RecipeError.

    The old kind has one row also for experts, one after the other.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        importance = _read_gguf(path) if is_gguf else _read_old(path.read_bytes())
    except (ArtifactError, OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise RecipeError(f"imatrix_file: {path} cannot be read as an importance file: {error}.") from None
    if not importance:
        raise RecipeError(f"imatrix_file: {path} holds no importance.")
    for name, values in importance.items():
        if not np.isfinite(values).all() or bool((values < 0).any()):
            raise RecipeError(f"imatrix_file: {path} holds NaN, infinite or negative values for {name}.")
    return importance


def _read_gguf(path: Path) -> Values:
    stored = read_header(path).tensors
    tensors = {t.name: np.fromfile(path, "<f4", t.weights, offset=t.start) for t in stored if t.type == "F32"}
    means: Values = {}
    for name in tensors:
        if name.endswith(SUMS):
            stem = name.removesuffix(SUMS)
            counts = tensors[stem + COUNTS].astype(np.float64).reshape(-1, 1)
            sums = tensors[name].astype(np.float64).reshape(len(counts), -1)
            means[stem] = (sums / np.maximum(counts, 1.0)).astype(np.float32)
    return means


def _read_old(content: bytes) -> Values:
    means: Values = {}
    at = 4
    for _ in range(struct.unpack_from("<i", content, 0)[0]):
        (length,) = struct.unpack_from("<i", content, at)
        if not 0 < length <= LARGEST_NAME:
            raise ValueError(f"a name of {length} bytes")
        name = content[at + 4 : at + 4 + length].decode("utf-8")
        calls, count = struct.unpack_from("<ii", content, at + 4 + length)
        at += 12 + length
        if count < 0 or at + 4 * count > len(content):
            raise ValueError(f"{name} is cut short")
        means[name] = (np.frombuffer(content, np.float32, count, at) / np.float32(max(calls, 1))).reshape(1, -1)
        at += 4 * count
    return means


def importance_from(path: Path, plan: Plan) -> Values:
    """The file's importance by the source's weight names, for every matrix inside the blocks; raises RecipeError."""
    values = read_imatrix(path)
    importance: Values = {}
    for tensor in plan.tensors:
        if not tensor.name.startswith("blk.") or stays_float(tensor.name, len(tensor.shape)):
            continue
        if tensor.name not in values:
            raise RecipeError(f"imatrix_file: {path} has no importance for {tensor.name}; it is another model's.")
        size = len(tensor.parts) * tensor.shape[-1]
        if values[tensor.name].size != size:
            raise RecipeError(
                f"imatrix_file: {path} has {values[tensor.name].size} values for {tensor.name}, which needs "
                f"{size}; it is another model's."
            )
        rows = values[tensor.name].reshape(len(tensor.parts), -1)
        importance |= dict(zip(tensor.parts, rows, strict=True))
    return importance
