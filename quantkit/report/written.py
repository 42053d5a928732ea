"""Which files quantkit wrote: a result may take the place of an earlier one, and of no other file."""

from __future__ import annotations

from pathlib import Path

from quantkit.artifact import MANIFEST
from quantkit.errors import OutputError
from quantkit.untrusted import read_json

# By the keys that tell them: what --json writes of artifacts, judgements, tables, forecasts, cross-checks, GGUF files,
# and the list of methods.
RESULTS = (
    {"schema_version", "recipe", "weight_files"},
    {"model", "measurements"},
    {"reports"},
    {"parts"},
    {"disk_bytes"},
    {"native", "reference", "agrees"},
    {"keys", "bits_per_weight", "tensors"},
    {"gptq", "awq", "rtn"},
)
CACHED = {"what", "bytes"}  # of each item of the cache's list
PAGE = '<meta name="generator" content="quantkit">'
HEAD = 1000  # characters of a page that hold it
TABLE = ("table.md", "table.csv", "table.json", "perplexity-size.svg", "perplexity-size.png")


def refuse_other(path: Path) -> None:
    """Raise OutputError where `path` is a file that has something in it and that quantkit did not write.

    A device or a pipe takes whatever comes.
    """
    if path.is_file() and path.stat().st_size and not is_result(path):
        raise OutputError(
            f"{path} is there, and quantkit wrote no such file: only its own results are replaced. "
            "Choose another name, or remove it."
        )


def refuse_other_table(folder: Path) -> None:
    """Raise OutputError where a table in `folder` would replace files that are none of an earlier one."""
    there = [name for name in TABLE if (folder / name).is_file()]
    if there and not ("table.json" in there and is_result(folder / "table.json")):
        raise OutputError(
            f"{folder / there[0]} is there, and quantkit wrote no table in that folder. Choose another, or remove it."
        )


def is_result(path: Path) -> bool:
    """Whether the file at `path` is a page or the JSON of a result; the manifest of an artifact is none."""
    if path.name == MANIFEST:
        return False
    try:
        with path.open(encoding="utf-8") as file:
            if PAGE in file.read(HEAD):
                return True
        values = read_json(path, OutputError)
    except (OutputError, OSError, ValueError):
        return False
    if isinstance(values, list):
        return all(isinstance(item, dict) and item.keys() == CACHED for item in values)
    return isinstance(values, dict) and any(keys <= values.keys() for keys in RESULTS)
