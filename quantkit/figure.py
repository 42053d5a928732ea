"""The picture: perplexity against size relative to float16, one mark a variant, the float16 level dashed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.table import Table

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
FAR = 3.0  # perplexities beyond this many times the source's are drawn at the upper edge


def draw(table: Table, folder: Path) -> list[Path]:
    """Write perplexity-size.svg and .png into `folder`; nothing where no perplexity was measured."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    points = []
    for report in table.reports:
        perplexity, size = report.find("perplexity"), report.find("bits_per_weight")
        if perplexity and size:
            points.append((report.subject, size.value / 16, perplexity.value, perplexity.stderr or 0.0))
    if not points:
        return []
    level = next((p for subject, _, p, _ in points if subject.method is None), None)
    least = min(p for _, _, p, _ in points)
    ceiling = (level or least) * FAR
    with mpl.rc_context({"svg.hashsalt": "quantkit", "font.size": 9}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        methods = sorted({subject.method or "source" for subject, *_ in points})
        for i, method in enumerate(methods):
            mine = [p for p in points if (p[0].method or "source") == method]
            mine.sort(key=lambda p: p[1])
            x = [p[1] for p in mine]
            y = [min(p[2], ceiling) for p in mine]
            axes.errorbar(
                x, y, yerr=[p[3] if p[2] <= ceiling else 0 for p in mine], marker="o", capsize=2,
                linestyle="-" if len(mine) > 1 else "", linewidth=0.8, color=COLOURS[i % len(COLOURS)], label=method,
            )  # fmt: skip
            for subject, where, p, _ in mine:
                name = subject.label if p <= ceiling else f"{subject.label} ({p:.0f} ↑)"
                axes.annotate(name, (where, min(p, ceiling)), xytext=(4, 5), textcoords="offset points", fontsize=7)
        if level is not None:
            axes.axhline(level, linestyle="--", color="grey", linewidth=0.8)
        windows = table.reports[0].windows
        axes.set_xlabel("size of the weight files relative to float16")
        axes.set_ylabel(f"perplexity ({windows.protocol}, {windows.windows} windows of {windows.n_ctx})")
        axes.set_title(
            f"{table.model}: perplexity against size; dashed: the source model\n{table.reports[0].text.name}"
        )
        axes.legend(fontsize=8)
        axes.grid(visible=True, linewidth=0.3)
        paths = [folder / "perplexity-size.svg", folder / "perplexity-size.png"]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths
