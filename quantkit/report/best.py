"""Which copy is the best in a measure: one that is better than every other beyond the error of their difference.

Quality is compared window by window, on the same tokens: what all copies find hard falls out of the differences.
Formulas: docs/measuring.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quantkit.report.records import Measurement

HIGHER = ("same_top_p", "pp", "tg", "answers_tokens_per_second")  # the better; of all others the lower
EXACT = ("weight_bytes", "bits_per_weight")
CONFIDENCE = 0.95
LEAST = 4  # windows or repeats for an error that can be relied on


def best(figures: Sequence[Measurement | None]) -> int | None:
    """The position of the best of `figures`, which have one name; None where no one is, or fewer than two are there."""
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
        return gain > 0 and _apart(np.array(one.sums) - np.array(other.sums))
    if one.stderr is None or other.stderr is None:
        return False
    repeats = min(one.n or 0, other.n or 0)
    return repeats >= LEAST and gain > quantile(repeats - 1) * math.hypot(one.stderr, other.stderr)


def _apart(differences: np.ndarray) -> bool:
    """Whether the mean of (W,) differences, one a window, is not 0."""
    count = len(differences)
    if count < LEAST:
        return False
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    return abs(float(differences.mean())) > quantile(count - 1) * error


def quantile(freedom: int) -> float:
    """Student's t for `freedom` degrees of freedom, two-sided."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
