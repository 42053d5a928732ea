"""What a judged chunk leaves in a folder: a record, and beside it its positions.

The positions (`probes/_scores.RECORD`) are a file of NumPy; the record is JSON and written last, with their sha256. It
says all that decided the figures, so chunks that were judged otherwise are not put together.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from quantkit.errors import QuantkitError, RecipeError, ReportError
from quantkit.probes._scores import RECORD, Positions
from quantkit.recipe import Strict, parse
from quantkit.report.records import Count, EngineEntry, Finite, Hardware
from quantkit.system.files import replace_text, sha256_of
from quantkit.untrusted import read_object, shown, told

MOST_CHUNKS = 100_000
MOST_RECORD = 1 << 24  # bytes
AGAIN = "Judge that chunk again."
NAME = "chunk-{}-of-{}"
OF_A_MACHINE = ("cores", "memory_bytes")  # what of the hardware decides no digit; threads are told apart


@dataclass(frozen=True)
class Chunk:
    """Chunk `index` of `count`, the first is 0."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """Of its files."""
        return NAME.format(self.index, self.count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_chunk(text: str) -> Chunk:
    """``0/4`` to ``3/4``; raises RecipeError."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 <= index < count <= MOST_CHUNKS:
        raise RecipeError(f"{shown(text)} is no chunk: give its number, from 0, and how many there are, such as 0/4")
    return Chunk(index, count)


class ChunkEntry(Strict):
    """The windows from `first` to the one before `stop`, judged: by whom, where, and what decided their figures.

    `nll` is the sum of the negative log-likelihoods of `positions` targets, in nats; `baseline` the sha256 of the
    source's states at these positions, None where divergences are not measured. `seconds` and `tokens` are what the
    windows took and held, `peak_rss_bytes` the memory of the process that judged them, `sha256` that of the positions.
    """

    index: Count
    count: Count
    first: Count
    stop: Count
    positions: Count
    nll: Finite
    engine: EngineEntry
    hardware: Hardware
    decides: dict[str, Any]
    baseline: str | None
    tokens: Count
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    peak_rss_bytes: Count
    sha256: str

    @property
    def name(self) -> str:
        """Of its files."""
        return NAME.format(self.index, self.count)


def leave(folder: Path, entry: ChunkEntry, positions: Path) -> None:
    """Put a chunk into the folder, in place of one of the same name: its positions first, its record last."""
    record = folder / f"{entry.name}.json"
    new = folder / f"{entry.name}.{os.getpid()}.new"  # other processes may leave the same chunk
    new.unlink(missing_ok=True)
    shutil.copyfile(positions, new)
    record.unlink(missing_ok=True)
    new.replace(folder / f"{entry.name}.npy")
    replace_text(record, entry.model_dump_json(indent=2) + "\n", shared=True)


def read_chunk(path: Path) -> tuple[ChunkEntry, Positions]:
    """A chunk by the path of its record; raises ReportError for one that is damaged."""
    try:
        entry = parse(ChunkEntry, read_object(path, ReportError, AGAIN, MOST_RECORD), str(path))
    except RecipeError as error:
        raise ReportError(f"the chunk {path} cannot be read: {error}") from None
    data = path.with_suffix(".npy")
    if path.stem != entry.name or data.is_symlink():
        raise ReportError(f"{path} is not the chunk that its name says. {AGAIN}")
    with told(f"the positions {data} cannot be read", ReportError, AGAIN):
        whole = sha256_of(data) == entry.sha256
        positions: Positions = np.load(data, allow_pickle=False) if whole else np.zeros(0, RECORD)
    if not whole or positions.dtype != RECORD or positions.shape != (entry.positions,):
        raise ReportError(f"{data} is not what {path.name} says: it is damaged, or was changed. {AGAIN}")
    return entry, positions


def kept_chunk(folder: Path, chunk: Chunk) -> ChunkEntry | None:
    """The whole chunk of that name in the folder, however it was judged; None where there is none."""
    path = folder / f"{chunk.name}.json"
    try:
        return read_chunk(path)[0] if path.is_file() else None
    except QuantkitError:
        return None


def chunks_in(folder: Path) -> list[tuple[ChunkEntry, Positions]]:
    """All chunks in the folder, in the order of their windows, the longest of those that begin alike first."""
    found = [read_chunk(path) for path in sorted(folder.glob(f"{NAME.format('*', '*')}.json"))]
    return sorted(found, key=lambda one: (one[0].first, -one[0].stop))


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first value in which two judgements differ beyond `OF_A_MACHINE`, with both; None where they are alike."""
    return next(_differences(_comparable(one), _comparable(other), ""), None)


def _comparable(decides: Mapping[str, Any]) -> dict[str, Any]:
    hardware = decides.get("hardware")
    if not isinstance(hardware, Mapping):
        return dict(decides)
    return {**decides, "hardware": {key: value for key, value in hardware.items() if key not in OF_A_MACHINE}}


def _differences(one: Any, other: Any, where: str) -> Any:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            yield from _differences(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for a, b in zip(one, other, strict=True):
            yield from _differences(a, b, where)
    elif one != other:
        yield f"{where} is {shown(one)} there and {shown(other)} here"
