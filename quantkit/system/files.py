"""Digests of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_text(path: Path, text: str, before: Callable[[], object] = lambda: None) -> None:
    """Write `text` as the whole content of `path`: whoever looks sees the old content or the new one.

    `before` is called when the new content is safe on the disk beside the old one, as `PATH.new`.
    """
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    before()
    new.replace(path)
