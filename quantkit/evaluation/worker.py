"""The child process that loads one subject in one engine and measures it.

A fresh process for each subject and thread count: its memory is the subject's alone, its thread pools have the asked
size, and an engine that crashes takes nothing with it. Called by child.py as
`python -m quantkit.worker REQUEST.json FD`; events go to the file descriptor FD, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import open_subject
from quantkit.contracts.probe import ProbeJob
from quantkit.contracts.registry import find_engine, find_probe
from quantkit.contracts.windows import load_cut
from quantkit.errors import EngineError, QuantkitError
from quantkit.evaluation import baseline, tasks
from quantkit.evaluation.protocols import context_of
from quantkit.evaluation.tasks import TaskSpec
from quantkit.formats.source import open_source
from quantkit.probes.speed import PROMPT_TOKENS
from quantkit.progress import Progress, Step
from quantkit.recipe import EvaluationSpec, Strict
from quantkit.report.records import Windows
from quantkit.system.memory import peak_bytes, restart_peak


class Request(Strict):
    """What a child is asked to do. `cut` is the path of what `Cut.save` wrote.

    `baseline` is the source (model, revision) and the key of its baseline; with `make_baseline` the subject is the
    source, and all that is asked for is to make it.
    """

    subject: str
    revision: str | None
    engine: str
    dtype: str | None
    threads: int
    python: str = sys.executable
    device: str = "cpu"
    probes: tuple[str, ...] = ()
    spec: EvaluationSpec = EvaluationSpec()
    cut: str = ""
    windows: Windows | None = None
    baseline: tuple[str, str | None, str] | None = None
    kept: str | None = None
    save: str | None = None
    make_baseline: bool = False
    tasks: TaskSpec | None = None


def serve(request: Request, tell: Callable[[dict[str, Any]], None]) -> None:
    """Load, measure, and tell every event."""
    subject = open_subject(request.subject, request.revision)
    engine = find_engine(request.engine)
    if request.tasks is not None:
        longest = tasks.longest(subject, request.tasks)
    else:
        assert request.windows is not None
        cut = load_cut(Path(request.cut), request.windows)
        wanted = max((find_probe(name).n_ctx for name in request.probes), default=0)
        longest = max(
            *(len(window.ids) for window in cut.windows),
            PROMPT_TOKENS + request.spec.new_tokens,
            min(wanted, context_of(subject.config)),
        )
    model = engine.load(subject, LoadSpec(request.threads, longest, request.dtype, request.device))
    loading_peak = peak_bytes()
    restart_peak()
    tell({"said": {"dtype": model.dtype, "device": request.device, "notes": model.notes}})

    def draw(step: Step) -> None:
        tell({"step": asdict(step)})

    progress = Progress(draw)
    if request.tasks is not None:
        tell({"said": {"tasks": tasks.run(model, subject, request.tasks, progress)}})
        return
    if request.make_baseline:
        assert request.baseline is not None
        assert subject.source is not None
        with progress.step(f"source ({cut.about.protocol})", len(cut.windows)) as advance:
            baseline.make(baseline.Place(request.baseline[2]), subject.source, model, cut, advance)
        return
    job = ProbeJob(
        model=model,
        subject=subject,
        spec=request.spec,
        threads=request.threads,
        cut=cut,
        progress=progress,
        baseline=None if request.baseline is None else partial(_open_baseline, *request.baseline),
        kept=None if request.kept is None else Path(request.kept),
        save=None if request.save is None else Path(request.save),
        n_ctx=longest,
        loading_peak=loading_peak,
    )
    for name in request.probes:
        for measurement in find_probe(name).run(job):
            tell({"measurement": measurement.model_dump()})


def _open_baseline(model: str, revision: str | None, key: str) -> baseline.Baseline:
    place = baseline.Place(key)
    facts = place.read_facts()
    if facts is None:
        raise EngineError(f"the baseline {place.states} has changed while it was used. Evaluate again.")
    return baseline.Baseline(place, facts, open_source(model, revision))


def _die_with(parent: int) -> None:
    """End this process once `parent` is gone: a killed parent cannot end its child itself."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Entry of the child process."""
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    request = Request.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as events:

        def tell(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        code = 0
        try:
            serve(request, tell)
        except QuantkitError as error:
            tell({"error": {"type": type(error).__name__, "message": str(error)}})
            code = 1
        except KeyboardInterrupt:
            code = 130
    # Everything is told. An ordinary exit would take the engines' threads down, and some abort on the way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
