"""The page: an answer, a matrix, a picture, a table, a section for each variant, and the data to save.

The template, the style and the script lie beside this file. The page tells the browser to load nothing and to run
nothing but that script, so that no text in it can do either.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
from collections.abc import Iterator
from importlib.resources import files
from string import Template
from typing import Any

from quantkit.errors import one_line
from quantkit.report.page.answer import answer
from quantkit.report.page.markup import Html, joined, listed, script_json, tag, text
from quantkit.report.page.section import section
from quantkit.report.page.tables import figures, matrix
from quantkit.report.page.view import View
from quantkit.report.records import Report
from quantkit.report.sheet import Part, Sheet
from quantkit.report.table import PERCENTILE, Table

MOST = 1_000_000  # bytes of a page, above which the JSON in it goes without the windows' sums
ACROSS = ("weight_bytes", "bits_per_weight", "ms_per_token@", "peak_rss_bytes", "device_peak_bytes")
UPWARDS = ("kld", "perplexity", "word_perplexity")
UNITS = {"weight_bytes": "MB", "peak_rss_bytes": "MB", "device_peak_bytes": "MB", "bits_per_weight": "bits"}
SCALES = {"MB": 1e-6}
NAMED = 3  # models in the title
LONGEST_LABEL = 200  # characters of a name in the picture
WITHOUT_SUMS = "The JSON to save is without the windows' sums, which would make this page larger than 1 MB."


def page(view: View) -> str:
    """The whole page as one HTML text."""
    sheet = view.sheet
    style, script = (_file(name) for name in ("page.css", "page.js"))
    short = listed([*sheet.notes(), *view.remarks])
    parts: dict[str, str] = {
        "title": text(f"{_named(sheet.models)}: what was measured"),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "answer": answer(view),
        "matrix": matrix(view),
        "figures": figures(view),
        "sections": joined(
            section(view, model, report) for model, reports in view.reports.items() for report in reports
        ),
        "notes": short,
        "full_notes": joined(
            joined([tag("h3", f"{part.table.model}, {part.machine}"), listed(part.table.notes())])
            for part in sheet.parts
        ),
        "data": script_json(plotted(view)),
        "csv": _packed(sheet.to_csv()),
        "json": _packed(sheet.to_json()),
    }
    template = Template(_file("page.html"))
    whole = template.substitute(parts)
    if len(whole.encode()) <= MOST:
        return whole
    parts |= {"json": _packed(_without_sums(sheet).to_json()), "notes": joined([short, tag("p", WITHOUT_SUMS)])}
    return template.substitute(parts)


def _named(models: list[str]) -> str:
    return ", ".join(models) if len(models) <= NAMED else f"{len(models)} models"


def _file(name: str) -> str:
    return files("quantkit.report.page").joinpath(name).read_text(encoding="utf-8")


def _hash(inside: str) -> str:
    """What a content security policy calls an element by."""
    return base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()


def _packed(content: str) -> Html:
    """A link's target that holds `content`, gzip."""
    packed = gzip.compress(content.encode("utf-8", "backslashreplace"), mtime=0)
    return Html(f"data:application/gzip;base64,{base64.b64encode(packed).decode()}")


def _without_sums(sheet: Sheet) -> Sheet:
    """The reports without the windows' sums; the fingerprint is of a report with them and goes, too."""
    return Sheet(tuple(Part(p.machine, Table(tuple(map(_bare, p.table.reports)))) for p in sheet.parts))


def _bare(report: Report) -> Report:
    bare = tuple(m.model_copy(update={"sums": ()}) for m in report.measurements)
    return report.model_copy(update={"measurements": bare, "fingerprint": None})


def plotted(view: View) -> dict[str, Any]:
    """The picture's points: what can be drawn across and upwards, with standard errors, and the noise floors."""
    across: dict[str, str] = {}
    upwards: dict[str, str] = {}
    points: dict[tuple[str, str], dict[str, Any]] = {}
    for model, reports in view.reports.items():
        for report in reports:
            label, method = report.model.label, report.model.method
            at = view.places[model, label]
            named = {"label": _line(label), "model": _line(model), "method": None if method is None else _line(method)}
            points[model, label] = {"at": at, **named, "values": {}}
        for title, name, cells in _drawable(view, model):
            axis = across if name.startswith(ACROSS) else upwards
            unit = _unit(name)
            axis.setdefault(title, unit)
            for label, (value, error) in cells.items():
                scale = SCALES.get(unit, 1)
                spread = None if error is None or not math.isfinite(error) else error * scale
                points[model, label]["values"][title] = [value * scale, spread]
    bases = {model: next((r.baseline for r in reports if r.baseline), None) for model, reports in view.reports.items()}
    return {
        "across": [[title, unit] for title, unit in across.items()],
        "upwards": [[title, unit] for title, unit in upwards.items()],
        "models": list(map(_line, view.sheet.models)),
        "points": list(points.values()),
        "noise": {_line(model): base.noise for model, base in bases.items() if base is not None and base.noise > 0},
    }


def _line(name: str) -> str:
    return one_line(name, LONGEST_LABEL)


Cells = dict[str, tuple[float, float | None]]


def _drawable(view: View, model: str) -> Iterator[tuple[str, str, Cells]]:
    """(title, name of the figure, value and error of each variant) of the rows that the picture can show."""
    for row in view.rows[model]:
        name = next((figure.name for figure in row.figures if figure), "")
        if row.title != PERCENTILE and (name.startswith(ACROSS) or name in UPWARDS):
            named = zip(view.sheet.columns, row.figures, strict=True)
            yield _line(row.title), name, {label: (m.value, m.stderr) for label, m in named if m is not None}


def _unit(name: str) -> str:
    if name == "kld":
        return "nats"
    return UNITS.get(name, "ms" if name.startswith("ms_") else "")
