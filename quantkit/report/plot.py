"""Plot perplexity against size relative to float16: a mark per variant, dashed lines for the sources.

Colors stand for methods if there is one model, else for models; many models get a small panel each. Labels are next to
their marks and cover nothing; a label further away has a line to its mark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.report.table import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quantkit.report.table import Table

FAR = 3.0  # perplexities above this many times the source's are drawn at the upper edge
TOGETHER = 3  # models in one panel
LETTERS = 7  # points
MARK = 5  # pixels from the middle of a mark to its sides, with some room
# Offsets of a label from its mark, in points, nearest first.
SPOTS = [
    (round(far * math.cos(turn)), round(far * math.sin(turn)))
    for far in (8, 14, 22, 32, 44, 56, 68, 80)
    for turn in map(math.radians, (0, 180, 35, 145, -35, -145, 65, 115, -65, -115, 15, 165, -15, -165, 80, -80))
]
IS_LED = np.array([math.hypot(*spot) > 12 for spot in SPOTS])  # in points; such a label has a line to its mark
RANK = np.arange(len(SPOTS))
# Costs of a spot: outside of the axes, or nearer to another mark without a line; per hidden thing; per mark that its
# line crosses; and per distance.
OUTSIDE, HIDDEN, CROSSED, FURTHER = 1000.0, 10.0, 2.0, 0.02
ROUNDS = 8  # passes over all labels

Boxes = NDArray[np.float64]  # (..., 4): left, low, right, high in pixels


@dataclass(frozen=True)
class Point:
    """A variant's mark: size relative to float16, perplexity with its error, and label.

    A perplexity above the axis is drawn at the upper edge, with the number in the label and no error bar.
    """

    words: str
    method: str | None
    size: float
    height: float
    error: float
    colour: str
    group: str


def draw(table: Table, folder: Path) -> list[Path]:
    """Write a table's perplexity-size.svg and .png; return their paths, or none if no perplexity was measured."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "quantkit", "font.size": 9}):
        figure = picture(table)
        if figure is None:
            return []
        paths = [folder / "perplexity-size.svg", folder / "perplexity-size.png"]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths


def picture(table: Table) -> Figure | None:
    """Plot the models that have perplexities, with labels; return None if there are none."""
    from matplotlib.figure import Figure

    models = {model: points for model in table.models if (points := points_of(table, model))}
    if not models:
        return None
    panels = [models] if len(models) <= TOGETHER else [{model: points} for model, points in models.items()]
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(8, 5 if len(panels) == 1 else 4 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for spare in grid[len(panels) :]:
        spare.remove()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, None if len(panels) == 1 else next(iter(panel)))
    one = table.reports[0]
    of, level = (f"{next(iter(models))}: ", "the source model") if len(models) == 1 else ("", "the source models")
    figure.suptitle(f"{of}perplexity against size; dashed: {level}\n{one.text.name}", fontsize="large")
    figure.supxlabel("size of the weight files relative to float16", fontsize="medium")
    w = one.windows
    figure.supylabel(f"perplexity ({w.protocol}, {w.windows} windows of {w.n_ctx})", fontsize="medium")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # placed labels must not move the axes
    for axes, panel in zip(grid, panels, strict=False):
        _write_labels(axes, [point for points in panel.values() for point in points])
    return figure


def points_of(table: Table, model: str) -> list[Point]:
    """Return the marks of a model's variants that have perplexity and size."""
    measured = [
        (report.model, perplexity, bits)
        for report in table.variants(model)
        if (perplexity := report.find("perplexity")) and (bits := report.find("bits_per_weight"))
    ]
    level = next((p.value for entry, p, _ in measured if entry.method is None), None)
    ceiling = (level or min((p.value for _, p, _ in measured), default=0.0)) * FAR
    several = len(table.models) > 1
    points = []
    for entry, p, bits in measured:
        group = model if several else entry.method
        place = (table.models if several else table.methods).index(group) if group else -1
        colour = COLOURS[place % (len(COLOURS) - 1)] if group else COLOURS[-1]
        far = p.value > ceiling
        words = f"{entry.label} ({p.value:.0f} ↑)" if far else entry.label
        where = (bits.value / 16, min(p.value, ceiling), 0.0 if far else p.stderr or 0.0)
        points.append(Point(words, entry.method, *where, colour, group or "source"))
    return points


def _draw_panel(axes: Any, models: dict[str, list[Point]], title: str | None) -> None:
    """Draw a panel without labels."""
    named: set[str] = set()
    for points in models.values():
        for method in dict.fromkeys(point.method for point in points):
            mine = sorted((p for p in points if p.method == method), key=lambda p: p.size)
            axes.errorbar(
                [p.size for p in mine],
                [p.height for p in mine],
                yerr=[p.error for p in mine],
                marker="o" if method else "s",
                capsize=2,
                linestyle="-" if len(mine) > 1 else "",
                linewidth=0.8,
                color=mine[0].colour,
                label=None if mine[0].group in named else mine[0].group,
            )
            named.add(mine[0].group)
        for point in points:
            if point.method is None:
                axes.axhline(point.height, linestyle="--", color=point.colour, linewidth=0.8)
    axes.legend(fontsize=8, title=title)
    axes.grid(visible=True, linewidth=0.3)


def obstacles(axes: Any, points: Sequence[Point]) -> Boxes:
    """Return boxes (N, 4) that labels must avoid: marks, error bars, lines, dashed levels, the legend."""
    at = axes.transData.transform
    left, _, right, _ = axes.get_window_extent().extents
    boxes = [axes.get_legend().get_window_extent().extents]
    for p in points:
        x, y = at((p.size, p.height))
        up = max(abs(at((p.size, p.height + p.error))[1] - y), MARK)
        boxes.append((x - MARK, y - up, x + MARK, y + up))
        if p.method is None:
            boxes.append((left, y - 1, right, y + 1))
    for line in axes.get_lines():
        for start, end in pairwise(at(line.get_xydata())) if line.get_linestyle() == "-" else ():
            steps = np.linspace(start, end, 1 + max(2, int(math.dist(start, end) / 4)))
            boxes += np.concatenate([steps - 1, steps + 1], axis=1).tolist()
    return np.array(boxes)


def _write_labels(axes: Any, points: Sequence[Point]) -> None:
    """Place and draw all labels."""
    from matplotlib.textpath import TextPath

    pixels = axes.figure.dpi / 72
    wide = [TextPath((0, 0), point.words, LETTERS).get_extents().width for point in points]
    sizes = [(1.08 * width * pixels, 1.2 * LETTERS * pixels) for width in wide]  # with some room: pixels round up
    middles = axes.transData.transform([(point.size, point.height) for point in points])
    found = place_labels(middles, sizes, obstacles(axes, points), axes.get_window_extent().extents, pixels)
    for point, spot in zip(points, found, strict=True):
        across, up = _alignment(*spot)
        line = {"arrowstyle": "-", "color": point.colour, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            point.words,
            (point.size, point.height),
            color=point.colour,
            xytext=spot,
            textcoords="offset points",
            fontsize=LETTERS,
            ha=across,
            va=up,
            arrowprops=line if IS_LED[SPOTS.index(spot)] else None,
        )


def _alignment(dx: int, dy: int) -> tuple[str, str]:
    """Return matplotlib's horizontal and vertical alignment for a label at this offset from its mark."""
    return "left" if dx > 0 else "right", "center" if abs(dy) < abs(dx) else "bottom" if dy > 0 else "top"


def place_labels(
    middles: Boxes, sizes: Sequence[tuple[float, float]], taken: Boxes, frame: Boxes, pixels: float
) -> list[tuple[int, int]]:
    """Choose each label's offset from its mark, in points.

    In pixels: mark centers `middles` (L, 2), label `sizes` (L), boxes to avoid `taken` (N, 4), and the `frame` (4,)
    that must contain all labels. `pixels` is the size of a point.
    """
    shapes, costs = [], []
    for mark, (wide, tall) in zip(middles, sizes, strict=True):
        corners = []
        for dx, dy in SPOTS:
            across, up = _alignment(dx, dy)
            left = mark[0] + dx * pixels - (0 if across == "left" else wide)
            low = mark[1] + dy * pixels - tall * {"bottom": 0.0, "center": 0.5, "top": 1.0}[up]
            corners.append((left, low, left + wide, low + tall))
        boxes = np.array(corners)
        line = np.linspace(np.broadcast_to(mark, (len(SPOTS), 2)), (boxes[:, :2] + boxes[:, 2:]) / 2, 40, axis=1)
        line[~IS_LED] = np.nan  # no line, so it crosses nothing
        shape = np.concatenate([boxes[:, None], np.concatenate([line - 1, line + 1], axis=2)], axis=1)
        others = middles[np.hypot(*(middles - mark).T) > 2 * MARK]
        own = _distances(boxes, mark[None])[:, 0]
        nearer = _distances(boxes, others).min(1, initial=np.inf) < own
        out = (boxes[:, :2] < frame[:2]).any(1) | (boxes[:, 2:] > frame[2:]).any(1)
        crossed = sum(_overlap(shape, np.concatenate([other - MARK, other + MARK])).any(1) for other in others)
        hidden = _overlap(boxes[:, None], taken).sum(1)
        shapes.append(shape)
        costs.append(
            OUTSIDE * (out | (nearer & ~IS_LED)) + HIDDEN * hidden + CROSSED * (crossed + nearer) + FURTHER * RANK
        )
    orders = [np.argsort(sign * middles[:, way], kind="stable") for way in (1, 0) for sign in (-1, 1)]
    tried = [_place_in_order(order.tolist(), shapes, costs) for order in orders]
    return [SPOTS[place] for _, place in sorted(min(tried, key=lambda found: found[0])[1].items())]


def _place_in_order(order: list[int], shapes: Sequence[Boxes], costs: Sequence[Boxes]) -> tuple[float, dict[int, int]]:
    """Place labels greedily in this order, each at its cheapest spot; return the total cost and the spots.

    `shapes` (S, 1 + K, 4) hold, per spot, the text's box and points of the line to the mark.
    """
    chosen: dict[int, int] = {}
    for _ in range(ROUNDS):
        total, before = 0.0, dict(chosen)
        for i in order:
            cost = costs[i]
            for j, place in chosen.items():
                if j != i:
                    theirs = shapes[j][place]
                    cost = cost + HIDDEN * _overlap(shapes[i], theirs[0]).any(1)
                    cost = cost + HIDDEN * _overlap(shapes[i][:, :1], theirs).any(1)
            chosen[i] = int(cost.argmin())
            total += float(cost.min())
        if chosen == before:
            break
    return total, chosen


def _overlap(boxes: Boxes, others: Boxes) -> NDArray[np.bool_]:
    """Return which boxes (..., 4) overlap which others."""
    overlap: NDArray[np.bool_] = np.all(
        (boxes[..., :2] <= others[..., 2:]) & (others[..., :2] <= boxes[..., 2:]), axis=-1
    )
    return overlap


def _distances(boxes: Boxes, points: Boxes) -> Boxes:
    """Return distances (B, P) in pixels from boxes to points; 0 inside a box."""
    low, high = boxes[:, None, :2] - points, points - boxes[:, None, 2:]
    distances: Boxes = np.linalg.norm(np.maximum(np.maximum(low, high), 0), axis=-1)
    return distances
