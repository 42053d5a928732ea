"""evaluate: open and check a subject, measure it in fresh child processes, and return a Report."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from quantkit.artifact import Artifact
from quantkit.contracts.model import Subject, open_subject
from quantkit.contracts.registry import find_probe, probes
from quantkit.contracts.windows import Cut
from quantkit.data.texts import Text, load_text
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluation.baseline import Place, ensure, kept_folder, key_of
from quantkit.evaluation.engine_choice import SOURCE_ENGINES, ChosenEngine, EngineSpec, choose
from quantkit.evaluation.process import run_child
from quantkit.evaluation.protocols import cut, find_protocol
from quantkit.evaluation.worker import Request
from quantkit.formats.source import Source, open_source
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec, parse
from quantkit.report.records import BaselineEntry, EngineEntry, Measurement, Report, TextEntry, this_machine
from quantkit.system.processor import usable_cores

MEMORY_SLACK = 1.3  # of the weights, for a model that is computed


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
    device: str = "cpu",
    revision: str | None = None,
    source: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Measure an artifact (or a source model) and return its Report.

    `text` is a file, or None for WikiText-2 / the bundled sample; `limit` a number of windows; `threads` the thread
    counts of the speed probe. The engine is the one that users would run unless `engine` names another; `python` is
    the interpreter that has it, where that is not this one, and `device` what it computes on (cpu, cuda). `source` is
    the model that an artifact was made from, where the manifest does not say enough to find it: divergences are
    measured from it, unless `divergence` is False.
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
    exact = None if source is None else open_source(str(source))
    loaded = load_text(spec.text, "evaluation")
    chosen = choose(subject, EngineSpec(engine, dtype, python, device))
    return judge(subject, spec, loaded, chosen, progress or Progress(), exact)


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
            "probes": tuple(n for n, probe in probes().items() if n in asked or (not asked and probe.usual)),
            "threads": tuple(sorted(set(spec.threads) or {1, cores})),
        }
    )


def judge(
    subject: Subject,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    progress: Progress,
    source: Source | None = None,
    save: Path | None = None,
) -> Report:
    """Measure an opened subject on a loaded text; see `evaluate`.

    `source` is the artifact's, where it is at hand. All judged positions (`positions.RECORD`) go to the file `save`.
    """
    spec = resolve(spec)
    if subject.artifact is not None:
        subject.artifact.refuse_changed_files()
    windows = cut(text, subject.tokenizer(), spec.protocol, spec.n_ctx, spec.limit, subject.config)
    measurements: list[Measurement] = []
    loaded: dict[str, Any] = {}
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quantkit-") as temp:
        windows.save(Path(temp) / "cut.npz")
        request = Request(
            subject=subject.location,
            revision=subject.source.revision if subject.source else None,
            engine=engine.name,
            dtype=engine.dtype,
            python=engine.python,
            device=engine.device,
            threads=max(spec.threads),
            probes=(),
            spec=spec,
            cut=str(Path(temp) / "cut.npz"),
            windows=windows.about,
        )
        exact, entry = None, None
        if spec.divergence and "perplexity" in spec.probes:
            exact = subject.source or source or _source_of(subject, notes)
        if exact is not None:
            request, entry = _with_baseline(request, exact, windows, Path(temp), notes, progress)
        same = [subject.digest, engine.version, request.model_dump_json(exclude={"cut"}), *engine.variables]
        kept = hashlib.sha256("\n".join(same).encode()).hexdigest()[:32]
        paths = {"kept": str(kept_folder() / f"{kept}.positions"), "save": None if save is None else str(save)}
        request = request.model_copy(update=paths)
        # The first child measures everything; the others only what depends on the number of threads.
        for count in sorted(spec.threads, reverse=True):
            first = count == max(spec.threads)
            asked = tuple(name for name in spec.probes if first or find_probe(name).per_threads)
            if not asked:
                continue
            said = run_child(
                request.model_copy(update={"threads": count, "probes": asked}), Path(temp), measurements, progress
            )
            loaded = loaded or said
    return Report(
        subject=subject.entry(),
        text=TextEntry(name=text.name, sha256=text.sha256, bundled=text.bundled),
        windows=windows.about,
        engine=EngineEntry(name=engine.name, version=engine.version, **loaded),
        hardware=this_machine(),
        settings=spec,
        measurements=tuple(measurements),
        baseline=entry,
        notes=tuple(notes),
    )


def _source_of(subject: Subject, notes: list[str]) -> Source | None:
    """The source that an artifact's manifest names, where it can be found and is the same; else a note."""
    assert subject.artifact is not None
    entry = subject.artifact.manifest.source
    if entry.model != "demo" and entry.revision is None:
        notes.append(f"no divergence from the source: give its folder ({entry.model}) with --source")
        return None
    try:
        found = open_source(entry.model, entry.revision)
    except QuantkitError as error:
        notes.append(f"no divergence from the source: {error}")
        return None
    if found.hashes != entry.hashes:
        notes.append(f"no divergence from the source: {entry.model} is not the checkpoint that it was made from")
        return None
    return found


def _with_baseline(
    request: Request, source: Source, windows: Cut, temp: Path, notes: list[str], progress: Progress
) -> tuple[Request, BaselineEntry]:
    """The request with the source's baseline, which is made first where there is none."""
    dtype = "float32"
    if source.parameters * 4 * MEMORY_SLACK > psutil.virtual_memory().available:
        dtype = "bfloat16"
        notes.append("the source was computed in bfloat16 for divergences: there is not enough memory for float32")
    place = Place(key_of(source, windows, dtype))

    def make() -> None:
        making = request.model_copy(
            update={
                "subject": source.model,
                "revision": source.revision,
                "engine": SOURCE_ENGINES[0],
                "python": sys.executable,
                "device": "cpu",
                "dtype": dtype,
                "baseline": (source.model, source.revision, place.key),
                "make_baseline": True,
            }
        )
        run_child(making, temp, [], progress)

    entry = ensure(place, make, progress.say)
    return request.model_copy(update={"baseline": (source.model, source.revision, place.key)}), entry
