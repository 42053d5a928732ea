"""Draw a grid of figures in a terminal, transposed if its columns do not fit; the best figures are marked."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich.table
from rich.console import Group
from rich.text import Text

from quantkit.errors import LONGEST, one_line

MARK = " *"
GAP = 3  # characters between two columns


@dataclass(frozen=True)
class FigureGrid:
    """Cells by row, with row names in the first column; `marked` are the (row, column) of the best figures."""

    names: list[str]
    headers: list[str]
    cells: list[list[str]]
    marked: frozenset[tuple[int, int]]

    def transposed(self) -> FigureGrid:
        cells = [[row[i] for row in self.cells] for i in range(len(self.headers))]
        return FigureGrid(self.headers, self.names, cells, frozenset((j, i) for i, j in self.marked))

    def cell(self, row: int, column: int) -> Text:
        text = plain_text(self.cells[row][column])
        if (row, column) in self.marked:
            return Text(f"{text}{MARK}", style="bold")
        return text + "  " if any(column == other for _, other in self.marked) else text

    def width(self, column: int) -> int:
        """Return a column's width in characters."""
        return max(self.cell(row, column).cell_len for row in range(len(self.names)))


def plain_text(text: str) -> Text:
    """Remove terminal control characters from a line."""
    return Text(one_line(text, LONGEST))


def draw_grid(grid: FigureGrid, title: str, width: int, transpose: bool | None = None) -> Group:
    """Draw the grid for a terminal of `width` columns; `transpose` None: only if columns do not fit.

    Columns that still do not fit go into further tables.
    """
    headers = [str(plain_text(header)) for header in grid.headers]
    if transpose or (transpose is None and len(list(_parts(grid, headers, width))) > 1):
        grid = grid.transposed()
        headers = [_folded(str(plain_text(header)), grid.width(i)) for i, header in enumerate(grid.headers)]
    return Group(*_tables(grid, headers, width, title))


def _folded(title: str, width: int) -> str:
    """Wrap a header to the width of its column; long words are not broken."""
    longest = max((len(word) for word in title.split()), default=0)
    return "\n".join(textwrap.wrap(title, max(width, longest), break_long_words=False))


def _parts(grid: FigureGrid, headers: Sequence[str], width: int) -> Iterator[range]:
    """Yield ranges of columns that fit on the screen, next to the row names."""
    first = max(len(name) for name in grid.names) + GAP + 1
    widths = [max(grid.width(i), *map(len, header.split("\n"))) + GAP for i, header in enumerate(headers)]
    start = 0
    while start < len(widths):
        stop, used = start + 1, first + widths[start]
        while stop < len(widths) and used + widths[stop] <= width:
            used += widths[stop]
            stop += 1
        yield range(start, stop)
        start = stop


def _tables(grid: FigureGrid, headers: Sequence[str], width: int, title: str) -> Iterator[rich.table.Table]:
    for part in _parts(grid, headers, width):
        made = rich.table.Table(title=plain_text(title) if part.start == 0 else None, title_justify="left")
        made.add_column("", no_wrap=True)
        for column in part:
            made.add_column(Text(headers[column]), justify="right", no_wrap=True, vertical="bottom")
        for row, name in enumerate(grid.names):
            made.add_row(plain_text(name), *(grid.cell(row, column) for column in part))
        yield made
