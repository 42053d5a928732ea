"""The parent's side of a child process that loads and measures; the child's side is worker.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from quantkit import errors
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation.request import LoadRequest, Request
from quantkit.progress import Progress, Step
from quantkit.report.records import Measurement
from quantkit.system import forking
from quantkit.system.interpreter import lent_code
from quantkit.system.ranks import without_ranks
from quantkit.untrusted import shown, told

# What OpenMP, OpenBLAS and MKL start with; the user's own would hold for one of them otherwise.
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

WORKER = "quantkit.evaluation.worker"


@dataclass
class ChildResult:
    """What a child says: of the model that it loaded (dtype, device, notes), its measurements, or results of tasks."""

    loaded: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    tasks: dict[str, Any] = field(default_factory=dict)


def run_child(request: Request, temp: Path, progress: Progress, forked: bool = False) -> ChildResult:
    """Run one child with its files in `temp`; `forked` from a process that has imported transformers, if it can be.

    Raises the QuantkitError that the child reports, and EngineError where it ends without a word.
    """
    path, load = temp / "request.json", request.load
    path.write_text(request.model_dump_json(), encoding="utf-8")
    read_end, write_end = os.pipe()
    env = _variables(load.threads)
    if load.python != sys.executable:
        env["PYTHONPATH"] = lent_code(Path(tempfile.mkdtemp(prefix="quantkit-", dir=temp)))
    result = ChildResult()
    steps: dict[str, Step] = {}
    with (temp / "engine.log").open("w+b") as log:
        forked = forked and load.device == "cpu" and load.python == sys.executable
        child = (forked and forking.fork(WORKER, [str(path)], write_end, log.fileno(), env)) or start(
            load.python, path, write_end, log, env
        )
        os.close(write_end)
        try:
            with os.fdopen(read_end, encoding="utf-8") as events:
                for line in events:
                    with told(f"the engine {load.engine} told something unusable of {load.model}", EngineError):
                        [(kind, content)] = json.loads(line).items()
                        if kind != "step":
                            _take(result, kind, content)
                            continue
                        step = _updated(content, steps)
                    progress.forward(step)
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
                child.kill()
                child.wait()
        if code != 0:
            raise EngineError(_crash(load, code, temp / "engine.log"))
        if not result.loaded:
            raise EngineError(f"the engine {load.engine} ended without a word while judging {load.model}")
    return result


def prepare() -> None:
    """Import what judging processes need while other things are done."""
    forking.start(_variables(1))


def _variables(threads: int) -> dict[str, str]:
    return {**without_ranks(os.environ), **dict.fromkeys(POOLS, str(threads)), "TOKENIZERS_PARALLELISM": "false"}


def start(
    python: str, request: Path, write_end: int, log: IO[bytes], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the child: its events go to the file descriptor `write_end`, what engines say into `log`."""
    return subprocess.Popen(
        [python, "-P", "-m", WORKER, str(request), str(write_end)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(write_end,),
        env=variables,
    )


def _take(result: ChildResult, kind: str, content: Any) -> None:
    """Put an event of the child into `result`, or raise the error that it tells."""
    if kind == "measurement":
        result.measurements.append(Measurement.model_validate(content))
    elif kind == "error":
        known = getattr(errors, content["type"], None)
        kind_of_error = known if isinstance(known, type) and issubclass(known, QuantkitError) else EngineError
        raise kind_of_error(str(content["message"]))
    elif kind in ("loaded", "tasks") and isinstance(content, dict):
        setattr(result, kind, content)
    else:
        raise ValueError(f"an event of the kind {shown(kind)}")


def _updated(values: dict[str, Any], steps: dict[str, Step]) -> Step:
    step = steps.setdefault(values["title"], Step(values["title"], values["total"], work=values["work"]))
    step.done, step.remark, step.ended = values["done"], values["remark"], values["ended"]
    return step


def _crash(load: LoadRequest, code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    return f"the engine {load.engine} {how} while judging {load.model}{last}"
