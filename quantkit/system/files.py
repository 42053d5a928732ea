"""File helpers: hashes, safe names, atomic replacement, temporary folders, the user's cache folder."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from quantkit.errors import QuantkitError, cut

LONGEST_NAME = 150  # bytes; most file systems allow 255


def sha256_of(path: Path) -> str:
    """Return a file's hex sha256, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safe_name(text: str) -> str:
    """Turn `text` into a file name: letters, digits and ``._-``; other characters become one dash, never first.

    A leading dash would look like an option. Long names are cut and end with a hash.
    """
    return cut(re.sub(r"[^\w.-]+", "-", text).lstrip("-") or "unnamed", LONGEST_NAME, "-")


def refuse_unwritable(folder: Path, error: type[QuantkitError]) -> None:
    """Raise `error` if no file can be created in `folder`."""
    reason = ""
    if not folder.is_dir():
        reason = "it is not a folder"
    elif os.statvfs(folder).f_flag & os.ST_RDONLY:
        reason = "its disk is read-only"
    elif not os.statvfs(folder).f_blocks:
        reason = "the system stores no files there"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = "this user has no permission"
    if reason:
        raise error(f"nothing can be written in {folder}: {reason}. Choose another place.")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that created, renamed or removed files persist."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync folders
            raise
    finally:
        os.close(number)


def create(path: Path) -> TextIO:
    """Open a new text file; an existing file is removed first, so that no link is followed."""
    if os.path.lexists(path):
        path.unlink()
    return path.open("x", encoding="utf-8")


def replace_text(path: Path, text: str, before: Callable[[], object] = lambda: None, shared: bool = False) -> None:
    """Atomically replace a file's content: readers see the old or the new text.

    `before` is called once `PATH.new` is safely on disk. `shared`: other processes may write the same file.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new" if shared else f"{path.name}.new")
    with create(new) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    before()
    new.replace(path)
    sync_folder(path.parent)


# The name has machine and process, since processes of other machines on a shared disk cannot be checked.
PREFIX = f"quantkit-{re.sub(r'[^A-Za-z0-9.]', '', platform.node())}-"
NAME = re.compile(rf"{re.escape(PREFIX)}(\d{{1,7}})-[a-z0-9_]{{8}}")


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in `parent` (default: the system's temporary folder), removed afterwards."""
    place = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_dead(place)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(place: Path) -> None:
    """Remove this user's temporary folders whose processes have ended."""
    import psutil

    with suppress(OSError):
        for path in place.iterdir():
            found = NAME.fullmatch(path.name)
            if found and not psutil.pid_exists(int(found[1])) and path.lstat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)  # refuses a link


def cache_folder() -> Path:
    """Return quantkit's cache folder for this user; the environment variable QUANTKIT_CACHE overrides it."""
    import platformdirs

    return Path(os.environ.get("QUANTKIT_CACHE") or platformdirs.user_cache_dir("quantkit"))
