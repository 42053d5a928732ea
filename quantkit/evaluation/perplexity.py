"""Perplexity by a named protocol and, given the source's baseline, the divergence from the source, in one pass.

Each scored position gives a record. With the source's logits it has the Kullback-Leibler divergence of the model's
next-token distribution from the source's, in nats, and whether both have the same most likely token. The figures are
the ones that llama.cpp's `llama-perplexity --kl-divergence` prints; formulas: docs/evaluating/divergence.md. Records of
finished batches are stored, so that an interrupted evaluation resumes after them.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.contracts.engine import Cut, LoadedModel, Window, alike, positions_in, tokens_in
from quantkit.contracts.model import Model
from quantkit.errors import EngineError
from quantkit.records.recipe import EvaluationSpec
from quantkit.records.report import Measurement
from quantkit.report.statistics import mean_and_error
from quantkit.system.memory import peak_rss_bytes
from quantkit.system.progress import Progress

# Negative log-likelihoods of the right token in nats, the divergence in nats, 1 if the most likely token is the
# source's. Without a source all except the first are NaN.
RECORD = np.dtype([("nll", "<f8"), ("source_nll", "<f8"), ("divergence", "<f8"), ("agrees", "<f8")])
MEANS = {"perplexity": "nll", "kld": "divergence", "same_top_p": "agrees"}
PERCENTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
NORMAL_95 = 1.959963984540054
Positions = NDArray[np.void]


def score(
    logits: NDArray[np.float32], targets: NDArray[np.int64], source: NDArray[np.float32] | None = None
) -> Positions:
    """Return a `RECORD` (P,) for P positions with logits or log-probabilities (P, V) float32 and right tokens (P,).

    `source`: the source model's logits, (P, V) float32. Neither array is changed.
    """
    import torch

    scores = np.full(len(targets), np.nan, dtype=RECORD)
    ours, right = torch.from_numpy(logits), torch.from_numpy(targets)[:, None]
    total = torch.logsumexp(ours, 1)
    scores["nll"] = (total - ours.gather(1, right)[:, 0]).double().numpy()
    if source is None:
        return scores
    exact = torch.from_numpy(source)
    source_total = torch.logsumexp(exact, 1)
    scores["source_nll"] = (source_total - exact.gather(1, right)[:, 0]).double().numpy()
    weights = torch.softmax(exact, 1)
    # sum of p (ln p - ln q); a common shift of the logits cancels before the sum.
    shift = (source_total - total)[:, None]
    scores["divergence"] = weights.mul_((exact - ours).sub_(shift)).sum(1).double().numpy()
    scores["agrees"] = (ours.argmax(1) == exact.argmax(1)).double().numpy()
    return scores


def summarize(nll: NDArray[np.float64]) -> tuple[float, float]:
    """Return perplexity and its standard error for nll (N,): PPL * sqrt((mean(nll^2) - mean(nll)^2) / (N - 1))."""
    mean, error = mean_and_error(nll)
    perplexity = math.exp(min(mean, 700.0))
    return perplexity, perplexity * error


def figures_of(positions: Positions, cut: Cut, **details: float) -> list[Measurement]:
    """Return all figures of a cut's scored positions; `details` are added to the perplexity's details.

    Figures that are means over positions also have their sums over each window.
    """
    value, stderr = summarize(positions["nll"])
    every: dict[str, float | str] = {"mean_nll": float(positions["nll"].mean()), **details}
    n = len(positions)
    measured = [Measurement(name="perplexity", value=value, unit="", n=n, stderr=stderr, details=every)]
    measured += divergence_of(positions)
    sizes = [len(window.targets) for window in cut.windows]
    starts = np.cumsum([0, *sizes[:-1]])
    for i, one in enumerate(measured):
        if field := MEANS.get(one.name):
            sums = np.add.reduceat(positions[field], starts).tolist()
            measured[i] = one.model_copy(update={"sums": tuple(sums)})
    if cut.about.documents:
        document = np.repeat([window.document for window in cut.windows], sizes)
        measured = [*text_rates(positions, document, cut.sizes[:, 0], cut.sizes[:, 1]), *measured]
    return measured


def divergence_of(positions: Positions) -> list[Measurement]:
    """Return the figures of the divergence from the source; an empty list if it was not measured."""
    if np.isnan(positions["divergence"]).any():
        return []
    count = len(positions)

    def figure(name: str, value: float, stderr: float | None, unit: str, **details: float | str) -> Measurement:
        return Measurement(name=name, value=value, unit=unit, n=count, stderr=stderr, details=dict(details))

    mean, stderr = mean_and_error(positions["divergence"])
    spread = {name: float(np.percentile(positions["divergence"], at)) for name, at in PERCENTILES.items()}
    share = float(positions["agrees"].mean())
    low, high = wilson(share, count)
    moved = np.exp(-positions["nll"]) - np.exp(-positions["source_nll"])
    shift, shift_error = mean_and_error(moved)
    square, square_error = mean_and_error(moved**2)
    rms = math.sqrt(square)
    ratio, ratio_error = mean_and_error(positions["nll"] - positions["source_nll"])
    source, source_error = summarize(positions["source_nll"])
    measured = [
        figure("kld", mean, stderr, "nats", **spread),
        figure(
            "same_top_p", share, math.sqrt(share * (1 - share) / max(count - 1, 1)), "", low_95=low, high_95=high
        ),
        figure("delta_p", shift, shift_error, ""),
        figure("delta_p_rms", rms, square_error / (2 * rms) if rms else 0.0, ""),
        figure("nll_correlation", _correlation(positions["nll"], positions["source_nll"]), None, ""),
        figure("ln_perplexity_ratio", ratio, ratio_error, "nats"),
        figure("source_perplexity", source, source_error, ""),
    ]  # fmt: skip
    return [one for one in measured if math.isfinite(one.value)]  # a single position has no correlation


def text_rates(
    positions: Positions, document: NDArray[np.int64], words: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> list[Measurement]:
    """Return word perplexity, byte perplexity and bits per byte.

    `document` (N,): document number of each position; `words`, `nbytes` (documents,): counts of the original text. The
    standard error treats documents as independent (ratio estimate, linearized).
    """
    sums = np.bincount(document, weights=positions["nll"], minlength=len(words))

    def rate(name: str, unit: str, counts: NDArray[np.int64], to_value: Callable[[float], float]) -> Measurement:
        mean = float(sums.sum() / counts.sum())
        error = None
        if len(counts) > 1:
            rest = sums - mean * counts
            error = math.sqrt(float((rest**2).sum()) * len(counts) / (len(counts) - 1)) / float(counts.sum())
            error *= to_value(mean) if unit == "" else to_value(1.0)
        return Measurement(name=name, value=to_value(mean), unit=unit, n=int(counts.sum()), stderr=error)

    return [
        rate("word_perplexity", "", words, lambda mean: math.exp(min(mean, 700.0))),
        rate("byte_perplexity", "", nbytes, lambda mean: math.exp(min(mean, 700.0))),
        rate("bits_per_byte", "bits", nbytes, lambda mean: mean / math.log(2)),
    ]


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share of `count` trials (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    z = NORMAL_95**2 / count
    middle = (share + z / 2) / (1 + z)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / count + z / (4 * count)) / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)


def _correlation(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    a, b = one - one.mean(), two - two.mean()
    scale = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / scale if scale else math.nan


class Baseline(Protocol):
    """Provider of the source's logits at the scored positions."""

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the logits (count, V) float32 of the scored positions from number `start` on."""


@dataclass(frozen=True)
class ProbeJob:
    """The inputs of a probe."""

    loaded: LoadedModel
    model: Model
    spec: EvaluationSpec
    threads: int
    cut: Cut
    progress: Progress
    resume: Path  # the file of the scored positions of finished batches, until all are finished
    baseline: Callable[[], Baseline] | None = None  # the source's
    save: Path | None = None  # the file for all scored positions
    n_ctx: int = 512  # longest context in tokens that the model was loaded for
    loading_peak: int = 0  # resident memory in bytes that loading took


@dataclass(frozen=True)
class Probe:
    """A measurement that an evaluation can run, registered in `evaluation/probes.py`."""

    name: str
    run: Callable[[ProbeJob], list[Measurement]]
    generates: bool = False  # generates tokens, so the model must not be computed block by block
    per_threads: bool = False  # runs once for each number of threads
    needs_source: bool = False  # uses the source's baseline if there is one
    n_ctx: int = 0  # preferred tokens of context; a model may have less
    usual: bool = True  # runs if no probe is named


CHECKSUM_BYTES = 4
WRITING_SHARE = 0.05  # maximum share of the time


class ResumeFile:
    """File with the scored positions of finished batches: a checksum, then records (`RECORD`).

    Each write replaces the whole file. A damaged or unwritable file only means that more is computed again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0.0

    def read(self) -> Positions:
        """Return the stored positions; an empty array if the file is missing or damaged."""
        data = b""
        with suppress(OSError):
            data = self._path.read_bytes()
        checksum, records = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
        whole = checksum == _checksum(records) and not len(records) % RECORD.itemsize
        return np.frombuffer(records if whole else b"", RECORD)

    def write(self, parts: Sequence[Positions]) -> None:
        """Store all positions so far; skipped if writing would take more than `WRITING_SHARE` of the time."""
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
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _checksum(records: bytes) -> bytes:
    return zlib.crc32(records).to_bytes(CHECKSUM_BYTES, "little")


def _scored(job: ProbeJob, windows: Sequence[Window], position: int) -> Iterator[Positions]:
    """Yield the scored positions of each window; `position` is the number of the first one in the text."""
    baseline = job.baseline() if job.baseline is not None else None
    pieces = job.loaded.pieces(windows)
    for window in windows:
        parts: list[Positions] = []
        for logits, targets in window.pairs(pieces):
            source = None if baseline is None else baseline.logits(position, len(logits))
            if source is not None and source.shape != logits.shape:
                raise EngineError(
                    f"{job.model.label}: the engine returned {logits.shape[1]} logits per position, and the source has "
                    f"{source.shape[1]}. Evaluate with --no-divergence."
                )
            part = score(logits, targets, source)
            if not np.isfinite(part["nll"]).all():
                raise EngineError(f"{job.model.label}: the engine returned NaN or infinite values: broken artifact")
            parts.append(part)
            position += len(logits)
        yield np.concatenate(parts)


def measure_perplexity(job: ProbeJob) -> list[Measurement]:
    """Score all windows; return perplexity, divergences, and the protocol's additional figures."""
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
