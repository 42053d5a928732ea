"""Read and write llama.cpp's importance-matrix (imatrix) files, as tools/imatrix/imatrix.cpp does.

The GGUF kind stores, for each weight NAME, `NAME.in_sum2` (sums of squared inputs per column) and `NAME.counts`
(number of tokens), both F32; importance is their quotient. The legacy kind (.dat) is a list: the number of entries,
then for each entry: length of name, name, number of calls, number of values, float32 means times calls.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.method import CalibrationTokens
from quantkit.errors import ArtifactError, RecipeError
from quantkit.formats.gguf.file_types import block_of, stays_float
from quantkit.formats.gguf.ggml.library import FAINTEST, WEIGHTED
from quantkit.formats.gguf.header import Stored, read_header
from quantkit.formats.gguf.plan import Plan, PlannedTensor
from quantkit.system.untrusted import reraise_as, shown

SUMS, COUNTS = ".in_sum2", ".counts"
LARGEST_NAME = 1 << 12  # bytes; a longer name means that the file is not an old importance file
MOST_BYTES = 1 << 30  # of an old file; the largest models have some 100 MB

SILENT = 1e-6  # of the mean importance, for inputs that are always zero
Values = dict[str, NDArray[np.float32]]
Importance = Mapping[str, NDArray[np.float32]]  # by name of the source's weight, (columns,)


def without_silent_runs(importance: NDArray[np.float32]) -> NDArray[np.float32]:
    """Increase near-zero importance in runs of 16 columns slightly, because ggml would zero the weights there."""
    runs = importance.copy().reshape(-1, 16) if len(importance) % 16 == 0 else importance.copy().reshape(1, -1)
    runs[runs.max(axis=1) < FAINTEST] = max(float(importance.mean()) * SILENT, SILENT)
    return runs.reshape(-1)


def write_imatrix(path: Path, importance: Importance, plan: Plan, tokens: CalibrationTokens) -> None:
    """Write the mean squared inputs, float32 (columns,) by source weight name, to a GGUF imatrix file."""
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
            mean = mean if tensor.columns is None else mean[:, tensor.columns]
            writer.add_tensor(tensor.name + SUMS, (mean * counts).astype(np.float32))
            writer.add_tensor(tensor.name + COUNTS, counts.repeat(len(mean), axis=0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_imatrix(path: Path) -> Values:
    """Read an imatrix file of either kind; return mean squared inputs, float32 (experts or 1, columns), by tensor name.

    Raises RecipeError if the file is unusable.
    """
    with reraise_as(f"imatrix_file: {path} cannot be read as an importance file", RecipeError):
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        try:
            importance = _read_gguf(path) if is_gguf else _read_old(path)
        except ArtifactError as error:
            raise ValueError(str(error)) from None
    if not importance:
        raise RecipeError(f"imatrix_file: {path} has no importance.")
    for name, values in importance.items():
        if not np.isfinite(values).all() or bool((values < 0).any()):
            raise RecipeError(
                f"imatrix_file: {path} has NaN, infinite or negative values for {name}. Measure it again."
            )
    return importance


def _read_gguf(path: Path) -> Values:
    stored = {tensor.name: tensor for tensor in read_header(path).tensors}
    means: Values = {}
    for name in stored:
        if not name.endswith(SUMS):
            continue
        stem = name.removesuffix(SUMS)
        sums, counts = (_floats(path, stored, stem + part) for part in (SUMS, COUNTS))
        if counts.size == 0 or sums.size % counts.size:
            raise ValueError(f"{stem} has {counts.size} counts of {sums.size} sums")
        if not (np.isfinite(counts).all() and counts.min() >= 0 and counts.max() > 0):
            raise ValueError(f"{stem} has counts of tokens that are not finite, negative, or all zero")
        sums, counts = sums.reshape(counts.size, -1), counts.reshape(-1, 1)
        if bool((sums[counts[:, 0] == 0] != 0).any()):
            raise ValueError(f"{stem} has sums over no tokens")
        with np.errstate(over="ignore"):  # values that are not finite are refused later
            means[stem] = (sums / np.where(counts == 0, 1.0, counts)).astype(np.float32)
    return means


def _floats(path: Path, stored: Mapping[str, Stored], name: str) -> NDArray[np.float64]:
    if name not in stored or stored[name].type != "F32":
        raise ValueError(f"it has no {name} of F32")
    return np.fromfile(path, "<f4", stored[name].weights, offset=stored[name].start).astype(np.float64)


def _read_old(path: Path) -> Values:
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, but such files have at most {MOST_BYTES:,}")
    content = path.read_bytes()
    means: Values = {}
    at = 4
    for _ in range(struct.unpack_from("<i", content, 0)[0]):
        (length,) = struct.unpack_from("<i", content, at)
        if not 0 < length <= LARGEST_NAME:
            raise ValueError(f"a name of {length} bytes")
        name = content[at + 4 : at + 4 + length].decode("utf-8")
        calls, count = struct.unpack_from("<ii", content, at + 4 + length)
        at += 12 + length
        if count < 1 or at + 4 * count > len(content):
            raise ValueError(f"{shown(name)} is truncated")
        if calls < 1 or name in means:
            raise ValueError(f"{shown(name)} is there twice, or has {calls} calls")
        means[name] = (np.frombuffer(content, np.float32, count, at) / np.float32(calls)).reshape(1, -1)
        at += 4 * count
    return means


def importance_from(path: Path, plan: Plan) -> Values:
    """Read an imatrix file and map it to the source's weight names; raise RecipeError if no weight matches."""
    values = read_imatrix(path)
    importance: Values = {}
    for tensor in plan.tensors:
        if tensor.name not in values or block_of(tensor.name) < 0 or stays_float(tensor.name, len(tensor.shape)):
            continue
        size = len(tensor.parts) * tensor.shape[-1]
        if tensor.is_of_heads and values[tensor.name].size != size:
            continue  # llama-imatrix measures each head, but a plan has one tensor for all
        if values[tensor.name].size != size:
            raise RecipeError(
                f"imatrix_file: {path} has {values[tensor.name].size} values for {tensor.name}, which needs "
                f"{size}. The file is for another model."
            )
        rows = values[tensor.name].reshape(len(tensor.parts), -1)
        rows = rows if tensor.columns is None else rows[:, np.argsort(tensor.columns)]
        importance |= dict(zip(tensor.parts, rows, strict=True))
    if not importance:
        raise RecipeError(f"imatrix_file: {path} names no tensor of this model; it has {shown(min(values))}.")
    return importance


def unweighted(plan: Plan, importance: Importance) -> list[PlannedTensor]:
    """List tensors whose type uses importance but which have none in `importance`."""
    weighted = [tensor for tensor in plan.tensors if block_of(tensor.name) >= 0 and tensor.type in WEIGHTED]
    return [tensor for tensor in weighted if not importance.keys() >= tensor.parts.keys()]
