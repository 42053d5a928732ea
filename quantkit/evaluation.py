"""evaluate: open and check a subject, measure it in fresh child processes, and return a Report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import errors
from quantkit.artifact import Artifact
from quantkit.errors import DependencyError, EngineError, RecipeError
from quantkit.progress import Progress, Step
from quantkit.protocol import cut, find_protocol
from quantkit.recipe import EvaluationSpec, parse
from quantkit.registry import find_method, find_probe, find_runtime, probes
from quantkit.report import (
    Measurement,
    Report,
    RuntimeEntry,
    SubjectEntry,
    TextEntry,
    this_machine,
    usable_cores,
)
from quantkit.source import Source
from quantkit.subject import Subject, open_subject
from quantkit.text import Text, load_text
from quantkit.worker import Request

SOURCE_RUNTIMES = ("transformers", "reference")
IMPORT_NAMES = {"llama-cpp-python": "llama_cpp"}


def evaluate(
    artifact: str | Path | Artifact | Source,
    probes: tuple[str, ...] | list[str] = (),
    text: str | None = None,
    *,
    protocol: str = "llama.cpp",
    n_ctx: int | None = None,
    limit: int | None = None,
    threads: tuple[int, ...] | list[int] = (),
    runtime: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Measure an artifact (or a source model) and return its Report.

    `text` is a file, or None for WikiText-2 / the bundled sample; `limit` a number of windows; `threads` the thread
    counts of the speed probe. The engine is the one that users would run unless `runtime` names another.
    Raises a QuantkitError; an engine that crashes ends as EngineError.
    """
    values = {
        "text": text,
        "protocol": protocol,
        "n_ctx": n_ctx,
        "limit": limit,
        "threads": tuple(threads),
        "probes": tuple(probes),
        **settings,
    }
    spec = parse(EvaluationSpec, values, "evaluation")
    subject = open_subject(artifact, revision)
    return judge(subject, spec, load_text(spec.text, "evaluation"), runtime, dtype, progress or Progress())


def require_engine(name: str) -> None:
    """Raise DependencyError where the engine `name` is not installed."""
    package = find_runtime(name).package
    if find_spec(IMPORT_NAMES.get(package, package)) is None:
        raise DependencyError(
            f"the engine {name} is not installed. Install it with: pip install 'quantkit[{name}]', "
            "or judge with our own reader: --runtime reference"
        )


def choose_runtime(subject: Subject, asked: str | None) -> str:
    """The engine for a subject: the asked one, else the method's first. Raises where it is missing or refuses."""
    name = asked or (find_method(subject.method).runtimes if subject.method else SOURCE_RUNTIMES)[0]
    if reason := find_runtime(name).refuses(subject):
        raise RecipeError(f"the runtime {name} cannot open {subject.label}: {reason}")
    require_engine(name)
    return name


def resolve(spec: EvaluationSpec) -> EvaluationSpec:
    """Fill in the probes (in their running order) and thread counts; raises RecipeError for unknown names."""
    asked = {find_probe(name).name for name in spec.probes}
    find_protocol(spec.protocol)
    cores = usable_cores()
    if any(not 1 <= n <= cores for n in spec.threads):
        asked_for = ", ".join(map(str, spec.threads))
        raise RecipeError(f"threads {asked_for}: this machine has {cores} usable cores. Give counts from 1 to {cores}.")
    return spec.model_copy(
        update={
            "probes": tuple(name for name in probes() if not asked or name in asked),
            "threads": tuple(sorted(set(spec.threads) or {1, cores})),
        }
    )


def judge(
    subject: Subject,
    spec: EvaluationSpec,
    text: Text,
    runtime: str | None,
    dtype: str | None,
    progress: Progress,
) -> Report:
    """Measure an opened subject on a loaded text; see `evaluate`."""
    engine = choose_runtime(subject, runtime)
    spec = resolve(spec)
    if subject.artifact is not None:
        subject.artifact.refuse_changed_files()
    tokens, windows = cut(text, subject.tokenizer(), spec.protocol, spec.n_ctx, spec.limit)
    measurements: list[Measurement] = []
    loaded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="quantkit-") as temp:
        np.save(Path(temp) / "tokens.npy", tokens)
        # The first child measures everything; the others only what depends on the number of threads.
        for count in sorted(spec.threads, reverse=True):
            first = count == max(spec.threads)
            asked = tuple(name for name in spec.probes if first or find_probe(name).per_threads)
            if not asked:
                continue
            request = Request(
                subject=subject.location,
                revision=subject.source.revision if subject.source else None,
                runtime=engine,
                dtype=dtype,
                threads=count,
                probes=asked,
                spec=spec,
                tokens=str(Path(temp) / "tokens.npy"),
                windows=windows,
            )
            said = _child(request, Path(temp), measurements, progress)
            loaded = loaded or said
    return Report(
        subject=SubjectEntry(
            label=subject.label,
            model=subject.model,
            method=subject.method,
            digest=subject.digest,
            notes=subject.artifact.manifest.notes if subject.artifact else (),
        ),
        text=TextEntry(name=text.name, sha256=text.sha256, bundled=text.bundled),
        windows=windows,
        runtime=RuntimeEntry(name=engine, **loaded),
        hardware=this_machine(),
        settings=spec,
        measurements=tuple(measurements),
    )


def _child(request: Request, temp: Path, measurements: list[Measurement], progress: Progress) -> dict[str, Any]:
    """Run one child; collect its measurements; return what it says of the loaded engine."""
    path = temp / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    read_end, write_end = os.pipe()
    env = {**os.environ, "OMP_NUM_THREADS": str(request.threads), "TOKENIZERS_PARALLELISM": "false"}
    loaded: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    with (temp / "engine.log").open("w+b") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "quantkit.worker", str(path), str(write_end)],
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
                    if "loaded" in event:
                        loaded = event["loaded"]
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
    return loaded


def _forward(values: dict[str, Any], steps: dict[str, Step], progress: Progress) -> None:
    step = steps.setdefault(values["title"], Step(values["title"], values["total"]))
    step.done, step.remark, step.ended = values["done"], values["remark"], values["ended"]
    progress.forward(step)


def _crash(request: Request, code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    return f"the engine {request.runtime} {how} while judging {request.subject}{last}"
