"""The journal of a spool: which decoder blocks are finished, where their tensors lie, and whether they are sound.

See spool.py, which writes it.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

from quantkit.checkpoints.safetensors import ITEM_BYTES, MOST_DIMENSIONS
from quantkit.errors import ArtifactError
from quantkit.untrusted import parse_json

SPOOL, JOURNAL = "tensors.spool", "tensors.journal"
CHUNK = 1 << 24  # bytes that are read at a time


def read_journal(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of the journal whose tensors lie in the spool, and how many of its bytes they take."""
    journal, spool = folder / JOURNAL, folder / SPOOL
    lines: list[dict[str, Any]] = []
    length = 0
    if not journal.is_file() or not spool.is_file():
        return lines, length
    size = spool.stat().st_size
    for text in journal.read_bytes().splitlines(keepends=True):
        line = _parsed(text, journal)
        start = lines[-1]["end"] if lines else 0
        if not _sound(line, len(lines), start, size):
            break
        lines.append(line)
        length += len(text)
    return lines, length


def line_of(values: dict[str, Any]) -> str:
    """A line of the journal: `values` as JSON, and behind them the CRC-32 of these bytes."""
    text = json.dumps(values)
    return f"{text} {zlib.crc32(text.encode()):08x}\n"


def _parsed(line: bytes, journal: Path) -> Any:
    """What `line_of` wrote, or None where it is not that to the last byte."""
    text, _, crc = line.rpartition(b" ")
    if crc != b"%08x\n" % zlib.crc32(text):
        return None
    try:
        return parse_json(text, str(journal), ArtifactError)
    except ArtifactError:
        return None


def _sound(line: Any, block: int, start: int, size: int) -> bool:
    """Whether a line is what spool.py writes for `block`, with tensors that lie between `start` and `size`."""
    if not isinstance(line, dict) or set(line) != {"block", "end", "crc32", "tensors", "state"}:
        return False
    end, tensors = line["end"], line["tensors"]
    if not all(_count(line[name]) for name in ("block", "end", "crc32")) or not isinstance(line["state"], dict):
        return False
    if line["block"] != block or not start <= end <= size or not isinstance(tensors, list):
        return False
    return all(_lies_within(tensor, start, end) for tensor in tensors)


def _lies_within(tensor: Any, start: int, end: int) -> bool:
    """Whether an entry is [name, dtype, shape, first byte], and all its bytes lie between `start` and `end`."""
    if not isinstance(tensor, list) or len(tensor) != 4:
        return False
    name, dtype, shape, first = tensor
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return False
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(map(_count, (*shape, first))):
        return False
    return start <= first and first + math.prod(shape) * ITEM_BYTES[dtype] <= end


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def cut_to_journal(folder: Path) -> list[dict[str, Any]]:
    """Cut off a torn last line of the journal, and the bytes of the spool that no line answers for."""
    lines, length = read_journal(folder)
    for path, end in ((folder / JOURNAL, length), (folder / SPOOL, lines[-1]["end"] if lines else 0)):
        if path.is_file() and path.stat().st_size > end:
            os.truncate(path, end)
    return lines


def restore(folder: Path) -> dict[str, Any] | None:
    """The state of the work after the finished blocks in `folder`; None where no block is finished.

    Reads the spool once: from the first block on whose bytes are not what the journal says, all are dropped.
    """
    lines = cut_to_journal(folder)
    start, sound = 0, 0
    for line in lines:
        if _crc32(folder / SPOOL, start, line["end"]) != line["crc32"]:
            break
        start, sound = line["end"], sound + 1
    if sound < len(lines):
        os.truncate(folder / SPOOL, start)
        lines = cut_to_journal(folder)
    return lines[-1]["state"] if lines else None


def _crc32(path: Path, start: int, end: int) -> int:
    crc = 0
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            chunk = file.read(min(end - start, CHUNK))
            crc = zlib.crc32(chunk, crc)
            start += len(chunk)
    return crc
