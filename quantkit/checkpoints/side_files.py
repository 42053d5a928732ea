"""Side files of a checkpoint: the files other than weights and config.json, such as the tokenizer and the licence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from quantkit.errors import SourceError
from quantkit.system.untrusted import inside, read_object, shown

# Patterns of fnmatch, as the hub uses them. A tokenizer has one of the vocabularies.
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model"),
    *("spiece.model", "sentencepiece.model", "sentencepiece.bpe.model"),
)
TEMPLATES = "additional_chat_templates"  # the folder of named templates
TOKENIZER_SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer.model.v*",  # mistral-common's
    "tokenizer.[0-9]*.json",  # `fast_tokenizer_files` of versions of transformers
    *(TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", f"{TEMPLATES}/*.jinja"),
)
# Processors of images and sound.
PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", "chat_template.json"),
)
# Licences by all their names: LICENSE-MODEL, Licence.txt, NOTICE.md, USE_POLICY.md.
TERMS = ("LICEN[CS]E*", "[Ll]icen[cs]e*", "NOTICE*", "[Nn]otice*", "*USE_POLICY*", "*[Uu]se_[Pp]olicy*")
SIDE_FILES = (*TOKENIZER_FILES, *PROCESSOR_FILES, GENERATION, *TERMS)
# JSON files with keys and values.
OBJECTS = (TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json", GENERATION, *PROCESSOR_FILES)
# Bytes. A token that fills a huge file would need 20 times its size in memory.
LARGEST, LARGEST_OBJECT, LARGEST_TEMPLATE = 1 << 26, 1 << 24, 1 << 20
# Endings of files that are not text: code, weights, pickles.
NO_TEXT = (".py", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".safetensors", ".gguf")
# Endings of files that a loader may read; a note names those that are not copied.
READABLE = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")
AGAIN = "Fetch the file again."


def matches(name: str, patterns: Iterable[str] = SIDE_FILES) -> bool:
    """Return whether a file name, relative to the checkpoint's folder, matches the patterns of side files."""
    return not name.lower().endswith(NO_TEXT) and any(fnmatchcase(name, pattern) for pattern in patterns)


def _named(origin: Path) -> dict[str, Path]:
    """Return the files and links in `origin` that are named like side files, by relative path."""
    paths = (path for folder in (origin, origin / TEMPLATES) if folder.is_dir() for path in sorted(folder.iterdir()))
    names = {path.relative_to(origin).as_posix(): path for path in paths if path.is_symlink() or not path.is_dir()}
    return {name: path for name, path in names.items() if matches(name)}


def refuse_large_files(origin: Path) -> None:
    """Raise SourceError for a side file larger than any published one."""
    for name, path in find_side_files(origin).items():
        most = LARGEST_OBJECT if name in OBJECTS else LARGEST_TEMPLATE if name.endswith(".jinja") else LARGEST
        if (size := path.stat().st_size) > most:
            raise SourceError(f"{path} has {size:,} bytes; at most {most:,} are read")


def refuse_side_files(origin: Path) -> None:
    """Raise SourceError for a side file that must not be copied: a link out of the folder, or a damaged file."""
    # Such a link could put a private file into an artifact that the user publishes.
    refuse_large_files(origin)
    for name, path in _named(origin).items():
        if not inside(origin, path):
            raise SourceError(f"{path} is a link out of its folder. Put the file itself there, or remove the link.")
        if path.exists() and not path.is_file():
            raise SourceError(f"{path} is not a file. Fetch the checkpoint again.")
        if not name.isprintable() or "\\" in name:
            raise SourceError(f"{origin} has a file with the name {shown(name)}. Rename it.")
        if name in OBJECTS and path.is_file():
            read_object(path, SourceError, AGAIN)


def find_side_files(origin: Path, patterns: Iterable[str] = SIDE_FILES) -> dict[str, Path]:
    """Return the side files in `origin` that match `patterns`, by relative path."""
    return {name: path for name, path in _named(origin).items() if path.is_file() and matches(name, patterns)}


def note_not_copied(origin: Path) -> tuple[str, ...]:
    """Return a note that names files in `origin` that loaders may read but quantkit does not copy; empty if none."""
    names = sorted(
        path.name
        for path in origin.iterdir()
        if path.name.endswith(READABLE)
        and not (path.name.startswith(".") or path.name == "config.json" or path.name.endswith(".index.json"))
        and "quant" not in path.name  # quantization settings are read with the weights
        and not matches(path.name)
    )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (f"not copied from the source: {', '.join(names[:3])}{more}",) if names else ()


def copy_side_files(origin: Path, folder: Path) -> None:
    """Copy the side files in `origin` to `folder`; raises SourceError as `refuse_side_files` does."""
    refuse_side_files(origin)
    copy_files(find_side_files(origin), folder)


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy side files under the given names; remove `auto_map`, which names code, from the tokenizer's settings."""
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    settings = folder / TOKENIZER_SETTINGS
    if settings.is_file():
        values = read_object(settings, SourceError, AGAIN)
        if values.pop("auto_map", None) is not None:
            settings.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
