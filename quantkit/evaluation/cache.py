"""What judging keeps in the user's cache folder: baselines of source models, and evaluations that were interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation.baseline import MOST_FACTS, BaselineFiles, folder, resume_folder
from quantkit.recipe import parse
from quantkit.report.records import BaselineEntry
from quantkit.untrusted import read_object


@dataclass(frozen=True)
class CacheEntry:
    """One thing that the cache holds: what it is, and its size in bytes."""

    what: str
    bytes: int


def list_cache() -> list[CacheEntry]:
    """Baselines, whole or under way, and evaluations that were interrupted."""
    return [entry for entry, _ in _entries()]


def clear_cache() -> list[CacheEntry]:
    """Remove what no process works on now, and return it."""
    from filelock import FileLock, Timeout

    removed = []
    for entry, paths in _entries():
        lock = FileLock(paths[0].with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        for path in paths:
            path.unlink(missing_ok=True)
        removed.append(entry)
        lock.release()
    return removed


def _entries() -> list[tuple[CacheEntry, list[Path]]]:
    entries = []
    for key in sorted({path.stem for path in folder().glob("*") if path.suffix in (".f16", ".partial", ".json")}):
        files = BaselineFiles(key)
        paths = [path for path in (files.states, files.facts, files.partial) if path.is_file()]
        if not paths:
            continue
        try:
            facts = parse(BaselineEntry, read_object(files.facts, EngineError, most=MOST_FACTS), key)
            what = f"{facts.model} in {facts.dtype}, {facts.protocol}, {facts.windows} windows of {facts.n_ctx}"
        except QuantkitError:
            what = f"unfinished baseline {key}"
        entries.append((CacheEntry(what, sum(path.stat().st_size for path in paths)), paths))
    for path in sorted(path for path in resume_folder().glob("*.positions") if path.is_file()):
        entries.append((CacheEntry(f"interrupted evaluation {path.stem}", path.stat().st_size), [path]))
    return entries
