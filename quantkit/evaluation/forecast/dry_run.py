"""What a judgement of perplexity would take: memory, disk, and time, measured on its first windows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_probe
from quantkit.contracts.windows import Cut, Window, alike
from quantkit.data.texts import load_text
from quantkit.errors import RecipeError
from quantkit.evaluation.baseline import NOISE_WINDOWS
from quantkit.evaluation.engine_choice import ChosenEngine, choose
from quantkit.evaluation.evaluate import Judgement, open_judged, prepare, resolve
from quantkit.evaluation.forecast.memory import FLOAT32, Need, disk_of, ends_of, wave_tokens
from quantkit.evaluation.process import run_child
from quantkit.evaluation.request import MeasureRequest, WindowsFile
from quantkit.models.source import Source
from quantkit.progress import Progress, Step
from quantkit.recipe import EngineSpec, EvaluationSpec, WalkSpec, parse
from quantkit.system.temporary import temporary_folder

BATCHES = 2  # of windows that go through a walk's first block; one is computed whole


@dataclass(frozen=True)
class Part:
    """One thing that is computed: what it takes, and about how many seconds."""

    what: str
    need: Need
    seconds: float


@dataclass(frozen=True)
class JudgementForecast:
    """The parts of a judgement in their order, the disk that it takes in bytes, and what a user should know."""

    parts: tuple[Part, ...]
    disk: int
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(part.seconds for part in self.parts)

    def to_values(self) -> dict[str, object]:
        """Plain values for JSON: bytes and seconds."""
        parts = [
            {
                "what": part.what,
                "engine": part.need.engine,
                "walk": part.need.walk,
                "memory_bytes": part.need.memory,
                "phases_bytes": dict(part.need.phases),
                "seconds": part.seconds,
            }
            for part in self.parts
        ]
        return {"parts": parts, "disk_bytes": self.disk, "seconds": self.seconds, "notes": list(self.notes)}


def forecast(
    artifact: str | Path | Artifact | Source,
    text: str | None = None,
    *,
    engine: EngineSpec | None = None,
    memory: WalkSpec | None = None,
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    source: str | Path | None = None,
    **settings: Any,
) -> JudgementForecast:
    """Forecast what `evaluate` would take for the probe perplexity; it writes nothing that stays.

    The first windows, or of a walk their first decoder block, are computed for real. Other probes that are asked for
    are named in a note. Raises what `evaluate` raises before it computes anything.
    """
    asked = resolve(parse(EvaluationSpec, {"text": text, **settings}, "evaluation"))
    if "perplexity" not in asked.probes:
        raise RecipeError(
            f"a forecast is of the probe perplexity, and {', '.join(asked.probes)} was asked for. Add it to the probes"
        )
    spec = asked.model_copy(update={"probes": ("perplexity",)})
    model, exact = open_judged(artifact, revision, source, adapters)
    chosen = choose(model, engine or EngineSpec())
    judgement = prepare(model, spec, load_text(spec.text, "evaluation"), chosen, exact, memory or WalkSpec())
    own = _seconds(judgement, judgement.model, judgement.engine, judgement.exact is not None)
    parts = [Part(judgement.model.label, judgement.settled.model, own)]
    kept = judgement.kept_baseline() is not None
    if judgement.exact is not None and not kept:
        need = judgement.settled.baseline
        computing = replace(
            judgement.engine, name=need.engine, dtype=FLOAT32, walk=need.walk, device=need.device,
            offload_bytes=judgement.settled.offload_bytes,
        )  # fmt: skip
        seconds = _seconds(judgement, Model(None, judgement.exact), computing, False)
        count = len(judgement.judged.windows)
        more = 1 + min(NOISE_WINDOWS, count) / count  # which are computed in bfloat16, too
        parts.insert(0, Part("the source in float32", need, seconds * more))
    windows, divergence = judgement.judged.windows, judgement.exact is not None
    disk = disk_of(windows, judgement.settled, ends_of(model.config), divergence)
    return JudgementForecast(tuple(parts), disk, (*judgement.notes, *_beside(asked, judgement.engine.walk)))


def _beside(asked: EvaluationSpec, walk: bool) -> tuple[str, ...]:
    """A note on the probes that are not forecast."""
    others = [name for name in asked.probes if name not in ("perplexity", "size")]
    if walk:
        others = [name for name in others if not find_probe(name).generates]
    return (f"the time is that of perplexity; it is more by that of {', '.join(others)}",) if others else ()


class _StopTrial(Exception):  # noqa: N818 - a signal, not an error
    """Ends the trial: a block is done."""


def _seconds(judgement: Judgement, model: Model, engine: ChosenEngine, divergence: bool) -> float:
    """About how long `model` takes: loading it and all windows."""
    windows = judgement.judged.windows
    first = _first(windows, BATCHES if engine.walk else 1)
    about = judgement.judged.about.model_copy(update={"windows": len(first)})
    beats: list[tuple[float, float]] = []

    def listen(step: Step) -> None:
        if step.work:
            beats.append((step.done, time.monotonic()))
            if step.done >= len(list(alike(first))):
                raise _StopTrial

    begin = time.monotonic()
    with temporary_folder() as temp:
        file = WindowsFile(path=str(temp / "cut.npz"), about=about)
        Cut(first, about, judgement.judged.sizes).save(Path(file.path))
        request = MeasureRequest(
            load=engine.load_request(model, max(judgement.spec.threads)), windows=file, spec=judgement.spec,
            probes=("perplexity",),
        )  # fmt: skip
        try:
            result = run_child(request, temp, Progress(listen))
        except _StopTrial:
            return beats[0][1] - begin + _walking(judgement, model, beats, divergence)
    whole = time.monotonic() - begin
    rate = float(result.measurements[0].details["tokens_per_second"])
    tried = _tokens(first) / rate
    return whole - tried + _tokens(windows) / rate


def _walking(judgement: Judgement, model: Model, beats: list[tuple[float, float]], divergence: bool) -> float:
    """Seconds of a walk, from the times at which it began and had done each batch of its first block."""
    windows = judgement.judged.windows
    first = _first(windows, BATCHES)
    times = [at for _, at in beats]
    last = list(alike(first))[-1]
    computing = (times[-1] - times[-2]) / _tokens(tuple(last))  # of a token in one block
    loading = max(0.0, times[-1] - times[0] - computing * _tokens(first))
    ends, tokens = ends_of(model.config), _tokens(windows)
    waves = -(-tokens // wave_tokens(windows))
    each = max(1, model.parameters - ends.head) / ends.blocks
    positions = sum(len(window.targets) for window in windows) * (2 if divergence else 1)
    return ends.blocks * (waves * loading + tokens * computing) + positions * computing * ends.head / each


def _first(windows: tuple[Window, ...], batches: int) -> tuple[Window, ...]:
    return tuple(window for batch in list(alike(windows))[:batches] for window in batch)


def _tokens(windows: tuple[Window, ...]) -> int:
    return sum(len(window.ids) for window in windows)
