"""Writes the tables of what loads what into docs/engines.md, from what the formats say.

Usage: python docs/make_engines.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.serving.servers import loaders, what_loads

PAGE = Path(__file__).parent / "engines.md"
BEGIN, END = "<!-- made by `make api` -->\n", "<!-- end -->\n"


def page() -> str:
    """The whole page, its tables made anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + "\n" + "\n".join(_lines()) + "\n\n" + END + rest.split(END)[1]


def _lines() -> Iterator[str]:
    yield f"| format | bits | {' | '.join(loaders())} |"
    yield "|---" * (2 + len(loaders())) + "|"
    reasons: dict[str, None] = {}
    for stored, kinds, programs in what_loads():
        cells = []
        for refusal, remark in programs.values():
            if refusal:
                reasons.setdefault(refusal)
                cells.append(f"no [{list(reasons).index(refusal) + 1}]")
            else:
                cells.append(f"yes ({remark})" if remark else "yes")
        yield f"| `{stored}` | {kinds} | {' | '.join(cells)} |"
    yield ""
    yield "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
