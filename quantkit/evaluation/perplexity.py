"""Perplexity by a named protocol and, with the source's baseline, the divergence from the source, in one pass.

Figures and formulas: scores.py. The positions of finished batches are stored; an interrupted evaluation resumes there.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.windows import Window, alike, positions_in, tokens_in
from quantkit.errors import EngineError
from quantkit.evaluation.scores import RECORD, Positions, figures_of, score
from quantkit.records.report import Measurement
from quantkit.system.memory import peak_rss_bytes

CHECKSUM_BYTES = 4
WRITING_SHARE = 0.05  # of the time, at most


class ResumeFile:
    """The scored positions of finished batches: a checksum, and records (`scores.RECORD`).

    The whole file is replaced each time. A file that is damaged or cannot be written only costs time.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0.0

    def read(self) -> Positions:
        """Return the stored positions; none if the file is missing or damaged."""
        data = b""
        with suppress(OSError):
            data = self._path.read_bytes()
        checksum, records = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
        whole = checksum == _checksum(records) and not len(records) % RECORD.itemsize
        return np.frombuffer(records if whole else b"", RECORD)

    def write(self, parts: Sequence[Positions]) -> None:
        """Store all positions so far, unless writing has taken more than its share of the time."""
        if (begin := time.monotonic()) < self._next:
            return
        records = np.concatenate(parts).tobytes()
        new = self._path.with_suffix(".new")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(_checksum(records) + records)
            new.replace(self._path)
        end = time.monotonic()
        self._next = end + (end - begin) / WRITING_SHARE

    def remove(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _checksum(records: bytes) -> bytes:
    return zlib.crc32(records).to_bytes(CHECKSUM_BYTES, "little")


def _scored(job: ProbeJob, windows: Sequence[Window], position: int) -> Iterator[Positions]:
    """Score `windows` one by one; `position` is the number of the first scored position."""
    baseline = job.baseline() if job.baseline is not None else None
    pieces = job.loaded.pieces(windows)
    for window in windows:
        parts: list[Positions] = []
        for logits, targets in window.pairs(pieces):
            source = None if baseline is None else baseline.logits(position, len(logits))
            if source is not None and source.shape != logits.shape:
                raise EngineError(
                    f"{job.model.label}: the engine gave {logits.shape[1]} logits a position and the source has "
                    f"{source.shape[1]}. Evaluate with --no-divergence."
                )
            part = score(logits, targets, source)
            if not np.isfinite(part["nll"]).all():
                raise EngineError(f"{job.model.label}: the engine gave NaN or infinite values; the artifact is broken")
            parts.append(part)
            position += len(logits)
        yield np.concatenate(parts)


def measure_perplexity(job: ProbeJob) -> list[Measurement]:
    """Score all windows; return perplexity, divergences, and what the protocol adds."""
    batches, resume = list(alike(job.cut.windows)), ResumeFile(job.resume)
    ends = np.cumsum([0, *map(positions_in, batches)])
    finished = resume.read()
    done = int(np.searchsorted(ends, len(finished)))
    if done == len(ends) or ends[done] != len(finished):
        done, finished = 0, finished[:0]
    first = sum(map(len, batches[:done]))
    parts, count, total = [finished], len(finished), float(finished["nll"].sum())
    with job.progress.step(f"perplexity ({job.cut.about.protocol})", len(job.cut.windows)) as advance:
        begin = time.perf_counter()
        if first:
            advance(first)
        scored = _scored(job, job.cut.windows[first:], len(finished))
        for batch in batches[done:]:
            for _ in batch:
                parts.append(next(scored))
                count, total = count + len(parts[-1]), total + float(parts[-1]["nll"].sum())
                advance(remark=f"{math.exp(min(total / count, 700.0)):.3f}")
            resume.write(parts)
        seconds = time.perf_counter() - begin
    positions = np.concatenate(parts)
    if job.save is not None:
        np.save(job.save, positions)
    resume.remove()
    tokens = tokens_in(job.cut.windows[first:])
    speed = {"tokens_per_second": tokens / seconds} if tokens else {}
    peak = max(job.loading_peak, peak_rss_bytes())
    return figures_of(positions, job.cut, peak_rss_bytes=peak, **speed)
