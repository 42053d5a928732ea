"""The tables of a page: models against variants, coloured by KLD, and every figure of every variant."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.report.page.markup import Html, joined, tag
from quantkit.report.page.view import View
from quantkit.report.records import Measurement
from quantkit.report.sheet import Row
from quantkit.report.table import EMPTY, LEGEND, PERCENTILE

STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # KLD in nats, where the colour changes


def step(kld: float) -> int:
    """The colour of a KLD, from 0 for the least to 7."""
    return sum(kld >= border for border in STEPS)


def matrix(view: View) -> Html:
    """Models against variants, coloured by KLD; a sentence where none was measured."""
    rows = {model: row for model in view.sheet.models if (row := _kld_row(view, model)) is not None}
    if not rows:
        return tag("p", "No divergence from the source was measured.")
    columns = [
        (i, column)
        for i, column in enumerate(view.sheet.columns)
        if any(row.figures[i] is not None for row in rows.values())
    ]
    head = tag("tr", tag("th", "model", scope="col"), *(tag("th", column, scope="col") for _, column in columns))
    lines = [
        tag("tr", tag("th", model, scope="row"), *(_coloured(view, model, row, i, column) for i, column in columns))
        for model, row in rows.items()
    ]
    legend = [tag("span", shown, class_=f"k k{i}") for i, shown in enumerate(_borders())]
    return joined(
        [
            _scrolled(tag("table", tag("thead", head), tag("tbody", *lines), class_="matrix"), "Divergence"),
            tag("p", "Nats a target: ", joined(legend, " "), class_="legend"),
        ]
    )


def _scrolled(inner: Html, name: str) -> Html:
    """A part that is wider than a window, which keys can scroll."""
    return tag("div", inner, class_="wide", tabindex="0", role="region", aria_label=name)


def _kld_row(view: View, model: str) -> Row | None:
    for row in view.rows[model]:
        if row.title != PERCENTILE and any(figure and figure.name == "kld" for figure in row.figures):
            return row
    return None


def _borders() -> Iterator[str]:
    yield f"below {STEPS[0]:g}"
    yield from (f"from {border:g}" for border in STEPS)


def _coloured(view: View, model: str, row: Row, i: int, column: str) -> Html:
    figure = row.figures[i]
    if figure is None:
        return tag("td", EMPTY)
    shown = view.link(model, column, f"{figure.value:.4f}")
    return tag("td", tag("b", shown) if row.best == i else shown, class_=f"k{step(figure.value)}", title=row.cells[i])


def figures(view: View) -> Html:
    """A row for each variant of each model, a column for each measure; the best copy of a model is marked."""
    titles = list(dict.fromkeys(row.title for rows in view.rows.values() for row in rows))
    several = len(view.sheet.models) > 1
    names = [*(["model"] if several else []), "variant", *titles]
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    lines = []
    for model in view.sheet.models:
        rows = {row.title: row for row in view.rows[model]}
        for report in view.reports[model]:
            label = report.model.label
            first = tag("th", view.link(model, label), scope="row")
            cells = (_cell(rows.get(title), view.sheet.columns.index(label)) for title in titles)
            lines.append(tag("tr", *([tag("td", model)] if several else []), first, *cells))
    body = tag("table", tag("thead", head), tag("tbody", *lines), class_="figures", id="figures")
    return joined(
        [
            _scrolled(body, "All figures"),
            tag("p", tag("b", "Bold"), f": {LEGEND} The source is not among the copies.", class_="legend"),
        ]
    )


def _cell(row: Row | None, i: int) -> Html:
    figure = row.figures[i] if row else None
    if row is None or figure is None:
        return tag("td", EMPTY)
    inner = tag("b", row.cells[i]) if row.best == i else row.cells[i]
    return tag("td", inner, data_v=value_of(row, figure))


def value_of(row: Row, figure: Measurement) -> float:
    """The number by which a cell is sorted."""
    return float(figure.details["p99"]) if row.title == PERCENTILE else figure.value
