"""compare: convert variants of one model, evaluate them and the model itself, and return one Table.

All errors that can be found early are raised before the first conversion. Finished artifacts and reports in the output
folder are reused, so an interrupted comparison continues. Each model card gets its figures next to the source's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from quantkit.contracts.check_manifest import refuse_untrue
from quantkit.contracts.method import CheckedJob, Job
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.conversion import check, convert
from quantkit.conversion.check import ReadyJob
from quantkit.conversion.manifest import portable, side_hashes
from quantkit.data.texts import Text, load_text
from quantkit.errors import ArtifactError, OutputError, RecipeError, ReportError
from quantkit.evaluation import evaluate, process
from quantkit.evaluation.engine_choice import choose, require
from quantkit.evaluation.evaluate import Evaluation
from quantkit.evaluation.memory import MemoryNeed, need_of_copy
from quantkit.formats.source import open_source
from quantkit.records.artifact import Artifact, open_artifact
from quantkit.records.recipe import (
    CompareRecipe,
    ConvertRecipe,
    EngineSpec,
    MemoryLimits,
    ModelRef,
    ResourceSpec,
    Variant,
    parse,
)
from quantkit.records.report import Report, read_report
from quantkit.report.card import write_card
from quantkit.report.plot import draw
from quantkit.report.table import Table, write_table
from quantkit.system.device import CPU, device_label, find_device
from quantkit.system.files import replace_text, safe_name
from quantkit.system.memory import free_memory
from quantkit.system.progress import Pieces, Progress
from quantkit.system.untrusted import path_of

DEFAULT_VARIANTS = (
    *("gptq:4", "awq:4", "nf4:4", "ctranslate2:int8", "ctranslate2:float16"),
    *("gguf:Q2_K", "gguf:Q3_K_M", "gguf:Q4_K_M", "gguf:Q5_K_M", "gguf:Q6_K"),
)
# Costs, in evaluations of a variant, until a piece of that kind has been timed (measured with `make demo`).
SOURCE_COST = 3.0  # for its baseline and its evaluation
CONVERSION_COST = 0.3
CALIBRATION_COST = 1.5  # for as many calibration tokens as evaluated tokens


def compare(
    model: str | Path,
    variants: Iterable[Variant | Mapping[str, Any] | str] = DEFAULT_VARIANTS,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    row: Callable[[Table], None] | None = None,
    **settings: Any,
) -> Table:
    """Convert and evaluate `variants` of `model` and the model itself; write the table and return it.

    `out` (default ``quantkit-compare/MODEL``, with the adapters' names) gets artifacts, reports, table.md/csv/json and
    the plot. After each variant, the table so far is written and passed to `row`. `settings` are further fields of
    `CompareRecipe`: `calibration` and `evaluation`, records or dicts; `revision` of a hub model; `adapters`, folders of
    LoRA adapters to merge first, in this order; `seed`; `device`.

    Raises a QuantkitError before any long work if the comparison cannot succeed.
    """
    values = {name: value for name, value in settings.items() if value is not None}
    values |= {"model": str(model), "variants": tuple(variants), "out": None if out is None else str(out)}
    values["adapters"] = tuple(map(str, values.get("adapters", ())))
    return run_comparison(parse(CompareRecipe, values, "compare"), progress, row)


def run_comparison(
    recipe: CompareRecipe, progress: Progress | None = None, row: Callable[[Table], None] | None = None
) -> Table:
    """Run a comparison recipe and return the table; see `compare`."""
    progress = progress or Progress()
    process.prepare()
    comparison = Comparison(recipe)
    jobs = comparison.check(recipe.variants)
    for one in jobs:
        require(find_engine(one.job.format.engines[0]))
    lines = list(comparison.how_evaluated(jobs))
    for line in (f"device: {device_label(find_device(recipe.device))}", *lines):
        progress.say(line)
    reports: list[Report] = []
    parts = [(comparison.cost_of(one.job), ("evaluation", 1.0)) for one in jobs]
    todo = [("evaluation", SOURCE_COST), *chain(*parts)]
    pieces, costs = Pieces(todo), iter(cost for _, cost in todo)
    with progress.step("all variants", sum(cost for _, cost in todo)) as advance:
        for ready in (None, *jobs):
            model = comparison.original
            if ready is not None:
                label = ready.job.recipe.label
                advance(0, f"converting {label}", pieces)
                model = Model(comparison.artifact(ready, progress.within(label)), None)
                advance(next(costs))
            advance(0, f"evaluating {model.label}", pieces)
            reports.append(comparison.report(model, progress.within(model.label)))
            table = Table(tuple(reports))
            write_table(table, comparison.out)
            if row is not None:
                row(table)
            advance(next(costs))
    draw(table, comparison.out)
    return table


def name_of(recipe: CompareRecipe | ModelRef) -> str:
    """Return a folder name for a model, made from the names of the model and its adapters."""
    return safe_name("-".join(Path(place).name for place in (recipe.model, *recipe.adapters)))


class Comparison:
    """One model and its variants: converts and evaluates them, or reuses earlier results in the folder `out`.

    `any_machine`: also reuse reports from other machines, whose quality figures are the same. `max_memory_gb`: memory
    limit; None: the free memory of this machine.
    """

    def __init__(self, recipe: CompareRecipe, any_machine: bool = False, max_memory_gb: float | None = None) -> None:
        self.recipe, self.any_machine, self.max_memory_gb = recipe, any_machine, max_memory_gb
        self.source = open_source(recipe.model, recipe.revision, recipe.adapters)
        self.original = Model(None, self.source)
        self.out = path_of(recipe.out or Path("quantkit-compare") / name_of(recipe), OutputError)

    @cached_property
    def text(self) -> Text:
        return load_text(self.recipe.evaluation.text, "evaluation")

    @cached_property
    def of_original(self) -> Evaluation:
        """Return the evaluation of the source; its windows are used for all variants."""
        return self.prepare(self.original)

    def folder_of(self, job: Job) -> Path:
        return self.out / "artifacts" / safe_name(job.recipe.label)

    def report_path(self, model: Model) -> Path:
        return self.out / "reports" / f"{safe_name(model.label)}.json"

    def check(self, variants: Sequence[Variant]) -> list[ReadyJob]:
        """Check all variants and return them ready to run; raises a QuantkitError if one cannot be converted."""
        shared = {key: getattr(self.recipe, key) for key in ("model", "revision", "adapters", "calibration", "seed")}
        recipes = [ConvertRecipe(**dict(variant), **shared) for variant in variants]
        resources = ResourceSpec(device=self.recipe.device, max_memory_gb=self.max_memory_gb)
        jobs = [check.prepare(recipe, self.source, resources) for recipe in recipes]
        folders = [self.folder_of(job) for job in jobs]
        for folder in folders:
            if folders.count(folder) > 1:
                raise RecipeError(f"two variants are named {folder.name}; leave one out")
        return [check.check(job, folder, force=True) for job, folder in zip(jobs, folders, strict=True)]

    def artifact(self, ready: ReadyJob, progress: Progress) -> Artifact:
        """Return the artifact of a variant: an earlier one if it can be reused, else convert it now."""
        return self.reusable_artifact(ready.job) or convert.run(ready, progress)

    def reusable_artifact(self, job: CheckedJob) -> Artifact | None:
        """Return the finished artifact of the same recipe and source if its files are unchanged, else None."""
        try:
            artifact = open_artifact(self.folder_of(job))
            refuse_untrue(artifact)
        except ArtifactError:
            return None
        m, source = artifact.manifest, job.source
        digest = None if job.calibration is None else job.calibration.digest
        wanted = (portable(job), job.format.name, source.hashes, source.parameters, digest)
        found = (m.recipe, m.format, m.source.hashes, m.source.parameters, m.calibration_sha256)
        # Options that the work decides are None before it.
        options = job.options.model_dump(mode="json") | json.loads(json.dumps(dict(job.checked.options)))
        same = all(m.options.get(name) == value for name, value in options.items() if value is not None)
        copied = side_hashes(source)
        copied.pop("tokenizer_config.json", None)  # some engines need a fixed version
        same = same and all(name in m.files and m.files[name].sha256 == sha256 for name, sha256 in copied.items())
        return artifact if same and found == wanted else None

    def prepare(self, model: Model) -> Evaluation:
        """Prepare an evaluation in the default engine of the model's format, on the recipe's device or else the CPU."""
        try:
            engine = choose(model, EngineSpec(device=self.recipe.device))
        except RecipeError:
            find_device(self.recipe.device)  # raises for an unknown device
            engine = choose(model, EngineSpec(device=CPU))
        limits = MemoryLimits(max_memory_gb=self.max_memory_gb)
        return evaluate.prepare(model, self.recipe.evaluation, self.text, engine, self.source, limits)

    def report(self, model: Model, progress: Progress) -> Report:
        """Return the report of the source or an artifact, reused or measured; also write it into the model card."""
        evaluation = self.of_original if model is self.original else self.prepare(model)
        report = self.reusable_report(evaluation)
        if report is None:
            report = evaluate.measure(evaluation, progress)
            path = self.report_path(model)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, report.model_dump_json(indent=2) + "\n")
        if model.artifact is not None:
            write_card(model.artifact, (read_report(self.report_path(self.original)), report))
        return report

    def reusable_report(self, evaluation: Evaluation) -> Report | None:
        """Return the finished report of an evaluation with the same fingerprint, or None."""
        try:
            report = read_report(self.report_path(evaluation.model))
        except ReportError:
            return None
        baseline, hardware = evaluation.stored_baseline(), None
        if self.any_machine:  # its cache has the baseline
            engine = replace(evaluation.engine, device=report.engine.device.split()[0])
            evaluation = replace(evaluation, engine=engine)
            baseline, hardware = baseline or report.baseline, report.hardware
        return report if report.fingerprint == evaluation.fingerprint(baseline, hardware) else None

    def need_of(self, job: CheckedJob) -> MemoryNeed:
        """Estimate the memory for evaluating a variant whole, before it is converted."""
        bits, windows = job.recipe.bits or job.method.default_bits, self.of_original.cut.windows
        return need_of_copy(self.source, job.format, job.checked.nbytes, bits, windows)

    def how_evaluated(self, jobs: Sequence[ReadyJob]) -> Iterator[str]:
        """Yield lines that list which models run whole and which block by block, with engine and memory."""
        evaluation = self.of_original
        needs = [(self.original.label, evaluation.plan.need)]
        if evaluation.baseline_plan is not None:
            needs.insert(0, ("the source for divergences", evaluation.baseline_plan.need))
        whole = [f"{label} ({need.words})" for label, need in needs if not need.walk]
        by_block = [f"{label} ({need.words})" for label, need in needs if need.walk]
        for ready in jobs:
            label, need = ready.job.recipe.label, self.need_of(ready.job)
            if need.fits(free_memory(need.device)):
                whole.append(f"{label} ({need.words})")
            else:
                by_block.append(f"{label} (whole: {need.words})")
        if whole:
            yield f"evaluated whole: {', '.join(whole)}"
        if by_block:
            yield f"evaluated block by block, since whole models do not fit into memory: {', '.join(by_block)}"

    def cost_of(self, job: Job) -> tuple[str, float]:
        """Return the kind of a conversion, and its cost in units of one variant's evaluation."""
        if not job.method.calibrated(job.options):
            return "conversion", CONVERSION_COST
        spec = job.recipe.calibration
        tokens = sum(len(window.ids) for window in self.of_original.cut.windows)
        return "calibration", CONVERSION_COST + CALIBRATION_COST * spec.sequences * spec.length / tokens
