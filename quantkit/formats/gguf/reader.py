"""Read a GGUF file: tensors dequantized by ggml, with transformers' names and row order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoints.rows import Rows, rows_of_array
from quantkit.errors import ArtifactError
from quantkit.formats.gguf import shapes
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.record import Architecture
from quantkit.formats.gguf.ggml.kquants import Floats
from quantkit.formats.gguf.ggml.library import dequantize
from quantkit.formats.gguf.header import FLOAT32, Header, Stored, read_header
from quantkit.formats.gguf.hyperparameters import MOST, MOST_BLOCKS, MOST_EXPERTS
from quantkit.formats.gguf.shapes import ModelShape, concatenated, in_order
from quantkit.formats.gguf.slots import Slot, is_taken, restacked, slots_of
from quantkit.system.untrusted import reraise_as, shown

ROPE = "rope_"  # prefix of names of computed tensors
MOST_FILES = 99_999
MOST_PIECES = 1 << 20  # heads of all blocks together, if each has its own matrix
GATE = "blk.0.attn_gate.weight"
FIX = "llama.cpp cannot load such a file. Fetch it again, or convert again from a config.json that fits the weights."
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # llama.cpp's names for the files of a split model


def read_file(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield (transformers name, values) of each tensor in a GGUF file, in transformers' layout.

    `path` is the first file of a split model. A tied head is not yielded. Raises ArtifactError for a damaged file, an
    unknown architecture, or tensors that do not match the keys.
    """
    headers = headers_of(path)
    first, name = headers[0], headers[0].text("general.architecture")
    rows = [replace(row, name=name) for row in _rows_named(name)]
    marked = [row for row in rows if row.mark and f"{name}.{row.mark}" in first.keys]
    rows = marked or [row for row in rows if not row.mark]
    if not rows:
        raise ArtifactError(f"{path} has the architecture {name!r}, which quantkit cannot read")
    row, shape, slots = _fitting_row(headers, rows)
    scales = _scales(headers, slots)
    found: dict[str, Rows] = {}
    split: dict[str, list[tuple[Slot, partial[Floats]]]] = {}
    for path, given in ((header.path, given) for header in headers for given in header.tensors):
        if given.name.startswith(ROPE) or given.name in scales:
            continue
        if given.name not in slots:
            raise ArtifactError(f"{path} holds the tensor {given.name}, which {name} does not have")
        slot = slots[given.name]
        scale = scales.get(f"{given.name.removesuffix('weight')}scale")
        read = partial(_rows, path, _of_shape(path, given, slot.shape), scale=scale)
        if is_taken(slot.parts[0], row, shape.own_blocks):  # nothing reads it
            continue
        with reraise_as(f"{path}: the rows of {slot.name} cannot be reordered", ArtifactError, FIX):
            _ = slot.rows, slot.columns
        if slot.transform.split:
            split.setdefault(slot.parts[0], []).append((slot, read))
        else:
            found.update(slot.from_file(read))
    for part, pieces in split.items():
        order = np.concatenate([slot.rows for slot, _ in pieces if slot.rows is not None])
        if len(pieces) < len(pieces[0][0].transform.split):
            raise ArtifactError(f"{path} lacks rows of {part}: it only has {pieces[0][0].name}. {FIX}")
        whole = concatenated([(read, slot.shape[0]) for slot, read in pieces])
        found[part] = Rows((len(order), *pieces[0][0].shape[1:]), in_order(whole, np.argsort(order)))
    yield from restacked(found, row, shape.blocks)
    for part, (key, own) in row.scalars.items():
        yield from _scalars(first, f"{row.blocks}.{{}}.{part}", key, own, shape.blocks)


def _rows_named(name: object) -> list[Architecture]:
    """Return the architecture rows with this llama.cpp name."""
    return [row for row in KNOWN.values() if name and name in (row.name, row.name_with_experts)]


def _scalars(header: Header, name: str, key: str, shape: tuple[int, ...], blocks: int) -> Iterator[tuple[str, Rows]]:
    values = header.keys.get(key)
    if not isinstance(values, list) or len(values) != blocks or not all(type(value) is float for value in values):
        raise ArtifactError(f"{header.path}: the key {key} is {shown(values)}, not a number for each block. {FIX}")
    for block, value in enumerate(values):
        yield name.format(block), rows_of_array(np.full(shape, value, np.float32))


def rope_divisors(path: Path) -> dict[str, Floats]:
    """Return the RoPE frequency divisors stored in the file, by tensor name."""
    return {
        tensor.name: _rows(header.path, tensor, 0, 1)[0]
        for header in headers_of(path)
        for tensor in header.tensors
        if tensor.name.startswith(ROPE)
    }


def _scales(headers: list[Header], slots: dict[str, Slot]) -> dict[str, Floats]:
    """Return the scales of matrices, one per matrix, and of their inputs (unused), by tensor name.

    llama.cpp stores NVFP4's global scale as ``X.scale`` and multiplies the product of ``X.weight`` by it.
    """
    given = {tensor.name: (header.path, tensor) for header in headers for tensor in header.tensors}
    found: dict[str, Floats] = {}
    for name in given.keys() - slots.keys():
        weight = re.sub(r"\.(input_)?scale$", ".weight", name)
        if weight != name and weight in given and weight in slots and not slots[weight].is_vector:
            path, tensor = given[name]
            found[name] = _rows(path, _of_shape(path, tensor, slots[weight].shape[:-2] or (1,)), 0, 1)[0]
    return found


def _rows(path: Path, tensor: Stored, start: int, stop: int, scale: Floats | None = None) -> Floats:
    """Read and dequantize rows of a tensor; mmap is avoided, since its pages would count as process memory."""
    row = tensor.nbytes // tensor.rows
    stored = np.fromfile(path, np.uint8, (stop - start) * row, offset=tensor.start + start * row)
    with reraise_as(f"{path}: the tensor {tensor.name} cannot be read", ArtifactError, FIX):
        values = dequantize(tensor.type, stored.reshape(stop - start, row), tensor.shape[-1])
    if scale is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # conversions refuse values that are not finite
            values *= scale.repeat(tensor.rows // len(scale))[start:stop, None]
    return values


def headers_of(path: Path) -> list[Header]:
    """Return the headers of all files of a split model; `path` is the first. Raises ArtifactError."""
    header = _plain(read_header(path))
    count = header.count("split.count", 0, MOST_FILES, 1)
    if count < 2:
        return [header]
    name = SPLIT.fullmatch(path.name)
    if name is None or int(name[2]) != 1 or int(name[3]) != count:
        raise ArtifactError(f"{path} is not the first of its {count} files. Give NAME-00001-of-{count:05d}.gguf.")
    parts = [path.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    if missing := next((part for part in parts if not part.is_file()), None):
        raise ArtifactError(f"{missing} is missing; the model has {count} files. Convert again.")
    headers = [header, *(read_header(part) for part in parts)]
    names = [tensor.name for header in headers for tensor in header.tensors]
    if len(set(names)) < len(names):
        raise ArtifactError(f"{path}: two tensors in its {count} files have the same name. Convert again.")
    return headers


def _plain(header: Header) -> Header:
    """Replace per-block lists of equal numbers by one number; raise ArtifactError for wrong value types."""
    keys, name = dict(header.keys), header.keys.get("general.architecture")
    own = f"{name}."
    if wrong := [key for key in header.unusual if key.startswith(own)]:
        raise ArtifactError(f"{header.path}: the key {wrong[0]} is not a uint32. {FIX}")
    for key, value in keys.items():
        if type(value) is float and key.startswith(own):
            if key.removeprefix(own) in shapes.NUMBERS:
                raise ArtifactError(f"{header.path}: the key {key} is {value}, not a uint32. {FIX}")
            if header.kinds[key] != (FLOAT32,):
                raise ArtifactError(f"{header.path}: the key {key} is not a float32. {FIX}")
    unlike, blocks = any(row.by_block for row in _rows_named(name)), keys.get(own + shapes.BLOCKS)
    for key in (own + key for key in shapes.BY_BLOCK):
        if not isinstance(values := keys.get(key), list):
            continue
        if len(values) == blocks and _differ(values, unlike, key != own + shapes.QUERY_HEADS):
            continue
        if not values or len(values) != blocks or values != [values[0]] * len(values):
            raise ArtifactError(
                f"{header.path}: the key {key} is {shown(values)}; quantkit reads it only if all blocks are alike"
            )
        keys[key] = values[0]
    return replace(header, keys=keys)


def _differ(values: list[Any], unlike: bool, lacking: bool) -> bool:
    """Return whether per-block numbers may differ: `unlike` architectures; `lacking` also allows 0 in some blocks."""
    whole = all(type(value) is int and 0 <= value <= MOST for value in values)
    kinds = len(set(values) - {0})
    return whole and (lacking and kinds == 1 if 0 in values else unlike and kinds > 1)


def _fitting_row(headers: list[Header], rows: list[Architecture]) -> tuple[Architecture, ModelShape, dict[str, Slot]]:
    """Return the architecture row that matches the file's tensors, the model's dimensions, and its slots by name."""
    there = {tensor.name for header in headers for tensor in header.tensors}
    shape = _shape_of(headers, rows[0].name, any("{head}" in part for row in rows for part in _parts(row)))
    if not there:  # a vocabulary
        return rows[0], shape, {}
    if shape.blocks > len(there):
        first = headers[0].path
        raise ArtifactError(f"{first} has keys for {shape.blocks} blocks, but {len(there)} tensors. {FIX}")

    choices = [(row, slots, _lacking(row, slots, there)) for row in rows for slots in [slots_of(row, shape)]]
    row, slots, missing = min(choices, key=lambda each: (len(each[2]), len(there - {slot.name for slot in each[1]})))
    if missing:
        raise ArtifactError(f"{headers[0].path} lacks {len(missing)} tensors, such as {missing[0]}. {FIX}")
    # Alternatives give one tensor different parts; the last one with all tensors wins.
    names = Counter(slot.name for slot in slots)
    alternatives = {slot.group for slot in slots if names[slot.name] > 1}
    partly = {slot.group for slot in slots if slot.name not in there} & alternatives
    return row, shape, {slot.name: slot for slot in slots if slot.group not in partly}


def _lacking(row: Architecture, slots: list[Slot], there: set[str]) -> list[str]:
    """List the tensors that are missing although every model of this architecture has them."""
    names = Counter(slot.name for slot in slots)
    needed = (slot for slot in slots if slot.condition is None or names[slot.name] > 1)
    return sorted({slot.name for slot in needed if row.head not in slot.parts} - there)


def _parts(row: Architecture) -> Iterator[str]:
    yield from row.parts
    for _, parts in row.per_block:
        yield from parts


def _shape_of(headers: list[Header], name: str, of_heads: bool) -> ModelShape:
    """Return the model's dimensions from its keys; `of_heads`: it may have per-head tensors. Raises ArtifactError."""
    first, own = headers[0], f"{name}."
    keys = {key.removeprefix(own): value for key, value in first.keys.items() if key.startswith(own)}

    def put(key: str, most: int = MOST, default: int | None = None, least: int = 1) -> None:
        if not (isinstance(keys.get(key), list) and key in shapes.BY_BLOCK):
            keys[key] = first.count(own + key, least, most, default)

    put(shapes.BLOCKS, MOST_BLOCKS)
    put(shapes.SHARED, keys[shapes.BLOCKS], 0, 0)
    put(shapes.HIDDEN)
    put(shapes.QUERY_HEADS)
    query = ModelShape(keys, 0).number(shapes.QUERY_HEADS)
    put(shapes.KEY_HEADS, default=query)
    put(shapes.KEY_LENGTH, default=keys[shapes.HIDDEN] // query)
    put(shapes.ROTATED, default=0, least=0)
    put(shapes.INNER, default=0, least=0)
    put(shapes.EXPERTS, MOST_EXPERTS, 0, 0)
    put(shapes.CONTEXT)
    listed = keys[shapes.QUERY_HEADS] if isinstance(keys[shapes.QUERY_HEADS], list) else [query] * keys[shapes.BLOCKS]
    if of_heads and sum(listed) > MOST_PIECES:
        raise ArtifactError(f"{first.path} counts {query} heads. {FIX}")
    tokens = first.keys.get("tokenizer.ggml.tokens")
    vocabulary = len(tokens) if isinstance(tokens, list) else first.count(own + "vocab_size", 1, MOST)
    gates = next((tensor.shape[0] for header in headers for tensor in header.tensors if tensor.name == GATE), query)
    return ModelShape(keys, vocabulary, gates // listed[0])


def _of_shape(path: Path, tensor: Stored, expected: tuple[int, ...]) -> Stored:
    """Restore a 1-row matrix that llama-quantize stored as a vector; raise ArtifactError for other shape mismatches."""
    if tensor.shape != expected and expected != (1, *tensor.shape):
        raise ArtifactError(
            f"{path}: the tensor {tensor.name} has the shape {tensor.shape}, but the file's keys require {expected}. "
            f"{FIX}"
        )
    return replace(tensor, shape=expected)
