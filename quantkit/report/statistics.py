"""Means with standard errors, percentiles, and which of several copies is the best in a measure.

Quality is compared window by window, on the same tokens: what all copies find hard falls out of the differences.
Formulas: docs/measuring.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quantkit.report.records import Measurement

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
HIGHER = ("same_top_p", "pp", "tg", "answers_tokens_per_second")  # is better; of all other figures the lower
EXACT = ("weight_bytes", "bits_per_weight")
CONFIDENCE = 0.95
LEAST = 4  # windows or repeats for an error that can be relied on


def percentiles(values: list[float]) -> dict[str, float | str]:
    """Median, 90th and 99th percentile of one or more values, by name, as a measurement's details."""
    return {name: float(np.percentile(values, at)) for name, at in PERCENTILES.items()}


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean of (N,) values and its standard error, positions taken as independent; NaN for fewer than two."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def best(figures: Sequence[Measurement | None]) -> int | None:
    """Return the position of the figure that is better than every other beyond the error of their difference.

    All figures have one name. None where no figure is, or fewer than two are there.
    """
    there = [(i, figure) for i, figure in enumerate(figures) if figure is not None]
    if len(there) < 2:
        return None
    winners = (i for i, one in there if all(_better(one, other) for j, other in there if j != i))
    return next(winners, None)


def _better(one: Measurement, other: Measurement) -> bool:
    gain = other.value - one.value
    if one.name.startswith(HIGHER):
        gain = -gain
    if one.name in EXACT:
        return gain > 0
    if one.sums and len(one.sums) == len(other.sums) and one.n == other.n:
        count = len(one.sums)
        mean, error = mean_and_error(np.array(one.sums) - np.array(other.sums))
        return gain > 0 and count >= LEAST and abs(mean) > quantile(count - 1) * error
    if one.stderr is None or other.stderr is None:
        return False
    repeats = min(one.n or 0, other.n or 0)
    return repeats >= LEAST and gain > quantile(repeats - 1) * math.hypot(one.stderr, other.stderr)


def quantile(freedom: int) -> float:
    """Student's t for `freedom` degrees of freedom, two-sided."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
