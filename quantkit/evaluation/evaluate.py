"""evaluate: open and check a model, measure it in child processes, return a Report; or forecast memory and time."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration.tokens import seen_notes
from quantkit.contracts.check_manifest import refuse_untrue
from quantkit.contracts.engine import Cut, alike, positions_in, tokens_in
from quantkit.contracts.model import Model, ModelLike
from quantkit.contracts.registry import find_engine
from quantkit.data.texts import Text, load_text
from quantkit.errors import ArtifactError, EngineError, QuantkitError, RecipeError
from quantkit.evaluation.baseline import NOISE_WINDOWS, BaselineFiles, ensure, key_of, resume_folder
from quantkit.evaluation.engine_choice import BASELINE_DTYPE, ChosenEngine, choose, choose_for_baseline
from quantkit.evaluation.memory import MemoryPlan, dims_of, disk_of, plan_memory, source_head_bytes, wave_tokens
from quantkit.evaluation.probes import PROBES, find_probe
from quantkit.evaluation.process import BaselineRef, BaselineRequest, LoadRequest, MeasureRequest, run_child
from quantkit.evaluation.protocols import cut, find_protocol
from quantkit.formats.source import is_artifact, open_model, open_source
from quantkit.models.config import note_beyond_context
from quantkit.models.source import Source
from quantkit.records.artifact import SourceEntry, package_versions
from quantkit.records.recipe import EngineSpec, EvaluationSpec, MemoryLimits, ModelRef, Strict, spec_of
from quantkit.records.report import BaselineEntry, Hardware, ModelEntry, Report, TextEntry, this_machine
from quantkit.system.device import device_label
from quantkit.system.files import temporary_folder
from quantkit.system.interpreter import PACKAGE, code_digest
from quantkit.system.processor import usable_cores
from quantkit.system.progress import Progress, Step

LIMITS = MemoryLimits()
TRIAL_BATCHES = 2  # through a walk's first block; without a walk one batch is computed


def evaluate(
    model: ModelLike,
    probes: tuple[str, ...] | list[str] = (),
    text: str | None = None,
    *,
    source: str | Path | ModelRef | None = None,
    engine: str | EngineSpec | None = None,
    memory: MemoryLimits | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Measure an artifact or a source model and return its Report.

    `text`: a file, or None for WikiText-2 or the bundled sample. `settings`: the other fields of EvaluationSpec.
    `source`: the model that an artifact was made from, needed for divergences if the manifest does not identify it.
    Adapters of a ModelRef are merged into the model, or for an artifact into its source. `engine`: a name or an
    EngineSpec (default: the engine that users of the format run). `memory`: memory limits. Raises a QuantkitError; an
    engine that crashes raises EngineError.
    """
    spec = spec_of(EvaluationSpec, settings, "evaluation", text=text, probes=tuple(probes))
    evaluation = _open_and_prepare(model, source, spec, engine, memory)
    progress = progress or Progress()
    progress.say(f"device: {device_label(evaluation.engine.device)}")
    return measure(evaluation, progress)


def _open_and_prepare(
    model: ModelLike,
    source: str | Path | ModelRef | None,
    spec: EvaluationSpec,
    engine: str | EngineSpec | None,
    memory: MemoryLimits | None,
) -> Evaluation:
    opened, exact = open_with_source(model, source)
    text = load_text(spec.text, "evaluation")
    return prepare(opened, spec, text, choose(opened, engine), exact, memory or LIMITS)


def open_with_source(model: ModelLike, source: str | Path | ModelRef | None = None) -> tuple[Model, Source | None]:
    """Open the model to evaluate and, if known, its unquantized source.

    An artifact's adapters are merged into its source; raises RecipeError if the manifest does not identify that source.
    """
    adapters = model.adapters if isinstance(model, ModelRef) else ()
    made = is_artifact(model)
    if isinstance(model, ModelRef) and made:
        model = model.model_copy(update={"adapters": ()})
    opened = open_model(model)
    if isinstance(source, ModelRef):
        return opened, open_source(source.model, source.revision, source.adapters or adapters)
    if source is not None:
        return opened, open_source(source, None, adapters)
    if opened.artifact is None or not adapters:
        return opened, None
    entry = opened.artifact.manifest.source
    if not _can_be_found(entry):
        raise RecipeError(f"--adapter needs its base model: give its folder ({entry.model}) with --source")
    return opened, open_source(entry.model, entry.revision, adapters)


def _can_be_found(entry: SourceEntry) -> bool:
    """Return whether a manifest's entry is enough to open the source without the user's help."""
    return entry.model == "demo" or entry.revision is not None


def resolve(spec: EvaluationSpec) -> EvaluationSpec:
    """Return the settings with default probes, in running order, and thread counts; raises RecipeError."""
    names = {find_probe(name).name for name in spec.probes}
    find_protocol(spec.protocol)
    cores = usable_cores()
    if any(not 1 <= n <= cores for n in spec.threads):
        counts = ", ".join(map(str, spec.threads))
        raise RecipeError(f"threads {counts}: this machine has {cores} usable cores. Give counts from 1 to {cores}.")
    return spec.model_copy(
        update={
            "probes": tuple(n for n, probe in PROBES.items() if n in names or (not names and probe.usual)),
            "threads": tuple(sorted(set(spec.threads) or {1, cores})),
        }
    )


@dataclass(frozen=True)
class Evaluation:
    """A checked evaluation: everything that decides its figures."""

    model: Model
    spec: EvaluationSpec
    text: Text
    engine: ChosenEngine
    cut: Cut
    source: Source | None  # divergences are measured against it
    plan: MemoryPlan
    baseline_plan: MemoryPlan | None  # None if the source's baseline is stored or not needed
    notes: tuple[str, ...]

    @property
    def baseline(self) -> BaselineRef | None:
        """Return a reference to the source's baseline, whether it is stored or not; None without a source."""
        if self.source is None:
            return None
        return BaselineRef(source=Model(None, self.source).ref, key=key_of(self.source, self.cut, BASELINE_DTYPE))

    def stored_baseline(self) -> BaselineEntry | None:
        """Return the facts of the source's baseline if it is stored, else None."""
        return None if self.baseline is None else BaselineFiles(self.baseline.key).read_facts()

    def decides(self, baseline: BaselineEntry | None, hardware: Hardware | None = None) -> dict[str, Any]:
        """Return all that the figures depend on, as JSON values; `baseline`: facts of the baseline in use.

        `hardware`: default, this machine.
        """
        engine = self.engine
        return {
            "model": self.model.entry().model_dump(mode="json"),
            "ends": sorted(self.model.end_tokens),
            "text": [self.text.name, self.text.sha256, self.text.bundled],
            "windows": self.cut.about.model_dump(mode="json"),
            "settings": self.spec.model_dump(mode="json"),
            "engine": [engine.name, engine.version, engine.dtype, engine.device, engine.walk, engine.kv_cache],
            "variables": engine.variables,
            "python": None if engine.python == sys.executable else engine.python,
            "baseline": None if baseline is None else baseline.model_dump(mode="json"),
            "hardware": (hardware or this_machine()).model_dump(mode="json"),
            "versions": package_versions(),
            "code": code_digest(PACKAGE),
        }

    def entry(self) -> ModelEntry:
        """Return the model's entry in a report; its label includes a requested key-value cache type."""
        entry, cache = self.model.entry(), self.engine.kv_cache
        return entry if cache is None else entry.model_copy(update={"label": f"{entry.label}, cache {cache}"})

    def fingerprint(self, baseline: BaselineEntry | None, hardware: Hardware | None = None) -> str:
        """Return a hash of all that the figures depend on; arguments as in `decides`."""
        decides = json.dumps(self.decides(baseline, hardware), sort_keys=True)
        return hashlib.sha256(decides.encode()).hexdigest()


def prepare(
    model: Model,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    source: Source | None = None,
    memory: MemoryLimits = LIMITS,
) -> Evaluation:
    """Check an evaluation and decide everything before any computation; `source`: the artifact's, if already open."""
    named, spec = spec.probes, resolve(spec)
    if model.artifact is not None:
        refuse_untrue(model.artifact)
    windows = cut(text, model.tokenizer(), spec.protocol, spec.n_ctx, spec.limit, model.config)
    longer = note_beyond_context(model.config, windows.about.n_ctx, "windows")
    notes = [] if longer is None else [longer]
    if model.artifact is not None and "perplexity" in spec.probes:
        notes += seen_notes(model.artifact.manifest.calibration, text, windows.windows, model.tokenizer())
    exact = _exact_source(model, source) if spec.divergence and "perplexity" in spec.probes else None
    if isinstance(exact, str):
        notes.append(f"no divergence from the source: {exact}")
        exact = None
    plan = plan_memory(model, engine, memory, windows.windows, 0 if exact is None else source_head_bytes(exact))
    baseline_plan = None if exact is None else _plan_baseline(exact, engine, memory, windows)
    if plan.engine.walk:
        spec, without = _without_generation(spec, named)
        notes += without
    notes += plan.notes + (() if baseline_plan is None else baseline_plan.notes)
    return Evaluation(model, spec, text, plan.engine, windows, exact, plan, baseline_plan, tuple(notes))


def _plan_baseline(source: Source, engine: ChosenEngine, memory: MemoryLimits, windows: Cut) -> MemoryPlan | None:
    """Plan how to compute a source's baseline; None if the baseline is stored."""
    if BaselineFiles(key_of(source, windows, BASELINE_DTYPE)).read_facts() is not None:
        return None
    by, head = choose_for_baseline(source, engine.asked_device), source_head_bytes(source)
    return plan_memory(Model(None, source), by, memory, windows.windows, head, "the source, for divergences,")


def _without_generation(spec: EvaluationSpec, named: tuple[str, ...]) -> tuple[EvaluationSpec, tuple[str, ...]]:
    """Drop probes that generate tokens, with a note; raises RecipeError if the user named one of them."""
    out = [name for name in spec.probes if find_probe(name).generates]
    if asked := [name for name in out if name in named]:
        raise RecipeError(
            f"the probe {asked[0]} generates tokens, which is impossible block by block: the model does not fit "
            "into memory whole, or --walk is set. Leave the probe out, or give --no-walk."
        )
    note = (f"left out, since a block-by-block run generates no tokens: {', '.join(out)}",) if out else ()
    return spec.model_copy(update={"probes": tuple(name for name in spec.probes if name not in out)}), note


def measure(evaluation: Evaluation, progress: Progress, save: Path | None = None) -> Report:
    """Run a prepared evaluation and return its report; `save`: file for all scored positions (`RECORD` array)."""
    with temporary_folder() as temp:
        windows = temp / "cut.npz"
        evaluation.cut.save(windows)
        entry = _make_baseline(evaluation, windows, progress)
        fingerprint = evaluation.fingerprint(entry)
        requests = _requests(evaluation, windows, fingerprint, save)
        results = [run_child(request, temp, progress, forked) for request, forked in requests]
    text = evaluation.text
    return Report(
        model=evaluation.entry(),
        text=TextEntry(name=text.name, sha256=text.sha256, bundled=text.bundled),
        windows=evaluation.cut.about,
        engine=evaluation.engine.entry(results[0].loaded),
        hardware=this_machine(),
        settings=evaluation.spec,
        measurements=tuple(measurement for result in results for measurement in result.measurements),
        baseline=entry,
        notes=evaluation.notes,
        fingerprint=fingerprint,
    )


def _make_baseline(evaluation: Evaluation, windows: Path, progress: Progress) -> BaselineEntry | None:
    """Return the facts of the source's baseline; compute the baseline in float32 if it is not stored."""
    ref, plan = evaluation.baseline, evaluation.baseline_plan
    if ref is None:
        return None

    def make() -> None:
        if plan is None:
            raise EngineError("the baseline of the source was removed during the evaluation. Evaluate again.")
        load = LoadRequest(model=ref.source, engine=plan.engine, threads=max(evaluation.spec.threads))
        run_child(BaselineRequest(load=load, windows=str(windows), key=ref.key), windows.parent, progress, True)

    return ensure(BaselineFiles(ref.key), make, progress.say)


def _requests(
    evaluation: Evaluation, windows: Path, fingerprint: str, save: Path | None
) -> Iterator[tuple[MeasureRequest, bool]]:
    """Yield a request to each child process, and whether that process is forked."""
    spec, engine, baseline = evaluation.spec, evaluation.engine, evaluation.baseline
    found = find_engine(engine.name)

    def request(probes: tuple[str, ...], threads: int, *further_threads: int) -> MeasureRequest:
        return MeasureRequest(
            load=LoadRequest(model=evaluation.model.ref, engine=engine, threads=threads), windows=str(windows),
            spec=spec, probes=probes, further_threads=further_threads, baseline=baseline,
            resume=str(resume_folder() / f"{fingerprint[:32]}.positions"), save=None if save is None else str(save),
        )  # fmt: skip

    # All figures are measured with the first number of threads; speed also with the others.
    most, *others = sorted(spec.threads, reverse=True)
    # What needs the source's output layer goes into a process of its own if the engine does not need torch.
    splits = found.process == "both" and engine.python == sys.executable and baseline is not None
    apart = tuple(name for name in spec.probes if splits and find_probe(name).needs_source)
    together = tuple(name for name in spec.probes if name not in apart)
    forked = found.process == "forked"
    for names, way in ((together, forked), (apart, True)):
        if names:
            yield request(names, most, *(others if found.sets_threads else ())), way
    names = tuple(name for name in spec.probes if find_probe(name).per_threads)
    for count in others if names and not found.sets_threads else ():
        yield request(names, count), forked


def _exact_source(model: Model, source: Source | None) -> Source | str | None:
    """Return the source for divergences: the model itself, the given `source`, or the manifest's source.

    If none can be opened, return the reason as a string. Raises ArtifactError if the artifact was made from another
    source, RecipeError for a `source` of a model that is a source itself.
    """
    if source is not None:
        _refuse_other_source(model, source)
        return source
    if model.artifact is None:
        return model.source
    entry = model.artifact.manifest.source
    flags = "".join(f" --adapter {shlex.quote(adapter.name)}" for adapter in entry.adapters)
    if not _can_be_found(entry):
        also = f" and its adapters ({flags.strip()})" if flags else ""
        return f"give its folder ({entry.model}) with --source{also}"
    if flags:
        return f"give the folders of its adapters with{flags}"
    try:
        exact = open_source(entry.model, entry.revision)
    except QuantkitError as error:
        return str(error)
    return exact if exact.hashes == entry.hashes else f"{entry.model} is not the artifact's source"


def _refuse_other_source(model: Model, source: Source) -> None:
    if model.artifact is None:
        if model.source is not source and model.digest != Model(None, source).digest:
            raise RecipeError(f"{model.label} is itself a source model: leave --source out")
        return
    entry = model.artifact.manifest.source
    if entry.adapters != (given_adapters := tuple(adapter.entry for adapter in source.adapters)):
        one, other = (", ".join(adapter.name for adapter in of) or "none" for of in (given_adapters, entry.adapters))
        raise ArtifactError(
            f"{model.artifact.folder} was made with other adapters than the given ones ({one}; the manifest has "
            f"{other}, or other files of that name). Give the same adapters in the same order."
        )
    made_from, given = entry.hashes, source.hashes
    same_config = model.config == source.config  # the bytes of the file do not matter
    for name in sorted(made_from.keys() | given.keys()):
        if made_from.get(name) != given.get(name) and not (same_config and name == "config.json"):
            one, other = (str(hashes.get(name, "no such file"))[:12] for hashes in (made_from, given))
            raise ArtifactError(
                f"{source.model} is not the source of {model.artifact.folder}: {name} has the sha256 "
                f"{other}, and {one} in the manifest. Give the right --source, or leave it out."
            )


class Part(Strict):
    """Forecast for computing one model."""

    what: str
    engine: str
    walk: bool
    memory_bytes: int | None
    phases_bytes: dict[str, int]
    seconds: float


class EvaluationForecast(Strict):
    """Forecast of an evaluation: its parts in order, bytes of disk, seconds, and notes."""

    parts: tuple[Part, ...]
    disk_bytes: int
    seconds: float
    notes: tuple[str, ...]


def forecast(
    model: ModelLike,
    text: str | None = None,
    *,
    source: str | Path | ModelRef | None = None,
    engine: str | EngineSpec | None = None,
    memory: MemoryLimits | None = None,
    **settings: Any,
) -> EvaluationForecast:
    """Forecast the memory, disk and time of `evaluate` with the probe perplexity; a note names omitted probes.

    The first windows, or only their first decoder block in a walk, are computed to measure the time. Raises the errors
    that `evaluate` raises before it computes anything.
    """
    asked = resolve(spec_of(EvaluationSpec, settings, "evaluation", text=text))
    if "perplexity" not in asked.probes:
        raise RecipeError(f"a forecast needs the probe perplexity, and --probes has only {', '.join(asked.probes)}")
    spec = asked.model_copy(update={"probes": ("perplexity",)})
    evaluation = _open_and_prepare(model, source, spec, engine, memory)
    opened, plan, baseline = evaluation.model, evaluation.plan, evaluation.baseline_plan
    windows, divergence = evaluation.cut.windows, evaluation.source is not None
    parts = [_part(opened.label, plan, _seconds(evaluation, opened, plan, 2 if divergence else 1))]
    if baseline is not None and evaluation.source is not None:
        more = 1 + min(NOISE_WINDOWS, len(windows)) / len(windows)  # these windows are also computed in bfloat16
        seconds = _seconds(evaluation, Model(None, evaluation.source), baseline, 1) * more
        parts.insert(0, _part("the source in float32", baseline, seconds))
    disk = disk_of(windows, [plan, baseline or plan], dims_of(opened.config), divergence)
    others = [name for name in asked.probes if name not in ("perplexity", "size")]
    if plan.engine.walk:
        others = [name for name in others if not find_probe(name).generates]
    note = (f"the time is for perplexity alone, without {', '.join(others)}",) if others else ()
    return EvaluationForecast(
        parts=tuple(parts), disk_bytes=disk, seconds=sum(part.seconds for part in parts), notes=evaluation.notes + note
    )


def _part(what: str, plan: MemoryPlan, seconds: float) -> Part:
    need = plan.need
    return Part(
        what=what, engine=need.engine, walk=need.walk, memory_bytes=need.memory if need.phases else None,
        phases_bytes=dict(need.phases),
        seconds=seconds,
    )  # fmt: skip


class _StopTrial(Exception):  # noqa: N818 - a signal, not an error
    """Signal that ends a trial after its first batches."""


def _seconds(evaluation: Evaluation, model: Model, plan: MemoryPlan, heads: int) -> float:
    """Estimate the seconds to load `model` and compute all windows, with `heads` output layers."""
    cut, walk = evaluation.cut, plan.engine.walk
    batches = list(alike(cut.windows))[: TRIAL_BATCHES if walk else 1]
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
        request = MeasureRequest(
            load=load, windows=str(file), spec=evaluation.spec, probes=("perplexity",), resume=str(temp / "positions")
        )
        try:
            result = run_child(request, temp, Progress(listen))
        except _StopTrial:
            pass
        else:
            rate = float(result.measurements[0].details["tokens_per_second"])
            return time.monotonic() - begin + (tokens_in(cut.windows) - tokens_in(first)) / rate
    # In a walk: the start, and the time after each batch of the first block.
    times, tokens = [at for _, at in beats], tokens_in(cut.windows)
    computing = (times[-1] - times[-2]) / tokens_in(batches[-1])  # seconds per token and block
    loading = max(0.0, times[-1] - times[0] - computing * tokens_in(first))
    dims, waves = dims_of(model.config), -(-tokens // wave_tokens(cut.windows))
    block = max(1, model.parameters - dims.head) / dims.blocks
    walking = dims.blocks * (waves * loading + tokens * computing)
    return times[0] - begin + walking + heads * positions_in(cut.windows) * computing * dims.head / block
