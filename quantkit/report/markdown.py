"""Texts of others, such as a model's name, in Markdown: they stay texts, whatever they hold."""

from __future__ import annotations

import re

from quantkit.errors import one_line

LONGEST = 2000  # characters of one text
# What would begin HTML, an entity, a link, code, emphasis or a cell.
ENTITIES = {"<": "&lt;", "&": "&amp;"}
SPECIAL = re.compile(r"[\\`*\[\]<|]|&(?=[#\w])")


def escaped(text: str) -> str:
    """`text` on one line of Markdown, also in a cell of a table: every reader shows it as it is."""
    return SPECIAL.sub(lambda match: ENTITIES.get(match[0], f"\\{match[0]}"), one_line(text, LONGEST))
