"""Temporary folders. Making one removes those of killed processes on this machine."""

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

# The name holds the machine and the process: processes of other machines on a shared disk are unknown here.
PREFIX = f"quantkit-{re.sub(r'[^A-Za-z0-9.]', '', platform.node())}-"
NAME = re.compile(rf"{re.escape(PREFIX)}(\d{{1,7}})-[a-z0-9_]{{8}}")


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder in `parent` (default: the system's temporary folder), and remove it afterwards."""
    place = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_dead(place)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(place: Path) -> None:
    """Remove this user's folders in `place` whose processes are gone."""
    with suppress(OSError):
        for path in place.iterdir():
            found = NAME.fullmatch(path.name)
            if found and not psutil.pid_exists(int(found[1])) and path.lstat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)  # refuses a link
