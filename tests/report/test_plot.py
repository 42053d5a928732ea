import io
import math
from itertools import combinations

import pytest
from made_up_reports import report
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from quantkit.report import plot
from quantkit.report.table import COLOURS, Table, join_tables

# (label, method, perplexity, bits per weight) as a comparison of the built-in model measures them: close to each other.
DEMO = (
    *(("bfloat16", None, 25.01, 16.0), ("gptq-4", "gptq", 28.4, 7.0), ("awq-4", "awq", 27.6, 7.07)),
    *(("nf4-4", "nf4", 28.0, 7.0), ("ctranslate2-int8", "ctranslate2", 25.2, 8.1)),
    *(("ctranslate2-float16", "ctranslate2", 25.0, 16.0), ("gguf-Q2_K", "gguf", 46.0, 5.24)),
    *(("gguf-Q3_K_M", "gguf", 30.9, 5.55), ("gguf-Q4_K_M", "gguf", 26.2, 6.27)),
    *(("gguf-Q5_K_M", "gguf", 25.5, 6.67), ("gguf-Q6_K", "gguf", 25.2, 8.22)),
)


def reports(model="tiny", shift=1.0):
    made = [report(label, method, p * shift, bits / 8 * 1e6) for label, method, p, bits in DEMO]
    return [r.model_copy(update={"model": r.model.model_copy(update={"name": model})}) for r in made]


def table(*groups):
    return join_tables((None, Table(tuple(group))) for group in groups)


def distance(point, box):
    return math.hypot(*(max(low - at, at - high, 0) for at, low, high in zip(point, box.min, box.max, strict=True)))


@pytest.mark.parametrize(("models", "apart"), [(1, 1.2), (2, 0.05), pytest.param(5, 1.2, marks=pytest.mark.slow)])
def test_labels_lie_on_no_mark_bar_line_or_other_label(models, apart):
    made = table(*(reports(f"m{i}", 1 + i * apart) for i in range(models)))
    figure = plot.picture(made)
    figure.savefig(io.BytesIO())  # after which all is where it is in the file
    assert len(figure.axes) == (1 if models <= plot.TOGETHER else models)
    hidden = 0
    for i, axes in enumerate(figure.axes):
        drawn = made.models if models <= plot.TOGETHER else [made.models[i]]
        points = [point for model in drawn for point in plot.points_of(made, model)]
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        assert len(boxes) == len(points)
        inside = axes.get_window_extent()
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
        hidden += sum(one.overlaps(two) for one, two in combinations(boxes, 2))
        hidden += sum(
            box.overlaps(Bbox([other[:2], other[2:]])) for box in boxes for other in plot.obstacles(axes, points)
        )
        # A label without a line is nearest to its own mark.
        marks = [axes.transData.transform((point.size, point.height)) for point in points]
        for text, box in zip(axes.texts, boxes, strict=True):
            own = axes.transData.transform(text.xy)
            near, others = distance(own, box), [mark for mark in marks if math.dist(mark, own) > 2 * plot.MARK]
            hidden += text.arrow_patch is None and any(distance(mark, box) < near for mark in others)
        lines = {i: text.arrow_patch.get_path() for i, text in enumerate(axes.texts) if text.arrow_patch}
        assert lines
        for i, line in lines.items():
            hidden += sum(line.intersects_bbox(box, filled=False) for j, box in enumerate(boxes) if i != j)
    assert hidden == 0


def test_each_model_has_a_colour_its_source_a_square_and_a_dashed_level():
    axes = plot.picture(table(reports()[:5])).axes[0]  # of one model, each method has one
    methods = {"source", "awq", "ctranslate2", "gptq", "nf4"}
    assert {text.get_text() for text in axes.get_legend().get_texts()} == methods
    axes = plot.picture(table(reports("small")[:3], reports("large", 0.5)[:3])).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["small", "large"]
    lines = axes.get_lines()
    squares = [line for line in lines if line.get_marker() == "s"]
    levels = [line for line in lines if line.get_linestyle() == "--"]
    assert [line.get_color() for line in squares] == [line.get_color() for line in levels] == list(COLOURS[:2])
    assert [line.get_ydata()[0] for line in levels] == pytest.approx([25.01, 12.505])
