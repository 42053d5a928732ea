"""Means with standard errors, percentiles, and tests for the best of several copies.

Quality is compared window by window on the same tokens, so that a window's difficulty cancels out. Formulas:
docs/evaluating/comparing.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quantkit.records.report import Measurement

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
# Figures for which higher is better; for all others lower is.
HIGHER = re.compile(r"same_top_p|(pp|tg)\d|answers_tokens_per_second")
EXACT = ("weight_bytes", "bits_per_weight")
CONFIDENCE = 0.95
LEAST = 4  # windows or repeats for a reliable error


def percentiles(values: list[float]) -> dict[str, float | str]:
    """Return the median and the 90th and 99th percentiles by name, as a measurement stores them in its details."""
    return {name: float(np.percentile(values, at)) for name, at in PERCENTILES.items()}


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of values (N,) and its standard error, assuming independence; NaN for fewer than two values."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def best(figures: Sequence[Measurement | None]) -> int | None:
    """Return the index of the figure that is significantly better than all others, or None.

    All figures must have the same name.
    """
    present = [(i, figure) for i, figure in enumerate(figures) if figure is not None]
    if len(present) < 2:
        return None
    winners = (i for i, one in present if all(_better(one, other) for j, other in present if j != i))
    return next(winners, None)


def _better(one: Measurement, other: Measurement) -> bool:
    gain = other.value - one.value
    if HIGHER.match(one.name):
        gain = -gain
    if one.name in EXACT:
        return gain > 0
    if one.sums and len(one.sums) == len(other.sums) and one.n == other.n:
        count = len(one.sums)
        mean, error = mean_and_error(np.array(one.sums) - np.array(other.sums))
        return gain > 0 and count >= LEAST and abs(mean) > student_t(count - 1) * error
    if one.stderr is None or other.stderr is None:
        return False
    repeats = min(one.n or 0, other.n or 0)
    return repeats >= LEAST and gain > student_t(repeats - 1) * math.hypot(one.stderr, other.stderr)


def student_t(freedom: int) -> float:
    """Return the two-sided quantile of Student's t distribution with `freedom` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
