"""compare: convert every variant, judge all of them and the source by one ruler, and return one Table.

What was measured also goes into each artifact's model card, beside the source's figures.

Everything that can be refused is refused before the first conversion. Finished artifacts and reports are kept in the
output folder and used again, so an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.artifact import MANIFEST, Artifact, FileEntry, open_artifact
from quantkit.contracts.method import Job
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.contracts.windows import tokens_in
from quantkit.conversion.agreement import refuse_untrue
from quantkit.conversion.check import CheckedJob, prepare
from quantkit.conversion.check import check as check_job
from quantkit.conversion.convert import refuse_own_source
from quantkit.conversion.convert import run as run_conversion
from quantkit.conversion.manifest import portable, side_hashes
from quantkit.conversion.staging import refuse_existing
from quantkit.data.texts import Text, load_text
from quantkit.errors import ArtifactError, OutputError, RecipeError, ReportError
from quantkit.evaluation import process
from quantkit.evaluation.engine_choice import ChosenEngine, choose, require
from quantkit.evaluation.evaluate import Evaluation, measure
from quantkit.evaluation.evaluate import prepare as prepare_evaluation
from quantkit.evaluation.memory import need_of_copy
from quantkit.formats.source import open_source
from quantkit.models.source import Source
from quantkit.progress import Pieces, Progress
from quantkit.recipe import CalibrationSpec, CompareRecipe, ConvertRecipe, EngineSpec, EvaluationSpec, Variant, parse
from quantkit.report.card import write_card
from quantkit.report.records import Report, read_report
from quantkit.report.sheet import Sheet
from quantkit.report.table import Table
from quantkit.system.device import CPU, described, find_device
from quantkit.system.files import replace_text, safe_name
from quantkit.system.memory import free_memory
from quantkit.untrusted import path_of

DEFAULT_VARIANTS = (
    "gptq:4",
    "awq:4",
    "nf4:4",
    "ctranslate2:int8",
    "ctranslate2:float16",
    "gguf:Q2_K",
    "gguf:Q3_K_M",
    "gguf:Q4_K_M",
    "gguf:Q5_K_M",
    "gguf:Q6_K",
)


def parse_variant(value: Variant | Mapping[str, Any] | str) -> Variant:
    """A Variant, its fields, or ``METHOD`` / ``METHOD:BITS``; raises RecipeError."""
    if isinstance(value, Variant):
        return value
    if isinstance(value, str):
        method, _, bits = value.partition(":")
        return parse(Variant, {"method": method, "bits": bits or None}, "variant")
    return parse(Variant, dict(value), "variant")


def compare(
    model_id: str,
    variants: Iterable[Variant | Mapping[str, Any] | str] = DEFAULT_VARIANTS,
    *,
    calibration: CalibrationSpec | dict[str, Any] | None = None,
    evaluation: EvaluationSpec | dict[str, Any] | None = None,
    out: str | Path | None = None,
    revision: str | None = None,
    adapters: Sequence[str | Path] = (),
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
    row: Callable[[Table], None] | None = None,
) -> Table:
    """Convert and judge `variants` of `model_id` and the model itself; write the table and return it.

    `adapters` are folders of LoRA adapters that are merged into the model first, in this order.
    `out` (default ``quantkit-compare/MODEL``, with the adapters' names) gets artifacts, reports, table.md/csv/json and
    the picture. The table so far is written after each variant, and handed to `row`.
    Raises a QuantkitError before any long work for whatever can be known beforehand.
    """
    values = {
        "model": str(model_id),
        "revision": revision,
        "adapters": tuple(map(str, adapters)),
        "variants": tuple(parse_variant(value) for value in variants),
        "calibration": parse(CalibrationSpec, calibration or {}, "calibration"),
        "evaluation": parse(EvaluationSpec, evaluation or {}, "evaluation"),
        "seed": seed,
        "device": device,
        "out": None if out is None else str(out),
    }
    return run(parse(CompareRecipe, values, "compare"), progress, row)


def run(recipe: CompareRecipe, progress: Progress | None = None, row: Callable[[Table], None] | None = None) -> Table:
    """Carry out a compare recipe; see `compare`."""
    progress = progress or Progress()
    process.prepare()
    source = open_source(recipe.model, recipe.revision, recipe.adapters)
    name = safe_name("-".join(Path(place).name for place in (recipe.model, *recipe.adapters)))
    out = path_of(recipe.out or Path("quantkit-compare") / name, OutputError)
    jobs = checked_jobs(recipe, source, out)
    text = load_text(recipe.evaluation.text, "evaluation")
    spec = recipe.evaluation
    for job in jobs:
        require(find_engine(job.job.format.engines[0]))
    engine = engine_for(Model(None, source), recipe.device)
    evaluation = prepare_evaluation(Model(None, source), spec, text, engine, source)
    progress.say(f"device: {described(find_device(recipe.device))}")
    for line in _how_evaluated(evaluation, jobs, source):
        progress.say(line)
    reports: list[Report] = []
    tokens = tokens_in(evaluation.cut.windows)
    todo = [("evaluation", SOURCE_COST)]
    for each in jobs:
        todo += [_piece(each.job, tokens), ("evaluation", 1.0)]
    pieces, costs = Pieces(todo), iter(cost for _, cost in todo)
    with progress.step("all variants", sum(cost for _, cost in todo)) as advance:
        for checked in (None, *jobs):
            model = Model(None, source)
            if checked is not None:
                label = checked.job.recipe.label
                advance(0, f"converting {label}", pieces)
                model = Model(artifact_of(checked, folder_of(out, checked.job), progress.within(label)), None)
                advance(next(costs))
            advance(0, f"evaluating {model.label}", pieces)
            engine = engine_for(model, recipe.device)
            reports.append(report_of(model, source, spec, text, engine, out, progress.within(model.label)))
            if model.artifact is not None:
                write_card(model.artifact, (reports[0], reports[-1]))
            table = Table(tuple(reports))
            write_table(table, out)
            if row is not None:
                row(table)
            advance(next(costs))
    draw_table(table, out)
    return table


# What parts of a comparison cost, in evaluations of a variant, until one of the kind has been done (measured with
# `make demo`).
SOURCE_COST = 3.0  # its baseline, and its evaluation
CONVERSION_COST = 0.3
CALIBRATION_COST = 1.5  # for as many tokens as are evaluated


def _piece(job: Job, tokens: int) -> tuple[str, float]:
    """The kind of a conversion and what it costs, where a variant is evaluated on `tokens` tokens."""
    if not job.method.calibrated(job.options):
        return "conversion", CONVERSION_COST
    spec = job.recipe.calibration
    return "calibration", CONVERSION_COST + CALIBRATION_COST * spec.sequences * spec.length / tokens


def _how_evaluated(evaluation: Evaluation, jobs: Sequence[CheckedJob], source: Source) -> Iterator[str]:
    """What will be judged whole by which engine, and what block by block, as far as memory can be forecast.

    One line for each of the two. Whole ones are named engine by engine, with the memory of the largest.
    """
    needs = [(evaluation.model.label, evaluation.plan.need)]
    if evaluation.baseline_plan is not None:
        needs.insert(0, ("the source for divergences", evaluation.baseline_plan.need))
    by_block = [f"{label} ({need.words})" for label, need in needs if need.walk]
    whole = [(label, need) for label, need in needs if not need.walk]
    for checked in jobs:
        recipe, kind = checked.job.recipe, checked.job.format
        bits = recipe.bits or checked.job.method.default_bits
        need = need_of_copy(source, kind, checked.job.checked.nbytes, bits, evaluation.cut.windows)
        if need.memory is None or need.memory <= free_memory(need.device):
            whole.append((recipe.label, need))
        else:
            by_block.append(f"{recipe.label} (whole: {need.words})")
    if whole:
        engines = dict.fromkeys(need.engine for _, need in whole)
        labels = {engine: ", ".join(label for label, need in whole if need.engine == engine) for engine in engines}
        most = max(need.memory or 0 for _, need in whole)
        named = "; ".join(f"{labels[engine]} by {engine}" for engine in engines)
        yield f"judged whole: {named}" + (f"; at most {most / 1e9:.2f} GB" if most else "")
    if by_block:
        yield f"judged block by block, since memory is short for all of it: {', '.join(by_block)}"


def write_table(table: Table | Sheet, folder: Path) -> None:
    """Write table.md, table.csv and table.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"table.json": table.to_json(), "table.md": table.to_markdown(), "table.csv": table.to_csv()}
    for name, text in texts.items():
        replace_text(folder / name, text)


def draw_table(table: Table | Sheet, folder: Path) -> list[Path]:
    """Draw the picture into `folder`, SVG and PNG; return the paths."""
    from quantkit.report.plot import draw

    if isinstance(table, Table):
        return draw([table.reports], folder)
    return draw([table.reports(model) for model in table.models], folder)


def folder_of(out: Path, job: Job) -> Path:
    """Where the artifact of a job lies in a comparison's folder."""
    return out / "artifacts" / safe_name(job.recipe.label)


def checked_jobs(recipe: CompareRecipe, source: Source, out: Path, max_memory: int | None = None) -> list[CheckedJob]:
    """Check every variant before the first is converted; `max_memory` in bytes, by default what is free here."""
    jobs = [
        prepare(
            ConvertRecipe(
                model=recipe.model,
                revision=recipe.revision,
                adapters=recipe.adapters,
                method=variant.method,
                bits=variant.bits,
                options=variant.options,
                format=variant.format,
                calibration=recipe.calibration,
                seed=recipe.seed,
            ),
            source,
            recipe.device,
        )
        for variant in recipe.variants
    ]
    folders = [folder_of(out, job) for job in jobs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise RecipeError(f"two variants are named {folder.name}; leave one out")
    for job, folder in zip(jobs, folders, strict=True):
        refuse_existing(folder, force=True)
        refuse_own_source(job, folder)
    return [check_job(job, folder, max_memory) for job, folder in zip(jobs, folders, strict=True)]


def artifact_of(checked: CheckedJob, folder: Path, progress: Progress) -> Artifact:
    """Use the finished artifact of the same recipe and source, or convert."""
    return kept_artifact(checked, folder) or run_conversion(checked, folder, force=True, progress=progress)


def kept_artifact(checked: CheckedJob, folder: Path) -> Artifact | None:
    """The finished artifact of the same recipe and source, if there is one."""
    if (folder / MANIFEST).is_file():
        try:
            finished = open_artifact(folder)
            refuse_untrue(finished)
        except ArtifactError:
            pass
        else:
            m = finished.manifest
            job = checked.job
            digest = None if job.calibration is None else job.calibration.digest
            same = (portable(job), job.format.name, job.source.hashes, job.source.parameters, digest)
            if (
                (m.recipe, m.format, m.source.hashes, m.source.parameters, m.calibration_sha256) == same
                and _same_options(job, m.options)
                and _same_side_files(job, m.files)
            ):
                return finished
    return None


def _same_options(job: Job, options: Mapping[str, object]) -> bool:
    """Whether an artifact has the `options` that the job resolves to; what only the work finds out is left to it."""
    resolved = job.options.model_dump(mode="json") | json.loads(json.dumps(dict(job.checked.options)))
    return all(options.get(name) == value for name, value in resolved.items() if value is not None)


def _same_side_files(job: Job, files: Mapping[str, FileEntry]) -> bool:
    """Whether an artifact has the source's tokenizer and what else is copied from it."""
    hashes = side_hashes(job.source)
    hashes.pop("tokenizer_config.json", None)  # mended for some engines
    return all(name in files and files[name].sha256 == digest for name, digest in hashes.items())


def engine_for(model: Model, device: str) -> ChosenEngine:
    """The engine that users of the model's format run, on `device` where it computes there, else on the CPU."""
    try:
        return choose(model, EngineSpec(device=device))
    except RecipeError:
        find_device(device)  # raises for a device that nothing here has
        return choose(model, EngineSpec(device=CPU))


def report_of(
    model: Model,
    source: Source,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    out: Path,
    progress: Progress,
    *,
    anywhere: bool = False,
) -> Report:
    """Use the finished report of a judgement that is the same in everything that decides its figures, or judge.

    `anywhere` as in `kept_report`.
    """
    if kept := kept_report(model, source, spec, text, engine, out, anywhere=anywhere):
        return kept
    report = measure(prepare_evaluation(model, spec, text, engine, source), progress)
    path = report_path(out, model.label)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, report.model_dump_json(indent=2) + "\n")
    return report


def report_path(out: Path, label: str) -> Path:
    """Where the report of a variant lies in a comparison's folder."""
    return out / "reports" / f"{safe_name(label)}.json"


def kept_report(
    model: Model,
    source: Source,
    spec: EvaluationSpec,
    text: Text,
    engine: ChosenEngine,
    out: Path,
    *,
    anywhere: bool = False,
) -> Report | None:
    """The finished report of a judgement that is the same in everything that decides its figures, if there is one.

    `anywhere`: it holds figures of quality alone, so it may be of another machine, whose cache has the baseline.
    """
    path = report_path(out, model.label)
    if path.is_file():
        try:
            report = read_report(path)
        except ReportError:
            pass
        else:
            evaluation = prepare_evaluation(model, spec, text, engine, source)
            baseline = evaluation.stored_baseline() or (report.baseline if anywhere else None)
            hardware = report.hardware if anywhere else None
            if anywhere:
                device = report.engine.device.split()[0]
                evaluation = replace(evaluation, engine=replace(evaluation.engine, device=device))
            if report.fingerprint == evaluation.fingerprint(baseline, hardware):
                return report
    return None
