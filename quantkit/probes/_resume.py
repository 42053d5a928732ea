"""Windows that an evaluation has judged so far, in a file: after a kill the same evaluation goes on behind them.

Each window is its records of `_scores.RECORD` and a checksum, which goes on from window to window: what is damaged is
judged again. A process that finds the file in use by another, or cannot write it, keeps nothing.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quantkit.probes._scores import RECORD, Positions

CHECKSUM_BYTES = 4


class ResumeFile:
    """`windows` are those that are done, each (positions,); `sizes` the numbers of positions of all windows.

    Without a `path`, nothing is kept beyond this process.
    """

    def __init__(self, path: Path | None, sizes: list[int]) -> None:
        from filelock import FileLock, Timeout

        self.windows: list[Positions] = []
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._checksum = 0
        if path is None:
            return
        self._lock = FileLock(path.with_suffix(".lock"))
        with suppress(OSError, Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            try:
                self._read(path.open("r+b" if path.exists() else "w+b"), sizes)
                self._path = path
            finally:
                if self._path is None:
                    self._lock.release()

    def _read(self, file: BinaryIO, sizes: list[int]) -> None:
        """Take the whole windows of the file; leave it open behind them."""
        end = 0
        for size in sizes:
            data, stored = file.read(size * RECORD.itemsize), file.read(CHECKSUM_BYTES)
            checksum = zlib.crc32(data, self._checksum)
            if stored != checksum.to_bytes(CHECKSUM_BYTES, "little"):
                break
            self.windows.append(np.frombuffer(data, RECORD))
            self._checksum, end = checksum, file.tell()
        file.seek(end)
        file.truncate()
        self._file = file

    def add(self, window: Positions) -> None:
        """Keep one more window."""
        self.windows.append(window)
        if self._file is None:
            return
        data = window.tobytes()
        self._checksum = zlib.crc32(data, self._checksum)
        try:
            self._file.write(data + self._checksum.to_bytes(CHECKSUM_BYTES, "little"))
            self._file.flush()
        except OSError:  # the disk is full: figures do not depend on it
            self.close()

    def forget(self) -> None:
        """Remove the file: everything is done."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
            self._lock.release()
