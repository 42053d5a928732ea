"""The child process that judges: it must not outlive its parent."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

# Says when the worker has told its last event and is busy generating.
PARENT = """
import sys
import quantkit
from quantkit.progress import Progress
quantkit.evaluate(
    sys.argv[1], probes=["speed"], n_ctx=64, limit=2, threads=[1], new_tokens=100000,
    progress=Progress(lambda step: print(step.title, flush=True)),
)
"""


def test_a_worker_ends_when_its_parent_is_killed(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_llama)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline().startswith("speed")
        worker = next(c for c in psutil.Process(started.pid).children() if "quantkit.evaluation.worker" in c.cmdline())
        time.sleep(2)
        assert worker.is_running()
        started.kill()
        assert psutil.wait_procs([worker], timeout=15)[0] == [worker]
