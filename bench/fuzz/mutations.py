"""Damage, drawn from a generator: to a value of JSON or YAML, to bytes, to the header of a safetensors file."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

MARK = "@@raw-{}@@"  # stands in a value for text that no serializer writes
DEEP = 100_000
LONG = "x" * 100_000
NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 255, 1_000_000_000, 2**31, 2**32, 2**62, -(2**63), 0.5, -0.0, 1e-300, 1e300,
    "", " ", "\0", "a\nb", "\x1b[31mred", "../../etc/passwd", "\ud800", "é" * 300, LONG, "null", "nan", "<s>", "{{",
    [], {}, [[]], [None], [{}], {"": None}, {"a": {"b": 1}}, [0], [-1], ["a"], [1, 2, 3], list(range(1000)),
)  # fmt: skip
# Text of JSON, which YAML reads as well.
RAW = (
    "Infinity", "-Infinity", "NaN", "1" + "0" * 400, "1" + "0" * 5000, "1e400", "-1e400",
    "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * 300 + "]" * 300, '"\\ud83d"', "'single'", "",
)  # fmt: skip
YAML_RAW = (
    "!!int x", "2024-02-30", "!!python/object/apply:os.system ['true']", "*nothing", "&a [*a, *a]", "!!float .inf",
    "!!set {a, b}", "!!binary '####'", "~", "!!timestamp '0000-99-99'", "0x", "1:60:90", ".nan", "!<tag:x> 1",
)  # fmt: skip
BOMB = tuple(zip("abcdefgh", "bcdefghi", strict=True))  # each stands for nine of the one before
YAML_HEADS = (
    "<<: *missing\n",
    "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in BOMB),
    "? [1, 2]\n: 3\n",
    "%YAML 9.9\n---\n",
    "--- a\n--- b\n",
    "\t- tab\n",
    "1: 2\nnull: 3\n",
    "2024-02-30: 1\n",
)  # fmt: skip


class Damage:
    """Draws changes of one value; `notes` say in words what was done."""

    def __init__(self, draw: random.Random, raws: tuple[str, ...] = RAW) -> None:
        self.draw, self.raws = draw, raws
        self.notes: list[str] = []
        self._texts: dict[str, str] = {}

    def value(self, old: Any) -> Any:
        """A value to stand in the place of `old`: nasty, or near to it."""
        kind = self.draw.random()
        if kind < 0.2:
            mark = MARK.format(len(self._texts))
            self._texts[mark] = self.draw.choice(self.raws)
            return mark
        if kind < 0.45:
            return self._near(old)
        return copy.deepcopy(self.draw.choice(NASTY))

    def _near(self, old: Any) -> Any:
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return self.draw.choice((old + 1, old - 1, 2 * old, old // 2, -old, float(old), str(old), [old]))
        if isinstance(old, float):
            return self.draw.choice((-old, old * 1e30, 0.0, str(old), [old], round(old), old + 1))
        if isinstance(old, str):
            choices = (
                old + "x",
                old[:-1],
                old.upper(),
                (old * 1000)[:200_000],
                f" {old}",
                [old],
                {"a": old},
                old.encode("utf-8", "surrogatepass").hex(),
            )
            return self.draw.choice(choices)
        if isinstance(old, list):
            return self.draw.choice((old[:-1], old + old, old[::-1], {"a": old}, [old], old[0] if old else 0))
        if isinstance(old, dict):
            return self.draw.choice((list(old), list(old.values()), [old], {str(k).upper(): v for k, v in old.items()}))
        return self.draw.choice((0, "null", [None], {}))

    def change(self, root: Any, places: tuple[str, ...] = ()) -> Any:
        """A copy of `root` with one thing changed; `places` are keys of `root` that are chosen first."""
        root = copy.deepcopy(root)
        if self.draw.random() < 0.02 or not isinstance(root, dict | list) or not root:
            self.notes.append("the whole")
            return self.value(root)
        holder, key, path = self._place(root, places)
        what = self.draw.random()
        if what < 0.12:
            self._remove(holder, key)
            self.notes.append(f"{path} removed")
        elif what < 0.18 and isinstance(holder, dict):
            name = self.draw.choice((f"{key}x", "", str(key).upper(), LONG, "a\nb", "\0"))
            holder[name] = holder.pop(key)
            self.notes.append(f"{path} renamed to {name[:40]!r}")
        elif what < 0.24 and isinstance(holder, dict) and isinstance(key, str):
            mark = MARK.format(len(self._texts))
            self._texts[mark] = ""
            holder[mark + key] = self.value(holder[key])
            self.notes.append(f"{path} twice, also as {_short(holder[mark + key], self._texts)}")
        elif what < 0.30:
            other, at, where = self._place(root, places)
            holder[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(holder[key])
            self.notes.append(f"{path} and {where} swapped")
        elif what < 0.34 and isinstance(holder, dict):
            name = self.draw.choice(("unknown_key", "auto_map", "quantization_config", "__class__", "name", "type"))
            holder[name] = self.value(holder[key])
            self.notes.append(f"{path} beside {name} = {_short(holder[name], self._texts)}")
        else:
            new = self.value(holder[key])
            self.notes.append(f"{path} = {_short(new, self._texts)} (was {_short(holder[key], self._texts)})")
            holder[key] = new
        return root

    def _place(self, root: Any, places: tuple[str, ...]) -> tuple[Any, Any, str]:
        """A place in `root`, near the top more often than deep in it: what holds it, its key, and both in words."""
        holder, path = root, ""
        known = [place for place in places if isinstance(root, dict) and place in root]
        while True:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = self.draw.choice(known or list(keys))
            known, path = [], f"{path}[{key!r:.60}]"
            inner = holder[key]
            if not isinstance(inner, dict | list) or not inner or self.draw.random() < 0.3:
                return holder, key, path
            holder = inner

    def _remove(self, holder: Any, key: Any) -> None:
        del holder[key]

    def text(self, dumped: str) -> str:
        """`dumped` with the raw texts in their places."""
        for mark, raw in self._texts.items():
            dumped = dumped.replace(f'"{mark}"', raw).replace(f"'{mark}'", raw).replace(mark, raw)
        return dumped


def _short(value: Any, texts: dict[str, str]) -> str:
    if isinstance(value, str) and value in texts:
        return f"raw {texts[value][:30]}{'...' if len(texts[value]) > 30 else ''}"
    shown = repr(value)
    return shown if len(shown) < 80 else f"{shown[:60]}... ({len(shown)} characters)"


def json_text(damage: Damage, value: Any, places: tuple[str, ...] = ()) -> bytes:
    """JSON with one to three changes in it."""
    for _ in range(damage.draw.choice((1, 1, 1, 2, 3))):
        value = damage.change(value, places)
    return damage.text(json.dumps(value)).encode("utf-8", "surrogatepass")


def yaml_text(damage: Damage, value: Any) -> bytes:
    """YAML with one to three changes in it, or with a head that parsers stumble over."""
    import yaml

    for _ in range(damage.draw.choice((1, 1, 2))):
        value = damage.change(value)
    text = damage.text(
        yaml.safe_dump(json.loads(json.dumps(value)), sort_keys=False, allow_unicode=True, width=1 << 20)
    )
    if damage.draw.random() < 0.12:
        head = damage.draw.choice(YAML_HEADS)
        damage.notes.append(f"head {head[:30]!r}")
        text = head + text
    return text.encode("utf-8", "surrogatepass")


def raw_bytes(damage: Damage, data: bytes, head: int = 0) -> bytes:
    """The bytes with one damage that knows no structure; more often within the first `head` where that is given."""
    draw = damage.draw
    size = len(data)
    reach = min(size, head) if head and draw.random() < 0.8 else size
    at = draw.randrange(max(1, reach))
    kind = draw.choice(
        ("flip", "flip", "flip", "cut", "insert", "double", "zero", "remove", "utf16", "bom", "empty", "join")
    )
    damage.notes.append(f"{kind} at byte {at} of {size}")
    if kind == "flip":
        changed = bytearray(data or b"\0")
        for _ in range(draw.choice((1, 1, 4, 64))):
            changed[draw.randrange(max(1, reach))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    many = draw.choice((1, 7, 8, 64, 1000, 65536))
    simple: dict[str, Callable[[], bytes]] = {
        "cut": lambda: data[:at],
        "insert": lambda: data[:at] + draw.randbytes(min(many, 1000)) + data[at:],
        "double": lambda: data[: at + many] + data[at:],
        "zero": lambda: data[:at] + bytes(min(many, size - at)) + data[at + many :],
        "remove": lambda: data[:at] + data[at + many :],
        "utf16": lambda: data.decode("latin1").encode("utf-16"),
        "bom": lambda: b"\xef\xbb\xbf" + data,
        "empty": lambda: b"",
        "join": lambda: data + data,
    }
    return simple[kind]()


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its tensors' bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def safetensors_bytes(damage: Damage, data: bytes) -> bytes:
    """A safetensors file with damage to its length field, its header, one entry of it, or its values."""
    draw, (header, tensors) = damage.draw, parts_of(data)
    names = [name for name in header if name != "__metadata__"]
    kind = draw.choice(
        ("raw", "length", "header", "header", "entry", "entry", "entry", "entry", "values", "values", "tail")
    )
    if kind == "raw":
        return raw_bytes(damage, data, 4096)
    if kind == "tail":
        damage.notes.append("bytes behind the last tensor")
        return data + draw.randbytes(draw.choice((1, 8, 4096)))
    if kind == "values":
        return _packed(json.dumps(header).encode(), _other_values(damage, header[draw.choice(names)], tensors))
    if kind == "entry":
        _other_entry(damage, header, names)
        text = damage.text(json.dumps(header)).encode("utf-8", "surrogatepass")
    else:
        text = json_text(damage, header) if kind == "header" else json.dumps(header).encode()
    if kind == "length":
        length = draw.choice(
            (0, 1, len(text) - 1, len(text) + 1, len(text) + 8, len(data), 2**31, 2**32, 2**63, 2**64 - 1, 10**8)
        )
        damage.notes.append(f"header length {length}, is {len(text)}")
        return struct.pack("<Q", length) + text + tensors
    return _packed(text, tensors)


def _packed(text: bytes, tensors: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + tensors


def _other_entry(damage: Damage, header: dict[str, Any], names: list[str]) -> None:
    draw = damage.draw
    name, other = draw.choice(names), draw.choice(names)
    entry, second = header[name], header[other]
    kind = draw.choice(("dtype", "shape", "offsets", "overlap", "rename", "remove", "flat", "turned", "swap", "copy"))
    note = f"tensor {name}: {kind}"
    if kind == "dtype":
        entry["dtype"] = draw.choice(
            ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "U16", "f32", 5, None)
        )
        note += f" {entry['dtype']}"
    elif kind == "shape":
        at = draw.randrange(max(1, len(entry["shape"])))
        entry["shape"][at : at + 1] = [damage.value((entry["shape"] or [1])[at])]
    elif kind == "offsets":
        at = draw.randrange(2)
        entry["data_offsets"][at] = damage.value(entry["data_offsets"][at])
    elif kind == "overlap":
        entry["data_offsets"] = list(second["data_offsets"])
        entry["shape"], entry["dtype"] = list(second["shape"]), second["dtype"]
    elif kind == "rename":
        header[draw.choice((f"{name}x", f"model.{name}", name.replace("layers.1", "layers.7"), "\n", LONG))] = (
            header.pop(name)
        )
    elif kind == "remove":
        del header[name]
    elif kind == "flat":
        entry["shape"] = [math.prod(entry["shape"])]
    elif kind == "turned":
        entry["shape"] = entry["shape"][::-1]
    elif kind == "swap":
        header[name], header[other] = second, entry
    else:
        header[draw.choice(("more.weight", "model.layers.2.mlp.up_proj.weight"))] = dict(entry)
    damage.notes.append(note)


def _other_values(damage: Damage, entry: dict[str, Any], tensors: bytes) -> bytes:
    start, end = entry["data_offsets"]
    pieces = {
        "NaN": {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\x7f", "F16": b"\0\x7e"},
        "infinity": {"F32": b"\0\0\x80\x7f", "BF16": b"\x80\x7f", "F16": b"\0\x7c"},
        "zeros": {},
        "largest": {"F32": b"\xff\xff\x7f\x7f", "BF16": b"\x7f\x7f", "F16": b"\xff\x7b"},
    }
    kind = damage.draw.choice(list(pieces))
    piece = pieces[kind].get(entry["dtype"], b"\0\0")
    count = damage.draw.choice((1, (end - start) // len(piece)))
    damage.notes.append(f"{count} {kind} in bytes {start} to {end}")
    return tensors[:start] + (piece * count)[: end - start] + tensors[start + len(piece) * count :]
