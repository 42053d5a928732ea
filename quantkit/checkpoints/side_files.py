"""The files that belong to a checkpoint besides its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from quantkit.errors import SourceError
from quantkit.untrusted import inside, read_object

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is what makes a tokenizer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
TOKENIZER_SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
# How the other halves of multimodal models take images and sound.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
SIDE_FILES = (*TOKENIZER_FILES, *PROCESSOR_FILES, GENERATION, "LICENSE", "LICENSE.md", "LICENSE.txt")
# Those that hold keys and values.
OBJECTS = (
    TOKENIZER_SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    GENERATION,
    *PROCESSOR_FILES,
)
# Bytes. A tokenizer takes 20 times the size of a token that fills a file, and ends the process for want of memory.
LARGEST, LARGEST_OBJECT, LARGEST_TEMPLATE = 1 << 26, 1 << 24, 1 << 20


def refuse_large_files(origin: Path) -> None:
    """Raise SourceError for a side file that is larger than any that is published."""
    for name in SIDE_FILES:
        path = origin / name
        most = LARGEST_OBJECT if name in OBJECTS else LARGEST_TEMPLATE if name.endswith(".jinja") else LARGEST
        if path.is_file() and (size := path.stat().st_size) > most:
            raise SourceError(f"{path} has {size:,} bytes; at most {most:,} are read. Fetch the file again.")


def refuse_side_files(origin: Path) -> None:
    """Raise SourceError for a side file that cannot be copied: a link out of the folder, or a damaged JSON object.

    Whoever made the folder could otherwise have any file of the user's copied into what he publishes.
    """
    refuse_large_files(origin)
    for name in SIDE_FILES:
        path = origin / name
        if path.is_symlink() and not inside(origin, path):
            raise SourceError(f"{path} is a link out of its folder. Put the file itself there, or remove the link.")
        if path.exists() and not path.is_file():
            raise SourceError(f"{path} is no file. Fetch the checkpoint again.")
        if name in OBJECTS and path.is_file():
            read_object(path, SourceError, "Fetch the file again.")


def find_side_files(origin: Path) -> dict[str, Path]:
    """Those of them that are in `origin`, by name."""
    return {name: path for name in SIDE_FILES if (path := origin / name).is_file()}


def copy_side_files(origin: Path, folder: Path) -> None:
    """Copy those of them that are in `origin`; raises SourceError for what `refuse_side_files` refuses."""
    refuse_side_files(origin)
    copy_files(find_side_files(origin), folder)


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy such files under their names.

    The code that a tokenizer names (`auto_map`) is not there, and is not named in the copy.
    """
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
    settings = folder / TOKENIZER_SETTINGS
    if settings.is_file():
        values = read_object(settings, SourceError, "Fetch the file again.")
        if values.pop("auto_map", None) is not None:
            settings.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
