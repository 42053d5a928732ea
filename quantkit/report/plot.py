"""The picture: perplexity against size relative to float16, one mark a variant, the sources' levels dashed.

One model has a colour for each method; of several models each has one, and many have small panels of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.text import Text
from matplotlib.transforms import Bbox

from quantkit.report.labels import MARK, SPOTS, alignment, around, is_led, places

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quantkit.report.records import Measurement, ModelEntry, Report

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
FAR = 3.0  # perplexities beyond this many times the source's are drawn at the upper edge
TOGETHER = 3  # models in one panel
COVERED = 8  # pixels between marks of which one covers the other
SHARED = "#404040"  # of what marks of several colours have in common


@dataclass(frozen=True)
class Point:
    """A variant: its size relative to float16, its perplexity with the error, and how it is drawn."""

    label: str
    method: str | None
    size: float
    perplexity: float
    error: float
    ceiling: float
    colour: str
    group: str

    @property
    def height(self) -> float:
        """Where it is drawn."""
        return min(self.perplexity, self.ceiling)

    @property
    def text(self) -> str:
        """The label, with the perplexity where that is beyond the picture."""
        return self.label if self.perplexity <= self.ceiling else f"{self.label} ({self.perplexity:.0f} ↑)"


def draw(models: Sequence[Sequence[Report]], folder: Path) -> list[Path]:
    """Write perplexity-size.svg and .png of the reports of each model; nothing where no perplexity was measured."""
    import matplotlib as mpl

    models = [reports for reports in models if any(True for _ in _measured(reports))]
    if not models:
        return []
    with mpl.rc_context({"svg.hashsalt": "quantkit", "font.size": 9}):
        figure = picture(models)
        paths = [folder / "perplexity-size.svg", folder / "perplexity-size.png"]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths


def picture(models: Sequence[Sequence[Report]]) -> Figure:
    """The drawing of models that have perplexities, with its labels in their places."""
    from matplotlib.figure import Figure

    panels = [models] if len(models) <= TOGETHER else [[reports] for reports in models]
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(8, 5 if len(panels) == 1 else 4 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for spare in grid[len(panels) :]:
        spare.remove()
    drawn = [(axes, _panel(axes, panel)) for axes, panel in zip(grid, panels, strict=False)]
    one, windows = models[0][0], models[0][0].windows
    of, level = (f"{one.model.name}: ", "the source model") if len(models) == 1 else ("", "the source models")
    figure.suptitle(f"{of}perplexity against size; dashed: {level}\n{one.text.name}", fontsize="large")
    figure.supxlabel("size of the weight files relative to float16", fontsize="medium")
    figure.supylabel(
        f"perplexity ({windows.protocol}, {windows.windows} windows of {windows.n_ctx})", fontsize="medium"
    )
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # a label that stands moves nothing
    for axes, points in drawn:
        _place(axes, points)
    return figure


def _measured(reports: Sequence[Report]) -> Iterator[tuple[ModelEntry, Measurement, Measurement]]:
    """What has both: the variant, its perplexity, its bits per weight."""
    for report in reports:
        perplexity, size = report.find("perplexity"), report.find("bits_per_weight")
        if perplexity and size:
            yield report.model, perplexity, size


def _points(reports: Sequence[Report], colour: str | None) -> list[Point]:
    """A model's variants; the colours are the methods' where no `colour` is given."""
    measured = list(_measured(reports))
    methods = sorted({model.method or "source" for model, *_ in measured})
    level = next((p.value for model, p, _ in measured if model.method is None), None)
    ceiling = (level or min(p.value for _, p, _ in measured)) * FAR
    return [
        Point(
            *(model.label, model.method, size.value / 16, p.value, p.stderr or 0.0, ceiling),
            colour or COLOURS[methods.index(model.method or "source") % len(COLOURS)],
            model.name if colour else model.method or "source",
        )
        for model, p, size in measured
    ]


def _panel(axes: Any, models: Sequence[Sequence[Report]]) -> list[Point]:
    """Draw all but the labels; return the points."""
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(models))] if len(models) > 1 else [None]
    named: set[str] = set()
    everything = []
    for reports, colour in zip(models, colours, strict=True):
        points = _points(reports, colour)
        everything += points
        for method in sorted({point.method or "" for point in points}):
            mine = sorted((p for p in points if (p.method or "") == method), key=lambda p: p.size)
            group = mine[0].group
            axes.errorbar(
                [p.size for p in mine],
                [p.height for p in mine],
                yerr=[p.error if p.height == p.perplexity else 0 for p in mine],
                marker="o" if method else "s",
                capsize=2,
                linestyle="-" if len(mine) > 1 else "",
                linewidth=0.8,
                color=mine[0].colour,
                label=None if group in named else group,
            )
            named.add(group)
        for point in points:
            if point.method is None:
                axes.axhline(point.perplexity, linestyle="--", color=colour or "grey", linewidth=0.8)
    alone = axes.get_subplotspec().get_gridspec().ncols == 1
    axes.legend(fontsize=8, title=None if alone else models[0][0].model.name)
    axes.grid(visible=True, linewidth=0.3)
    return everything


def _obstacles(axes: Any, points: Sequence[Point]) -> list[Bbox]:
    """What a label must not lie on: marks, error bars, lines between marks, dashed levels, the legend."""
    at = axes.transData.transform
    boxes = [axes.get_legend().get_window_extent()]
    for p in points:
        x, y = at((p.size, p.height))
        up = abs(at((p.size, p.height + p.error))[1] - y) if p.height == p.perplexity else 0
        boxes.append(around(x, y, MARK, max(up, MARK)))
        if p.method is None:
            left, right = axes.get_window_extent().intervalx
            boxes.append(Bbox.from_extents(left, y - 1, right, y + 1))
    for line in axes.get_lines():
        if line.get_linestyle() != "-":
            continue
        for (x0, y0), (x1, y1) in pairwise(at(line.get_xydata())):
            steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / 4))
            for i in range(steps + 1):
                x, y = x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps
                boxes.append(around(x, y, 1))
    return boxes


def _place(axes: Any, points: Sequence[Point]) -> None:
    """Write the labels; what several models' marks at one place have in common is written once."""
    labels = _labels(axes, points)
    sizes = []
    for label in labels:
        text = _write(axes, label, *SPOTS[0])
        width, height = _extent(text).size
        sizes.append((float(width), float(height)))
        text.remove()
    found = places(
        [_middle(axes, label) for label in labels],
        sizes,
        [_middle(axes, point) for point in points],
        _obstacles(axes, points),
        axes.get_window_extent(),
        axes.figure.dpi / 72,
    )
    for label, (dx, dy) in zip(labels, found, strict=True):
        _extent(_write(axes, label, dx, dy))


def _middle(axes: Any, point: Point) -> tuple[float, float]:
    """Where a point's mark is, in pixels."""
    x, y = axes.transData.transform((point.size, point.height))
    return float(x), float(y)


def _labels(axes: Any, points: Sequence[Point]) -> list[Point]:
    """The points that get a label: of those whose marks cover each other and that say the same, one, in grey."""
    labels: list[Point] = []
    for point in points:
        for i, other in enumerate(labels):
            if other.text == point.text and math.dist(_middle(axes, other), _middle(axes, point)) < COVERED:
                labels[i] = replace(other, colour=SHARED if point.colour != other.colour else other.colour)
                break
        else:
            labels.append(point)
    return labels


def _extent(label: Any) -> Bbox:
    """Where a label's words are, without the line to its mark."""
    label.get_window_extent()  # which puts them in their place
    return Text.get_window_extent(label)


def _write(axes: Any, point: Point, dx: int, dy: int) -> Any:
    across, up = alignment(dx, dy)
    line = {"arrowstyle": "-", "color": point.colour, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
    return axes.annotate(
        point.text,
        (point.size, point.height),
        color=point.colour,
        xytext=(dx, dy),
        textcoords="offset points",
        fontsize=7,
        ha=across,
        va=up,
        arrowprops=line if is_led(dx, dy) else None,
    )
