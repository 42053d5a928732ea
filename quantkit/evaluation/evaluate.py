"""evaluate: open and check a model, measure it in fresh child processes, and return a Report."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from quantkit.artifact import Artifact
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_probe, probes
from quantkit.data.texts import Text, load_text
from quantkit.errors import QuantkitError, RecipeError
from quantkit.evaluation.baseline import BaselineFiles, ensure, key_of, resume_folder
from quantkit.evaluation.engine_choice import ChosenEngine, choose
from quantkit.evaluation.process import ChildResult, run_child
from quantkit.evaluation.protocols import cut, find_protocol
from quantkit.evaluation.request import BaselineName, BaselineRequest, LoadRequest, MeasureRequest, WindowsFile
from quantkit.formats.source import open_model, open_source
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.recipe import EngineSpec, EvaluationSpec, parse
from quantkit.report.records import BaselineEntry, EngineEntry, Report, TextEntry, this_machine
from quantkit.system.memory import available_memory
from quantkit.system.processor import usable_cores

BASELINE_ENGINE = "transformers"
MEMORY_SLACK = 1.3  # of the weights, for a model that is computed
BFLOAT16_NOTE = "the source was computed in bfloat16 for divergences: there is not enough memory for float32"


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
    model = open_model(artifact, revision)
    exact = None if source is None else open_source(str(source))
    loaded = load_text(spec.text, "evaluation")
    chosen = choose(model, EngineSpec(engine=engine, dtype=dtype, python=python, device=device))
    return evaluate_model(model, spec, loaded, chosen, progress or Progress(), exact)


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


def evaluate_model(
    model: Model,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    progress: Progress,
    source: Source | None = None,
    save: Path | None = None,
) -> Report:
    """Measure an opened model on a loaded text; see `evaluate`.

    `source` is the artifact's, where it is at hand. All judged positions (`_scores.RECORD`) go to the file `save`.
    """
    spec = resolve(spec)
    if model.artifact is not None:
        model.artifact.refuse_changed_files()
    judged = cut(text, model.tokenizer(), spec.protocol, spec.n_ctx, spec.limit, model.config)
    exact: Source | None = None
    notes: tuple[str, ...] = ()
    if spec.divergence and "perplexity" in spec.probes:
        exact, notes = _exact_source(model, source)
    baseline, entry = None, None
    results: list[ChildResult] = []
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        temp, windows = Path(folder), WindowsFile(path=str(Path(folder) / "cut.npz"), about=judged.about)
        judged.save(Path(windows.path))
        if exact is not None:
            dtype = "float32"
            if exact.parameters * 4 * MEMORY_SLACK > available_memory():
                dtype = "bfloat16"
                notes += (BFLOAT16_NOTE,)
            baseline = BaselineName(model=exact.model, revision=exact.revision, key=key_of(exact, judged, dtype))
            entry = _ensure_baseline(baseline, dtype, max(spec.threads), windows, temp, progress)
        load = engine.load_request(model, max(spec.threads))
        request = MeasureRequest(load=load, windows=windows, spec=spec, baseline=baseline)
        same = [model.digest, engine.version, request.model_dump_json(exclude={"windows": {"path"}}), *engine.variables]
        resume = resume_folder() / f"{hashlib.sha256(chr(10).join(same).encode()).hexdigest()[:32]}.positions"
        paths = {"resume": str(resume), "save": None if save is None else str(save)}
        # The first child measures everything; the others only what depends on the number of threads.
        for count in sorted(spec.threads, reverse=True):
            names = tuple(name for name in spec.probes if not results or find_probe(name).per_threads)
            if names:
                changes = {"load": load.model_copy(update={"threads": count}), "probes": names, **paths}
                results.append(run_child(request.model_copy(update=changes), temp, progress))
    return Report(
        model=model.entry(),
        text=TextEntry(name=text.name, sha256=text.sha256, bundled=text.bundled),
        windows=judged.about,
        engine=EngineEntry(name=engine.name, version=engine.version, **results[0].loaded),
        hardware=this_machine(),
        settings=spec,
        measurements=tuple(measurement for result in results for measurement in result.measurements),
        baseline=entry,
        notes=notes,
    )


def _exact_source(model: Model, source: Source | None) -> tuple[Source | None, tuple[str, ...]]:
    """What divergences are measured from: the model itself, the `source` at hand, or the one that the manifest names.

    Where that cannot be found or is not the same, a note says so.
    """
    if model.artifact is None or source is not None:
        return model.source or source, ()
    entry = model.artifact.manifest.source
    if entry.model != "demo" and entry.revision is None:
        return None, (f"no divergence from the source: give its folder ({entry.model}) with --source",)
    try:
        exact = open_source(entry.model, entry.revision)
    except QuantkitError as error:
        return None, (f"no divergence from the source: {error}",)
    if exact.hashes != entry.hashes:
        return None, (f"no divergence from the source: {entry.model} is not the checkpoint that it was made from",)
    return exact, ()


def _ensure_baseline(
    name: BaselineName, dtype: str, threads: int, windows: WindowsFile, temp: Path, progress: Progress
) -> BaselineEntry:
    """The source's baseline, which is made first where there is none."""
    load = LoadRequest(model=name.model, revision=name.revision, engine=BASELINE_ENGINE, threads=threads, dtype=dtype)
    request = BaselineRequest(load=load, windows=windows, key=name.key)
    return ensure(BaselineFiles(name.key), lambda: run_child(request, temp, progress), progress.say)
