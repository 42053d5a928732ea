"""The journal of a spool: which decoder blocks are finished, where their tensors lie, and whether they are sound.

See spool.py, which writes it.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

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
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not text.endswith(b"\n") or line["block"] != len(lines) or line["end"] > size:
            break
        lines.append(line)
        length += len(text)
    return lines, length


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
