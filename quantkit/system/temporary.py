"""Temporary folders. The next one that is made removes those of killed processes of this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# The name holds the machine and the process: another machine's processes, on a shared disk, are not known here.
PREFIX = f"quantkit-{re.sub(r'[^A-Za-z0-9.]', '', platform.node())}-"
NAME = re.compile(rf"{re.escape(PREFIX)}(\d{{1,7}})-[a-z0-9_]{{8}}")


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in `parent` (default: the system's place for such) and remove it with all that is in it."""
    place = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_dead(place)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(place: Path) -> None:
    """Remove the folders of this user in `place` whose processes are gone."""
    with suppress(OSError):
        for path in place.iterdir():
            found = NAME.fullmatch(path.name)
            if found and not psutil.pid_exists(int(found[1])) and path.lstat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)  # refuses a link
