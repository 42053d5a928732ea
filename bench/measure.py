"""Run a command as a process of its own and measure it: CPU seconds, wall seconds, peak memory.

CPU seconds are user + system of the process and of its children that it waited for. Peak memory is the largest
resident size of one of them. Both come from the operating system's accounts at the process's end. Under a limit of
addresses, which each of them gets, the largest sum of their resident sizes is looked at, too, a few times a second.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

PAUSE_S = 0.2
ERROR = re.compile(r"^(\(.*\) )?([A-Z]+ [-0-9: ]+\[.*\] )?([\w.]+(Error|Exception)|error): ", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """What came of a command; `output` is all that it wrote, `together_gb` the sum of its processes where limited."""

    code: int
    cpu_s: float
    wall_s: float
    peak_gb: float
    output: str
    timed_out: bool
    together_gb: float = 0.0

    @property
    def reason(self) -> str:
        """Why it failed: the last line that names an error, or the last line."""
        if self.timed_out:
            return f"stopped after {self.wall_s:.0f} s"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if ERROR.search(line)]
        last = (errors or lines or ["no output"])[-1]
        return f"exit code {self.code}: {last[-300:]}"


def run(
    command: list[str],
    variables: dict[str, str],
    log: Path,
    limit_s: float,
    folder: Path,
    addresses: int | None = None,
) -> Run:
    """Run `command` in `folder` with its output in `log`; end it and its children after `limit_s` seconds.

    No process of it gets more than `addresses` bytes of addresses (RLIMIT_AS), whatever lies behind them.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    timed_out, together = False, 0
    limited = partial(resource.setrlimit, resource.RLIMIT_AS, (addresses, addresses)) if addresses else None
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, cwd=folder, start_new_session=True,
            preexec_fn=limited,
        )  # fmt: skip
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if not timed_out and time.monotonic() - begin > limit_s:
                    timed_out = True
                    os.killpg(process.pid, signal.SIGKILL)
                if addresses:
                    together = max(together, _resident(process.pid))
                time.sleep(PAUSE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return Run(
        code=process.returncode,
        cpu_s=usage.ru_utime + usage.ru_stime,
        wall_s=time.monotonic() - begin,
        peak_gb=usage.ru_maxrss * 1024 / 1e9,
        output=log.read_text(encoding="utf-8", errors="replace"),
        timed_out=timed_out,
        together_gb=max(together, usage.ru_maxrss * 1024) / 1e9 if addresses else 0.0,
    )


def _resident(pid: int) -> int:
    """Bytes in memory of a process and all below it; pages that several of them map are counted for each."""
    try:
        family = [process := psutil.Process(pid), *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    sizes = [0]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            sizes.append(member.memory_info().rss)
    return sum(sizes)
