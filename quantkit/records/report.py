"""Evaluation reports, stored as JSON so that figures can be traced and compared."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field

from quantkit.errors import RecipeError, ReportError
from quantkit.records.recipe import EvaluationSpec, Strict, TaskSpec, parse
from quantkit.system.processor import processor_name, usable_cores
from quantkit.system.untrusted import read_object

AGAIN = "Evaluate again."
# Details of a figure that tables show.
SPREAD = ("p50", "p90", "p99")
DETAILS = {"kld": ("p99",), "answers_ttft_ms": SPREAD, "answers_ms_per_token": SPREAD, "answers_itl_ms": SPREAD}
MOST_REPORT = 1 << 24  # bytes
Count = Annotated[int, Field(ge=0, le=1 << 60)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TEXT_RATES = ("word_perplexity", "byte_perplexity", "bits_per_byte")
DIVERGENCES = ("same_top_p", "ln_perplexity_ratio", "delta_p", "delta_p_rms", "nll_correlation")
NAMES = {
    "kld": "KLD",
    "same_top_p": "same top token",
    "ln_perplexity_ratio": "ln(PPL / source's)",
    "delta_p": "change of the right token's probability",
    "delta_p_rms": "its RMS",
    "nll_correlation": "correlation",
}


class Windows(Strict):
    """How the text was cut: windows of at most `n_ctx` tokens, each scored from position `first` on.

    `scored` is the number of scored tokens in all windows. Protocols that score documents separately also set
    `documents`, `words` and `bytes`.
    """

    protocol: str
    n_ctx: Count
    windows: Count
    first: Count
    scored: Count
    tokens_sha256: str
    documents: Count | None = None
    words: Count | None = None
    bytes: Count | None = None


class Measurement(Strict):
    """A measured figure with its unit, number of observations `n`, and standard error if known.

    Means over token positions also have the `sums` of each window, in order.
    """

    name: str
    value: float
    unit: str
    n: Count | None = None
    stderr: float | None = None
    details: dict[str, float | str] = Field(default_factory=dict)
    sums: tuple[Finite, ...] = ()

    def text(self, digits: int) -> str:
        """Return the value rounded to `digits`, with its standard error; zero has no sign."""
        error = "" if self.stderr is None else f" ± {self.stderr:.{digits}f}"
        return f"{self.value:z.{digits}f}{error}"


class ModelEntry(Strict):
    """The evaluated model: `digest` identifies its bytes, `name` is the source model's."""

    label: str
    name: str
    method: str | None
    digest: str
    notes: tuple[str, ...] = ()


class TextEntry(Strict):
    """The evaluation text."""

    name: str
    sha256: str
    bundled: bool


class EngineEntry(Strict):
    """The engine with the dtype and device it used, and its notes."""

    name: str
    version: str
    dtype: str
    device: str = "cpu"
    kv_cache: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Return the engine's name, with its device if that is not the CPU."""
        return self.name if self.device == "cpu" else f"{self.name}, {self.device.split()[0]}"


class BaselineEntry(Strict):
    """The baseline of divergences: how the source model was computed, and two noise floors.

    `rounding` is the mean divergence in nats caused by storing states in float16; `noise` is the divergence of the
    source computed in bfloat16, with its standard error.
    """

    format: int
    model: str
    dtype: str
    protocol: str
    n_ctx: Count
    windows: Count
    positions: Count
    width: Count
    sha256: str
    rounding: Finite
    noise: Finite
    noise_stderr: Finite


class Hardware(Strict):
    """The machine that ran the evaluation."""

    cpu: str
    cores: Count
    memory_bytes: Count


class Report(Strict):
    """All measurements of one model.

    `fingerprint` is a hash of everything that affects them; a report is reused only if the fingerprint is unchanged.
    """

    model: ModelEntry
    text: TextEntry
    windows: Windows
    engine: EngineEntry
    hardware: Hardware
    settings: EvaluationSpec
    measurements: tuple[Measurement, ...]
    baseline: BaselineEntry | None = None
    notes: tuple[str, ...] = ()
    fingerprint: str | None = None

    def find(self, name: str) -> Measurement | None:
        """Return the first measurement with this name, or None."""
        return next((m for m in self.measurements if m.name == name), None)

    def quality(self) -> list[str]:
        """Return text lines with perplexity, protocol figures, divergence and notes."""
        w = self.windows
        cut = f"{w.windows} windows of {w.n_ctx}" if w.documents is None else f"{w.documents} pages"
        named = (self.find(name) for name in (TEXT_RATES if w.documents else ("perplexity",)))
        rates = ", ".join(_named(m, 4) for m in named if m is not None)
        lines = [
            f"{self.model.label}: {rates} (protocol {w.protocol}, {cut}, {w.scored} targets, text {self.text.name}, "
            f"engine {self.engine.name} in {self.engine.dtype})"
        ]
        if (kld := self.find("kld")) is not None and (base := self.baseline) is not None:
            spread = ", ".join(f"{name} {float(value):.5f}" for name, value in kld.details.items())
            others = (self.find(name) for name in DIVERGENCES)
            lines += [
                f"  {_named(kld, 6)} nats per token, against the source in {base.dtype} ({spread})",
                f"  {', '.join(_named(m, 6) for m in others if m is not None)}",
                f"  noise floor: {noise_of([self])[1]}; float16 in the baseline adds {base.rounding:.1g}",
            ]
        return [*lines, *(f"  note: {note}" for note in (*self.notes, *self.engine.notes))]


def _named(m: Measurement, digits: int) -> str:
    return f"{NAMES.get(m.name, m.name.replace('_', ' '))} {m.text(digits)}"


def noise_of(reports: Iterable[Report]) -> tuple[float, str]:
    """Return the noise floor of a model's divergences in nats, and its description; 0 if not measured.

    If the source was evaluated in bfloat16, the floor is its divergence. Otherwise it is the baseline's figure, which
    covers only the first windows of the text.
    """
    reports = list(reports)
    for report in reports:
        own = report.find("kld")
        if own is not None and report.model.method is None and report.engine.dtype == "bfloat16":
            return own.value, f"the source in bfloat16 has a KLD of {own.text(5)}"
    base = next((report.baseline for report in reports if report.baseline), None)
    if base is None:
        return 0.0, ""
    figure = f"{base.noise:.2g} ± {base.noise_stderr:.1g}"
    return base.noise, f"the source in bfloat16 has a KLD of {figure} on the first windows"


def read_report(path: Path) -> Report:
    """Read a report's JSON file; raise ReportError."""
    return parse_report(read_object(path, ReportError, AGAIN, MOST_REPORT), str(path))


def parse_report(values: object, where: str) -> Report:
    """Parse a report's JSON values; raise ReportError for invalid values or figures that are not finite."""
    if not isinstance(values, dict):
        raise ReportError(f"{where} has no report. {AGAIN}")
    try:
        report = parse(Report, values, where)
    except RecipeError as error:
        raise ReportError(f"the report {where} cannot be read: {error}") from None
    for m in report.measurements:
        figures = [m.value, *(value for value in m.details.values() if isinstance(value, float))]
        if not all(math.isfinite(figure) for figure in figures):
            raise ReportError(f"the report {where} cannot be read: {m.name} is not a finite number. {AGAIN}")
        for detail in DETAILS.get(m.name.partition("@")[0], ()):
            if not isinstance(m.details.get(detail), float):
                raise ReportError(f"the report {where} cannot be read: {m.name} has no {detail}. {AGAIN}")
    return report


def this_machine() -> Hardware:
    """Return a description of this machine."""
    return Hardware(cpu=processor_name(), cores=usable_cores(), memory_bytes=psutil.virtual_memory().total)


class TaskReport(Strict):
    """Accuracy on tasks: `results` by task and metric, with lm-evaluation-harness's names."""

    model: ModelEntry
    engine: EngineEntry
    hardware: Hardware
    settings: TaskSpec
    results: dict[str, dict[str, float]]
    versions: dict[str, str]
    num_fewshot: dict[str, int]
    samples: dict[str, int]
    lm_eval: str
