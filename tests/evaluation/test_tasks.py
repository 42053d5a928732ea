"""Tasks of lm-evaluation-harness through our engines, against the harness's own transformers model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SAMPLE, save_tiny

from quantkit.conversion.convert import convert
from quantkit.errors import DependencyError, RecipeError
from quantkit.evaluation.tasks import evaluate_tasks

pytest.importorskip("lm_eval")

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e", "zz"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}
FOREIGN = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
model, tasks, context = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf", model_args={"pretrained": model, "dtype": "float32", "max_length": int(context)}, device="cpu",
    tasks=["choice", "pages", "answers"], task_manager=TaskManager(include_path=tasks), batch_size=1,
)
print("FOUND" + json.dumps({"results": found["results"], "samples": {
    task: [sample["filtered_resps"] for sample in samples] for task, samples in found["samples"].items()
}}, default=str))
"""
CONTEXT = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = SAMPLE.read_text(encoding="utf-8").split()
    rows = [
        {
            "question": " ".join(words[50 * n : 50 * n + 12]),
            "choices": [" " + " ".join(words[50 * n + 12 + k : 50 * n + 14 + 2 * k]) for k in range(3)],
            "label": n % 3,
            "page": " ".join(words[90 * n : 90 * n + 60 + n]),
            "answer": words[n],
        }
        for n in range(6)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + text)
    return folder


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("home")
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def foreign(tiny: Path, tasks: Path, offline: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", FOREIGN, str(tiny), str(tasks), str(CONTEXT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline})
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition("FOUND")[2])
    return found


def test_figures_equal_the_harness_s_own(
    tiny: Path, tasks: Path, foreign: dict[str, Any], offline: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    report = evaluate_tasks(str(tiny), list(TASKS), include=tasks, n_ctx=CONTEXT, dtype="float32")
    assert set(report.results) == set(TASKS)
    for task, figures in report.results.items():
        for name, value in figures.items():
            if "stderr" not in name:
                assert value == pytest.approx(foreign["results"][task][name], rel=1e-4), (task, name)
    assert report.samples == dict.fromkeys(TASKS, 6)
    assert report.results["pages"]["word_perplexity,none"] > 10
    assert (report.engine.name, report.engine.dtype) == ("transformers", "float32")


def test_every_runtime_answers_the_harness(
    tiny: Path, tasks: Path, offline: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    made = convert(str(tiny), "gguf", "Q8_0", tmp_path / "gguf")
    native, ours = (
        evaluate_tasks(made, list(TASKS), include=tasks, n_ctx=CONTEXT, engine=engine)
        for engine in ("llamacpp", "reference")
    )
    assert native.results["pages"]["word_perplexity,none"] == pytest.approx(
        ours.results["pages"]["word_perplexity,none"], rel=0.02
    )


def test_what_cannot_run_is_refused_before_a_model_is_loaded(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no task is asked for"):
        evaluate_tasks(str(tiny), [])
    with pytest.raises(RecipeError, match="does not exist"):
        evaluate_tasks(str(tiny), ["choice"], include=tmp_path / "none")


def test_an_unknown_task_is_told_and_the_harness_s_own_are_known(tiny: Path, tasks: Path) -> None:
    with pytest.raises(RecipeError, match="no task 'choise'"):
        evaluate_tasks(str(tiny), ["hellaswag", "choice", "choise"], include=tasks, n_ctx=CONTEXT)


def test_a_missing_harness_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quantkit.evaluation.tasks.look", lambda _python, modules: ([m for m in modules if m == "lm_eval"], "1")
    )
    with pytest.raises(DependencyError, match=r"quantkit\[tasks\]"):
        evaluate_tasks(str(tiny), ["wikitext"])
