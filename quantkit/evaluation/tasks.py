"""Task accuracy: run tasks of lm-evaluation-harness on any model that an engine can load.

https://github.com/EleutherAI/lm-evaluation-harness. The child process presents the loaded model as a model of the
harness. Tasks can score continuations (loglikelihood) and texts (loglikelihood_rolling), and generate greedily
(generate_until). Tokens and windows are the same as in the harness's transformers model. Sampling is not supported.
"""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.contracts.engine import LoadedModel, Window
from quantkit.contracts.model import Model, ModelLike
from quantkit.data.texts import first_token
from quantkit.errors import RecipeError, UnsupportedError, missing_package
from quantkit.evaluation.engine_choice import choose
from quantkit.evaluation.perplexity import score
from quantkit.evaluation.process import LoadRequest, TasksRequest, run_child
from quantkit.formats.source import open_model
from quantkit.models.config import context_of, note_beyond_context
from quantkit.records.recipe import EngineSpec, TaskSpec, spec_of
from quantkit.records.report import TaskReport, this_machine
from quantkit.system.device import device_label
from quantkit.system.files import temporary_folder
from quantkit.system.interpreter import inspect_interpreter
from quantkit.system.processor import usable_cores
from quantkit.system.progress import Progress
from quantkit.system.untrusted import path_of, reraise_as

MOST_FILES = 50_000  # in the folder of further tasks; lm-eval itself has some 15,000
MAX_NEW_TOKENS = 256  # per answer, if a task sets no number


def evaluate_tasks(
    model: ModelLike,
    tasks: tuple[str, ...] | list[str],
    *,
    engine: str | EngineSpec | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> TaskReport:
    """Run tasks of lm-evaluation-harness on an artifact or a source model, in a child process; return a report.

    `settings` are fields of TaskSpec: `include`, a folder with more task definitions, whose code is executed; `limit`,
    samples of each task; `n_ctx`, the longest text in tokens (default: the model's context); `num_fewshot`,
    `chat_template`. Raises a QuantkitError.
    """
    if (include := settings.get("include")) is not None:
        settings["include"] = str(path_of(include, RecipeError).absolute())
    spec = spec_of(TaskSpec, settings, "tasks", tasks=tuple(tasks))
    if not spec.tasks:
        raise RecipeError("no task is given. Give some with --tasks, such as wikitext.")
    if spec.include is not None:
        if not Path(spec.include).is_dir():
            raise RecipeError(f"the folder {include} of further tasks does not exist")
        if any(total > MOST_FILES for total in accumulate(len(files) for _, _, files in os.walk(spec.include))):
            raise RecipeError(
                f"the folder {include} of further tasks has more than {MOST_FILES:,} files, and lm-eval reads "
                "all of them. Give a folder with task definitions only."
            )
    opened = open_model(model)
    chosen = choose(opened, engine)
    if inspect_interpreter(chosen.python, ("lm_eval",))[0]:
        raise missing_package("lm-eval", "tasks", ImportError(f"{chosen.python} has none"))
    if spec.n_ctx is not None:
        note_beyond_context(opened.config, spec.n_ctx, "texts")  # refuses a too long context
    if opened.artifact is not None:
        from quantkit.contracts.check_manifest import refuse_untrue  # imported here, not in the child process

        refuse_untrue(opened.artifact)
    load = LoadRequest(model=opened.ref, engine=chosen, threads=usable_cores())
    progress = progress or Progress()
    progress.say(f"device: {device_label(chosen.device)}")
    with temporary_folder() as temp:
        result = run_child(TasksRequest(load=load, tasks=spec), temp, progress)
    return TaskReport(
        model=opened.entry(),
        engine=chosen.entry(result.loaded),
        hardware=this_machine(),
        settings=spec,
        **result.tasks,
    )


def longest(model: Model, spec: TaskSpec) -> int:
    """Return the longest text in tokens: the requested length, else the model's context."""
    return spec.n_ctx or context_of(model.config)


def run_tasks(loaded: LoadedModel, model: Model, spec: TaskSpec, progress: Progress) -> dict[str, Any]:
    """Run the harness on a loaded model and return results, versions and sample counts by task.

    Raises RecipeError, DependencyError.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_package("lm-eval", "tasks", error) from None
    what = f"lm-eval cannot run {', '.join(spec.tasks)}"
    with reraise_as(what, RecipeError):
        manager = TaskManager(include_path=spec.include, include_defaults=False)
        if not set(spec.tasks) <= set(manager.all_subtasks):
            manager = TaskManager(include_path=spec.include)  # reads thousands of files
        unknown = [name for name in spec.tasks if not manager.match_tasks([name])]
    if unknown:
        raise RecipeError(
            f"lm-eval has no task {unknown[0]!r}. `lm-eval ls tasks` lists them; add yours with --include."
        )
    harness_model = _as_harness_model(loaded, model.tokenizer(), longest(model, spec), progress)
    with reraise_as(what, RecipeError):
        answer = lm_eval.simple_evaluate(
            model=harness_model, tasks=list(spec.tasks), task_manager=manager, num_fewshot=spec.num_fewshot,
            limit=spec.limit, log_samples=False, apply_chat_template=spec.chat_template,
        )  # fmt: skip
    return {
        "results": {
            task: {name: value for name, value in figures.items() if isinstance(value, int | float)}
            for task, figures in answer["results"].items()
        },
        "versions": {task: str(version) for task, version in answer["versions"].items()},
        "num_fewshot": answer["n-shot"],
        "samples": {task: counts["effective"] for task, counts in answer["n-samples"].items()},
        "lm_eval": lm_eval.__version__,
    }


def _as_harness_model(loaded: LoadedModel, tokenizer: Any, max_length: int, progress: Progress) -> Any:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class HarnessModel(TemplateLM):
        """An engine's model as a model of lm-evaluation-harness."""

        tokenizer_name = "quantkit"

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer, self.max_length = tokenizer, max_length

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return int(first_token(tokenizer))  # type: ignore[arg-type]

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            first = tokenizer.decode(self.prefix_token_id)
            if add_special_tokens is None and string.startswith(first):
                add_special_tokens = False
            extra = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(tokenizer.encode(string, **extra))

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            text: str = tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )  # fmt: skip
            return text

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return _continuations(loaded, pairs, max_length, progress)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs: list[Any] = []
            owners: list[int] = []
            for number, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                rolled = get_rolling_token_windows(ids, self.prefix_token_id, max_length, context_len=1)
                pairs += map(make_disjoint_window, rolled)
                owners += [number] * (len(pairs) - len(owners))
            scored = [value for value, _ in _continuations(loaded, pairs, max_length, progress)]
            return np.bincount(owners, weights=scored, minlength=len(requests)).tolist()

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            answers = []
            with progress.step("generating answers", len(requests)) as advance:
                for request in requests:
                    ids = self.tok_encode(request.args[0])
                    answers.append(_answer(loaded, tokenizer, ids, request.args[1], max_length))
                    advance()
            return answers

    return HarnessModel()


def _continuations(
    loaded: LoadedModel, pairs: list[tuple[list[int], list[int]]], max_length: int, progress: Progress
) -> list[tuple[float, bool]]:
    """Return each continuation's log-probability after its context, and whether it is the greedy one."""
    windows = []
    for context, continuation in pairs:
        whole = np.asarray([*context, *continuation][-(max_length + 1) :], dtype=np.int64)
        first = max(len(whole) - 1 - len(continuation), 0)
        windows.append(Window(whole[:-1], first, whole[first + 1 :]))
    # Equal lengths are computed together; the longest come first, so that a lack of memory shows at once.
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
    pieces = loaded.pieces([windows[i] for i in order])
    with progress.step("scoring continuations", len(windows)) as advance:
        for i in order:
            total, greedy = 0.0, True
            for logits, targets in windows[i].pairs(pieces):
                total -= float(score(logits, targets)["nll"].sum())
                greedy = greedy and bool((logits.argmax(1) == targets).all())
            scores[i] = (total, greedy)
            advance()
    return scores


def _answer(loaded: LoadedModel, tokenizer: Any, ids: list[int], settings: dict[str, Any], max_length: int) -> str:
    """Return the greedy continuation of `ids` as text, up to EOS or the first stop string in ``until``."""
    if settings.get("do_sample") and float(settings.get("temperature") or 0) > 0:
        raise UnsupportedError("this task samples its answers, but quantkit's engines only generate greedily")
    until = settings.get("until") or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    limit = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW_TOKENS)
    if limit >= max_length:
        raise UnsupportedError(f"this task generates {limit} tokens, but the context has only {max_length}")
    made: list[int] = []
    text = ""
    for token in loaded.stream(ids[-(max_length - limit) :], limit):
        if token == tokenizer.eos_token_id:
            break
        made.append(token)
        text = tokenizer.decode(made)
        if any(stop in text for stop in stops):
            break
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)
