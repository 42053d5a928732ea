"""A judgement of a sweep in chunks: where they lie, and one report out of them and of what is not judged in chunks."""

from __future__ import annotations

from pathlib import Path

from quantkit.contracts.model import Model
from quantkit.data.texts import Text
from quantkit.evaluation.chunks.judge import merge_chunks
from quantkit.evaluation.engine_choice import ChosenEngine
from quantkit.evaluation.evaluate import evaluate_model, prepare, reported
from quantkit.models.source import Source
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec
from quantkit.report.records import Measurement, Report, this_machine
from quantkit.sweep.tasks import CHUNKED
from quantkit.system.files import safe_name


def chunks_of(out: Path, label: str, count: int) -> Path:
    """The folder of a variant's chunks, where its judgement has so many."""
    return out / "chunks" / f"{safe_name(label)}-{count}"


def chunk_spec(spec: EvaluationSpec) -> EvaluationSpec:
    """What of an evaluation is judged in chunks."""
    return spec.model_copy(update={"probes": (CHUNKED,)})


def evaluate_merged(
    model: Model,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    progress: Progress,
    source: Source,
    chunks: Path,
) -> Report:
    """The report that `evaluate_model` would give, the perplexity's figures out of the chunks in a folder.

    Raises ReportError for chunks that are missing, or were judged otherwise.
    """
    merged = merge_chunks(model, chunk_spec(spec), text, engine, chunks, progress, source)
    judgement = prepare(model, spec, text, engine, source)
    rest = tuple(name for name in judgement.spec.probes if name != CHUNKED)
    measured: tuple[Measurement, ...] = ()
    if rest:
        others = judgement.spec.model_copy(update={"probes": rest})
        measured = evaluate_model(model, others, text, engine, progress, source).measurements
    fingerprint = judgement.fingerprint(merged.baseline)
    every = (*measured, *merged.measurements)
    return reported(judgement, merged.engine, this_machine(), every, merged.baseline, fingerprint)
