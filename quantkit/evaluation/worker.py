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
from pathlib import Path
from typing import Any

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.registry import find_engine
from quantkit.contracts.windows import load_cut
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation import baseline, tasks
from quantkit.evaluation.probes import PROMPT_TOKENS, find_probe
from quantkit.evaluation.process import BaselineRequest, MeasureRequest, Request, TasksRequest, read_request
from quantkit.formats.source import open_model, open_source
from quantkit.models.config import context_of
from quantkit.progress import Progress
from quantkit.system.memory import peak_rss_bytes, restart_peak
from quantkit.system.threads import end_with_parent
from quantkit.untrusted import read_text, told

Send = Callable[[dict[str, Any]], None]


def serve(request: Request, send: Send) -> None:
    """Load the model, do what is asked, and send every event: a kind and its content."""
    load, engine = request.load, find_engine(request.load.engine.name)
    # A source may be an artifact's folder, too.
    as_source = isinstance(request, BaselineRequest) or load.model.adapters
    model = Model(None, open_source(load.model)) if as_source else open_model(load.model)
    if isinstance(request, TasksRequest):
        n_ctx = tasks.longest(model, request.tasks)
    else:
        with told(f"the token windows in {request.windows} cannot be read", EngineError):
            cut = load_cut(Path(request.windows))
        n_ctx = max(len(window.ids) for window in cut.windows)
    if isinstance(request, MeasureRequest):
        wanted = max((find_probe(name).n_ctx for name in request.probes), default=0)
        n_ctx = max(n_ctx, PROMPT_TOKENS + request.spec.new_tokens, min(wanted, context_of(model.config)))
    progress = Progress(lambda step: send({"step": asdict(step)}))
    chosen, device = load.engine, engine.find_device(load.engine.device)
    spec = LoadSpec(load.threads, n_ctx, chosen.dtype, device, chosen.walk, chosen.offload_bytes, progress)
    loaded = engine.load(model, spec)
    loading_peak = peak_rss_bytes()
    restart_peak()
    send({"loaded": {"dtype": loaded.dtype, "device": device, "notes": loaded.notes}})
    if isinstance(request, TasksRequest):
        send({"tasks": tasks.run_tasks(loaded, model, request.tasks, progress)})
        return
    if isinstance(request, BaselineRequest):
        assert model.source is not None
        with progress.step(f"source ({cut.about.protocol})", len(cut.windows)) as advance:
            baseline.make(baseline.BaselineFiles(request.key), model.source, loaded, cut, advance)
        return

    def open_baseline() -> baseline.Baseline:
        assert request.baseline is not None
        return baseline.open_baseline(request.baseline.key, open_source(request.baseline.source))

    job = ProbeJob(
        loaded=loaded,
        model=model,
        spec=request.spec,
        threads=load.threads,
        cut=cut,
        progress=progress,
        baseline=None if request.baseline is None else open_baseline,
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
    # Everything is reported. An ordinary exit would take the engines' threads down, and some abort on the way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
