import json
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from killed import forked
from tiny_models import SAMPLE

from quantkit.errors import DependencyError, RecipeError
from quantkit.evaluation.tasks import evaluate_tasks, run_tasks
from quantkit.records.recipe import EngineSpec, TaskSpec
from quantkit.system.progress import Progress

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
CONTEXT = 64
FLOAT32 = EngineSpec(dtype="float32")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
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
        for n in range(4)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + text)
    return folder


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


def evaluate_with_the_harness(model, tasks, out):
    import lm_eval
    from huggingface_hub import constants
    from lm_eval.tasks import TaskManager

    constants.HF_HUB_OFFLINE = True
    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(model), "dtype": "float32", "max_length": CONTEXT}, device="cpu",
        tasks=list(TASKS), task_manager=TaskManager(include_path=str(tasks), include_defaults=False), batch_size=1,
    )  # fmt: skip
    out.write_text(json.dumps(found["results"], default=str))


def test_figures_equal_the_harness_s_own(one_block, tasks, tmp_path):
    forked(partial(evaluate_with_the_harness, one_block, tasks, tmp_path / "foreign.json"), tmp_path / "log").wait(0)
    foreign = json.loads((tmp_path / "foreign.json").read_text())
    report = evaluate_tasks(str(one_block), list(TASKS), include=tasks, n_ctx=CONTEXT, engine=FLOAT32)
    assert set(report.results) == set(TASKS)
    for task, figures in report.results.items():
        for name, value in figures.items():
            if "stderr" not in name:
                assert value == pytest.approx(foreign[task][name], rel=1e-4), (task, name)
    assert report.samples == dict.fromkeys(TASKS, 4)
    assert report.results["pages"]["word_perplexity,none"] > 10
    assert (report.engine.name, report.engine.dtype) == ("transformers", "float32")


@pytest.mark.slow
def test_every_runtime_answers_the_harness(gguf, tasks):
    how = {"include": tasks, "n_ctx": CONTEXT}
    native, ours = (evaluate_tasks(gguf, list(TASKS), **how, engine=name) for name in ("llamacpp", "reference"))
    one, other = (found.results["pages"]["word_perplexity,none"] for found in (native, ours))
    assert one == pytest.approx(other, rel=0.02)


def test_tasks_are_looked_for_among_the_harness_s_own_too(monkeypatch):
    """With a harness that only tells its tasks: the real one takes seconds to read them."""

    class TaskManager:
        def __init__(self, include_path, include_defaults=True):
            self.all_subtasks = ["mine", "hellaswag"] if include_defaults else ["mine"]

        def match_tasks(self, names):
            return [name for name in names if name in self.all_subtasks]

    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=TaskManager))
    with pytest.raises(RecipeError, match="no task 'other'"):
        run_tasks(None, None, TaskSpec(tasks=("hellaswag", "mine", "other")), Progress())


def test_what_cannot_run_is_refused_before_a_model_is_loaded(tiny, tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="no task is given"):
        evaluate_tasks(str(tiny), [])
    with pytest.raises(RecipeError, match="does not exist"):
        evaluate_tasks(str(tiny), ["choice"], include=tmp_path / "none")
    with pytest.raises(RecipeError, match="has more than 50,000 files"):
        evaluate_tasks(str(tiny), ["choice"], include="/")
    monkeypatch.setattr(
        "quantkit.evaluation.tasks.inspect_interpreter",
        lambda _python, modules: ([m for m in modules if m == "lm_eval"], "1"),
    )
    with pytest.raises(DependencyError, match=r"quantkit-lm\[tasks\]"):
        evaluate_tasks(str(tiny), ["wikitext"])
