"""Start child processes that load one model and measure it: their requests and results. The child is worker.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from quantkit import errors
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation.engine_choice import ChosenEngine, LoadedEntry
from quantkit.records.recipe import EvaluationSpec, Frozen, ModelRef, Strict, TaskSpec
from quantkit.records.report import Measurement
from quantkit.system import forking
from quantkit.system.interpreter import lent_code
from quantkit.system.progress import Progress, Step
from quantkit.system.ranks import without_ranks
from quantkit.system.untrusted import reraise_as, shown

# The thread counts of OpenMP, OpenBLAS and MKL; all are set, since the user may have set one.
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WORKER = "quantkit.evaluation.worker"


class LoadRequest(Strict):
    """Request to load a model in an engine, with a number of threads."""

    model: ModelRef
    engine: ChosenEngine
    threads: int


class BaselineRef(Strict):
    """A source, and the cache key of its baseline."""

    source: ModelRef
    key: str


class MeasureRequest(Frozen):
    """Request to run `probes`, and speed probes again with each of `further_threads`."""

    kind: Literal["measure"] = "measure"
    load: LoadRequest
    windows: str  # a file, as `Cut.save` writes it
    spec: EvaluationSpec
    probes: tuple[str, ...]
    resume: str  # the file of the positions of finished batches
    further_threads: tuple[int, ...] = ()
    baseline: BaselineRef | None = None
    save: str | None = None  # the file for all positions


class BaselineRequest(Frozen):
    """Request to make the baseline `key` of the model, which is a source."""

    kind: Literal["baseline"] = "baseline"
    load: LoadRequest
    windows: str
    key: str


class TasksRequest(Frozen):
    """Request to run tasks of lm-evaluation-harness."""

    kind: Literal["tasks"] = "tasks"
    load: LoadRequest
    tasks: TaskSpec


Request = MeasureRequest | BaselineRequest | TasksRequest


def read_request(text: str) -> Request:
    """Return the request in a JSON text; raises EngineError."""
    adapter: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise EngineError(f"the request to the evaluation process is invalid: {place}: {first['msg']}") from None


@dataclass(frozen=True)
class ChildResult:
    """Result of a child process: facts about the loaded model, and measurements or task results."""

    loaded: LoadedEntry
    measurements: tuple[Measurement, ...]
    tasks: dict[str, Any]


def run_child(request: Request, temp: Path, progress: Progress, forked: bool = False) -> ChildResult:
    """Run a request in a child process with its files in `temp`; `forked`: fork it from a prepared process if possible.

    Raises the QuantkitError that the child reports, EngineError if it ends without a result.
    """
    path, load = temp / "request.json", request.load
    engine, model = load.engine, load.model.model
    path.write_text(request.model_dump_json(), encoding="utf-8")
    read_end, write_end = os.pipe()
    env = _variables(load.threads)
    own = engine.python == sys.executable
    if not own:
        env["PYTHONPATH"] = lent_code(Path(tempfile.mkdtemp(prefix="quantkit-", dir=temp)))
    with (temp / "engine.log").open("w+b") as log:
        forked = forked and engine.device == "cpu" and own
        child = (forked and forking.fork(WORKER, [str(path)], write_end, log.fileno(), env)) or start(
            engine.python, path, write_end, log, env
        )
        os.close(write_end)
        try:
            with os.fdopen(read_end, encoding="utf-8") as events:
                result = _read_events(events, f"the engine {engine.name} sent an invalid event about {model}", progress)
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
                child.kill()
                child.wait()
        if code != 0:
            lines = (temp / "engine.log").read_text(encoding="utf-8", errors="replace").splitlines()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            last = next((f": {line.strip()[:300]}" for line in reversed(lines) if line.strip()), "")
            raise EngineError(f"the engine {engine.name} {how} while evaluating {model}{last}")
    if result is None:
        raise EngineError(f"the engine {engine.name} ended without a result while evaluating {model}")
    return result


def _read_events(events: Iterable[str], what: str, progress: Progress) -> ChildResult | None:
    """Pass a child's steps to `progress`, raise the error it reports; return its result, None if no model loaded."""
    loaded: LoadedEntry | None = None
    measurements: list[Measurement] = []
    tasks: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for line in events:
        with reraise_as(what, EngineError):
            [(kind, content)] = json.loads(line).items()
            match kind, content:
                case "step", dict():
                    step = steps.setdefault(content["title"], Step(content["title"], content["total"]))
                    for name in ("done", "remark", "ended", "work"):
                        setattr(step, name, content[name])
                case "loaded", dict():
                    loaded = LoadedEntry.model_validate(content)
                case "measurement", dict():
                    measurements.append(Measurement.model_validate(content))
                case "tasks", dict():
                    tasks = content
                case "error", dict():
                    known = getattr(errors, content["type"], None)
                    error = known if isinstance(known, type) and issubclass(known, QuantkitError) else EngineError
                    raise error(str(content["message"]))
                case _:
                    raise ValueError(f"an event of unknown kind {shown(kind)}")
        if kind == "step":
            progress.forward(step)
    return None if loaded is None else ChildResult(loaded, tuple(measurements), tasks)


def prepare() -> None:
    """Start a background process that imports what forked children need."""
    forking.start(_variables(1))


def _variables(threads: int) -> dict[str, str]:
    return {**without_ranks(os.environ), **dict.fromkeys(POOLS, str(threads)), "TOKENIZERS_PARALLELISM": "false"}


def start(
    python: str, request: Path, write_end: int, log: IO[bytes], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a child process; its events go to the file descriptor `write_end`, other output to `log`."""
    return subprocess.Popen(
        [python, "-P", "-m", WORKER, str(request), str(write_end)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(write_end,),
        env=variables,
    )
