"""Pages of made-up reports, for tests of what stands in them and of what a browser makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
from test_table import WINDOWS, report

from quantkit.artifact import Artifact, Manifest, SourceEntry, WeightError
from quantkit.recipe import ConvertRecipe
from quantkit.report.page.page import page
from quantkit.report.page.view import View
from quantkit.report.records import BaselineEntry, Measurement, ModelEntry, Report
from quantkit.report.sheet import Part, Sheet, joined
from quantkit.report.table import Table

BASE = BaselineEntry(
    format=2, model="m", dtype="float32", protocol="llama.cpp", n_ctx=512, windows=4, positions=1020, width=100,
    sha256="cc" * 32, rounding=1e-6, noise=0.0006, noise_stderr=1e-5,
)  # fmt: skip
METHODS = ("gptq", "awq", "nf4", "gguf")


def diverging(one: Report, kld: float, number: int = 4, seed: int = 0, **changes: Any) -> Report:
    """A report with a divergence of about `kld` nats, which varies from window to window."""
    draw = np.random.default_rng(seed)
    count = 255 * number
    sums = kld * 255 * draw.uniform(0.8, 1.2, number)
    mean = float(sums.sum() / count)
    spread = {name: mean * times for name, times in (("median", 0.5), ("p90", 2.0), ("p99", 8.0), ("max", 30.0))}
    ruler = [("kld", mean, "nats", spread, sums), ("same_top_p", 0.9, "", {}, draw.uniform(200, 255, number))]
    more = [
        Measurement(name=name, value=value, unit=unit, n=count, stderr=value / 40, details=details, sums=tuple(each))
        for name, value, unit, details, each in ruler
    ]
    more += [
        Measurement(name="delta_p", value=-kld / 10, unit="", n=count, stderr=kld / 100),
        Measurement(name="peak_rss_bytes", value=5e8 + 1e6 * seed, unit="bytes", n=1),
    ]
    return one.model_copy(update={"measurements": (*one.measurements, *more), "baseline": BASE, **changes})


def sheet(models: int, variants: int, windows: int = 4, last: float | None = None) -> Sheet:
    """Models with a source and copies, the larger the better; `last` is the last one's KLD.

    The fourth of each has no ms/token with 2 threads.
    """
    parts = []
    about = WINDOWS.model_copy(update={"windows": windows, "scored": 255 * windows})
    for m in range(models):
        reports = []
        for v in range(variants):
            method = METHODS[v % len(METHODS)] if v else None
            label = f"{method}-{v}" if method else "bfloat16"
            size = 2e6 * (m + 1) * (v + 1) / variants if v else 2.2e6 * (m + 1)
            notes = (f"{v} tensors of {label} have rows that 256 does not divide: Q4_K -> Q5_0",)
            speeds = {1: 60.0 - v} if v == 3 else {1: 60.0 - v, 2: 30.0 + v}
            one = report(label, method, 20 + 30 / (v + 1), size, speeds, notes=notes)
            entry = one.model.model_copy(update={"name": f"org/model-{m}", "digest": f"{m}-{v}"})
            kld = 1.5 / (v + 1) ** 2.5 if v else 0.001
            kld = last if last is not None and v == variants - 1 else kld
            reports.append(diverging(one, kld, windows, 100 * m + v, model=entry, windows=about).sealed())
        parts.append(Part("Test CPU", Table(tuple(reports))))
    return Sheet(tuple(parts))


def manifest(name: str) -> Manifest:
    """A manifest in which `name` stands wherever others decide on a text."""
    recipe = ConvertRecipe(model=name, method=name, bits=name, format=name, options={name: name}, revision=name)
    return Manifest(
        recipe=recipe,
        format=name,
        options={name: name},
        source=SourceEntry(model=name, revision=name, architecture=name, parameters=1, config={}, hashes={}),
        versions={name: name},
        tensor_types={name: 1},
        weight_files=(name,),
        weight_bytes=1,
        bits_per_weight=4,
        weight_error=WeightError(mean=0.1, worst=0.2, worst_tensor=name),
        notes=(name,),
        files={},
    )


def hostile(name: str) -> str:
    """A page in which `name` stands wherever others decide on a text."""
    reports = []
    for i, kld in enumerate((0.001, 0.5, 0.02)):
        entry = ModelEntry(label=f"{name}{i}", name=name, method=name if i else None, digest=name, notes=(name,))
        one = report(name, "gptq", 21.0 + i, 1e6 + 1e5 * i, {1: 5.0 + i}, engine=name, model=entry, notes=())
        text = one.text.model_copy(update={"name": name})
        about = one.hardware.model_copy(update={"cpu": name})
        reports.append(diverging(one, kld, seed=i, text=text, hardware=about, notes=(name,)))
    made = joined([(name, Table(tuple(reports)))])
    artifacts = {name: Artifact(Path(name), manifest(name))}
    return page(View(made, artifacts, remarks=(name,), server=lambda _: name))


def written(folder: Path, content: str) -> Path:
    """A page as a file."""
    path = folder / "page.html"
    path.write_text(content, encoding="utf-8")
    return path
