"""How times spread: the percentiles that latencies are told with."""

from __future__ import annotations

import numpy as np

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def percentiles(values: list[float]) -> dict[str, float | str]:
    """Median, 90th and 99th percentile of one or more values, by name, as a measurement's details."""
    return {name: float(np.percentile(values, at)) for name, at in PERCENTILES.items()}
