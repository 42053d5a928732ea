"""The mean with its standard error, and the percentiles that latencies are reported with."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def percentiles(values: list[float]) -> dict[str, float | str]:
    """Median, 90th and 99th percentile of one or more values, by name, as a measurement's details."""
    return {name: float(np.percentile(values, at)) for name, at in PERCENTILES.items()}


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean of (N,) values and its standard error, positions taken as independent; NaN for fewer than two."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error
