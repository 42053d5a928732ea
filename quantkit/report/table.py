"""The comparison table: a block per model, rows perplexity / size / ms a token, columns the variants.

Every figure comes from a Report. Reports that were measured differently are refused, with the field that differs.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quantkit.errors import ReportError
from quantkit.report.best import best
from quantkit.report.markdown import escaped
from quantkit.report.records import Measurement, Report
from quantkit.report.screen import Grid, drawn, plain
from quantkit.system.processor import threads

if TYPE_CHECKING:
    from rich.console import Console, Group

EMPTY = "-"
LEGEND = "better than every other copy beyond the error of the difference (95 %)."
MORE = "Notes in full: --notes, or table.md where there is one."
MAIN = ("perplexity", "word perplexity", "KLD from source", "file size")  # of a line
PERCENTILE = "KLD, 99th percentile"
Show = Callable[[Measurement], str]
# What stands under a table that has figures of a name.
NOTES = {
    "ms_per_token": "ms/token: batch 1, greedy, median of the repeats after a warm-up.",
    "ttft_ms": "ms to first token: from a prompt of at most 32 tokens to the first new one, median.",
    "pp512": "prompt and generated tokens/s: mean ± standard deviation of the repeats, random tokens, as llama-bench.",
    "answers_tokens_per_second": "answers: nine prompts, greedy, batch 1; mean ± standard error; times: "
    "median / p90 / p99.",
    "peak_rss_bytes": "Peak memory: resident, of a process of its own that loads and generates.",
}

# What reports in one table share.
COMPARED: dict[str, Callable[[Report], object]] = {
    "model": lambda r: r.model.name,
    "protocol": lambda r: r.windows.protocol,
    "n_ctx": lambda r: r.windows.n_ctx,
    "windows": lambda r: r.windows.windows,
    "text": lambda r: r.text.sha256,
    "tokens": lambda r: r.windows.tokens_sha256,
    "hardware": lambda r: r.hardware.cpu,
    "baseline": lambda r: r.baseline.sha256 if r.baseline else None,
}
# Settings that the reports share which have figures of such names.
SETTINGS_OF = {
    "new_tokens": ("ms_per_token@",),
    "max_tokens": ("answers_",),
    "price_per_hour": ("cost_per_1000_tokens@",),
}


def megabytes(value: float) -> str:
    """Bytes as MB or GB (powers of ten)."""
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def refuse_unlike(reports: list[Report]) -> None:
    """Raise ReportError where two reports differ in one of `COMPARED`, or in a setting that figures of both go by."""
    if not reports:
        raise ReportError("a table needs at least one report")
    for field, value in COMPARED.items():
        _refuse_unlike(field, reports, value)
    for setting, figures in SETTINGS_OF.items():
        having = [report for report in reports if any(m.name.startswith(figures) for m in report.measurements)]
        _refuse_unlike(setting, having, partial(_setting, setting))


def _setting(name: str, report: Report) -> object:
    return getattr(report.settings, name)


def _refuse_unlike(field: str, reports: list[Report], value: Callable[[Report], object]) -> None:
    for other in reports[1:]:
        one, two = value(reports[0]), value(other)
        if one != two:
            raise ReportError(
                f"{reports[0].model.label} and {other.model.label} cannot stand in one table: their {field} differs "
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
        return self.reports[0].model.name

    @property
    def columns(self) -> list[str]:
        """Labels of the variants."""
        return [report.model.label for report in self.reports]

    def rows(self) -> list[tuple[str, list[str]]]:
        """(name, one cell for each variant), as printed."""
        rows = []
        for title, name, show in self.measures():
            figures = [report.find(name) for report in self.reports]
            if any(figures):
                rows.append((title, [show(m) if m else EMPTY for m in figures]))
        rows.append(("engine", [report.engine.where for report in self.reports]))
        return rows

    def best(self) -> dict[str, int]:
        """The column of the best copy by the row's name, where one is better than every other beyond the error."""
        # A percentile has no error: what the figure carries is the mean's.
        copies = [(i, report) for i, report in enumerate(self.reports) if report.model.method is not None]
        winners = {}
        for title, name, _ in self.measures():
            place = best([None if title == PERCENTILE else report.find(name) for _, report in copies])
            if place is not None:
                winners[title] = copies[place][0]
        return winners

    def measures(self) -> list[tuple[str, str, Show]]:
        """(title, name of the figure, how it is shown) of all that can have a row."""
        return [
            ("perplexity", "perplexity", _with_error),
            ("word perplexity", "word_perplexity", _with_error),
            ("bits per byte", "bits_per_byte", lambda m: _with_error(m, 4)),
            ("KLD from source", "kld", _divergence),
            (PERCENTILE, "kld", lambda m: f"{float(m.details['p99']):.4f}"),
            ("same top token", "same_top_p", lambda m: f"{100 * m.value:.2f} %"),
            ("file size", "weight_bytes", lambda m: megabytes(m.value)),
            ("bits per weight", "bits_per_weight", lambda m: f"{m.value:.2f}"),
            *self._per_threads("ms/token", "ms_per_token", _ms),
            *self._per_threads("ms to first token", "ttft_ms", _ms),
            *self._per_threads("prompt tokens/s", "pp", _with_deviation),
            *self._per_threads("generated tokens/s", "tg", _with_deviation),
            *self._per_threads("answers: tokens/s", "answers_tokens_per_second", lambda m: _with_error(m, 1)),
            *self._per_threads("answers: seconds", "answers_seconds", lambda m: _with_error(m, 2)),
            *self._per_threads("answers: tokens", "answers_tokens", lambda m: _with_error(m, 1)),
            *self._per_threads("answers: ms to first token", "answers_ttft_ms", _percentiles),
            *self._per_threads("answers: ms/token", "answers_ms_per_token", _percentiles),
            *self._per_threads("answers: ms between tokens", "answers_itl_ms", _percentiles),
            *self._per_threads("cost per 1,000 tokens", "cost_per_1000_tokens", lambda m: f"{m.value:.3g}"),
            ("peak memory", "peak_rss_bytes", lambda m: megabytes(m.value)),
            ("peak memory of the GPU", "device_peak_bytes", lambda m: megabytes(m.value)),
        ]

    def _per_threads(self, title: str, prefix: str, show: Show) -> Iterator[tuple[str, str, Show]]:
        """A row for each figure NAME@THREADS; a prefix such as pp stands for pp512, too."""
        pattern = re.compile(rf"({prefix}\d*)@(\d+)")
        names = {m.name for report in self.reports for m in report.measurements}
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        for match in sorted(matches, key=lambda match: int(match[2])):
            kind = f" ({match[1]})" if match[1] != prefix else ""
            yield f"{title}{kind} @ {threads(int(match[2]))}", match[0], show

    @property
    def _text(self) -> str:
        text = self.reports[0].text
        return text.name + (" (not WikiText: compare only within this table)" if text.bundled else "")

    @property
    def _hardware(self) -> str:
        h = self.reports[0].hardware
        return f"Hardware: {h.cpu}, {h.cores} cores, {h.memory_bytes / 1e9:.0f} GB."

    def _has(self, name: str) -> bool:
        return any(m.name.partition("@")[0] == name for report in self.reports for m in report.measurements)

    def notes(self) -> list[str]:
        """What stands under the table: protocol, text, windows, hardware, engines, and remarks of the variants."""
        one = self.reports[0]
        w = one.windows
        counted = "the second half of each counted" if w.first else "every target counted"
        cut = f"{w.windows} windows of {w.n_ctx} tokens"
        if w.documents:
            cut = f"{w.documents} pages in windows of at most {w.n_ctx} tokens"
        lines = []
        if self._has("perplexity"):
            lines = [
                f"Perplexity ± standard error: protocol {w.protocol}, {cut}, {counted} ({w.scored} targets).",
                f"Text: {self._text}, sha256 {one.text.sha256[:12]}.",
            ]
        lines.append(self._hardware)
        lines += [note for name, note in NOTES.items() if self._has(name)]
        if base := one.baseline:
            lines.append(
                f"KLD: nats a target, from the source in {base.dtype}. Noise floor: the source in bfloat16 has "
                f"{base.noise:.2g} ± {base.noise_stderr:.1g}; keeping its states in float16 costs {base.rounding:.1g}."
            )
        engines: dict[str, list[str]] = {}
        for report in self.reports:
            e = report.engine
            engines.setdefault(f"{e.name} {e.version}, computing in {e.dtype}", []).append(report.model.label)
        lines += [f"{engine}: {', '.join(labels)}." for engine, labels in engines.items()]
        remarks = [(r.model.label, note) for r in self.reports for note in (*_of_figures(r), *r.model.notes)]
        return lines + _grouped(remarks)

    def short_notes(self) -> list[str]:
        """What changes how a figure is read, each once; of how the copies were made only the first words."""
        one = self.reports[0]
        w = one.windows
        lines = []
        if self._has("perplexity"):
            lines = [f"Perplexity: {w.protocol}, {w.windows} windows of {w.n_ctx} tokens of {self._text}."]
        if one.baseline:
            lines.append(f"KLD: nats a target, from the source in {one.baseline.dtype}.")
        lines.append(self._hardware)
        figures = [(r.model.label, note) for r in self.reports for note in _of_figures(r)]
        made = [(r.model.label, re.split(r": |; | \(", note)[0]) for r in self.reports for note in r.model.notes]
        return lines + _grouped(figures) + _grouped(made)

    def line(self) -> str:
        """The last variant's main figures in one line."""
        named = {title: cells[-1] for title, cells in self.rows() if cells[-1] != EMPTY}
        shown = [f"{title} {named[title]}" for title in MAIN if title in named]
        shown += [f"{value} {title}" for title, value in named.items() if title.startswith("ms/token")]
        return f"{self.columns[-1]}: {', '.join(shown)}"

    def drawn(self, width: int, transpose: bool | None = None) -> Group:
        """For a screen of `width` columns; `transpose`: a row for each variant, by default where columns do not fit."""
        rows, best = self.rows(), self.best()
        marked = frozenset((i, best[title]) for i, (title, _) in enumerate(rows) if title in best)
        grid = Grid([title for title, _ in rows], self.columns, [cells for _, cells in rows], marked)
        return drawn(grid, self.model, width, transpose)

    def show(self, console: Console, *, transpose: bool | None = None, notes: bool = False) -> None:
        """Print it, below it what changes how a figure is read, or with `notes` all notes in full; see `drawn`."""
        console.print(self.drawn(console.width, transpose))
        lines = self.notes() if notes else [*self.short_notes(), MORE]
        if self.best():
            lines.insert(0, f"* {LEGEND}")
        for line in lines:
            console.print(plain(line), style="dim", soft_wrap=not console.is_terminal)  # a log's lines stay whole

    def to_markdown(self) -> str:
        """The table as GitHub Markdown, notes below a fold; the best copy of a row in bold."""
        lines = [
            "| Model | Measure | " + " | ".join(map(escaped, self.columns)) + " |",
            "|---|---|" + "---:|" * len(self.columns),
        ]
        model = escaped(self.model)
        winners = self.best()
        for title, cells in self.rows():
            texts = [
                f"**{escaped(cell)}**" if winners.get(title) == i else escaped(cell) for i, cell in enumerate(cells)
            ]
            lines.append(f"| {model} | {title} | " + " | ".join(texts) + " |")
        lines += ["", *(f"- {escaped(note)}" for note in self.short_notes())]
        if winners:
            lines.append(f"- **Bold**: {LEGEND}")
        lines += ["", "<details><summary>Notes in full</summary>", ""]
        lines += [*(f"- {escaped(note)}" for note in self.notes()), "", "</details>"]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """One line for each figure: model, variant, measure, value, unit, standard error, n."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "variant", "measure", "value", "unit", "stderr", "n"])
        for report in self.reports:
            for m in report.measurements:
                stderr = "" if m.stderr is None else m.stderr
                writer.writerow([self.model, report.model.label, m.name, m.value, m.unit, stderr, m.n or ""])
        return out.getvalue()

    def to_json(self) -> str:
        """All reports in full."""
        return json.dumps({"reports": [report.model_dump() for report in self.reports]}, indent=2) + "\n"


def _of_figures(report: Report) -> tuple[str, ...]:
    """Remarks on the judgement, not on how the variant was made."""
    return (*report.notes, *report.engine.notes)


def _grouped(remarks: list[tuple[str, str]]) -> list[str]:
    """(variant, remark) as lines, each remark once."""
    labels: dict[str, dict[str, None]] = {}
    for label, note in remarks:
        labels.setdefault(note, {})[label] = None
    return [f"{', '.join(variants)}: {note}." for note, variants in labels.items()]


def _with_error(m: Measurement, digits: int | None = None) -> str:
    digits = digits or (2 if m.value < 1000 else 0)
    return f"{m.value:.{digits}f}" + (f" ± {m.stderr:.{digits}f}" if m.stderr is not None else "")


def _divergence(m: Measurement) -> str:
    return _with_error(m, 5)


def _with_deviation(m: Measurement) -> str:
    return f"{m.value:.1f}" + (f" ± {float(m.details['stdev']):.1f}" if "stdev" in m.details else "")


def _percentiles(m: Measurement) -> str:
    return " / ".join(f"{float(m.details[at]):.1f}" for at in ("p50", "p90", "p99"))


def _ms(m: Measurement) -> str:
    return f"{m.value:.1f}"
