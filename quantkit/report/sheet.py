"""A sheet: tables of several models and machines as one, as llama.cpp's README has it.

Rows stand model by model. Figures of quality stand once a variant, since they do not depend on the machine; those of
speed and memory have a row for each machine. What was measured in another way is refused, with the field that differs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import ReportError
from quantkit.report.best import best
from quantkit.report.markdown import escaped
from quantkit.report.records import Measurement, Report, report_of
from quantkit.report.screen import Grid, drawn, plain
from quantkit.report.table import COMPARED, EMPTY, LEGEND, MORE, PERCENTILE, SETTINGS_OF, Show, Table
from quantkit.untrusted import LARGEST_NAME, path_of, read_object, shown

if TYPE_CHECKING:
    from rich.console import Console

# What tables of one sheet share, and what those of them do that have figures of quality; those of one model share more.
SHARED: dict[str, Callable[[Report], object]] = {
    **{name: COMPARED[name] for name in ("protocol", "n_ctx", "text")},
    "limit": lambda r: r.settings.limit,
}
OF_QUALITY: dict[str, Callable[[Report], object]] = {
    "type of the baseline": lambda r: r.baseline.dtype if r.baseline else None,
}
OF_ONE_MODEL = {name: COMPARED[name] for name in ("windows", "tokens")}
ROUNDING = 1e-4  # of a figure, which other processors' products may change it by
TABLE = "table.json"
NEVER_SHARED = ("peak_rss_bytes", "device_peak_bytes")


@dataclass(frozen=True)
class Part:
    """A table of one model that was measured on the machine called `machine`."""

    machine: str
    table: Table


@dataclass(frozen=True)
class Row:
    """A measure of one model: what is shown for each of the sheet's columns, and the column of the best copy."""

    title: str
    figures: tuple[Measurement | None, ...]
    cells: tuple[str, ...]
    best: int | None


def of_machine(name: str) -> bool:
    """Whether a figure of this name depends on the machine."""
    return "@" in name or name in NEVER_SHARED


def machine_of(report: Report) -> str:
    """What a machine is called where nobody says: its processor, and the device that computed where that is another."""
    device = report.engine.device
    return report.hardware.cpu if device == "cpu" else f"{report.hardware.cpu}, {device}"


def joined(tables: Iterable[tuple[str | None, Table]]) -> Sheet:
    """The sheet of tables, each with its machine's label or None for the processor's name.

    Tables of one model and machine become one, such as those of the shares of a comparison. Raises ReportError.
    """
    reports: dict[tuple[str, str], list[Report]] = {}
    for label, table in tables:
        for report in table.reports:
            found = reports.setdefault((report.model.name, label or machine_of(report)), [])
            twin = next((other for other in found if other.model.label == report.model.label), None)
            if twin is None:
                found.append(report)
            elif twin.model.digest != report.model.digest:
                raise ReportError(
                    f"two different files are called {report.model.label} on {label or machine_of(report)}. "
                    "Leave one of their tables out, or give the machines labels."
                )
    for found in reports.values():
        found.sort(key=lambda report: report.model.method is not None)
    return Sheet(tuple(Part(machine, Table(tuple(found))) for (_, machine), found in reports.items()))


@dataclass(frozen=True)
class Sheet:
    """Tables of several models and machines, one for each pair of them; `missing`: what was not measured, and why."""

    parts: tuple[Part, ...]
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts:
            raise ReportError("a sheet needs at least one table")
        for part in self.parts[1:]:
            _refuse_unlike(self.parts[0], part, SHARED)
        judged = [part for part in self.parts if any(map(_is_judged, part.table.reports))]
        for part in judged[1:]:
            _refuse_unlike(judged[0], part, OF_QUALITY)
        for setting, figures in SETTINGS_OF.items():
            if setting != "price_per_hour":  # machines have prices of their own
                _refuse_other_setting(self.parts, setting, figures)
        for model in self.models:
            one, *others = self.of(model)
            for other in others:
                _refuse_unlike(one, other, OF_ONE_MODEL)

    @property
    def models(self) -> list[str]:
        """The source models, in their order."""
        return list(dict.fromkeys(part.table.model for part in self.parts))

    @property
    def machines(self) -> list[str]:
        """The machines' labels, in their order."""
        return list(dict.fromkeys(part.machine for part in self.parts))

    @property
    def columns(self) -> list[str]:
        """Labels of all variants, the sources first."""
        reports = [report for part in self.parts for report in part.table.reports]
        reports.sort(key=lambda report: report.model.method is not None)
        return list(dict.fromkeys(report.model.label for report in reports))

    def of(self, model: str) -> list[Part]:
        """The parts of a model, one for each machine."""
        return [part for part in self.parts if part.table.model == model]

    def reports(self, model: str) -> list[Report]:
        """One report for each variant of a model, from the first machine that has it."""
        reports = [report for part in self.of(model) for report in part.table.reports]
        first = {report.model.label: report for report in reversed(reports)}
        return [first[column] for column in self.columns if column in first]

    def rows(self, model: str) -> list[Row]:
        """All measures of a model; figures of speed and memory are named after their machine where there are two."""
        parts, rows = self.of(model), []
        for title, name, show in _measures(parts):
            if not of_machine(name):
                rows.append(self._row(title, name, show, parts))
                continue
            for part in parts:
                if any(report.find(name) for report in part.table.reports):
                    of = f", {part.machine}" if len(self.machines) > 1 else ""
                    rows.append(self._row(title + of, name, show, [part]))
        return rows

    def _row(self, title: str, name: str, show: Show, parts: list[Part]) -> Row:
        figures = tuple(_first(parts, column, name) for column in self.columns)
        copies = [
            (i, figure)
            for i, (column, figure) in enumerate(zip(self.columns, figures, strict=True))
            if _is_copy(parts, column)
        ]
        place = None if title == PERCENTILE else best([figure for _, figure in copies])
        cells = tuple(EMPTY if figure is None else show(figure) for figure in figures)
        return Row(title, figures, cells, None if place is None else copies[place][0])

    def notes(self) -> list[str]:
        """What changes how a figure is read: each table's short notes once, and where machines do not agree."""
        lines: dict[str, None] = {}
        for part in self.parts:
            where = f"{part.machine}: " if len(self.machines) > 1 else ""
            for note in part.table.short_notes():
                lines.setdefault(where + note if note.startswith("Hardware: ") else note)
        for model in self.models:
            lines |= dict.fromkeys(_disagreements(model, self.of(model)))
        return [*self.missing, *lines]

    def show(self, console: Console, *, transpose: bool | None = None, notes: bool = False) -> None:
        """Print the models' tables one below the other, and below them the notes, with `notes` each table's in full."""
        marked = False
        for model in self.models:
            rows = self.rows(model)
            best = frozenset((i, row.best) for i, row in enumerate(rows) if row.best is not None)
            marked = marked or bool(best)
            grid = Grid([row.title for row in rows], self.columns, [list(row.cells) for row in rows], best)
            console.print(drawn(grid, model, console.width, transpose))
        lines = [*self.notes(), MORE]
        if notes:
            lines = [line for part in self.parts for line in (f"{_place(part)}:", *part.table.notes())]
        for line in [*([f"* {LEGEND}"] if marked else []), *lines]:
            console.print(plain(line), style="dim", soft_wrap=not console.is_terminal)

    def to_markdown(self) -> str:
        """One table of all models as GitHub Markdown; the best copy of a row in bold; each table's notes in a fold."""
        lines = [
            "| Model | Measure | " + " | ".join(map(escaped, self.columns)) + " |",
            "|---|---|" + "---:|" * len(self.columns),
        ]
        marked = False
        for model in self.models:
            for row in self.rows(model):
                cells = [f"**{escaped(c)}**" if row.best == i else escaped(c) for i, c in enumerate(row.cells)]
                marked = marked or row.best is not None
                lines.append(f"| {escaped(model)} | {escaped(row.title)} | " + " | ".join(cells) + " |")
        lines += ["", *(f"- {escaped(note)}" for note in self.notes())]
        lines += [f"- **Bold**: {LEGEND}"] if marked else []
        lines += ["", "<details><summary>Notes in full</summary>", ""]
        for part in self.parts:
            lines += [f"{escaped(part.table.model)}, {escaped(part.machine)}:", ""]
            lines += [*(f"- {escaped(note)}" for note in part.table.notes()), ""]
        return "\n".join([*lines, "</details>"]) + "\n"

    def to_csv(self) -> str:
        """One line for each figure that was measured: model, machine, variant, measure, value, unit, error, n."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "machine", "variant", "measure", "value", "unit", "stderr", "n"])
        for part in self.parts:
            for report in part.table.reports:
                for m in report.measurements:
                    stderr = "" if m.stderr is None else m.stderr
                    about = (part.table.model, part.machine, report.model.label)
                    writer.writerow([*about, m.name, m.value, m.unit, stderr, m.n or ""])
        return out.getvalue()

    def to_json(self) -> str:
        """All reports in full, by machine."""
        parts = [
            {"machine": part.machine, "reports": [report.model_dump() for report in part.table.reports]}
            for part in self.parts
        ]
        return json.dumps({"parts": parts}, indent=2) + "\n"


def read_places(places: Iterable[str]) -> list[tuple[str | None, Table]]:
    """The tables at places: ``PATH`` or ``LABEL=PATH`` of a file, or of a folder with table.json; see `read_tables`."""
    found: list[tuple[str | None, Table]] = []
    for place in places:
        label, path = labelled(place)
        if path.is_dir() and not (path / TABLE).is_file():
            raise ReportError(f"the folder {path} holds no {TABLE}. Give a folder that quantkit compare has written.")
        tables = read_tables(path / TABLE if path.is_dir() else path)
        if label is not None and len({own for own, _ in tables}) > 1:
            owns = ", ".join(dict.fromkeys(own or "without a name" for own, _ in tables))
            raise ReportError(
                f"{path} holds tables of several machines ({owns}), which cannot all be called {label}. Leave "
                "the label out."
            )
        found += [(label or own, table) for own, table in tables]
    return found


def labelled(place: str) -> tuple[str | None, Path]:
    """The label, where one stands before the sign ``=``, and the path of a place; raises ReportError."""
    label, equals, rest = place.partition("=")
    path = path_of(place, ReportError)
    if not equals or path.exists():
        return None, path
    if not label.strip():
        raise ReportError(f"{shown(place)} has no label before the sign =")
    return label, path_of(rest, ReportError)


def read_tables(path: Path) -> list[tuple[str | None, Table]]:
    """The tables in a JSON file (a comparison's, a sheet's or one report), with the machines' labels.

    Raises ReportError.
    """
    values = read_object(path, ReportError)
    if "model" in values and "measurements" in values:
        return [(None, Table((report_of(values, str(path)),)))]
    parts = values.get("parts", [values])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ReportError(f"{path} is no table of quantkit: its parts are no list of tables")
    return [_read_part(part, path) for part in parts]


def _read_part(part: dict[str, Any], path: Path) -> tuple[str | None, Table]:
    machine, reports = part.get("machine"), part.get("reports")
    if not isinstance(reports, list):
        raise ReportError(f"{path} is no table of quantkit: it holds no reports")
    if machine is not None and not (isinstance(machine, str) and 0 < len(machine) <= LARGEST_NAME):
        raise ReportError(f"{path} is no table of quantkit: a machine's label is no short text")
    return machine, Table(tuple(report_of(value, str(path)) for value in reports))


def _measures(parts: list[Part]) -> Iterator[tuple[str, str, Show]]:
    """The measures that one of the parts has, in a table's order, by threads."""
    measures = {title: (name, show) for part in parts for title, name, show in part.table.measures()}
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(map(_kind, measures)))}
    for title, (name, show) in sorted(measures.items(), key=lambda m: (kinds[_kind(m[0])], _threads(m[1][0]))):
        if any(report.find(name) for part in parts for report in part.table.reports):
            yield title, name, show


def _kind(title: str) -> str:
    return title.partition(" @ ")[0]


def _threads(name: str) -> int:
    return int(name.rpartition("@")[2]) if "@" in name else 0


def _first(parts: list[Part], column: str, name: str) -> Measurement | None:
    return next(_all(parts, column, name), (None, None))[1]


def _all(parts: list[Part], column: str, name: str) -> Iterator[tuple[Part, Measurement]]:
    for part in parts:
        for report in part.table.reports:
            if report.model.label == column and (figure := report.find(name)) is not None:
                yield part, figure


def _is_judged(report: Report) -> bool:
    """Whether it has figures of quality beside the size, which no baseline decides."""
    return any(m.name in ("perplexity", "word_perplexity", "kld") for m in report.measurements)


def _is_copy(parts: list[Part], column: str) -> bool:
    return any(r.model.label == column and r.model.method is not None for part in parts for r in part.table.reports)


def _refuse_unlike(one: Part, other: Part, fields: dict[str, Callable[[Report], object]]) -> None:
    for field, value in fields.items():
        first, second = value(one.table.reports[0]), value(other.table.reports[0])
        if first != second:
            raise ReportError(
                f"{_place(one)} and {_place(other)} cannot stand in one table: their {field} differs "
                f"({first} and {second}). Evaluate both in the same way."
            )


def _refuse_other_setting(parts: tuple[Part, ...], setting: str, figures: tuple[str, ...]) -> None:
    having = [
        (part, getattr(report.settings, setting))
        for part in parts
        for report in part.table.reports
        if any(m.name.startswith(figures) for m in report.measurements)
    ]
    for part, value in having[1:]:
        if value != having[0][1]:
            raise ReportError(
                f"{_place(having[0][0])} and {_place(part)} cannot stand in one table: their {setting} differs "
                f"({having[0][1]} and {value}). Evaluate both in the same way."
            )


def _place(part: Part) -> str:
    return f"{part.table.model} on {part.machine}"


def _disagreements(model: str, parts: list[Part]) -> Iterator[str]:
    """Where machines have other files, or other figures of quality than rounding explains."""
    columns = dict.fromkeys(report.model.label for part in parts for report in part.table.reports)
    for column in columns:
        there = [(part, r) for part in parts for r in part.table.reports if r.model.label == column]
        first, report = there[0]
        for part, other in there[1:]:
            if other.model.digest != report.model.digest:
                yield f"{model}, {column}: the files on {part.machine} are others than those on {first.machine}."
        for title, name, show in first.table.measures():
            if of_machine(name) or title == PERCENTILE:
                continue
            found = list(_all(parts, column, name))
            for part, figure in found[1:]:
                if abs(figure.value - found[0][1].value) > ROUNDING * abs(found[0][1].value):
                    yield (
                        f"{model}, {column}: {title} is {show(found[0][1])} on {found[0][0].machine} and "
                        f"{show(figure)} on {part.machine}."
                    )
