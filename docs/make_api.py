"""Writes docs/api.md: the public functions and classes of quantkit, from their signatures and docstrings.

Usage: python docs/make_api.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quantkit

HEAD = """\
# Python

What `import quantkit` gives; made from the docstrings by `make api`. The commands do the same, see the
[README](../README.md). A `ModelLike` is a name, a path, a ModelRef, an Artifact, or an opened source.
"""
WIDTH = 100  # of a signature in one line


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name in sorted(quantkit.__all__, key=lambda name: (name[0].isupper(), name.lower())):
        parts += _entry(name, getattr(quantkit, name))
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if inspect.isclass(value):
        yield f"{_text(value)}\n"
        members = [(m, inspect.getattr_static(value, m)) for m in vars(value) if not m.startswith("_")]
        lines = [f"- `{m}{_brief(member)}`: {_text(member).splitlines()[0]}" for m, member in members if _shown(member)]
        if lines:
            yield "\n".join(lines) + "\n"
    else:
        yield f"```text\n{_signature(name, value)}\n```\n\n{_text(value)}\n"


def _shown(member: Any) -> bool:
    return (inspect.isfunction(member) or isinstance(member, property)) and bool(inspect.getdoc(member))


def _brief(member: Any) -> str:
    if isinstance(member, property):
        return ""
    names = [p.name for p in inspect.signature(member).parameters.values() if p.name != "self"]
    return f"({', '.join(names)})"


def _signature(name: str, function: Any) -> str:
    """As it is written, in one line or one parameter a line."""
    signature = inspect.signature(function)
    parts, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    returns = signature.return_annotation
    line = f"{name}({', '.join(parts)}) -> {returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f") -> {returns}"])


def _text(value: Any) -> str:
    """The docstring, its double backquotes as Markdown's."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.getdoc(value) or "")


if __name__ == "__main__":
    (Path(__file__).parent / "api.md").write_text(page(), encoding="utf-8")
