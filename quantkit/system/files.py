"""Files: digests, names, and whole contents replaced at once."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safe_name(text: str) -> str:
    """`text` as the name of a file or folder: letters, digits and ``._-``, all else one dash."""
    return re.sub(r"[^\w.-]+", "-", text)


def replace_text(path: Path, text: str, before: Callable[[], object] = lambda: None, shared: bool = False) -> None:
    """Write `text` as the whole content of `path`: whoever looks sees the old content or the new one.

    `before` is called when the new content is safe on the disk beside the old one, as `PATH.new`. `shared`: other
    processes may write the same file.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new" if shared else f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    before()
    new.replace(path)
