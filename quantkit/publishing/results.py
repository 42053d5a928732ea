"""Convert reports of `quantkit eval-tasks` to the Hub's benchmark scores, `.eval_results/*.yaml`.

The Hub shows the scores in percent on the model page and the benchmark's leaderboard. Format:
https://huggingface.co/docs/hub/eval-results. `BENCHMARKS` lists Hub benchmarks that are lm-evaluation-harness
tasks; other tasks are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from quantkit.errors import RecipeError, ReportError
from quantkit.records.artifact import Artifact
from quantkit.records.recipe import parse
from quantkit.records.report import TaskReport
from quantkit.system.untrusted import path_of, read_object

PREFIX = ".eval_results/quantkit-"  # prefix of quantkit's files; other files are not touched
MOST_REPORT = 1 << 24  # bytes
AGAIN = "Write it again with: quantkit eval-tasks ARTIFACT --json FILE"


@dataclass(frozen=True)
class Benchmark:
    """A Hub benchmark: dataset, task in its ``eval.yaml``, and the harness metric (0 to 1) that is its score."""

    dataset: str
    task: str
    figure: str


GSM8K = Benchmark("openai/gsm8k", "gsm8k", "exact_match,strict-match")
GPQA = Benchmark("Idavidrein/gpqa", "diamond", "acc,none")
GPQA_WRITTEN = Benchmark("Idavidrein/gpqa", "diamond", "exact_match,flexible-extract")
# By the harness's task names.
BENCHMARKS = {
    "gsm8k": GSM8K,
    "gsm8k_cot": GSM8K,
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "mmlu_pro", "exact_match,custom-extract"),
    "gpqa_diamond_zeroshot": GPQA,
    "gpqa_diamond_n_shot": GPQA,
    "gpqa_diamond_cot_zeroshot": GPQA_WRITTEN,
    "gpqa_diamond_cot_n_shot": GPQA_WRITTEN,
}


def eval_results(paths: Iterable[str | Path], artifact: Artifact) -> tuple[dict[str, bytes], list[str]]:
    """Return the score files, by name in the repository, and notes on omitted tasks.

    `paths` are reports of `quantkit eval-tasks`. Raises ReportError for a report of another artifact, of a subset of
    the samples, or of user-defined tasks, and if two reports have the same task.
    """
    files: dict[str, bytes] = {}
    notes = []
    for path in paths:
        report = _read(path_of(path, ReportError), artifact)
        for task, figures in report.results.items():
            benchmark = BENCHMARKS.get(task)
            score = None if benchmark is None else figures.get(benchmark.figure)
            if benchmark is None or score is None:
                notes.append(f"{task} is not a benchmark registered on the hub: its scores are not pushed")
                continue
            if not 0 <= score <= 1:
                raise ReportError(f"{path}: {task} has the score {score}, which is not from 0 to 1. {AGAIN}")
            name = f"{PREFIX}{task}.yaml"
            if name in files:
                raise ReportError(f"{path}: another report has {task}, too. Give one of them.")
            files[name] = _text(benchmark, score, task, report).encode()
    return files, list(dict.fromkeys(notes))


def _read(path: Path, artifact: Artifact) -> TaskReport:
    try:
        report = parse(TaskReport, read_object(path, ReportError, AGAIN, MOST_REPORT), str(path))
    except RecipeError as error:
        raise ReportError(f"{path} is not a report of eval-tasks: {error} {AGAIN}") from None
    if report.model.digest != artifact.digest:
        raise ReportError(
            f"{path} has scores of other bytes: {report.model.label}, sha256 {report.model.digest[:12]}, but "
            f"{artifact.folder} has {artifact.digest[:12]}. Measure this artifact."
        )
    if report.settings.limit is not None:
        raise ReportError(
            f"{path} has scores of {report.settings.limit} samples of each task; a benchmark needs all. "
            "Measure again without --limit."
        )
    if report.settings.include is not None:
        raise ReportError(
            f"{path} was measured with task definitions of {report.settings.include}, which may differ from the "
            "harness's. Measure again without --include."
        )
    return report


def _text(benchmark: Benchmark, score: float, task: str, report: TaskReport) -> str:
    measure, _, how = benchmark.figure.partition(",")
    how = "" if how == "none" else f" ({how})"
    shots = report.num_fewshot.get(task)
    notes = [
        *([] if shots is None else [f"{shots}-shot"]),
        f"{measure}{how} of lm-eval {report.lm_eval}, task {task} {report.versions.get(task, '')}".rstrip(),
        f"engine {report.engine.name} {report.engine.version} in {report.engine.dtype}",
        *(["chat template"] if report.settings.chat_template else []),
    ]
    entry = {
        "dataset": {"id": benchmark.dataset, "task_id": benchmark.task},
        "value": round(100 * score, 2),
        "notes": ", ".join(notes),
    }
    return yaml.safe_dump([entry], sort_keys=False, allow_unicode=True, width=1000)
