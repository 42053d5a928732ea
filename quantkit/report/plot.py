"""The picture: perplexity against size relative to float16, one mark a variant, the float16 level dashed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.transforms import Bbox

if TYPE_CHECKING:
    from quantkit.report.table import Table

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
SPOTS = [(s * 5, dy, "left" if s > 0 else "right") for dy in (6, -6, 15, -15, 24, -24, 33, -33) for s in (1, -1)]
FAR = 3.0  # perplexities beyond this many times the source's are drawn at the upper edge


def draw(table: Table, folder: Path) -> list[Path]:
    """Write perplexity-size.svg and .png into `folder`; nothing where no perplexity was measured."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    points = []
    for report in table.reports:
        perplexity, size = report.find("perplexity"), report.find("bits_per_weight")
        if perplexity and size:
            points.append((report.model, size.value / 16, perplexity.value, perplexity.stderr or 0.0))
    if not points:
        return []
    level = next((p for model, _, p, _ in points if model.method is None), None)
    least = min(p for _, _, p, _ in points)
    ceiling = (level or least) * FAR
    with mpl.rc_context({"svg.hashsalt": "quantkit", "font.size": 9}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        methods = sorted({model.method or "source" for model, *_ in points})
        for i, method in enumerate(methods):
            mine = [p for p in points if (p[0].method or "source") == method]
            mine.sort(key=lambda p: p[1])
            x = [p[1] for p in mine]
            y = [min(p[2], ceiling) for p in mine]
            axes.errorbar(
                x, y, yerr=[p[3] if p[2] <= ceiling else 0 for p in mine], marker="o", capsize=2,
                linestyle="-" if len(mine) > 1 else "", linewidth=0.8, color=COLOURS[i % len(COLOURS)], label=method,
            )  # fmt: skip
        if level is not None:
            axes.axhline(level, linestyle="--", color="grey", linewidth=0.8)
        windows = table.reports[0].windows
        axes.set_xlabel("size of the weight files relative to float16")
        axes.set_ylabel(f"perplexity ({windows.protocol}, {windows.windows} windows of {windows.n_ctx})")
        axes.set_title(
            f"{table.model}: perplexity against size; dashed: the source model\n{table.reports[0].text.name}"
        )
        axes.legend(fontsize=8)
        labels = [
            (
                model.label if p <= ceiling else f"{model.label} ({p:.0f} ↑)",
                where,
                min(p, ceiling),
                COLOURS[methods.index(model.method or "source") % len(COLOURS)],
            )
            for model, where, p, _ in points
        ]
        _place(figure, axes, labels)
        axes.grid(visible=True, linewidth=0.3)
        paths = [folder / "perplexity-size.svg", folder / "perplexity-size.png"]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths


def _place(figure: Any, axes: Any, labels: list[tuple[str, float, float, str]]) -> None:
    """Write each label beside its mark, where it hides no other label or mark and stays inside the axes."""
    figure.canvas.draw()
    inside = axes.get_window_extent()
    at = axes.transData.transform
    taken: list[Any] = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in (at((w, p)) for _, w, p, _ in labels)]
    for name, where, p, colour in sorted(labels, key=lambda label: -label[2]):
        text: Any = None
        for dx, dy, side in SPOTS:
            if text is not None:
                text.remove()
            text = axes.annotate(
                name,
                (where, p),
                color=colour,
                xytext=(dx, dy),
                textcoords="offset points",
                fontsize=7,
                ha=side,
                va="center",
            )
            box = text.get_window_extent()
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in taken):
                break
        taken.append(text.get_window_extent())
