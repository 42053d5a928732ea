"""Temporary folders, which go even if their process is killed: the next one that is made takes the dead ones away.

Each holds a file that its process has locked; the system gives the lock back when the process ends, however that
happens. What cannot be locked, or has other names, is nobody's business here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "quantkit-", ".quantkit-lock"
NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # as tempfile makes them


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in `parent` (default: the system's place for such) and remove it with all that is in it.

    Folders of killed processes in the same place are removed, too.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_dead(place)
    folder, lock = _make(place)
    try:
        inner = folder / "files"
        inner.mkdir()
        yield inner
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(place: Path) -> tuple[Path, int]:
    """A fresh folder and the descriptor of its locked file."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        path = folder / LOCK
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # taken for a dead one before its file was there
            continue
        if _locked(number, path):
            return folder, number
        os.close(number)


def _locked(number: int, path: Path) -> bool:
    """Whether the open file could be locked and is still the one at `path`; a place without locks counts as well."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return path.exists()
    return path.exists()


def _remove_dead(place: Path) -> None:
    """Remove the folders of this user in `place` whose processes are gone."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in list(entries):
            with suppress(OSError):
                ours = NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                if ours and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    _remove_if_dead(Path(entry.path))


def _remove_if_dead(folder: Path) -> None:
    try:
        number = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        folder.rmdir()  # killed before its file was there; one that holds anything else stays
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises for that of a living process
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(number)
