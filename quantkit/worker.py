"""The child process that loads one subject in one engine and measures it.

A fresh process for each subject and thread count: its memory is the subject's alone, its thread pools have the asked
size, and an engine that crashes takes nothing with it. Called by evaluation.py as
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.progress import Progress, Step
from quantkit.protocol import Windows
from quantkit.recipe import EvaluationSpec, Strict
from quantkit.registry import LoadSpec, ProbeJob, find_probe, find_runtime
from quantkit.subject import open_subject


class Request(Strict):
    """What a child is asked to do. `tokens` is the path of a .npy file with (windows, n_ctx) int64 ids."""

    subject: str
    revision: str | None
    runtime: str
    dtype: str | None
    threads: int
    probes: tuple[str, ...]
    spec: EvaluationSpec
    tokens: str
    windows: Windows


def serve(request: Request, tell: Callable[[dict[str, Any]], None]) -> None:
    """Load, measure, and tell every event."""
    subject = open_subject(request.subject, request.revision)
    runtime = find_runtime(request.runtime)
    tokens = np.load(request.tokens, allow_pickle=False)
    longest = max(request.windows.n_ctx, 32 + request.spec.new_tokens)
    model = runtime.load(subject, LoadSpec(threads=request.threads, n_ctx=longest, dtype=request.dtype))
    tell({"loaded": {"dtype": model.dtype, "notes": model.notes, "version": version(runtime.package)}})

    def draw(step: Step) -> None:
        tell({"step": asdict(step)})

    job = ProbeJob(model, subject, request.spec, request.threads, tokens, request.windows, Progress(draw))
    for name in request.probes:
        for measurement in find_probe(name).run(job):
            tell({"measurement": measurement.model_dump()})


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
