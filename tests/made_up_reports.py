"""Reports of models that nobody measured, for tests of what is made of reports."""

import numpy as np

from quantkit.records.recipe import EvaluationSpec
from quantkit.records.report import (
    BaselineEntry,
    EngineEntry,
    Hardware,
    Measurement,
    ModelEntry,
    Report,
    TextEntry,
    Windows,
)
from quantkit.report.table import Table

HARDWARE = Hardware(cpu="Test CPU", cores=2, memory_bytes=8_000_000_000)
WINDOWS = Windows(protocol="llama.cpp", n_ctx=512, windows=4, first=256, scored=1020, tokens_sha256="aa" * 32)
TEXT = TextEntry(name="some.txt", sha256="0123456789abcdef" * 4, bundled=False)


def figure(name, value, n=1, unit="", sums=(), **more):
    return Measurement(name=name, value=value, unit=unit, n=n, sums=tuple(map(float, sums)), **more)


def report(label, method, perplexity, size, speeds=None, notes=(), engine="reference", more=(), weights=1e6, **changes):
    measurements = [
        figure("weight_bytes", size, unit="bytes"),
        figure("bits_per_weight", size * 8 / weights, int(weights), "bits"),
        *(figure(f"ms_per_token@{threads}", value, 3, stderr=0.5) for threads, value in (speeds or {}).items()),
    ]
    if perplexity is not None:
        measurements.append(figure("perplexity", perplexity, 1020, stderr=perplexity / 20))
    values = {
        "model": ModelEntry(label=label, name="tiny", method=method, digest="d" + label, notes=notes),
        "text": TEXT,
        "windows": WINDOWS,
        "engine": EngineEntry(name=engine, version="1.0", dtype="float32"),
        "hardware": HARDWARE,
        "settings": EvaluationSpec(),
        "measurements": (*measurements, *more),
    }
    return Report(**values | changes)


BASELINE = BaselineEntry(
    format=2, model="m", dtype="float32", protocol="llama.cpp", n_ctx=512, windows=4, positions=1020, width=100,
    sha256="cc" * 32, rounding=1e-6, noise=0.0006, noise_stderr=1e-5,
)  # fmt: skip
METHODS = ("gptq", "awq", "nf4", "gguf")


def diverging(one, kld, number=4, seed=0, **changes):
    """A report with a divergence of about `kld` nats, which varies from window to window."""
    draw = np.random.default_rng(seed)
    count = 255 * number
    sums = kld * 255 * draw.uniform(0.8, 1.2, number)
    mean = float(sums.sum() / count)
    spread = {name: mean * times for name, times in (("median", 0.5), ("p90", 2.0), ("p99", 8.0), ("max", 30.0))}
    more = [
        figure("kld", mean, count, "nats", sums, stderr=mean / 40, details=spread),
        figure("same_top_p", 0.9, count, sums=draw.uniform(200, 255, number), stderr=0.9 / 40),
        figure("delta_p", -kld / 10, count, stderr=kld / 100),
        figure("peak_rss_bytes", 5e8 + 1e6 * seed, unit="bytes"),
    ]
    return one.model_copy(update={"measurements": (*one.measurements, *more), "baseline": BASELINE, **changes})


def sheet(models, variants, windows=4, last=None):
    """Models with a source and copies, the larger the better; `last` is the last one's KLD.

    The fourth of each has no ms/token with 2 threads.
    """
    made = []
    about = WINDOWS.model_copy(update={"windows": windows, "scored": 255 * windows})
    for m in range(models):
        reports = []
        for v in range(variants):
            method = METHODS[v % len(METHODS)] if v else None
            label = f"{method}-{v}" if method else "bfloat16"
            size = 1.9e6 * (m + 1) * (v + 1) / variants if v else 2e6 * (m + 1)
            notes = (f"{v} tensors of {label} have rows that 256 does not divide: Q4_K -> Q5_0",)
            speeds = {1: 60.0 - v} if v == 3 else {1: 60.0 - v, 2: 30.0 + v}
            one = report(label, method, 20 + 30 / (v + 1), size, speeds, notes=notes, weights=1e6 * (m + 1))
            entry = one.model.model_copy(update={"name": f"org/model-{m}", "digest": f"{m}-{v}"})
            kld = 1.5 / (v + 1) ** 2.5 if v else 0.001
            kld = last if last is not None and v == variants - 1 else kld
            reports.append(diverging(one, kld, windows, 100 * m + v, model=entry, windows=about))
        made += reports
    return Table(tuple(made), ("Test CPU",) * len(made))
