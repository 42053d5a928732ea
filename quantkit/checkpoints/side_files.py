"""The files that belong to a checkpoint besides its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
)


def copy_side_files(origin: Path, folder: Path) -> None:
    """Copy those of them that are in `origin`."""
    for name in SIDE_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
