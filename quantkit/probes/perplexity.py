"""Perplexity by a named protocol and, with the source's baseline, the divergence from the source, in one pass.

Figures and their formulas: _scores.py. Windows that are done are kept, so an interrupted pass goes on after them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.contracts.windows import Cut, batch_edge
from quantkit.errors import EngineError
from quantkit.probes._resume import ResumeFile
from quantkit.probes._scores import Positions, divergence_of, perplexity_of, score, text_rates, with_sums
from quantkit.report.records import Measurement
from quantkit.system.memory import peak_rss_bytes


def _scored(job: ProbeJob, first: int, position: int) -> Iterator[Positions]:
    """Score window after window from number `first` on, whose first judged position is number `position`.

    Windows of the same batch before it are computed again: the last digits depend on what is computed together.
    """
    baseline = job.baseline() if job.baseline is not None else None
    edge = batch_edge(job.cut.windows, first)
    pieces = job.loaded.pieces(job.cut.windows[edge:])
    for window in job.cut.windows[edge:first]:
        for _ in window.judged(pieces):
            pass
    for window in job.cut.windows[first:]:
        parts: list[Positions] = []
        for logits, targets in window.judged(pieces):
            source = None if baseline is None else baseline.logits(position, len(logits))
            if source is not None and source.shape != logits.shape:
                raise EngineError(
                    f"{job.model.label}: the engine gave {logits.shape[1]} logits a position and the source has "
                    f"{source.shape[1]}. Judge with --no-divergence."
                )
            part = score(logits, targets, source)
            if not np.isfinite(part["nll"]).all():
                raise EngineError(f"{job.model.label}: the engine gave NaN or infinite values; the artifact is broken")
            parts.append(part)
            position += len(logits)
        yield np.concatenate(parts)


def _run(job: ProbeJob) -> list[Measurement]:
    sizes = [len(window.targets) for window in job.cut.windows]
    with (
        closing(ResumeFile(job.resume, sizes)) as finished,
        job.progress.step(f"perplexity ({job.cut.about.protocol})", len(sizes)) as advance,
    ):
        windows = finished.windows
        begin, before = time.perf_counter(), len(windows)
        done, total = sum(map(len, windows)), sum(float(window["nll"].sum()) for window in windows)
        if before:
            advance(before)
        for window in _scored(job, before, done):
            finished.add(window)
            done, total = done + len(window), total + float(window["nll"].sum())
            advance(remark=f"{math.exp(min(total / done, 700.0)):.3f}")
        seconds = time.perf_counter() - begin
        every = np.concatenate(windows)
        if job.save is not None:
            np.save(job.save, every)
        finished.forget()
    tokens = sum(len(window.ids) for window in job.cut.windows[before:])
    speed = {"tokens_per_second": tokens / seconds} if tokens else {}
    peak = max(job.loading_peak, peak_rss_bytes())
    return _figures(every, job.cut, peak_rss_bytes=peak, **speed)


def _figures(positions: Positions, cut: Cut, **details: float) -> list[Measurement]:
    """All that comes of the judged positions of a cut, in the order of its windows; `details` are the perplexity's."""
    sizes = [len(window.targets) for window in cut.windows]
    measured = with_sums([*perplexity_of(positions, **details), *divergence_of(positions)], positions, sizes)
    if cut.about.documents:
        document = np.repeat([window.document for window in cut.windows], sizes)
        measured = [*text_rates(positions, document, cut.sizes[:, 0], cut.sizes[:, 1]), *measured]
    return measured


PROBE = Probe(
    name="perplexity",
    summary="perplexity by a named protocol, and divergence from the source",
    run=_run,
    order=30,
    needs_source=True,
)
