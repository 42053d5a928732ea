"""Damage to GGUF files: to a key, a type, a count, the vocabulary, a tensor's entry, or to bytes that nobody looks at.

The header is taken apart and put together again, with values cut to the width that the file has for them.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from typing import Any

from bench.fuzz.mutations import Damage, raw_bytes

LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NUMBERS = (0, 1, 2, 3, 7, 255, 65535, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-300, 1e30, float("inf"), float("-inf"), float("nan"), 0.5)
STRINGS = ("", "x", "llama", "mamba", "gpt2", "bert", "\0", "a\nb", "\x1b[31m", "é" * 100, "x" * 100_000, "../../x")


@dataclass
class Value:
    """A value of a key: its type by number, of an array also that of its entries; `count` where the file lies of it."""

    type: int
    value: Any
    inner: int = 0
    count: int | None = None


@dataclass
class File:
    """A GGUF file taken apart. `counts` are (tensors, keys) where the header lies of them."""

    version: int
    keys: list[tuple[bytes, Value]]
    tensors: list[list[Any]]  # name, dimensions, type, offset
    data: bytes
    counts: list[int | None] = field(default_factory=lambda: [None, None])


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def text(self) -> bytes:
        (size,) = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at]

    def value(self, kind: int) -> Any:
        return self.text() if kind == STRING else self.take(LETTERS[kind])[0]


def parse(data: bytes) -> File:
    """Take a sound file apart."""
    reader = _Reader(data)
    _, version, tensors, keys = reader.take("IIQQ")
    pairs = []
    for _ in range(keys):
        name, (kind,) = reader.text(), reader.take("I")
        if kind == ARRAY:
            inner, count = reader.take("IQ")
            pairs.append((name, Value(kind, [reader.value(inner) for _ in range(count)], inner)))
        else:
            pairs.append((name, Value(kind, reader.value(kind))))
    entries = []
    for _ in range(tensors):
        name, (rank,) = reader.text(), reader.take("I")
        entries.append([name, list(reader.take(f"{rank}Q")), *reader.take("IQ")])
    start = -(-reader.at // 32) * 32
    return File(version, pairs, entries, data[start:])


def dump(file: File) -> bytes:
    """Put it together again."""
    counts = [
        len(real) if lie is None else lie for lie, real in zip(file.counts, (file.tensors, file.keys), strict=True)
    ]
    parts = [struct.pack("<4sIQQ", b"GGUF", file.version & 0xFFFFFFFF, *(count & (2**64 - 1) for count in counts))]
    for name, value in file.keys:
        parts += [_text(name), struct.pack("<I", value.type & 0xFFFFFFFF)]
        if value.type == ARRAY and isinstance(value.value, list):
            count = len(value.value) if value.count is None else value.count
            parts.append(struct.pack("<IQ", value.inner & 0xFFFFFFFF, count & (2**64 - 1)))
            parts += [_one(value.inner, item) for item in value.value]
        else:
            parts.append(_one(value.type, value.value))
    for name, dimensions, kind, offset in file.tensors:
        parts += [
            _text(name),
            struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *(d & (2**64 - 1) for d in dimensions)),
        ]
        parts.append(struct.pack("<IQ", kind & 0xFFFFFFFF, offset & (2**64 - 1)))
    head = b"".join(parts)
    return head + bytes(-len(head) % 32) + file.data


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _one(kind: int, value: Any) -> bytes:
    if isinstance(value, bytes) or kind == STRING:
        return _text(value if isinstance(value, bytes) else str(value).encode())
    if isinstance(value, list):
        return b"".join(_one(kind, item) for item in value[:100])
    letter = LETTERS.get(kind, "I")
    if letter in "fd":
        try:
            return struct.pack("<" + letter, float(value))
        except OverflowError:
            return struct.pack("<" + letter, float("inf"))
    if letter == "?":
        return bytes([int(bool(value))])
    size = struct.calcsize("<" + letter)
    whole = int(value) if value == value and abs(value) != float("inf") else 0
    return (whole & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def gguf_bytes(damage: Damage, data: bytes) -> bytes:
    """A GGUF file with one damage, or two."""
    if damage.draw.random() < 0.15:
        return raw_bytes(damage, data, 2048)
    file = parse(data)
    for _ in range(damage.draw.choice((1, 1, 1, 2))):
        kind = damage.draw.choice(
            ("key", "key", "key", "key", "tensor", "tensor", "tensor", "count", "vocabulary", "values", "order")
        )
        {
            "key": _key,
            "tensor": _tensor,
            "count": _count,
            "vocabulary": _vocabulary,
            "values": _values,
            "order": _order,
        }[kind](damage, file)
    return dump(file)


def _key(damage: Damage, file: File) -> None:
    draw = damage.draw
    at = draw.randrange(len(file.keys))
    name, value = file.keys[at]
    kind = draw.choice(("value", "value", "value", "type", "remove", "twice", "rename", "array"))
    note = f"key {name.decode()}: {kind}"
    if kind == "value":
        file.keys[at] = name, Value(value.type, _other(draw, value), value.inner)
        note += f" {str(file.keys[at][1].value)[:60]}"
    elif kind == "type":
        other = draw.choice((*LETTERS, STRING, 13, 2**31))
        if value.type == ARRAY and draw.random() < 0.7:
            file.keys[at] = name, Value(ARRAY, value.value, other)
        else:
            file.keys[at] = name, Value(other, value.value if not isinstance(value.value, list) else 1)
        note += f" {other}"
    elif kind == "remove":
        del file.keys[at]
    elif kind == "twice":
        file.keys.append((name, Value(value.type, _other(draw, value), value.inner)))
    elif kind == "rename":
        other_name = draw.choice((b"", name + b"x", b"\xff\xfe", name.upper(), draw.choice(file.keys)[0]))
        file.keys[at] = other_name, value
        note += f" {other_name!r}"
    elif value.type == ARRAY:
        file.keys[at] = (
            name,
            Value(ARRAY, value.value, value.inner, draw.choice((0, 1, len(value.value) + 1, *NUMBERS[-5:]))),
        )
        note += f" count {file.keys[at][1].count}"
    else:
        file.keys[at] = name, Value(ARRAY, [value.value] * draw.choice((0, 1, 2)), value.type)
    damage.notes.append(note)


def _other(draw: random.Random, value: Value) -> Any:
    if value.type == ARRAY:
        items = list(value.value)
        if not items:
            return items
        at = draw.randrange(len(items))
        kind = draw.choice(("one", "all", "shorter", "longer", "none", "turned"))
        if kind == "one":
            items[at] = _other(draw, Value(value.inner, items[at]))
        elif kind == "all":
            items = [items[at]] * len(items)
        elif kind == "shorter":
            items = items[:at]
        elif kind == "longer":
            items = items + items
        elif kind == "none":
            items = []
        else:
            items = items[::-1]
        return items
    if value.type == STRING or isinstance(value.value, bytes):
        return draw.choice((*(text.encode() for text in STRINGS), b"\xff\xff", value.value[:-1], value.value + b"x"))
    if value.type in (6, 12):
        return draw.choice((*FLOATS, -value.value, value.value * 2))
    if value.type == 7:
        return not value.value
    return draw.choice((*NUMBERS, value.value + 1, value.value - 1, value.value * 2))


def _tensor(damage: Damage, file: File) -> None:
    draw = damage.draw
    at = draw.randrange(len(file.tensors))
    tensor = file.tensors[at]
    kind = draw.choice(
        ("dimension", "dimension", "rank", "type", "offset", "offset", "overlap", "rename", "remove", "twice", "turned")
    )
    damage.notes.append(f"tensor {tensor[0].decode()}: {kind}")
    if kind == "dimension":
        place = draw.randrange(len(tensor[1]))
        tensor[1][place] = draw.choice((*NUMBERS, tensor[1][place] + 1, tensor[1][place] * 2, tensor[1][place] // 2))
    elif kind == "rank":
        tensor[1] = draw.choice(([], [1] * 5, [*tensor[1], 1], [*tensor[1], 0], tensor[1] * 20))
    elif kind == "type":
        tensor[2] = draw.choice((0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 15, 16, 24, 26, 28, 30, 31, 36, 99, 2**31))
    elif kind == "offset":
        tensor[3] = draw.choice((*NUMBERS, tensor[3] + 1, tensor[3] + 32, tensor[3] - 32))
    elif kind == "overlap":
        tensor[3] = draw.choice(file.tensors)[3]
    elif kind == "rename":
        tensor[0] = draw.choice(
            (b"", tensor[0] + b"x", b"\xff", b"x" * 64, b"blk.999.attn_q.weight", draw.choice(file.tensors)[0])
        )
    elif kind == "remove":
        del file.tensors[at]
    elif kind == "twice":
        file.tensors.append(list(tensor))
    else:
        tensor[1] = tensor[1][::-1]


def _count(damage: Damage, file: File) -> None:
    draw = damage.draw
    kind = draw.choice(("tensors", "keys", "version", "cut", "more"))
    damage.notes.append(f"count {kind}")
    if kind == "version":
        file.version = draw.choice((0, 1, 2, 4, 2**24 * 3, 2**32 - 1))
    elif kind == "cut":
        file.data = file.data[: draw.randrange(len(file.data) + 1)]
    elif kind == "more":
        file.data += draw.randbytes(draw.choice((1, 32, 4096)))
    else:
        place = 0 if kind == "tensors" else 1
        real = len((file.tensors, file.keys)[place])
        file.counts[place] = draw.choice((0, real - 1, real + 1, *NUMBERS[-6:]))


def _vocabulary(damage: Damage, file: File) -> None:
    draw = damage.draw
    names = [at for at, (name, value) in enumerate(file.keys) if name.startswith(b"tokenizer.") and value.type == ARRAY]
    if not names:
        return _key(damage, file)
    at = draw.choice(names)
    name, value = file.keys[at]
    items = list(value.value)
    kind = draw.choice(("equal", "some equal", "empty", "shorter", "longer", "shuffled", "bytes"))
    damage.notes.append(f"vocabulary {name.decode()}: {kind}")
    if kind == "equal":
        items = [items[-1]] * len(items)
    elif kind == "some equal":
        items[10:20] = [items[5]] * 10
    elif kind == "empty":
        items = [b"" if value.inner == STRING else 0] * len(items)
    elif kind == "shorter":
        items = items[: draw.randrange(len(items))]
    elif kind == "longer":
        items += [items[0]] * draw.choice((1, 1000))
    elif kind == "shuffled":
        draw.shuffle(items)
    else:
        items = [
            draw.randbytes(4) if value.inner == STRING else _other(draw, Value(value.inner, items[0])) for _ in items
        ]
    file.keys[at] = name, Value(ARRAY, items, value.inner)


def _values(damage: Damage, file: File) -> None:
    draw = damage.draw
    data = bytearray(file.data)
    start = draw.randrange(len(data))
    piece = draw.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\x7e", b"\0\x7c", b"\xff\xff\xff\xff", bytes(32)))
    count = draw.choice((1, 100))
    data[start : start + len(piece) * count] = (piece * count)[: len(data) - start]
    damage.notes.append(f"values at {start} = {count} x {piece.hex()}")
    file.data = bytes(data)


def _order(damage: Damage, file: File) -> None:
    what = damage.draw.choice((file.keys, file.tensors))
    damage.notes.append("another order of " + ("keys" if what is file.keys else "tensors"))
    damage.draw.shuffle(what)  # type: ignore[arg-type]
