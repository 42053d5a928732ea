"""Write the option tables of docs/methods/*.md from the methods' option records.

Usage: python docs/make_options.py

A page marks the place of a table with `<!-- options:METHOD -->` and `<!-- /options -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from quantkit.contracts.registry import methods

PAGES = Path(__file__).parent / "methods"
MARKED = re.compile(r"(<!-- options:(\w+) -->\n).*?(<!-- /options -->\n)", re.DOTALL)
NAMES: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "flag"}


def pages() -> dict[Path, str]:
    """Return every page that has option tables, with the tables up to date."""
    found = {path: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))}
    return {path: MARKED.sub(_filled, text) for path, text in found.items() if MARKED.search(text)}


def _filled(place: re.Match[str]) -> str:
    begin, method, end = place.groups()
    return "\n".join([begin, *_lines(method), "", end])


def _lines(method: str) -> Iterator[str]:
    fields = methods()[method].Options.model_fields
    if not fields:
        yield "None."
        return
    yield "| option | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, info in fields.items():
        flag = name.replace("_", "-")
        flags = f"`--{flag}`, `--no-{flag}`" if info.annotation is bool else f"`--{flag}`"
        default = info.get_default(call_default_factory=True)
        shown = "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        meaning = (info.description or "").replace("|", r"\|")
        yield f"| {flags} | {_value(info.annotation)} | {shown} | {meaning} |"


def _value(annotation: Any) -> str:
    """Return the values that an option takes, as words and choices."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(_value(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"{_value(parts[0])}s, separated by commas"
    if origin is dict:
        return "pairs PATTERN=VALUE, separated by commas"
    return NAMES[annotation]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
