"""Writes the tables of what loads what into docs/engines.md, from what the formats say.

Usage: python docs/make_engines.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.serving import loaders

PAGE = Path(__file__).parent / "engines.md"
BEGIN, END = "<!-- made by `make api` -->\n", "<!-- end -->\n"


def page() -> str:
    """The whole page, its tables made anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + "\n" + "\n".join(_lines()) + "\n\n" + END + rest.split(END)[1]


def _lines() -> Iterator[str]:
    names = loaders.names()
    yield f"| format | bits | {' | '.join(names)} |"
    yield "|---" * (2 + len(names)) + "|"
    reasons: dict[str, None] = {}
    for row in loaders.table():
        cells = []
        for found in row.loaded.values():
            if found.refusal:
                reasons.setdefault(found.refusal)
            cells.append(f"no [{list(reasons).index(found.refusal) + 1}]" if found.refusal else str(found))
        yield f"| `{row.format}` | {row.kinds} | {' | '.join(cells)} |"
    yield ""
    yield "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
