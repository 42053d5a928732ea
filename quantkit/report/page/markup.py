"""HTML from parts: what is not marked as HTML is text, whoever wrote it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from quantkit.errors import one_line
from quantkit.report.markdown import LONGEST

LONGEST_CODE = 1 << 18  # characters of a line


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


def text(value: str) -> Html:
    """`value` as it is shown, on one line; also between the quotes of an attribute."""
    return value if isinstance(value, Html) else Html(html.escape(one_line(value, LONGEST)))


def code(lines: str) -> Html:
    """Lines to be copied, whole however long they are."""
    shown = (html.escape(one_line(line, LONGEST_CODE)) for line in lines.rstrip("\n").split("\n"))
    return tag("pre", tag("code", Html("\n".join(shown))))


def tag(name: str, *inner: str, **attributes: str | float | None) -> Html:
    """An element. An attribute such as ``class_`` or ``data_value`` has dashes for ``_``; None leaves it out."""
    written = [f' {key.strip("_").replace("_", "-")}="{text(str(value))}"' for key, value in _given(attributes)]
    return Html(f"<{name}{''.join(written)}>{joined(inner)}</{name}>")


def _given(attributes: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in attributes.items():
        if value is not None:
            yield key, value if isinstance(value, str) else f"{value:.10g}"


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Parts one after the other."""
    return Html(text(between).join(map(text, parts)))


def table(rows: Iterable[tuple[str, str]], class_: str) -> Html:
    """Names and values below each other."""
    lines = (tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows)
    return tag("table", tag("tbody", *lines), class_=class_)


def listed(notes: Iterable[str]) -> Html:
    """A list, or nothing where there are no notes."""
    items = [tag("li", note) for note in notes]
    return tag("ul", *items) if items else Html("")


def script_json(value: object) -> Html:
    """JSON for the inside of a script element, which no text in it can end."""
    written = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
