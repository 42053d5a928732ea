"""The parent's side of a child process that loads and measures; the child's side is worker.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quantkit import errors
from quantkit.errors import EngineError
from quantkit.evaluation.worker import Request
from quantkit.progress import Progress, Step
from quantkit.report.records import Measurement
from quantkit.system.interpreter import lent_code


def run_child(request: Request, temp: Path, measurements: list[Measurement], progress: Progress) -> dict[str, Any]:
    """Run one child with its files in `temp`; collect its measurements; return what else it says.

    That is what it tells of the loaded engine. Raises the QuantkitError that the child tells, and EngineError where it
    ends without a word.
    """
    path = temp / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    read_end, write_end = os.pipe()
    env = {**os.environ, "OMP_NUM_THREADS": str(request.threads), "TOKENIZERS_PARALLELISM": "false"}
    if request.python != sys.executable:
        env["PYTHONPATH"] = lent_code(Path(tempfile.mkdtemp(prefix="quantkit-", dir=temp)))
    said: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    with (temp / "engine.log").open("w+b") as log:
        child = subprocess.Popen(
            [request.python, "-P", "-m", "quantkit.evaluation.worker", str(path), str(write_end)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write_end,),
            env=env,
        )
        os.close(write_end)
        try:
            with os.fdopen(read_end, encoding="utf-8") as events:
                for line in events:
                    event = json.loads(line)
                    if "said" in event:
                        said |= event["said"]
                    elif "measurement" in event:
                        measurements.append(Measurement.model_validate(event["measurement"]))
                    elif "step" in event:
                        _forward(event["step"], steps, progress)
                    else:
                        kind = getattr(errors, event["error"]["type"], EngineError)
                        raise kind(event["error"]["message"])
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
                child.kill()
                child.wait()
        if code != 0:
            raise EngineError(_crash(request, code, temp / "engine.log"))
    return said


def _forward(values: dict[str, Any], steps: dict[str, Step], progress: Progress) -> None:
    step = steps.setdefault(values["title"], Step(values["title"], values["total"]))
    step.done, step.remark, step.ended = values["done"], values["remark"], values["ended"]
    progress.forward(step)


def _crash(request: Request, code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    return f"the engine {request.engine} {how} while judging {request.subject}{last}"
