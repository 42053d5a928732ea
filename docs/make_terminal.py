"""Writes docs/terminal.svg: a table of `quantkit compare` as a terminal of 100 columns shows it.

Usage: python docs/make_terminal.py demo-output/table.json "make demo"
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from quantkit.report.table import read_tables

WIDTH = 100


def main(path: str, command: str) -> None:
    """Draw the table at `path` below the command that printed it."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(f"$ {command}")
    [(_, table)] = read_tables(Path(path))
    table.show(console)
    drawing = re.sub(
        r"@font-face \{.*?\}\s*", "", console.export_svg(title=command), flags=re.DOTALL
    )  # no fetched fonts
    (Path(__file__).parent / "terminal.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
