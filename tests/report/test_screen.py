"""The table on a terminal: every figure at any width, the best ones marked, notes short or in full."""

import io
from itertools import product

import pytest
from made_up_reports import report
from rich.console import Console
from test_table import SOURCE, TABLE

from quantkit.report.table import LEGEND, Table

MANY = Table((SOURCE, *(report(f"variant-{i}", "gptq", 21.0 + i, 1e6 + i * 1e5, {1: 9.0 + i}) for i in range(8))))


def shown(table, width, transpose=None, notes=False):
    console = Console(width=width, file=io.StringIO())
    table.show(console, transpose=transpose, notes=notes)
    return console.file.getvalue()


def grid(text):
    """Cells of the rows below the header, of the first table."""
    lines = text.split("└")[0].splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


@pytest.mark.parametrize("table", [TABLE, MANY], ids=["three", "many"])
def test_every_figure_is_there_at_any_width(table):
    for transpose, width in product((None, True, False), (200, 110, 60, 45)):
        text = shown(table, width, transpose)
        for _, cells in table.rows():
            for cell in cells:
                assert f" {cell} " in text
        assert max(len(line) for line in text.splitlines() if line[:1] in "┏┃┡│└") <= width


def test_the_best_is_marked():
    """Sizes are exact; the perplexities' errors are larger than their differences."""
    text = shown(MANY, 200, transpose=True)
    marked = [cell for row in grid(text) for cell in row if cell.endswith("*")]
    assert sorted(marked) == ["1.0 MB *", "8.00 *"]
    assert LEGEND in text
    # Notes are short unless asked for.
    assert all(line in shown(TABLE, 200) for line in TABLE.short_notes())
    assert all(line in shown(TABLE, 200, notes=True) for line in TABLE.notes())
