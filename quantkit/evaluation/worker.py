"""The child process that loads one model in one engine and measures it.

A process for each model: its memory is the model's alone, its thread pools have the right size, and an engine that
crashes takes nothing with it. An engine that cannot change its number of threads gets a process for each. Started or
forked by process.py as `python -P -m quantkit.evaluation.worker REQUEST.json FD`; events go to the file descriptor FD,
one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.registry import find_engine, find_probe
from quantkit.contracts.windows import Cut, load_cut
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation import baseline, harness
from quantkit.evaluation.request import BaselineRequest, MeasureRequest, Request, TasksRequest, read_request
from quantkit.formats.source import open_model, open_source
from quantkit.models.config import context_of
from quantkit.probes._generation import PROMPT_TOKENS
from quantkit.progress import Progress
from quantkit.system.memory import peak_rss_bytes, restart_peak
from quantkit.system.threads import end_with_parent
from quantkit.untrusted import read_text, told


def serve(request: Request, send: Callable[[dict[str, Any]], None]) -> None:
    """Load, do what is asked, and send every event: a kind and its content."""
    load = request.load
    if isinstance(request, BaselineRequest) or load.adapters:  # of a source, an artifact or a file, too
        model = Model(None, open_source(load.model, load.revision, load.adapters))
    else:
        model = open_model(load.model, load.revision)
    if isinstance(request, TasksRequest):
        n_ctx = harness.longest(model, request.tasks)
    else:
        with told(f"the token windows in {request.windows.path} cannot be read", EngineError):
            cut = load_cut(Path(request.windows.path), request.windows.about)
        n_ctx = _longest(request, model, cut)
    progress = Progress(lambda step: send({"step": asdict(step)}))
    engine = find_engine(load.engine)
    device = engine.find_device(load.device)
    spec = LoadSpec(load.threads, n_ctx, load.dtype, device, load.walk, load.offload_bytes, progress)
    loaded = engine.load(model, spec)
    loading_peak = peak_rss_bytes()
    restart_peak()
    send({"loaded": {"dtype": loaded.dtype, "device": device, "notes": loaded.notes}})
    if isinstance(request, TasksRequest):
        send({"tasks": harness.run(loaded, model, request.tasks, progress)})
        return
    if isinstance(request, BaselineRequest):
        assert model.source is not None
        with progress.step(f"source ({cut.about.protocol})", len(cut.windows)) as advance:
            baseline.make(baseline.BaselineFiles(request.key), model.source, loaded, cut, advance)
        return
    job = ProbeJob(
        loaded=loaded,
        model=model,
        spec=request.spec,
        threads=load.threads,
        cut=cut,
        progress=progress,
        baseline=None if request.baseline is None else partial(baseline.open_baseline, request.baseline),
        resume=None if request.resume is None else Path(request.resume),
        save=None if request.save is None else Path(request.save),
        n_ctx=n_ctx,
        loading_peak=loading_peak,
    )
    for threads in (load.threads, *request.further_threads):
        if threads != load.threads:
            if engine.set_threads is None:
                raise EngineError(f"the engine {engine.name} cannot change its number of threads")
            engine.set_threads(loaded, threads)
        for probe in map(find_probe, request.probes):
            if threads == load.threads or probe.per_threads:
                for measurement in probe.run(replace(job, threads=threads)):
                    send({"measurement": measurement.model_dump()})


def _longest(request: MeasureRequest | BaselineRequest, model: Model, cut: Cut) -> int:
    """Tokens of the longest context that is needed."""
    windows = max(len(window.ids) for window in cut.windows)
    if isinstance(request, BaselineRequest):
        return windows
    probes = max((find_probe(name).n_ctx for name in request.probes), default=0)
    return max(windows, PROMPT_TOKENS + request.spec.new_tokens, min(probes, context_of(model.config)))


def main() -> None:
    """Entry of the child process."""
    end_with_parent()
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as events:

        def send(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        code = 0
        try:
            serve(read_request(read_text(Path(sys.argv[1]), EngineError)), send)
        except QuantkitError as error:
            send({"error": {"type": type(error).__name__, "message": str(error)}})
            code = 1
        except KeyboardInterrupt:
            code = 130
    # Everything is said. An ordinary exit would take the engines' threads down, and some abort on the way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
