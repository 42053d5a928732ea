"""Reports: what was measured, on what, with what; written as JSON so that figures can be traced and compared."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
from pydantic import Field

from quantkit.errors import RecipeError, ReportError
from quantkit.recipe import EvaluationSpec, Strict, parse
from quantkit.system.processor import processor_name, usable_cores

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


class Measurement(Strict):
    """One figure: its unit, the number of observations `n`, and its standard error where it has one."""

    name: str
    value: float
    unit: str
    n: int | None = None
    stderr: float | None = None
    details: dict[str, float | str] = Field(default_factory=dict)


class ModelEntry(Strict):
    """What was judged. `digest` identifies its bytes; `name` is the source model's."""

    label: str
    name: str
    method: str | None
    digest: str
    notes: tuple[str, ...] = ()


class TextEntry(Strict):
    """The text that was used."""

    name: str
    sha256: str
    bundled: bool


class EngineEntry(Strict):
    """The engine that computed, the type it computed in, on which device, and its remarks."""

    name: str
    version: str
    dtype: str
    device: str = "cpu"
    notes: tuple[str, ...] = ()


class BaselineEntry(Strict):
    """The source as it was computed for divergences, and two floors under each of them.

    `rounding` is the mean divergence in nats that the states' float16 costs; `noise` that of the source computed in
    bfloat16, with its standard error.
    """

    format: int
    model: str
    dtype: str
    protocol: str
    n_ctx: int
    windows: int
    positions: int
    width: int
    sha256: str
    rounding: float
    noise: float
    noise_stderr: float


class Hardware(Strict):
    """The machine."""

    cpu: str
    cores: int
    memory_bytes: int


class Report(Strict):
    """All measurements of one model."""

    model: ModelEntry
    text: TextEntry
    windows: Windows
    engine: EngineEntry
    hardware: Hardware
    settings: EvaluationSpec
    measurements: tuple[Measurement, ...]
    baseline: BaselineEntry | None = None
    notes: tuple[str, ...] = ()

    def find(self, name: str) -> Measurement | None:
        """The first measurement of that name."""
        return next((m for m in self.measurements if m.name == name), None)

    def quality(self) -> list[str]:
        """The figures of quality as lines of text: perplexity, what the protocol adds, divergence, remarks."""
        w = self.windows
        cut = f"{w.windows} windows of {w.n_ctx}" if w.documents is None else f"{w.documents} pages"
        named = (self.find(name) for name in (TEXT_RATES if w.documents else ("perplexity",)))
        rates = ", ".join(_text(m) for m in named if m is not None)
        lines = [
            f"{self.model.label}: {rates} (protocol {w.protocol}, {cut}, {w.scored} targets, text {self.text.name}, "
            f"engine {self.engine.name} in {self.engine.dtype})"
        ]
        if (kld := self.find("kld")) is not None and (base := self.baseline) is not None:
            spread = ", ".join(f"{name} {float(value):.5f}" for name, value in kld.details.items())
            others = (self.find(name) for name in DIVERGENCES)
            lines += [
                f"  {_text(kld, 6)} nats from the source in {base.dtype} ({spread})",
                f"  {', '.join(_text(m, 6) for m in others if m is not None)}",
                f"  noise floor: the source in bfloat16 has a KLD of {base.noise:.2g} ± {base.noise_stderr:.1g}; "
                f"float16 in the baseline costs {base.rounding:.1g}",
            ]
        return [*lines, *(f"  note: {note}" for note in (*self.notes, *self.engine.notes))]


def _text(m: Measurement, digits: int = 4) -> str:
    error = "" if m.stderr is None else f" ± {m.stderr:.{digits}f}"
    return f"{NAMES.get(m.name, m.name.replace('_', ' '))} {m.value:.{digits}f}{error}"


def read_report(path: Path) -> Report:
    """Read a report's JSON; raises ReportError."""
    try:
        return parse(Report, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RecipeError) as error:
        raise ReportError(f"the report {path} cannot be read: {error}") from None


def this_machine() -> Hardware:
    """Name of the processor, number of usable cores, memory in bytes."""
    return Hardware(cpu=processor_name(), cores=usable_cores(), memory_bytes=psutil.virtual_memory().total)


class Windows(Strict):
    """How the windows were cut: the longest has `n_ctx` tokens; in each the logits from `first` on are judged.

    `scored` targets count over all windows. `documents`, `words` and `bytes` are counted by protocols that judge
    documents one by one.
    """

    protocol: str
    n_ctx: int
    windows: int
    first: int
    scored: int
    tokens_sha256: str
    documents: int | None = None
    words: int | None = None
    bytes: int | None = None
