"""evaluate: open and check a model, measure it in child processes, and return a Report."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.artifact import Artifact, SourceEntry, package_versions
from quantkit.calibration.tokens import seen_notes
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine, find_probe, probes
from quantkit.contracts.windows import Cut
from quantkit.conversion.agreement import refuse_untrue
from quantkit.conversion.manifest import PACKAGE, code_digest
from quantkit.data.texts import Text, load_text
from quantkit.errors import ArtifactError, QuantkitError, RecipeError
from quantkit.evaluation.baseline import BaselineFiles, ensure, key_of, resume_folder
from quantkit.evaluation.engine_choice import ChosenEngine, choose
from quantkit.evaluation.forecast.memory import FLOAT32, Settled, settle
from quantkit.evaluation.process import ChildResult, run_child
from quantkit.evaluation.protocols import cut, find_protocol
from quantkit.evaluation.request import BaselineName, BaselineRequest, LoadRequest, MeasureRequest, WindowsFile
from quantkit.formats.source import is_artifact, open_model, open_source
from quantkit.models.config import note_beyond_context
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.recipe import EngineSpec, EvaluationSpec, WalkSpec, parse
from quantkit.report.records import (
    BaselineEntry,
    Hardware,
    Report,
    TextEntry,
    this_machine,
)
from quantkit.system.device import described
from quantkit.system.processor import usable_cores
from quantkit.system.temporary import temporary_folder

BASELINE_ENGINE, QUANTIZED_ENGINE = "transformers", "reference"  # of a source, and of one that is quantized itself
WALK = WalkSpec()


def evaluate(
    artifact: str | Path | Artifact | Source,
    probes: tuple[str, ...] | list[str] = (),
    text: str | None = None,
    *,
    protocol: str = "llama.cpp",
    n_ctx: int | None = None,
    limit: int | None = None,
    threads: tuple[int, ...] | list[int] = (),
    engine: str | None = None,
    dtype: str | None = None,
    python: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    source: str | Path | None = None,
    walk: bool | None = None,
    offload_gb: float | None = None,
    max_memory_gb: float | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Measure an artifact (or a source model) and return its Report.

    `text` is a file, or None for WikiText-2 / the bundled sample; `limit` a number of windows; `threads` the thread
    counts of the speed probe. The engine is the one that users would run unless `engine` names another; `python` is
    the interpreter that has it, where that is not this one, and `device` what it computes on (auto, cpu, cuda:1).
    `source` is the model that an artifact was made from, where the manifest does not say enough to find it: divergences
    are measured from it, unless `divergence` is False. `adapters` are folders of LoRA adapters that are merged into the
    model that is judged, or into the one that an artifact was made from.
    `walk` has the model computed block by block by our own reader, with one decoder block's weights in memory; None
    does so where the whole model does not fit into `max_memory_gb` (default: what is free), False never. Hidden states
    of more than `offload_gb` go to a file then.
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
    model, exact = open_judged(artifact, revision, source, adapters)
    loaded = load_text(spec.text, "evaluation")
    by = parse(EngineSpec, {"engine": engine, "dtype": dtype, "python": python, "device": device}, "engine")
    limits = {"walk": walk, "offload_gb": offload_gb, "max_memory_gb": max_memory_gb}
    memory = parse(WalkSpec, limits, "evaluation")
    judgement, progress = prepare(model, spec, loaded, choose(model, by), exact, memory), progress or Progress()
    progress.say(f"device: {described(judgement.engine.device)}")
    return measure(judgement, progress)


def open_judged(
    artifact: str | Path | Artifact | Source,
    revision: str | None = None,
    source: str | Path | None = None,
    adapters: Sequence[str | Path] = (),
) -> tuple[Model, Source | None]:
    """What is judged, and the model that it was made from where that is told; adapters go into a source model.

    Raises RecipeError for adapters of an artifact whose source the manifest does not say enough to find.
    """
    made = is_artifact(artifact)
    model = open_model(artifact, revision, () if made else adapters)
    if source is not None:
        return model, open_source(str(source), None, adapters)
    if not made or not adapters:
        return model, None
    assert model.artifact is not None
    entry = model.artifact.manifest.source
    if not _can_be_found(entry):
        raise RecipeError(
            f"--adapter needs the model that it belongs to: give its folder ({entry.model}) with --source"
        )
    return model, open_source(entry.model, entry.revision, adapters)


def _can_be_found(entry: SourceEntry) -> bool:
    """Whether a manifest tells where the source is."""
    return entry.model == "demo" or entry.revision is not None


def resolve(spec: EvaluationSpec) -> EvaluationSpec:
    """Fill in the probes (in their running order) and thread counts; raises RecipeError for unknown names."""
    names = {find_probe(name).name for name in spec.probes}
    find_protocol(spec.protocol)
    cores = usable_cores()
    if any(not 1 <= n <= cores for n in spec.threads):
        counts = ", ".join(map(str, spec.threads))
        raise RecipeError(f"threads {counts}: this machine has {cores} usable cores. Give counts from 1 to {cores}.")
    return spec.model_copy(
        update={
            "probes": tuple(n for n, probe in probes().items() if n in names or (not names and probe.usual)),
            "threads": tuple(sorted(set(spec.threads) or {1, cores})),
        }
    )


@dataclass(frozen=True)
class Judgement:
    """What is judged, on what, with what: everything that decides the figures, before anything is computed.

    `exact` is what divergences are measured from, None where they are not; `settled` says how much of it and of the
    model is in memory at a time.
    """

    model: Model
    spec: EvaluationSpec
    text: Text
    engine: ChosenEngine
    judged: Cut
    exact: Source | None
    settled: Settled
    notes: tuple[str, ...]

    @property
    def baseline(self) -> BaselineName | None:
        """The baseline of the source, whether or not it is there."""
        if self.exact is None:
            return None
        key = key_of(self.exact, self.judged, FLOAT32)
        return BaselineName(
            model=self.exact.model, revision=self.exact.revision, key=key,
            adapters=tuple(str(adapter.folder) for adapter in self.exact.adapters),
        )  # fmt: skip

    def kept_baseline(self) -> BaselineEntry | None:
        """What is known of the baseline that is there."""
        return None if self.baseline is None else BaselineFiles(self.baseline.key).read_facts()

    def decides(self, baseline: BaselineEntry | None, hardware: Hardware | None = None) -> dict[str, Any]:
        """All that the figures depend on, with the `baseline` that is used, as JSON values.

        They are measured on this machine, where no other `hardware` is given.
        """
        engine = self.engine
        return {
            "model": self.model.entry().model_dump(mode="json"),
            "ends": sorted(self.model.end_tokens),
            "text": [self.text.name, self.text.sha256, self.text.bundled],
            "windows": self.judged.about.model_dump(mode="json"),
            "settings": self.spec.model_dump(mode="json"),
            "engine": [engine.name, engine.version, engine.dtype, engine.device, engine.walk],
            "variables": engine.variables,
            "python": None if engine.python == sys.executable else engine.python,
            "baseline": None if baseline is None else baseline.model_dump(mode="json"),
            "hardware": (hardware or this_machine()).model_dump(mode="json"),
            "versions": package_versions(),
            "code": code_digest(PACKAGE),
        }

    def fingerprint(self, baseline: BaselineEntry | None, hardware: Hardware | None = None) -> str:
        """A hash of all that the figures depend on, by default on this machine."""
        decides = json.dumps(self.decides(baseline, hardware), sort_keys=True)
        return hashlib.sha256(decides.encode()).hexdigest()


def prepare(
    model: Model,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    source: Source | None = None,
    memory: WalkSpec = WALK,
) -> Judgement:
    """Check and settle everything that can be settled before anything is computed; see `evaluate_model`."""
    named, spec = spec.probes, resolve(spec)
    if model.artifact is not None:
        refuse_untrue(model.artifact)
    judged = cut(text, model.tokenizer(), spec.protocol, spec.n_ctx, spec.limit, model.config)
    longer = note_beyond_context(model.config, judged.about.n_ctx, "windows")
    notes: tuple[str, ...] = () if longer is None else (longer,)
    if model.artifact is not None and "perplexity" in spec.probes:
        notes += seen_notes(model.artifact.manifest.calibration, text, judged.windows, model.tokenizer())
    exact: Source | None = None
    if spec.divergence and "perplexity" in spec.probes:
        exact, why_not = _exact_source(model, source)
        notes += why_not

    def kept() -> bool:
        return exact is not None and BaselineFiles(key_of(exact, judged, FLOAT32)).read_facts() is not None

    computing = BASELINE_ENGINE if exact is not None and exact.format == "float" else QUANTIZED_ENGINE
    settled = settle(model, engine, memory, judged.windows, exact, kept, computing)
    if settled.engine.walk:
        spec, without = _without_generation(spec, named)
        notes += without
    return Judgement(model, spec, text, settled.engine, judged, exact, settled, notes + settled.notes)


def _without_generation(spec: EvaluationSpec, named: tuple[str, ...]) -> tuple[EvaluationSpec, tuple[str, ...]]:
    """The settings without probes that need tokens one by one; raises RecipeError where one of those was `named`."""
    out = tuple(name for name in spec.probes if find_probe(name).generates)
    if asked := [name for name in out if name in named]:
        raise RecipeError(
            f"the probe {asked[0]} generates tokens, and the model would be computed block by block: it does not fit "
            "into memory whole, or --walk asks for it. Leave the probe out, or try it whole with --no-walk."
        )
    rest = tuple(name for name in spec.probes if name not in out)
    note = (f"left out, since a walk generates no tokens: {', '.join(out)}",) if out else ()
    return spec.model_copy(update={"probes": rest}), note


def evaluate_model(
    model: Model,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    progress: Progress,
    source: Source | None = None,
    save: Path | None = None,
    memory: WalkSpec = WALK,
) -> Report:
    """Measure an opened model on a loaded text; see `evaluate`.

    `source` is the artifact's, where it is at hand. All judged positions (`_scores.RECORD`) go to the file `save`.
    """
    return measure(prepare(model, spec, text, engine, source, memory), progress, save)


def measure(judgement: Judgement, progress: Progress, save: Path | None = None) -> Report:
    """Measure what was prepared; see `evaluate_model`."""
    model, spec, text, engine = judgement.model, judgement.spec, judgement.text, judgement.engine
    judged, baseline = judgement.judged, judgement.baseline
    entry = None
    results: list[ChildResult] = []
    with temporary_folder() as temp:
        windows = WindowsFile(path=str(temp / "cut.npz"), about=judged.about)
        judged.save(Path(windows.path))
        if baseline is not None and judgement.exact is not None:
            request = _baseline_request(judgement, baseline, windows)
            entry = ensure(BaselineFiles(baseline.key), partial(run_child, request, temp, progress, True), progress.say)
        fingerprint = judgement.fingerprint(entry)
        load = engine.load_request(model, max(spec.threads))
        measuring = MeasureRequest(load=load, windows=windows, spec=spec, baseline=baseline)
        resume = resume_folder() / f"{fingerprint[:32]}.positions"
        paths = {"resume": str(resume), "save": None if save is None else str(save)}
        # The first number of threads is that of all figures; the others are for what depends on it.
        _, *others = sorted(spec.threads, reverse=True)
        one = find_engine(engine.name)
        further = () if one.set_threads is None else tuple(others)
        together = measuring.model_copy(update={"further_threads": further, **paths})
        # What needs the source's output layer goes into a process of its own where the engine does not need torch.
        splits = one.process == "both" and engine.python == sys.executable and baseline is not None
        apart = tuple(name for name in spec.probes if splits and find_probe(name).needs_source)
        rest = tuple(name for name in spec.probes if name not in apart)
        forked = one.process == "forked"
        for names, way in ((rest, forked), (apart, True)):
            if names:
                results.append(run_child(together.model_copy(update={"probes": names}), temp, progress, way))
        names = tuple(name for name in spec.probes if find_probe(name).per_threads)
        for count in others if names and not further else ():
            changes = {"load": load.model_copy(update={"threads": count}), "probes": names}
            results.append(run_child(measuring.model_copy(update=changes), temp, progress, forked))
    return Report(
        model=model.entry(),
        text=TextEntry(name=text.name, sha256=text.sha256, bundled=text.bundled),
        windows=judged.about,
        engine=engine.entry(results[0].loaded),
        hardware=this_machine(),
        settings=spec,
        measurements=tuple(measurement for result in results for measurement in result.measurements),
        baseline=entry,
        notes=judgement.notes,
        fingerprint=fingerprint,
    )


def _exact_source(model: Model, source: Source | None) -> tuple[Source | None, tuple[str, ...]]:
    """What divergences are measured from: the model itself, the `source` at hand, or the one that the manifest names.

    Where that cannot be found or is not the same, a note says so. Raises ArtifactError for another `source` than the
    artifact was made from, RecipeError for one besides a model that is none.
    """
    if source is not None:
        _refuse_other_source(model, source)
        return source, ()
    if model.artifact is None:
        return model.source, ()
    entry = model.artifact.manifest.source
    flags = "".join(f" --adapter {shlex.quote(adapter.name)}" for adapter in entry.adapters)
    if not _can_be_found(entry):
        also = f" and its adapters ({flags.strip()})" if flags else ""
        return None, (f"no divergence from the source: give its folder ({entry.model}) with --source{also}",)
    if flags:
        return None, (f"no divergence from the source: give the folders of its adapters with{flags}",)
    try:
        exact = open_source(entry.model, entry.revision)
    except QuantkitError as error:
        return None, (f"no divergence from the source: {error}",)
    if exact.hashes != entry.hashes:
        return None, (f"no divergence from the source: {entry.model} is not the checkpoint that it was made from",)
    return exact, ()


def _refuse_other_source(model: Model, source: Source) -> None:
    if model.artifact is None:
        if model.source is not source and model.digest != Model(None, source).digest:
            raise RecipeError(f"{model.label} is a source itself, and {source.model} another one: leave the source out")
        return
    entry = model.artifact.manifest.source
    if entry.adapters != (given_adapters := tuple(adapter.entry for adapter in source.adapters)):
        one, other = (", ".join(adapter.name for adapter in of) or "none" for of in (given_adapters, entry.adapters))
        raise ArtifactError(
            f"{model.artifact.folder} was made with other adapters than those that are given ({one}; the manifest has "
            f"{other}, or other files of the name). Give the same, in the same order, with --adapter."
        )
    made_from, given = entry.hashes, source.hashes
    same_config = model.config == source.config  # whatever its file looks like
    for name in sorted(made_from.keys() | given.keys()):
        if made_from.get(name) != given.get(name) and not (same_config and name == "config.json"):
            one, other = (str(hashes.get(name, "no such file"))[:12] for hashes in (made_from, given))
            raise ArtifactError(
                f"{source.model} is not the model that {model.artifact.folder} was made from: {name} has the sha256 "
                f"{other}, and {one} in the manifest. Give the model that it was made from, or leave the source out."
            )


def _baseline_request(judgement: Judgement, name: BaselineName, windows: WindowsFile) -> BaselineRequest:
    """To make the source's baseline, in float32."""
    settled, threads = judgement.settled, max(judgement.spec.threads)
    need = settled.baseline
    load = LoadRequest(
        model=name.model, revision=name.revision, adapters=name.adapters, engine=need.engine, threads=threads,
        dtype=FLOAT32, device=need.device, walk=need.walk, offload_bytes=settled.offload_bytes,
    )  # fmt: skip
    return BaselineRequest(load=load, windows=windows, key=name.key)
