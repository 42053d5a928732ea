"""Tables that compare reports of one model's variants, or of several models and machines.

Columns are variants, rows are measures, grouped by model. Quality figures do not depend on the machine and have one
row; speed and memory figures have a row per machine. Reports measured under different conditions are refused; the error
names the field that differs.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group

from quantkit.errors import ReportError, one_line
from quantkit.records.report import SPREAD, Measurement, Report, noise_of, parse_report
from quantkit.report.screen import FigureGrid, draw_grid, plain_text
from quantkit.report.statistics import best
from quantkit.system.files import replace_text
from quantkit.system.processor import threads
from quantkit.system.sizes import megabytes
from quantkit.system.untrusted import LARGEST_NAME, path_of, read_object, shown

if TYPE_CHECKING:
    from rich.console import Console

EMPTY = "-"
UNCOMPRESSED = 15.5  # bits per weight; from here a copy counts as not quantized, such as float16
LEGEND = "better than every other quantized copy beyond the error of the difference (95 %)."
MORE = "All notes: --notes, or table.md."
KLD, PERCENTILE = "KLD from source", "KLD, 99th percentile"
MAIN = ("perplexity", "word perplexity", KLD, "file size")  # of a line
ROUNDING = 1e-4  # relative change that another processor's rounding may cause
TABLE = "table.json"
LONGEST = 2000  # characters of one text in Markdown or HTML
# Characters that begin HTML, an entity, a link, code, emphasis or a cell.
ENTITIES = {"<": "&lt;", "&": "&amp;"}
SPECIAL = re.compile(r"[\\`*\[\]<|]|&(?=[#\w])")
# Colours of methods or models in plots and on the page; the last is the source's.
COLOURS = ("#0072b2", "#c44e00", "#008a64", "#b0508a", "#a36a00", "#2a86bd", "#1b1f24")

Show = Callable[[Measurement], str]
# Settings that reports must share if they have figures of these names.
SETTINGS_OF = {
    "new_tokens": ("ms_per_token@",),
    "max_tokens": ("answers_",),
    "price_per_hour": ("cost_per_1000_tokens@",),
}
QUALITY = ("perplexity", "word_perplexity", "kld")
OF_A_MACHINE = ("peak_rss_bytes", "device_peak_bytes")  # and all figures at a number of threads

# Notes below a table that has figures of a name.
NOTES = {
    "ms_per_token": "ms/token: batch 1, greedy, median of the repeats after a warm-up.",
    "ttft_ms": "ms to first token: from a prompt of at most 32 tokens to the first new token, median.",
    "pp512": "prompt and generated tokens/s: mean ± standard deviation of the repeats, random tokens, as llama-bench.",
    "answers_tokens_per_second": "answers: nine prompts, greedy, batch 1; mean ± standard error; times: "
    "median / p90 / p99.",
    "peak_rss_bytes": "Peak memory: resident size of a process that loads the model and generates.",
}


def escape_markdown(text: str) -> str:
    """Escape `text` so that Markdown shows it unchanged, on one line, also in a table cell."""
    return SPECIAL.sub(lambda match: ENTITIES.get(match[0], f"\\{match[0]}"), one_line(text, LONGEST))


def _perplexity(m: Measurement) -> str:
    return m.text(2 if m.value < 1000 else 0)


def _with_deviation(m: Measurement) -> str:
    return f"{m.value:.1f}" + (f" ± {float(m.details['stdev']):.1f}" if "stdev" in m.details else "")


def _percentiles(m: Measurement) -> str:
    return " / ".join(f"{float(m.details[at]):.1f}" for at in SPREAD)


def _bytes(m: Measurement) -> str:
    return megabytes(m.value)


def _tenths(m: Measurement) -> str:
    return f"{m.value:.1f}"


# (title, name of the figure, its formatter) of each row. NAME also stands for NAME@THREADS, and pp for pp512.
MEASURES: tuple[tuple[str, str, Show], ...] = (
    ("perplexity", "perplexity", _perplexity),
    ("word perplexity", "word_perplexity", _perplexity),
    ("bits per byte", "bits_per_byte", lambda m: m.text(4)),
    (KLD, "kld", lambda m: m.text(5)),
    (PERCENTILE, "kld", lambda m: f"{float(m.details['p99']):z.4f}"),
    ("same top token", "same_top_p", lambda m: f"{100 * m.value:.2f} %"),
    ("file size", "weight_bytes", _bytes),
    ("bits per weight", "bits_per_weight", lambda m: f"{m.value:.2f}"),
    ("ms/token", "ms_per_token", _tenths),
    ("ms to first token", "ttft_ms", _tenths),
    ("prompt tokens/s", "pp", _with_deviation),
    ("generated tokens/s", "tg", _with_deviation),
    ("answers: tokens/s", "answers_tokens_per_second", lambda m: m.text(1)),
    ("answers: seconds", "answers_seconds", lambda m: m.text(2)),
    ("answers: tokens", "answers_tokens", lambda m: m.text(1)),
    ("answers: ms to first token", "answers_ttft_ms", _percentiles),
    ("answers: ms/token", "answers_ms_per_token", _percentiles),
    ("answers: ms between tokens", "answers_itl_ms", _percentiles),
    ("cost per 1,000 tokens", "cost_per_1000_tokens", lambda m: f"{m.value:.3g}"),
    ("peak memory", "peak_rss_bytes", _bytes),
    ("peak memory of the GPU", "device_peak_bytes", _bytes),
)


def _measures(reports: Iterable[Report]) -> Iterator[tuple[str, str, Show]]:
    """Yield (title, figure name, formatter) for all figures of the reports, in order; speeds by threads."""
    names = {m.name for report in reports for m in report.measurements}
    for title, prefix, show in MEASURES:
        found = [match for name in names if (match := re.fullmatch(rf"({prefix}\d*)(?:@(\d+))?", name))]
        for match in sorted(found, key=lambda match: (int(match[2] or 0), match[1])):
            kind = f" ({match[1]})" if match[1] != prefix else ""
            cores = f" @ {threads(int(match[2]))}" if match[2] else ""
            yield f"{title}{kind}{cores}", match[0], show


@dataclass(frozen=True)
class Row:
    """A measure of one model: each column's figure and cell, and the column of the best copy."""

    title: str
    figures: tuple[Measurement | None, ...]
    cells: tuple[str, ...]
    best: int | None = None


class Part(NamedTuple):
    """The reports of one model on one machine."""

    model: str
    machine: str
    reports: list[Report]


def _is_quantized(report: Report) -> bool:
    bits = report.find("bits_per_weight")
    return report.model.method is not None and (bits is None or bits.value < UNCOMPRESSED)


def shared_fields(report: Report, machine: str) -> Iterator[tuple[str, object, object]]:
    """Yield (field, group, value) for all fields on which the reports of a group must agree to be comparable."""
    model, w, base = report.model.name, report.windows, report.baseline
    everywhere, part = "", (model, machine)
    if machine:
        yield "limit", everywhere, report.settings.limit
    else:
        yield "model", everywhere, model
    yield "protocol", everywhere, w.protocol
    yield "n_ctx", everywhere, w.n_ctx
    yield "windows", model, w.windows
    yield "text", everywhere, report.text.sha256
    yield "tokens", model, w.tokens_sha256
    yield "hardware", part, report.hardware.cpu
    yield "baseline", part, base.sha256 if base else None
    if any(map(report.find, QUALITY)):
        yield "type of the baseline", everywhere, base.dtype if base else None
    for setting, prefixes in SETTINGS_OF.items():
        if any(m.name.startswith(prefixes) for m in report.measurements):
            among = part if setting == "price_per_hour" else everywhere  # machines have prices of their own
            yield setting, among, getattr(report.settings, setting)


@dataclass(frozen=True)
class Table:
    """Reports of variants; sources come first.

    `machines` gives each report's machine; without it, all are of one model on one machine. `missing`: what was not
    measured, and why. Raises ReportError for reports that cannot be compared.
    """

    reports: tuple[Report, ...]
    machines: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.reports:
            raise ReportError("a table needs at least one report")
        first: dict[tuple[str, object], tuple[object, str]] = {}
        for report, machine in self._placed:
            place = f"{report.model.label} of {report.model.name} on {machine}" if machine else report.model.label
            for field, among, value in shared_fields(report, machine):
                one, there = first.setdefault((field, among), (value, place))
                if one != value:
                    raise ReportError(
                        f"{there} and {place} cannot be in one table: their {field} differs ({one} and {value}). "
                        "Evaluate both in the same way."
                    )

    @property
    def _placed(self) -> list[tuple[Report, str]]:
        return list(zip(self.reports, self.machines or [""] * len(self.reports), strict=True))

    @property
    def parts(self) -> list[Part]:
        """Return the reports, grouped by model and machine."""
        found: dict[tuple[str, str], list[Report]] = {}
        for report, machine in self._placed:
            found.setdefault((report.model.name, machine), []).append(report)
        return [Part(model, machine, reports) for (model, machine), reports in found.items()]

    @property
    def models(self) -> list[str]:
        """Return the names of the source models."""
        return list(dict.fromkeys(report.model.name for report in self.reports))

    @property
    def methods(self) -> list[str]:
        """Return the methods of the copies."""
        return list(dict.fromkeys(report.model.method for report in self.reports if report.model.method))

    @cached_property
    def _columns(self) -> list[tuple[str, list[tuple[Report, str]]]]:
        """Return (label, reports with their machines) of each column."""
        if not self.machines:
            return [(report.model.label, [(report, "")]) for report in self.reports]
        found: dict[str, list[tuple[Report, str]]] = {}
        for report, machine in sorted(self._placed, key=lambda pair: pair[0].model.method is not None):
            found.setdefault(report.model.label, []).append((report, machine))
        return list(found.items())

    @property
    def columns(self) -> list[str]:
        """Return the variants' labels, sources first."""
        return [label for label, _ in self._columns]

    def variants(self, model: str) -> list[Report]:
        """Return one report per variant of a model, from the first machine that has it."""
        found = ([report for report, _ in pairs if report.model.name == model] for _, pairs in self._columns)
        return [reports[0] for reports in found if reports]

    def rows(self, model: str | None = None) -> list[Row]:
        """Return all measures of a model (default: the first one), by machine if there are several."""
        model = self.models[0] if model is None else model
        columns = [[pair for pair in pairs if pair[0].model.name == model] for _, pairs in self._columns]
        copies = [any(_is_quantized(report) for report, _ in pairs) for pairs in columns]
        parts = [part for part in self.parts if part.model == model]
        rows = []
        for title, name, show in _measures([report for part in parts for report in part.reports]):
            having = [part.machine for part in parts if any(report.find(name) for report in part.reports)]
            for machine in having if "@" in name or name in OF_A_MACHINE else [None]:
                found = (((r.find(name) for r, on in pairs if machine in (None, on))) for pairs in columns)
                figures = [next(filter(None, figures), None) for figures in found]
                # A percentile has no error: what the figure carries is the mean's.
                rivals = [f if copy and title != PERCENTILE else None for f, copy in zip(figures, copies, strict=True)]
                named = f"{title}, {machine}" if machine and len(set(self.machines)) > 1 else title
                cells = tuple(EMPTY if figure is None else show(figure) for figure in figures)
                rows.append(Row(named, tuple(figures), cells, best(rivals)))
        if not self.machines:
            rows.append(Row("engine", (None,) * len(columns), tuple(r.engine.where for r in self.reports)))
        return rows

    def notes(self, full: bool = False) -> list[str]:
        """Return the notes below the table, without repetitions; notes on some models or machines name them.

        Without `full`: only notes that affect how figures are read, each cut at its first colon, semicolon or bracket.
        """
        about: dict[tuple[str, str], dict[str, None]] = {}
        engines: list[tuple[Report, str]] = []
        remarks: list[tuple[Report, str]] = []
        for part in self.parts:
            for kind, line in _how_measured(part.reports, full):
                about.setdefault((kind, line), {})[part.model if kind == "model" else part.machine] = None
            for report in part.reports:
                e, made = report.engine, report.model.notes
                engines.append((report, f"{e.name} {e.version}, computing in {e.dtype}"))
                made = made if full else tuple(re.split(r": |; | \(", note)[0] for note in made)
                remarks += [(report, note) for note in (*report.notes, *e.notes, *made)]
        every = {"model": len(self.models), "machine": len({part.machine for part in self.parts})}
        lines = [
            line if len(places) == every[kind] else f"{', '.join(places)}: {line}"
            for (kind, line), places in about.items()
        ]
        if full:
            lines += [f"{engine}: {who}." for engine, who in self._grouped(engines)]
        lines += [f"{who}: {note}." for note, who in self._grouped(remarks)]
        return [*self.missing, *lines, *self._disagreements()]

    def _grouped(self, said: list[tuple[Report, str]]) -> Iterator[tuple[str, str]]:
        """Yield each distinct text with the variants it applies to."""
        found: dict[str, dict[str, dict[str, None]]] = {}
        for report, text in said:
            found.setdefault(text, {}).setdefault(report.model.name, {})[report.model.label] = None
        several = len(self.models) > 1
        for text, models in found.items():
            yield text, ", ".join(f"{m} ({', '.join(v)})" if several else ", ".join(v) for m, v in models.items())

    def _disagreements(self) -> Iterator[str]:
        """Yield notes on machines with different files, or quality figures that differ by more than rounding."""
        pairs: dict[tuple[str, str], list[tuple[Report, str]]] = {}
        for report, machine in self._placed if self.machines else []:
            pairs.setdefault((report.model.name, report.model.label), []).append((report, machine))
        for (model, label), ((one, here), *others) in pairs.items():
            for other, there in others:
                if other.model.digest != one.model.digest:
                    yield f"{model}, {label}: the files on {there} differ from those on {here}."
                for title, name, show in _measures([one]):
                    a, b = one.find(name), other.find(name)
                    if a is None or b is None or "@" in name or name in OF_A_MACHINE or title == PERCENTILE:
                        continue
                    if abs(a.value - b.value) > ROUNDING * abs(a.value):
                        yield f"{model}, {label}: {title} is {show(a)} on {here} and {show(b)} on {there}."

    def line(self) -> str:
        """Return the last variant's main figures in one line."""
        named = {row.title: row.cells[-1] for row in self.rows() if row.cells[-1] != EMPTY}
        shown = [f"{title} {named[title]}" for title in MAIN if title in named]
        shown += [f"{value} {title}" for title, value in named.items() if title.startswith("ms/token")]
        return f"{self.columns[-1]}: {', '.join(shown)}"

    def drawn(self, width: int, transpose: bool | None = None) -> Group:
        """Draw the table for a terminal of `width` columns, with a row per variant if `transpose` (None: if needed)."""
        grids = []
        for model in self.models:
            rows = self.rows(model)
            marked = frozenset((i, row.best) for i, row in enumerate(rows) if row.best is not None)
            grid = FigureGrid([row.title for row in rows], self.columns, [list(row.cells) for row in rows], marked)
            grids.append(draw_grid(grid, model, width, transpose))
        return Group(*grids)

    def show(self, console: Console, *, transpose: bool | None = None, notes: bool = False) -> None:
        """Print the table with short notes, or with `notes` all notes in full; `transpose` as in `drawn`."""
        console.print(self.drawn(console.width, transpose))
        lines = self.notes(full=True) if notes else [*self.notes(), MORE]
        for line in [*([f"* {LEGEND}"] if self._has_best else []), *lines]:
            console.print(plain_text(line), style="dim", soft_wrap=not console.is_terminal)  # a log's lines stay whole

    @property
    def _has_best(self) -> bool:
        return any(row.best is not None for model in self.models for row in self.rows(model))

    def to_markdown(self) -> str:
        """Return GitHub Markdown, with full notes in a collapsed section; the best copy in each row is bold."""

        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cells)} |"

        lines = [
            line(["Model", "Measure", *map(escape_markdown, self.columns)]),
            "|---|---|" + "---:|" * len(self.columns),
        ]
        for model in self.models:
            for row in self.rows(model):
                cells = [escape_markdown(cell) for cell in row.cells]
                if row.best is not None:
                    cells[row.best] = f"**{cells[row.best]}**"
                lines.append(line([escape_markdown(model), escape_markdown(row.title), *cells]))
        lines += ["", *(f"- {escape_markdown(note)}" for note in self.notes())]
        lines += [f"- **Bold**: {LEGEND}"] if self._has_best else []
        lines += ["", "<details><summary>All notes</summary>", ""]
        lines += [*(f"- {escape_markdown(note)}" for note in self.notes(full=True)), "", "</details>"]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """Return CSV with a line per figure: model, machine if named, variant, measure, value, unit, error, n."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        about = ["model", *(["machine"] if self.machines else []), "variant"]
        writer.writerow([*about, "measure", "value", "unit", "stderr", "n"])
        for model, machine, reports in self.parts:
            for report in reports:
                about = [model, *([machine] if machine else []), report.model.label]
                for m in report.measurements:
                    stderr = "" if m.stderr is None else m.stderr
                    writer.writerow([*about, m.name, m.value, m.unit, stderr, m.n or ""])
        return out.getvalue()

    def to_json(self) -> str:
        """Return all reports in full as JSON, by machine if named."""
        parts = [
            {**({"machine": machine} if machine else {}), "reports": [report.model_dump() for report in reports]}
            for _, machine, reports in self.parts
        ]
        return json.dumps({"parts": parts} if self.machines else parts[0], indent=2) + "\n"


def _how_measured(reports: Sequence[Report], full: bool) -> Iterator[tuple[str, str]]:
    """Yield ("model" or "machine", text): how the reports of one model and machine were measured."""
    one, w = reports[0], reports[0].windows
    names = {m.name.partition("@")[0] for report in reports for m in report.measurements}
    text = one.text.name + (" (not WikiText: compare only within this table)" if one.text.bundled else "")
    cut = f"{w.windows} windows of {w.n_ctx} tokens"
    if "perplexity" in names and not full:
        yield "model", f"Perplexity: {w.protocol}, {cut} of {text}."
    elif "perplexity" in names:
        counted = "the second half of each scored" if w.first else "every token scored"
        if w.documents:
            cut = f"{w.documents} pages in windows of at most {w.n_ctx} tokens"
        yield "model", f"Perplexity ± standard error: protocol {w.protocol}, {cut}, {counted} ({w.scored} tokens)."
        yield "model", f"Text: {text}, sha256 {one.text.sha256[:12]}."
    h = one.hardware
    hardware = f"Hardware: {h.cpu}, {h.cores} cores, {h.memory_bytes / 1e9:.0f} GB."
    divergence = f"KLD: nats per token, against the source in {one.baseline.dtype}." if one.baseline else ""
    if not full:
        yield from (("model", divergence),) if divergence else ()
        yield "machine", hardware
        return
    yield "machine", hardware
    yield from (("model", note) for name, note in NOTES.items() if name in names)
    if one.baseline:
        floor = f"Noise floor: {noise_of(reports)[1]}; storing its states in float16 adds {one.baseline.rounding:.1g}."
        yield "model", f"{divergence} {floor}"


def join_tables(tables: Iterable[tuple[str | None, Table]]) -> Table:
    """Join tables given with their machines' labels; None means the processor and device names.

    Reports of one model and machine form one part. Raises ReportError.
    """
    parts: dict[tuple[str, str], list[Report]] = {}
    for label, table in tables:
        for report in table.reports:
            device = report.engine.device
            machine = label or report.hardware.cpu + ("" if device == "cpu" else f", {device}")
            found = parts.setdefault((report.model.name, machine), [])
            twin = next((other for other in found if other.model.label == report.model.label), None)
            if twin is None:
                found.append(report)
            elif twin.model.digest != report.model.digest:
                raise ReportError(
                    f"{machine} has two different files with the label {report.model.label}. "
                    "Leave one of their tables out, or give LABEL=PATH."
                )
            else:  # the same copy: one report is enough, if both were made alike
                Table((twin, report), (machine, machine))
    for found in parts.values():
        found.sort(key=lambda report: report.model.method is not None)
    placed = [(report, machine) for (_, machine), found in parts.items() for report in found]
    return Table(tuple(report for report, _ in placed), tuple(machine for _, machine in placed))


def read_places(places: Iterable[str]) -> list[tuple[str | None, Table]]:
    """Read tables from ``PATH`` or ``LABEL=PATH``: a file, or a folder with table.json."""
    found: list[tuple[str | None, Table]] = []
    for place in places:
        label, path = split_label(place)
        if path.is_dir() and not (path / TABLE).is_file():
            raise ReportError(f"the folder {path} has no {TABLE}. Give a folder written by quantkit compare.")
        tables = read_tables(path / TABLE if path.is_dir() else path)
        if label is not None and len({own for own, _ in tables}) > 1:
            owns = ", ".join(dict.fromkeys(own or "without a name" for own, _ in tables))
            raise ReportError(
                f"{path} has tables of several machines ({owns}), so they cannot share the label {label}. Leave "
                "the label out."
            )
        found += [(label or own, table) for own, table in tables]
    return found


def split_label(place: str) -> tuple[str | None, Path]:
    """Split ``LABEL=PATH`` or ``PATH`` into (label or None, path); raise ReportError."""
    label, equals, rest = place.partition("=")
    path = path_of(place, ReportError)
    if not equals or path.exists():
        return None, path
    if not label.strip():
        raise ReportError(f"{shown(place)} has no label before the =")
    return label, path_of(rest, ReportError)


def read_tables(path: Path) -> list[tuple[str | None, Table]]:
    """Read a JSON file, a table or a report; return (machine label, table) of each part. Raises ReportError."""

    values = read_object(path, ReportError)
    if "model" in values and "measurements" in values:
        values = {"reports": [values]}
    parts = values.get("parts", [values])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ReportError(f"{path} is not a table of quantkit: its parts are not a list of tables")
    found = []
    for machine, reports in ((part.get("machine"), part.get("reports")) for part in parts):
        if not isinstance(reports, list):
            raise ReportError(f"{path} is not a table of quantkit: it has no reports")
        if machine is not None and not (isinstance(machine, str) and 0 < len(machine) <= LARGEST_NAME):
            raise ReportError(f"{path} is not a table of quantkit: a machine's label is not a short text")
        found.append((machine, Table(tuple(parse_report(value, str(path)) for value in reports))))
    return found


def write_table(table: Table, folder: Path) -> None:
    """Write table.md, table.csv and table.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((TABLE, table.to_json()), ("table.md", table.to_markdown()), ("table.csv", table.to_csv())):
        replace_text(folder / name, text)
