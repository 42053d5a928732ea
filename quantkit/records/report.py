"""Reports of evaluations, stored as JSON so that figures can be traced and compared."""

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
    """How the text was cut: windows of at most `n_ctx` tokens, each evaluated from the logit `first` on.

    `scored` counts tokens over all windows. Protocols that evaluate documents one by one count `documents`, `words`
    and `bytes`.
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
    """One figure: its unit, the number of observations `n`, and its standard error if it has one.

    A mean over evaluated positions has the `sums` of the windows, in order.
    """

    name: str
    value: float
    unit: str
    n: Count | None = None
    stderr: float | None = None
    details: dict[str, float | str] = Field(default_factory=dict)
    sums: tuple[Finite, ...] = ()

    def text(self, digits: int) -> str:
        """Return the value rounded to `digits`, and its standard error; a zero has no sign."""
        error = "" if self.stderr is None else f" ± {self.stderr:.{digits}f}"
        return f"{self.value:z.{digits}f}{error}"


class ModelEntry(Strict):
    """The evaluated model. `digest` identifies its bytes; `name` is the source model's."""

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
    """The engine, the dtype and device that it computed with, and its notes."""

    name: str
    version: str
    dtype: str
    device: str = "cpu"
    kv_cache: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Return the engine's name, and its device if it is not the CPU."""
        return self.name if self.device == "cpu" else f"{self.name}, {self.device.split()[0]}"


class BaselineEntry(Strict):
    """The baseline for divergences: how the source was computed, and two noise floors of every divergence.

    `rounding` is the mean divergence in nats from storing states in float16; `noise` is that of the source computed in
    bfloat16, with its standard error.
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
    """The machine."""

    cpu: str
    cores: Count
    memory_bytes: Count


class Report(Strict):
    """All measurements of one model.

    `fingerprint` is a hash of everything that affects them; a report is reused only if a new one would have the same.
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
        """Return the first measurement of that name."""
        return next((m for m in self.measurements if m.name == name), None)

    def quality(self) -> list[str]:
        """Return lines of text: perplexity, protocol figures, divergence, notes."""
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
    """Return the noise floor of a model's divergences in nats, and its description; 0 if none was measured.

    If the source itself was evaluated in bfloat16, its divergence is the floor. Otherwise it is the baseline's figure,
    which covers only the first windows of the text.
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
    """Read a report's JSON; raises ReportError."""
    return parse_report(read_object(path, ReportError, AGAIN, MOST_REPORT), str(path))


def parse_report(values: object, where: str) -> Report:
    """Parse a report's JSON values; raises ReportError for damaged values or figures that are not finite."""
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
    """Describe this machine."""
    return Hardware(cpu=processor_name(), cores=usable_cores(), memory_bytes=psutil.virtual_memory().total)


class TaskReport(Strict):
    """Accuracy on tasks: `results` by task and figure, with the harness's names."""

    model: ModelEntry
    engine: EngineEntry
    hardware: Hardware
    settings: TaskSpec
    results: dict[str, dict[str, float]]
    versions: dict[str, str]
    num_fewshot: dict[str, int]
    samples: dict[str, int]
    lm_eval: str
