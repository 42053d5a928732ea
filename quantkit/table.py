"""The comparison table: a block per model, rows perplexity / size / ms a token, columns the variants.

Every figure comes from a Report. Reports that were measured differently are refused, with the field that differs.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import ReportError
from quantkit.report import Measurement, Report

if TYPE_CHECKING:
    from rich.console import Console

EMPTY = "-"


def megabytes(value: float) -> str:
    """Bytes as MB or GB (powers of ten)."""
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def refuse_unlike(reports: list[Report]) -> None:
    """Raise ReportError where two reports do not share model, protocol, windows, text, tokens or hardware."""
    if not reports:
        raise ReportError("a table needs at least one report")
    first = reports[0]
    for other in reports[1:]:
        pairs = {
            "model": (first.subject.model, other.subject.model),
            "protocol": (first.windows.protocol, other.windows.protocol),
            "n_ctx": (first.windows.n_ctx, other.windows.n_ctx),
            "windows": (first.windows.windows, other.windows.windows),
            "text": (first.text.sha256, other.text.sha256),
            "tokens": (first.windows.tokens_sha256, other.windows.tokens_sha256),
            "hardware": (first.hardware.cpu, other.hardware.cpu),
            "baseline": tuple(r.baseline.sha256 if r.baseline else None for r in (first, other)),
        }
        for field, (one, two) in pairs.items():
            if one != two:
                raise ReportError(
                    f"{first.subject.label} and {other.subject.label} cannot stand in one table: their {field} differs "
                    f"({one} and {two}). Evaluate both in the same way."
                )


@dataclass(frozen=True)
class Table:
    """Reports of one model's variants, the source first."""

    reports: tuple[Report, ...]

    def __post_init__(self) -> None:
        refuse_unlike(list(self.reports))

    @property
    def model(self) -> str:
        """The source model."""
        return self.reports[0].subject.model

    @property
    def columns(self) -> list[str]:
        """Labels of the variants."""
        return [report.subject.label for report in self.reports]

    def rows(self) -> list[tuple[str, list[str]]]:
        """(name, one cell for each variant), as printed."""
        named = [
            ("perplexity", "perplexity", _with_error),
            ("word perplexity", "word_perplexity", _with_error),
            ("bits per byte", "bits_per_byte", lambda m: _with_error(m, 4)),
            ("KLD from source", "kld", lambda m: _with_error(m, 5)),
            ("KLD, 99th percentile", "kld", lambda m: f"{float(m.details['p99']):.4f}"),
            ("same top token", "same_top", lambda m: f"{100 * m.value:.2f} %"),
            ("file size", "weight_bytes", lambda m: megabytes(m.value)),
            ("bits per weight", "bits_per_weight", lambda m: f"{m.value:.2f}"),
            *((f"ms/token @ {n} thread{'s' if n > 1 else ''}", f"ms_per_token@{n}", _ms) for n in self._threads()),
            ("peak memory", "peak_bytes", lambda m: megabytes(m.value)),
        ]
        rows = []
        for title, name, show in named:
            found = [report.find(name) for report in self.reports]
            if any(found):
                rows.append((title, [show(m) if m else EMPTY for m in found]))
        rows.append(("engine", [report.runtime.name for report in self.reports]))
        return rows

    def _threads(self) -> list[int]:
        names = {m.name for report in self.reports for m in report.measurements if m.name.startswith("ms_per_token@")}
        return sorted(int(name.partition("@")[2]) for name in names)

    def notes(self) -> list[str]:
        """What stands under the table: protocol, text, windows, hardware, engines, and remarks of the variants."""
        one = self.reports[0]
        w, h = one.windows, one.hardware
        label = " (not WikiText: compare only within this table)" if one.text.bundled else ""
        counted = "the second half of each counted" if w.first else "every target counted"
        cut = f"{w.windows} windows of {w.n_ctx} tokens"
        if w.documents:
            cut = f"{w.documents} pages in windows of at most {w.n_ctx} tokens"
        lines = [
            f"Perplexity ± standard error: protocol {w.protocol}, {cut}, {counted} ({w.scored} targets).",
            f"Text: {one.text.name}{label}, sha256 {one.text.sha256[:12]}.",
            f"Hardware: {h.cpu}, {h.cores} cores, {h.memory_bytes / 1e9:.0f} GB. "
            "ms/token: batch 1, greedy, median of the repeats after a warm-up.",
            "Peak memory: resident, of a fresh process that loads and generates.",
        ]
        if base := one.baseline:
            lines.append(
                f"KLD: nats a target, from the source in {base.dtype}. Noise floor: the source in bfloat16 has "
                f"{base.noise:.2g} ± {base.noise_stderr:.1g}; keeping its states in float16 costs {base.rounding:.1g}."
            )
        engines: dict[str, list[str]] = {}
        for report in self.reports:
            r = report.runtime
            engines.setdefault(f"{r.name} {r.version}, computing in {r.dtype}", []).append(report.subject.label)
        lines += [f"{engine}: {', '.join(labels)}." for engine, labels in engines.items()]
        remarks: dict[str, list[str]] = {}
        for report in self.reports:
            for note in (*report.notes, *report.runtime.notes, *report.subject.notes):
                remarks.setdefault(note, []).append(report.subject.label)
        lines += [f"{', '.join(labels)}: {note}." for note, labels in remarks.items()]
        return lines

    def to_markdown(self) -> str:
        """The table as GitHub Markdown, notes below."""
        lines = [
            "| Model | Measure | " + " | ".join(self.columns) + " |",
            "|---|---|" + "---:|" * len(self.columns),
        ]
        lines += [f"| {self.model} | {title} | " + " | ".join(cells) + " |" for title, cells in self.rows()]
        lines += ["", *(f"- {note}" for note in self.notes())]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """One line for each figure: model, variant, measure, value, unit, standard error, n."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "variant", "measure", "value", "unit", "stderr", "n"])
        for report in self.reports:
            for m in report.measurements:
                stderr = "" if m.stderr is None else m.stderr
                writer.writerow([self.model, report.subject.label, m.name, m.value, m.unit, stderr, m.n or ""])
        return out.getvalue()

    def to_json(self) -> str:
        """All reports in full."""
        return json.dumps({"reports": [report.model_dump() for report in self.reports]}, indent=2) + "\n"

    def show(self, console: Console) -> None:
        """Print with rich; on a narrow terminal, columns go on in further tables."""
        import rich.table

        rows = self.rows()
        first = max(len(title) for title, _ in rows) + 4
        widths = [max(len(label), *(len(cells[i]) for _, cells in rows)) + 3 for i, label in enumerate(self.columns)]
        start = 0
        while start < len(widths):
            stop, used = start + 1, first + widths[start]
            while stop < len(widths) and used + widths[stop] <= console.width:
                used += widths[stop]
                stop += 1
            grid = rich.table.Table(title=self.model if start == 0 else None)
            grid.add_column("", no_wrap=True)
            for label in self.columns[start:stop]:
                grid.add_column(label, justify="right", no_wrap=True)
            for title, cells in rows:
                grid.add_row(title, *cells[start:stop])
            console.print(grid)
            start = stop
        for note in self.notes():
            console.print(note, style="dim", highlight=False, soft_wrap=True)


def _with_error(m: Measurement, digits: int | None = None) -> str:
    digits = digits or (2 if m.value < 1000 else 0)
    return f"{m.value:.{digits}f}" + (f" ± {m.stderr:.{digits}f}" if m.stderr is not None else "")


def _ms(m: Measurement) -> str:
    return f"{m.value:.1f}"


def table_from_json(path: Path) -> Table:
    """Read a table.json back; raises ReportError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["reports"]
        return Table(tuple(Report.model_validate(value) for value in values))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path} is no table of quantkit: {str(error).splitlines()[0]}") from None
