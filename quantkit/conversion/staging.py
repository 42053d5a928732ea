"""Staging: artifacts are written to `OUT.partial`, and renamed to `OUT` when they are whole and proven.

A process that is killed or interrupted leaves `OUT.partial` behind. `work.json` in it says which conversion it belongs
to; the next run of the same conversion goes on after the last finished decoder block (checkpoints/spool.py), or only
renames where all was done. Another conversion clears the folder. A lock on `.owner` keeps a second process away; the
system gives the lock back when its process ends, however that happens.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from quantkit.artifact import MANIFEST, FileEntry, open_artifact
from quantkit.checkpoints.journal import JOURNAL, SPOOL, read_journal
from quantkit.errors import ArtifactError, OutputError
from quantkit.system.files import replace_text, sha256_of

OWNER, WORK = ".owner", "work.json"
# What belongs to the work, not to the artifact, in the order in which it goes when the artifact is whole.
WORK_FILES = (SPOOL, JOURNAL, OWNER, WORK)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, a user's quota, a file's limit


def partial_of(out: Path) -> Path:
    """The folder that `out` is written in."""
    return out.with_name(out.name + ".partial")


def refuse_existing(out: Path, force: bool) -> None:
    """Raise OutputError where `out` exists and may not be replaced."""
    if out.exists() and not force:
        raise OutputError(f"the output {out} exists. Choose another --out, or give --force to replace it.")
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise OutputError(f"--force replaces only artifacts of quantkit, and {out} is none. Choose another --out.")


def refuse_small_disk(out: Path, need: int) -> None:
    """Raise OutputError where the disk of `out` has fewer than `need` bytes free beside what `OUT.partial` holds."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    partial = partial_of(out)
    held = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else 0
    free = shutil.disk_usage(place).free + held
    if free < need:
        raise OutputError(
            f"the disk of {place} is too small: {need / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free. "
            "Free some space or choose another --out."
        )


@contextmanager
def staged(
    out: Path,
    force: bool,
    fingerprint: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Iterator[Path]:
    """Yield `OUT.partial`; rename it to `out` when the block ends well.

    It is empty, or holds the work of an earlier run with the same `fingerprint` (JSON values): finished blocks in the
    spool, or the whole artifact with its manifest. On an error it is removed. When the process is interrupted, or
    space or memory run out, finished work stays.
    """
    partial = partial_of(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _owned(partial):
        _make_ready(partial, fingerprint, say)
        try:
            yield partial
            _publish(partial, out, force)
        except (KeyboardInterrupt, SystemExit, OSError, MemoryError, OutputError) as error:
            done = _done(partial)
            if done:
                say(f"{done} kept in {partial}. The same command goes on from there; to give up, delete the folder.")
            else:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise OutputError(
                    f"the disk of {out.parent} was full while {partial.name} was written "
                    f"({error.strerror}; {shutil.disk_usage(out.parent).free / 1e9:.2f} GB are free now). "
                    "Make room, or choose another --out, and run the same command again."
                ) from None
            raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file under `folder` but the manifest and the work's own, by relative name."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, *WORK_FILES)
    }


@contextmanager
def _owned(partial: Path) -> Iterator[None]:
    """Make the folder and hold the lock on it; raises OutputError where another process holds it."""
    path = partial / OWNER
    while True:
        partial.mkdir(exist_ok=True)
        if any(partial.iterdir()) and not any((partial / name).exists() for name in (OWNER, WORK, MANIFEST)):
            raise OutputError(f"{partial} exists and is no work folder of quantkit. Move it, or choose another --out.")
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except (Timeout, FileNotFoundError):
            if not path.exists():  # renamed by its owner in this moment
                continue
            pid = path.read_text(encoding="utf-8") or "another"
            raise OutputError(
                f"{partial} is being written by process {pid}. Wait for it, or choose another --out."
            ) from None
        break
    with lock:
        path.write_text(str(os.getpid()), encoding="utf-8")
        try:
            yield
        finally:
            lock.release()


def _make_ready(partial: Path, fingerprint: dict[str, Any] | None, say: Callable[[str], None]) -> None:
    """Keep of an earlier run what this conversion can go on from; clear everything else."""
    other = _difference(partial, fingerprint)
    if not other and _whole(partial):
        say(f"the artifact in {partial} is whole already")
        return
    done = _done(partial)
    if other and done:
        say(f"{done} in {partial} belong to another conversion ({other}) and are removed")
    elif done:
        say(f"going on after {done} in {partial}")
    spared = (OWNER,) if other else WORK_FILES
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in spared:
            path.unlink()
    if other and fingerprint is not None:
        replace_text(partial / WORK, json.dumps(fingerprint, indent=2) + "\n")


def _difference(partial: Path, fingerprint: dict[str, Any] | None) -> str:
    """Why the work is not this conversion's; empty where it is."""
    try:
        earlier = json.loads((partial / WORK).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return "its work.json is missing"
    if fingerprint is None:
        return "nothing is to be kept"
    current = json.loads(json.dumps(fingerprint))
    differing = ", ".join(key for key in current if earlier.get(key) != current[key])
    return f"differing in {differing}" if differing else ""


def _done(partial: Path) -> str:
    """What of the work is finished, in words; empty where nothing is."""
    if (partial / MANIFEST).is_file():
        return "the whole artifact"
    blocks = len(read_journal(partial)[0])
    return f"{blocks} finished decoder blocks" if blocks else ""


def _whole(partial: Path) -> bool:
    """Whether the manifest is there, which is written last, and every file is as it says."""
    if not (partial / MANIFEST).is_file():
        return False
    try:
        whole = open_artifact(partial).manifest.files == list_files(partial)
    except ArtifactError:
        whole = False
    if not whole:
        (partial / MANIFEST).unlink()
    return whole


def _publish(partial: Path, out: Path, force: bool) -> None:
    """Put every byte on the disk, remove the work's own files, and rename; the old artifact goes last."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    refuse_existing(out, force)
    for name in WORK_FILES:
        (partial / name).unlink(missing_ok=True)
    replaced = out.with_name(out.name + ".replaced")
    if (replaced / MANIFEST).is_file():  # left by a process that was killed between the renames
        shutil.rmtree(replaced)
    if out.exists():
        out.rename(replaced)
        partial.rename(out)
        shutil.rmtree(replaced)
    else:
        partial.rename(out)
