"""What an evaluation of perplexity would take: memory, disk, and time, measured on its first windows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.contracts.windows import Cut, alike, positions_in, tokens_in
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError
from quantkit.evaluation.baseline import NOISE_WINDOWS
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.evaluate import LIMITS, Evaluation, open_with_source, prepare, resolve
from quantkit.evaluation.memory import MemoryPlan, dims_of, disk_of, wave_tokens
from quantkit.evaluation.probes import find_probe
from quantkit.evaluation.process import LoadRequest, MeasureRequest, run_child
from quantkit.models.source import Source
from quantkit.progress import Progress, Step
from quantkit.recipe import EngineSpec, EvaluationSpec, MemoryLimits, ModelRef, Strict, spec_of
from quantkit.system.temporary import temporary_folder

BATCHES = 2  # of windows that go through a walk's first block; one is computed whole


class Part(Strict):
    """A model that is computed: the bytes of memory that it needs, and about how many seconds."""

    what: str
    engine: str
    walk: bool
    memory_bytes: int | None
    phases_bytes: dict[str, int]
    seconds: float


class EvaluationForecast(Strict):
    """The parts of an evaluation in their order, the bytes of disk that it takes, its seconds, and notes."""

    parts: tuple[Part, ...]
    disk_bytes: int
    seconds: float
    notes: tuple[str, ...]


def forecast(
    model: str | Path | ModelRef | Artifact | Source,
    text: str | None = None,
    *,
    source: str | Path | ModelRef | None = None,
    engine: str | EngineSpec | None = None,
    memory: MemoryLimits | None = None,
    **settings: Any,
) -> EvaluationForecast:
    """Forecast what `evaluate` would take for the probe perplexity; nothing that is written stays.

    The first windows, or of a walk their first decoder block, are computed for real. A note names the other probes that
    are asked for. Raises what `evaluate` raises before it computes anything.
    """
    asked = resolve(spec_of(EvaluationSpec, settings, "evaluation", text=text))
    if "perplexity" not in asked.probes:
        raise RecipeError(
            f"a forecast is of the probe perplexity, and {', '.join(asked.probes)} was asked for. Add it to the probes"
        )
    spec = asked.model_copy(update={"probes": ("perplexity",)})
    opened, exact = open_with_source(model, source)
    loaded = load_text(spec.text, "evaluation")
    evaluation = prepare(opened, spec, loaded, choose(opened, engine), exact, memory or LIMITS)
    plan, baseline, windows = evaluation.plan, evaluation.baseline_plan, evaluation.cut.windows
    divergence = evaluation.source is not None
    parts = [_part(opened.label, plan, _seconds(evaluation, opened, plan, 2 if divergence else 1))]
    if baseline is not None and evaluation.source is not None:
        more = 1 + min(NOISE_WINDOWS, len(windows)) / len(windows)  # which are computed in bfloat16, too
        seconds = _seconds(evaluation, Model(None, evaluation.source), baseline, 1) * more
        parts.insert(0, _part("the source in float32", baseline, seconds))
    disk = disk_of(windows, [plan, baseline or plan], dims_of(opened.config), divergence)
    others = [name for name in asked.probes if name not in ("perplexity", "size")]
    if plan.engine.walk:
        others = [name for name in others if not find_probe(name).generates]
    note = (f"the time is that of perplexity; it is more by that of {', '.join(others)}",) if others else ()
    return EvaluationForecast(
        parts=tuple(parts), disk_bytes=disk, seconds=sum(part.seconds for part in parts), notes=evaluation.notes + note
    )


def _part(what: str, plan: MemoryPlan, seconds: float) -> Part:
    need = plan.need
    return Part(
        what=what, engine=need.engine, walk=need.walk, memory_bytes=need.memory, phases_bytes=dict(need.phases),
        seconds=seconds,
    )  # fmt: skip


class _StopTrial(Exception):  # noqa: N818 - a signal, not an error
    """Ends the trial: a block is done."""


def _seconds(evaluation: Evaluation, model: Model, plan: MemoryPlan, heads: int) -> float:
    """About how long `model` takes: to load it and compute all windows, with `heads` output layers for their states."""
    cut, walk = evaluation.cut, plan.engine.walk
    batches = list(alike(cut.windows))[: BATCHES if walk else 1]
    first = tuple(window for batch in batches for window in batch)
    beats: list[tuple[float, float]] = []

    def listen(step: Step) -> None:
        if step.work:
            beats.append((step.done, time.monotonic()))
            if step.done >= len(batches):
                raise _StopTrial

    begin = time.monotonic()
    with temporary_folder() as temp:
        file = temp / "cut.npz"
        Cut(first, cut.about.model_copy(update={"windows": len(first)}), cut.sizes).save(file)
        load = LoadRequest(model=model.ref, engine=plan.engine, threads=max(evaluation.spec.threads))
        request = MeasureRequest(load=load, windows=str(file), spec=evaluation.spec, probes=("perplexity",))
        try:
            result = run_child(request, temp, Progress(listen))
        except _StopTrial:
            pass
        else:
            rate = float(result.measurements[0].details["tokens_per_second"])
            return time.monotonic() - begin + (tokens_in(cut.windows) - tokens_in(first)) / rate
    # A walk: the times at which it began and had done each batch of its first block.
    times, tokens = [at for _, at in beats], tokens_in(cut.windows)
    computing = (times[-1] - times[-2]) / tokens_in(batches[-1])  # of a token in one block
    loading = max(0.0, times[-1] - times[0] - computing * tokens_in(first))
    dims, waves = dims_of(model.config), -(-tokens // wave_tokens(cut.windows))
    block = max(1, model.parameters - dims.head) / dims.blocks
    walking = dims.blocks * (waves * loading + tokens * computing)
    return times[0] - begin + walking + heads * positions_in(cut.windows) * computing * dims.head / block
