"""Windows that an evaluation has judged so far, in a file: after a kill the same evaluation goes on behind them.

Records of `_scores.RECORD` one after the other. A process that finds the file in use by another keeps nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from quantkit.probes._scores import RECORD, Positions


class ResumeFile:
    """`windows` are those that are done, each (positions,); `sizes` the numbers of positions of all windows.

    Without a `path`, nothing is kept beyond this process.
    """

    def __init__(self, path: Path | None, sizes: list[int]) -> None:
        from filelock import FileLock, Timeout

        self.windows: list[Positions] = []
        self._path = path
        self._file: BinaryIO | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path.with_suffix(".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._path = None
            return
        self._file = file = path.open("r+b" if path.exists() else "w+b")
        content = np.frombuffer(file.read(), np.uint8)
        positions = content[: len(content) // RECORD.itemsize * RECORD.itemsize].view(RECORD)
        ends = np.cumsum(sizes)
        whole = int(np.searchsorted(ends, len(positions), side="right"))
        if whole:
            self.windows = np.split(positions[: ends[whole - 1]].copy(), ends[: whole - 1])
        file.truncate(sum(sizes[:whole]) * RECORD.itemsize)
        file.seek(0, 2)

    def add(self, window: Positions) -> None:
        """Keep one more window."""
        self.windows.append(window)
        if self._file is not None:
            self._file.write(window.tobytes())
            self._file.flush()

    def forget(self) -> None:
        """Remove the file: everything is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the file."""
        if self._file is not None:
            self._file.close()
            self._lock.release()
