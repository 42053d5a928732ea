"""What judging keeps in the user's cache folder: baselines of source models, and evaluations that were interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.evaluation.baseline import BaselineFiles, folder, resume_folder
from quantkit.report.records import BaselineEntry


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
        paths = [path for path in (files.states, files.facts, files.partial) if path.exists()]
        try:
            facts = BaselineEntry.model_validate_json(files.facts.read_text(encoding="utf-8"))
            what = f"{facts.model} in {facts.dtype}, {facts.protocol}, {facts.windows} windows of {facts.n_ctx}"
        except (OSError, ValueError):
            what = f"unfinished baseline {key}"
        entries.append((CacheEntry(what, sum(path.stat().st_size for path in paths)), paths))
    for path in sorted(resume_folder().glob("*.positions")):
        entries.append((CacheEntry(f"interrupted evaluation {path.stem}", path.stat().st_size), [path]))
    return entries
