"""Reading a GGUF file back: dequantized by ggml, in the names and the row order of the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoints.rows import Rows, rows_of_array
from quantkit.errors import ArtifactError
from quantkit.formats.gguf.architectures.expected_shapes import (
    INNER,
    KEY_HEADS,
    QUERY_HEADS,
    Sizes,
    expected_shape,
    is_flat,
    root_factor,
)
from quantkit.formats.gguf.architectures.hyperparameters import MOST_BLOCKS, MOST_EXPERTS, NUMBERS, SHARED
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.record import Architecture
from quantkit.formats.gguf.architectures.rope import MOST
from quantkit.formats.gguf.architectures.row_orders import (
    Heads,
    RowOrder,
    RowReader,
    in_order,
    joined,
    order_of,
)  # fmt: skip
from quantkit.formats.gguf.architectures.stacks import restacked
from quantkit.formats.gguf.architectures.tensor_map import FUNCTIONS, TensorSlot, is_taken, tensor_slots
from quantkit.formats.gguf.ggml.kquants import Floats
from quantkit.formats.gguf.ggml.library import dequantize
from quantkit.formats.gguf.header import FLOAT32, Header, Stored, read_header
from quantkit.untrusted import shown, told

ROPE = "rope_"  # how names of tensors begin that are computed
MOST_FILES = 99_999
CONVOLUTIONS = (".conv.weight", "conv1d.weight")  # of one channel each, which is a dimension of their tensors
MOST_PIECES = 1 << 20  # heads of all blocks together, where each has a matrix of its own
# Keys that may be a list with one number for each block, of which only equal numbers are read here.
BY_BLOCK = (QUERY_HEADS, KEY_HEADS, INNER)
GATE = "blk.0.attn_gate.weight"
FIX = "llama.cpp cannot load such a file. Fetch it again, or convert again from a config.json that fits the weights."
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama.cpp names the files of a split model


def read_file(path: Path) -> Iterator[tuple[str, Rows]]:
    """Yield (tensor name in transformers, its values in transformers' layout) of a GGUF file.

    Works from the file's own metadata; of a split model `path` is the first file. A tied head is not yielded. Raises
    ArtifactError for a broken file, an architecture that is not known, or tensors that are not those of its keys.
    """
    headers = headers_of(path)
    architecture = headers[0].text("general.architecture")
    rows = [replace(row, name=architecture) for row in _rows_of(headers[0], architecture)]
    if not rows:
        raise ArtifactError(f"{path} has the architecture {architecture!r}, which is not read here")
    slots = _slots(headers, rows)
    sizes = _sizes(headers, architecture)
    other = {name: lengths for row in rows for name, lengths in row.shapes.items()}
    blocks = headers[0].count(f"{architecture}.block_count", 1, MOST_BLOCKS)
    own_blocks = blocks - headers[0].count(f"{architecture}.{SHARED}", 0, blocks, 0)
    found: dict[str, Rows] = {}
    parted: dict[str, list[tuple[Rows, RowOrder]]] = {}
    for header in headers:
        for given in header.tensors:
            if given.name.startswith(ROPE):
                continue
            if given.name not in slots:
                raise ArtifactError(f"{header.path} holds the tensor {given.name}, which {architecture} does not have")
            expected = expected_shape(given.name, sizes, other)
            _refuse_shape(header.path, tensor := _of_one_row(given, expected), expected)
            slot = slots[tensor.name]
            if is_taken(slot.parts[0], rows[0], own_blocks):  # nothing reads it
                continue
            order = _order(header.path, tensor.name, slot.order, sizes, tensor.shape[-2:][0])
            if slot.split:
                assert order is not None
                plain = Rows(tensor.shape, partial(_rows, header.path, tensor, 0))
                parted.setdefault(slot.parts[0], []).append((plain, order))
                continue
            columns = _order(header.path, tensor.name, slot.columns, sizes, tensor.shape[-1])
            factor = root_factor(tensor.name, sizes, slot.root)
            found |= _values(header.path, tensor, slot, order, columns, factor)
    for part, pieces in parted.items():
        shape = (sum(len(order) for _, order in pieces), *pieces[0][0].shape[1:])
        found[part] = Rows(shape, joined([(plain.read, order) for plain, order in pieces]))
    stacks = {stack.part: stack for row in rows for stack in row.stacks}
    yield from restacked(found, stacks.values(), rows[0].blocks, blocks)
    for row in rows:
        for part, (key, shape) in row.scalars.items():
            yield from _scalars(headers[0], f"{row.blocks}.{{}}.{part}", key, shape, blocks)


def _rows_named(architecture: object) -> list[Architecture]:
    """What is known of the architectures of transformers that llama.cpp calls so."""
    return [row for row in KNOWN.values() if architecture and architecture in (row.name, row.name_with_experts)]


def _rows_of(header: Header, architecture: object) -> list[Architecture]:
    """Of those the ones whose mark a file has; of a file without marks those without."""
    rows = _rows_named(architecture)
    marked = [row for row in rows if row.mark and f"{architecture}.{row.mark}" in header.keys]
    return marked or [row for row in rows if not row.mark]


def _scalars(header: Header, name: str, key: str, shape: tuple[int, ...], blocks: int) -> Iterator[tuple[str, Rows]]:
    values = header.keys.get(key)
    if not isinstance(values, list) or len(values) != blocks or not all(type(value) is float for value in values):
        raise ArtifactError(f"{header.path}: the key {key} is {shown(values)}, not a number for each block. {FIX}")
    for block, value in enumerate(values):
        yield name.format(block), rows_of_array(np.full(shape, value, np.float32))


def rope_divisors(path: Path) -> dict[str, Floats]:
    """The computed tensors of a GGUF file, which are divisors of the rope, by their names."""
    return {
        tensor.name: _rows(header.path, tensor, 0, 0, 1)[0]
        for header in headers_of(path)
        for tensor in header.tensors
        if tensor.name.startswith(ROPE)
    }


def _order(path: Path, name: str, order: str | None, sizes: Sizes, count: int) -> RowOrder | None:
    if order is None:
        return None
    with told(f"{path}: the rows of {name} cannot be put in order", ArtifactError, FIX):
        return order_of(order, sizes.heads, sizes.linear_heads, sizes.index_heads, count)


def _values(
    path: Path, tensor: Stored, slot: TensorSlot, order: RowOrder | None, columns: RowOrder | None, factor: float
) -> dict[str, Rows]:
    back = None if order is None else np.argsort(order)
    if len(tensor.shape) == 1 or is_flat(tensor.name):
        with np.errstate(invalid="ignore"):  # what is not finite is refused by whoever reads it
            values = _rows(path, tensor, 0, 0, tensor.rows).reshape(-1) - np.float32(slot.shift)
            values = values / np.float32(factor)
        values = values if slot.function is None else FUNCTIONS[slot.function][1](values)
        return {slot.parts[0]: rows_of_array((values if back is None else values[back]).reshape(slot.form))}
    found = {}
    rows, width = tensor.rows // len(slot.parts), tensor.shape[-1]
    for number, part in enumerate(slot.parts):
        if slot.stacked and len(tensor.shape) == 2:  # biases
            found[part] = rows_of_array(_rows(path, tensor, number, 0, 1)[0])
            continue
        read = in_order(partial(_rows, path, tensor, number * rows), back)
        if columns is not None:
            read = partial(_with_columns, read, np.argsort(columns))
        if part.endswith(CONVOLUTIONS):
            found[part] = Rows((rows, 1, width), partial(_of_convolution, read))
        else:
            found[part] = _transposed(read, rows, width) if slot.transposed else Rows((rows, width), read)
    return found


def _of_convolution(read: RowReader, start: int, stop: int) -> Floats:
    values: Floats = read(start, stop)[:, None]
    return values


def _with_columns(read: RowReader, columns: RowOrder, start: int, stop: int) -> Floats:
    values: Floats = read(start, stop)[:, columns]
    return values


def _transposed(read: RowReader, rows: int, columns: int) -> Rows:
    """What `read` reads, turned; all of it is read once, when it is first asked for."""
    whole = cache(lambda: np.ascontiguousarray(read(0, rows).T))
    return Rows((columns, rows), lambda start, stop: whole()[start:stop])


def _rows(path: Path, tensor: Stored, first: int, start: int, stop: int) -> Floats:
    """Rows from `first + start` on of a tensor. They are read, not mapped: mapped pages would count as memory."""
    row = tensor.nbytes // tensor.rows
    stored = np.fromfile(path, np.uint8, (stop - start) * row, offset=tensor.start + (first + start) * row)
    with told(f"{path}: the tensor {tensor.name} cannot be read", ArtifactError, FIX):
        return dequantize(tensor.type, stored.reshape(stop - start, row), tensor.shape[-1])


def headers_of(path: Path) -> list[Header]:
    """The headers of all files of a model, of which `path` is the first or the only one; raises ArtifactError."""
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
        raise ArtifactError(f"{path}: the name of a tensor comes twice in its {count} files. Convert again.")
    return headers


def _plain(header: Header) -> Header:
    """`header` with one number where its keys list equal ones for every block."""
    keys = dict(header.keys)
    own = f"{keys.get('general.architecture')}."
    if wrong := [key for key in header.unusual if key.startswith(own)]:
        raise ArtifactError(f"{header.path}: the key {wrong[0]} is no uint32. {FIX}")
    for key, value in keys.items():
        if type(value) is float and key.startswith(own):
            if key.removeprefix(own) in NUMBERS:
                raise ArtifactError(f"{header.path}: the key {key} is {value}, and no uint32. {FIX}")
            if header.kinds[key] != (FLOAT32,):
                raise ArtifactError(f"{header.path}: the key {key} is no float32. {FIX}")
    unlike = any(row.by_block for row in _rows_named(keys.get("general.architecture")))
    for name in BY_BLOCK:
        key = f"{keys.get('general.architecture')}.{name}"
        if not isinstance(values := keys.get(key), list):
            continue
        blocks = keys.get(f"{keys['general.architecture']}.block_count")
        if len(values) == blocks and _differ(values, unlike, name != QUERY_HEADS):
            continue
        if not values or len(values) != blocks or values != [values[0]] * len(values):
            raise ArtifactError(
                f"{header.path}: the key {key} is {shown(values)}; only blocks that are all alike are read here"
            )
        keys[key] = values[0]
    return replace(header, keys=keys)


def _differ(values: list[Any], unlike: bool, lacking: bool) -> bool:
    """Whether a number of each block is one of blocks that differ: 0 in those without it, where some may be `lacking`
    it, or, where they may be `unlike` one another, any.
    """
    whole = all(type(value) is int and 0 <= value <= MOST for value in values)
    kinds = len(set(values) - {0})
    return whole and (lacking and kinds == 1 if 0 in values else unlike and kinds > 1)


def _slots(headers: list[Header], rows: list[Architecture]) -> dict[str, TensorSlot]:
    """By name in the file, of all architectures of transformers that llama.cpp calls so; all of one must be there."""
    first, name = headers[0], rows[0].name
    there = {tensor.name for header in headers for tensor in header.tensors}
    blocks = first.count(f"{name}.block_count", 1, MOST_BLOCKS)
    experts = first.count(f"{name}.expert_count", 0, MOST_EXPERTS, 0)
    if not there:  # a vocabulary
        return {}
    if blocks > len(there):
        raise ArtifactError(f"{first.path} counts {blocks} blocks and holds {len(there)} tensors. {FIX}")
    heads = _heads_of(first, f"{name}.{QUERY_HEADS}", blocks) if any(row.heads for row in rows) else []
    groups = [tensor_slots(row, blocks, experts, heads, head=True) for row in rows]
    missing = [sorted(_needed(slots, row) - there) for slots, row in zip(groups, rows, strict=True)]
    if least := min(missing, key=len):
        raise ArtifactError(f"{first.path} lacks {len(least)} tensors, such as {least[0]}. {FIX}")
    slots = [slot for group in groups for slot in group]
    # Of alternatives the one that the file has wholly; a later one may hold all names of an earlier.
    alternatives = {slot.group for slot in slots if slot.group is not None}
    whole = alternatives - {slot.group for slot in slots if slot.name not in there}
    chosen = max(whole, default=None)
    return {slot.name: slot for slot in slots if slot.group in (None, chosen)}


def _heads_of(header: Header, key: str, blocks: int) -> list[int]:
    """The heads of each block, which have a matrix each."""
    listed = header.keys.get(key)  # of numbers, as many as blocks (`_plain`)
    heads = listed if isinstance(listed, list) else [header.count(key, 1, MOST)] * blocks
    if sum(heads) > MOST_PIECES:
        raise ArtifactError(f"{header.path} counts {max(heads)} heads. {FIX}")
    return heads


def _needed(slots: list[TensorSlot], row: Architecture) -> set[str]:
    """The tensors that every file of such a model has; of alternatives those of the first."""
    return {
        slot.name for slot in slots if slot.setting is None and slot.group in (None, 0) and row.head not in slot.parts
    }


def _sizes(headers: list[Header], architecture: str) -> Sizes:
    first = headers[0]

    def number(key: str, default: int | None = None, least: int = 1) -> int:
        return first.count(f"{architecture}.{key}", least, MOST, default)

    hidden = number("embedding_length")

    def most(key: str, default: int | None, least: int = 1) -> int:
        listed = first.keys.get(f"{architecture}.{key}")
        return max(listed) if isinstance(listed, list) else number(key, default, least)

    query, listed = most(QUERY_HEADS, None), first.keys.get(f"{architecture}.{QUERY_HEADS}")
    size = number("attention.key_length", hidden // query)
    heads = Heads(query, most(KEY_HEADS, query), size, number("rope.dimension_count", 0, 0))
    gates = next((tensor.shape[0] for header in headers for tensor in header.tensors if tensor.name == GATE), query)
    tokens = first.keys.get("tokenizer.ggml.tokens")
    vocabulary = len(tokens) if isinstance(tokens, list) else number("vocab_size")
    inner = most(INNER, 0, 0)
    own = f"{architecture}."
    whole = {key.removeprefix(own): value for key, value in first.keys.items() if key.startswith(own)}
    return Sizes(
        vocabulary, number("context_length"), hidden, inner, heads, number("expert_count", 0, 0),
        {key: value for key, value in whole.items() if type(value) is int},
        {key: value for key, value in whole.items() if isinstance(value, list)},
        gates // (listed[0] if isinstance(listed, list) else query),
    )  # fmt: skip


def _of_one_row(tensor: Stored, expected: tuple[int, ...]) -> Stored:
    """A matrix of one row, which llama-quantize writes as a vector."""
    return replace(tensor, shape=expected) if expected == (1, *tensor.shape) else tensor


def _refuse_shape(path: Path, tensor: Stored, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ArtifactError(
            f"{path}: the tensor {tensor.name} has the shape {tensor.shape}, and the file's keys ask for {expected}. "
            f"{FIX}"
        )
