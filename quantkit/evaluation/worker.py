"""The child process that loads one model in one engine and measures it.

Each model has its own process: memory is measured for that model alone, thread pools have the right size, and a crash
of the engine ends only this process. process.py runs `python -P -m quantkit.evaluation.worker REQUEST.json FD`; the
child writes events to the file descriptor FD, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.contracts.engine import Cut, LoadedModel, LoadSpec, StatesModel, ThreadedModel, load_cut, longest_in
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation import baseline, tasks
from quantkit.evaluation.perplexity import ProbeJob
from quantkit.evaluation.probes import PROMPT_TOKENS, find_probe
from quantkit.evaluation.process import BaselineRef, BaselineRequest, LoadRequest, MeasureRequest, Request, read_request
from quantkit.formats.source import open_model, open_source
from quantkit.models.config import context_of
from quantkit.records.recipe import ModelRef
from quantkit.system.memory import peak_rss_bytes, restart_peak
from quantkit.system.progress import Progress
from quantkit.system.threads import end_with_parent
from quantkit.system.untrusted import read_text, reraise_as

Send = Callable[[dict[str, Any]], None]


def serve(request: Request, send: Send) -> None:
    """Run a request; `send` gets each event as a dict {kind: content}."""
    if isinstance(request, MeasureRequest):
        _measure(request, send)
    elif isinstance(request, BaselineRequest):
        source, cut = open_source(request.load.model), _read_cut(request.windows)
        loaded, progress = _load(request.load, Model(None, source), longest_in(cut.windows), send)
        if not isinstance(loaded, StatesModel):
            raise EngineError(f"the engine {request.load.engine.name} returns no hidden states for a baseline")
        with progress.step(f"source ({cut.about.protocol})", len(cut.windows)) as advance:
            baseline.make(baseline.BaselineFiles(request.key), source, loaded, cut, advance)
    else:
        model = _open(request.load.model)
        loaded, progress = _load(request.load, model, tasks.longest(model, request.tasks), send)
        send({"tasks": tasks.run_tasks(loaded, model, request.tasks, progress)})


def _measure(request: MeasureRequest, send: Send) -> None:
    load, model, cut = request.load, _open(request.load.model), _read_cut(request.windows)
    wanted = max((find_probe(name).n_ctx for name in request.probes), default=0)
    n_ctx = max(longest_in(cut.windows), PROMPT_TOKENS + request.spec.new_tokens, min(wanted, context_of(model.config)))
    loaded, progress = _load(load, model, n_ctx, send)
    loading_peak = peak_rss_bytes()
    restart_peak()
    for threads in (load.threads, *request.further_threads):
        if threads != load.threads:
            if not isinstance(loaded, ThreadedModel):
                raise EngineError(f"the engine {load.engine.name} cannot change its number of threads")
            loaded.set_threads(threads)
        job = ProbeJob(
            loaded=loaded,
            model=model,
            spec=request.spec,
            threads=threads,
            cut=cut,
            progress=progress,
            baseline=None if request.baseline is None else partial(_open_baseline, request.baseline),
            resume=Path(request.resume),
            save=None if request.save is None else Path(request.save),
            n_ctx=n_ctx,
            loading_peak=loading_peak,
        )
        for probe in map(find_probe, request.probes):
            if threads == load.threads or probe.per_threads:
                for measurement in probe.run(job):
                    send({"measurement": measurement.model_dump()})


def _open(ref: ModelRef) -> Model:
    # A model with adapters is a source, even if its folder is an artifact's.
    return Model(None, open_source(ref)) if ref.adapters else open_model(ref)


def _open_baseline(ref: BaselineRef) -> baseline.Baseline:
    return baseline.open_baseline(ref.key, open_source(ref.source))


def _read_cut(path: str) -> Cut:
    with reraise_as(f"the token windows in {path} cannot be read", EngineError):
        return load_cut(Path(path))


def _load(request: LoadRequest, model: Model, n_ctx: int, send: Send) -> tuple[LoadedModel, Progress]:
    """Load the model for contexts of `n_ctx` tokens; return it and a progress listener that sends events."""
    progress = Progress(lambda step: send({"step": asdict(step)}))
    chosen, engine = request.engine, find_engine(request.engine.name)
    device = engine.find_device(chosen.device)
    spec = LoadSpec(
        request.threads, n_ctx, chosen.dtype, device, chosen.walk, chosen.offload_bytes, progress, chosen.kv_cache
    )
    loaded = engine.load(model, spec)
    send({"loaded": {"dtype": loaded.dtype, "device": device, "notes": loaded.notes}})
    return loaded, progress


def main() -> None:
    """Run the child process."""
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
    # All results are sent. A normal exit would end the engines' threads, and some engines abort then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
