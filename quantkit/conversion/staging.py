"""Staging: artifacts are written to `OUT.partial`, and renamed to `OUT` when they are complete and checked.

A process that is killed or interrupted leaves `OUT.partial` behind, with a `work.json` that identifies the conversion.
The next run of the same conversion resumes after the last finished decoder block (checkpoints/spool.py), or only
renames if all was done. A different conversion clears the folder. A lock on `.owner` excludes a second process; the
operating system releases the lock when the first process ends.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from quantkit.checkpoints.spool import JOURNAL, SPOOL, read_journal
from quantkit.errors import ArtifactError, OutputError, QuantkitError, UnsupportedError, reason_of
from quantkit.records.artifact import MANIFEST, FileEntry, open_artifact
from quantkit.system.files import refuse_unwritable, replace_text, sha256_of, sync_folder
from quantkit.system.sizes import in_one_unit
from quantkit.system.untrusted import path_of, read_object

OWNER, WORK = ".owner", "work.json"
# Files of the work, not of the artifact, in the order in which they are removed at the end.
WORK_FILES = (SPOOL, JOURNAL, OWNER, WORK)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, user's quota, file size limit


def partial_of(out: Path) -> Path:
    """Return the folder in which the artifact for `out` is written."""
    return out.with_name(out.name + ".partial")


def place_of(out: str | Path) -> Path:
    """Return `out` as a path; raises OutputError if no artifact can be created there."""
    path = path_of(out, OutputError)
    if path.name in ("", ".."):
        raise OutputError(f"the output {path} is not the name of a folder. Choose another --out.")
    path_of(partial_of(path), OutputError)
    if path.is_symlink():
        raise OutputError(f"the output {path} is a symbolic link. Remove it, or give the folder itself as --out.")
    parents = path.absolute().parents
    wrong = next((above for above in parents if (above.exists() or above.is_symlink()) and not above.is_dir()), None)
    if wrong is not None:
        raise OutputError(f"the output {path} cannot be created: {wrong} is not a folder. Choose another --out.")
    return path


def refuse_existing(out: Path, force: bool) -> None:
    """Raise OutputError if `out` exists, unless `force` is set and it is an artifact or an empty folder."""
    place_of(out)
    replaced = _replaced_by(out)
    if replaced.is_symlink():
        raise OutputError(f"{replaced} is a symbolic link, but --force moves the old artifact there. Remove the link.")
    if not out.exists():
        return
    if not force:
        raise OutputError(f"the output {out} exists. Choose another --out, or give --force to replace it.")
    for old, what in ((out, "replaces only artifacts"), (replaced, f"moves the old one to {replaced.name}")):
        if (old.exists() or old.is_symlink()) and not _replaceable(old):
            raise OutputError(f"--force {what} of quantkit, and {old} is not one. Choose another --out.")


def _replaceable(folder: Path) -> bool:
    """Return whether `folder` is an artifact or an empty folder."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return (folder / MANIFEST).is_file() or not any(folder.iterdir())


def _replaced_by(out: Path) -> Path:
    """Return the path to which the old artifact is moved while the new one replaces it."""
    return out.with_name(out.name + ".replaced")


def refuse_overlap(out: Path, source: Path) -> None:
    """Raise OutputError if `out` is the source, contains it, or is inside a source that is an artifact."""
    new, old = out.absolute().resolve(), source.absolute().resolve()
    if old.is_relative_to(new) or (new.is_relative_to(old) and (old / MANIFEST).is_file()):
        how = "is" if new == old else "is inside" if new.is_relative_to(old) else "contains"
        raise OutputError(f"the output {out} {how} the source. Choose another --out.")


def refuse_small_disk(out: Path, need: int) -> None:
    """Raise OutputError if the disk of `out` has less than `need` bytes free; `OUT.partial` counts as free.

    It is also raised if the folder cannot be written.
    """
    place = _existing(out.absolute())
    refuse_unwritable(place, OutputError)
    partial = partial_of(out)
    held = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else 0
    free = shutil.disk_usage(place).free + held
    if free < need:
        needed, there = in_one_unit(need, free)
        raise OutputError(
            f"the disk of {place} is too small: {needed} needed, {there} free. Free space or choose another --out."
        )


def _existing(place: Path) -> Path:
    """Return `place` if it exists, else its nearest existing parent."""
    while not place.exists():
        place = place.parent
    return place


@contextmanager
def staged(
    out: Path,
    force: bool,
    fingerprint: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Iterator[Path]:
    """Yield `OUT.partial`, locked; rename it to `out` if the body of the with statement succeeds.

    The folder is empty, or holds the work of an earlier run with the same `fingerprint` (JSON values): finished blocks
    in the spool, or the complete artifact with its manifest. An ArtifactError or UnsupportedError removes the folder;
    after any other error, finished work stays.
    """
    partial = partial_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{partial} cannot be created: {reason_of(error)}. Choose another --out.") from None
    with _owned(partial):
        _refuse_made_meanwhile(partial, out, force)
        _make_ready(partial, fingerprint, say)
        try:
            yield partial
            _publish(partial, out, force)
        except (ArtifactError, UnsupportedError):
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except BaseException as error:
            done = _done(partial)
            if done:
                say(f"{partial} has {done}. Run the same command to continue, or delete the folder.")
            else:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise OutputError(
                    f"the disk of {out.parent} is full: {partial.name} could not be written "
                    f"({error.strerror}; {in_one_unit(shutil.disk_usage(out.parent).free, 0)[0]} are free). "
                    "Free space and run the same command again, or choose another --out."
                ) from None
            raise


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Return size and sha256 of every file under `folder`, except manifest and work files, by relative path."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, *WORK_FILES)
    }


def _refuse_made_meanwhile(partial: Path, out: Path, force: bool) -> None:
    """Raise OutputError if another process has created `out` since the check."""
    try:
        refuse_existing(out, force)
    except OutputError:
        if not _done(partial):
            shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _owned(partial: Path) -> Iterator[None]:
    """Lock the folder for this process; raises OutputError if another process holds the lock."""
    path = partial / OWNER
    while True:
        partial.mkdir(exist_ok=True)
        _refuse_planted(partial)
        if any(partial.iterdir()) and not any((partial / name).exists() for name in (OWNER, WORK, MANIFEST)):
            raise OutputError(f"{partial} is not a work folder of quantkit. Move it, or choose another --out.")
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
            try:
                path.write_text(str(os.getpid()), encoding="utf-8")
            except FileNotFoundError:  # renamed by its previous owner, which has finished
                lock.release()
                continue
        except (Timeout, FileNotFoundError):
            if not path.exists():  # renamed by its owner just now
                continue
            pid = path.read_bytes()[:20].decode("ascii", "replace")
            whose = f"process {pid}" if pid.isdigit() else "another process"
            raise OutputError(f"{partial} is being written by {whose}. Wait for it, or choose another --out.") from None
        break
    with lock:
        try:
            yield
        finally:
            lock.release()


def _refuse_planted(partial: Path) -> None:
    """Raise OutputError for links and special files in the folder: writing to them could change other files."""
    for path in (partial, *partial.rglob("*")):
        with suppress(FileNotFoundError):  # its owner renames the folder just now
            about = path.lstat()
            alone = stat.S_ISREG(about.st_mode) and (about.st_nlink == 1 or path.name not in WORK_FILES)
            if not alone and (not stat.S_ISDIR(about.st_mode) or path.name in WORK_FILES):
                raise OutputError(f"{path} is not a plain file or folder. Remove it, or choose another --out.")


def _make_ready(partial: Path, fingerprint: dict[str, Any] | None, say: Callable[[str], None]) -> None:
    """Prepare the folder: leave work that this conversion can resume, and delete everything else."""
    other = _difference(partial, fingerprint)
    if not other and _whole(partial):
        say(f"the artifact in {partial} is already complete")
        return
    done = _done(partial)
    if other and done:
        say(f"removed from {partial}: {done} of another conversion ({other})")
    elif done:
        say(f"resuming from {partial}: {done}")
    spared = (OWNER,) if other else WORK_FILES
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in spared:
            path.unlink()
    if other and fingerprint is not None:
        replace_text(partial / WORK, json.dumps(fingerprint, indent=2) + "\n")


def _difference(partial: Path, fingerprint: dict[str, Any] | None) -> str:
    """Return why the work in the folder belongs to another conversion; empty if it belongs to this one."""
    if not (partial / WORK).is_file():
        return "its work.json is missing"
    try:
        earlier = read_object(partial / WORK, OutputError)
    except OutputError:
        return "its work.json is damaged"
    if fingerprint is None:
        return "this conversion cannot resume"
    current = json.loads(json.dumps(fingerprint))
    differing = ", ".join(key for key in current if earlier.get(key) != current[key])
    return f"differing in {differing}" if differing else ""


def _done(partial: Path) -> str:
    """Return a description of the finished work in the folder; empty if there is none."""
    if (partial / MANIFEST).is_file():
        return "the complete artifact"
    blocks = len(read_journal(partial)[0])
    return f"{blocks} finished decoder blocks" if blocks else ""


def _whole(partial: Path) -> bool:
    """Return whether the manifest is present and all files match it; delete a manifest that does not match."""
    if not (partial / MANIFEST).is_file():
        return False
    try:
        whole = open_artifact(partial).manifest.files == list_files(partial)
    except QuantkitError:
        whole = False
    if not whole:
        (partial / MANIFEST).unlink()
    return whole


def _publish(partial: Path, out: Path, force: bool) -> None:
    """Flush all files to disk, remove the work files, and rename `partial` to `out`; delete the old artifact last.

    Once the lock file is gone, another process may create a new one before the rename; it is removed from `out`.
    """
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    refuse_existing(out, force)
    for name in WORK_FILES:
        (partial / name).unlink(missing_ok=True)
    for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        sync_folder(folder)
    replaced = _replaced_by(out)
    if (replaced / MANIFEST).is_file():  # left by a process that was killed between the renames
        shutil.rmtree(replaced)
    if out.exists():
        out.rename(replaced)
        partial.rename(out)
        sync_folder(out.absolute().parent)
        shutil.rmtree(replaced)
    else:
        partial.rename(out)
        sync_folder(out.absolute().parent)
    (out / OWNER).unlink(missing_ok=True)
