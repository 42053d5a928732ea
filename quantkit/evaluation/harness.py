"""Tasks of lm-evaluation-harness on any model that an engine opens, in the process that has loaded it.

https://github.com/EleutherAI/lm-evaluation-harness. The model is handed to the harness as one of its own kind, so that
each of its tasks works: continuations are scored (loglikelihood), texts (loglikelihood_rolling), and answers generated
greedily (generate_until). Tokens and windows are those of the harness's transformers model.

Not supported: sampling, since engines here generate greedily.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.contracts.engine import LoadedModel
from quantkit.contracts.model import Model
from quantkit.contracts.windows import Window
from quantkit.data.texts import first_token
from quantkit.errors import RecipeError, UnsupportedError, missing_package
from quantkit.evaluation.request import TaskSpec
from quantkit.models.config import context_of
from quantkit.probes._scores import score
from quantkit.progress import Progress
from quantkit.untrusted import told

MAX_NEW_TOKENS = 256  # of an answer, where a task names no number


def run(loaded: LoadedModel, model: Model, spec: TaskSpec, progress: Progress) -> dict[str, Any]:
    """The harness's results, by task and figure, for a model that an engine has `loaded`.

    Raises RecipeError, DependencyError.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_package("lm-eval", "tasks", error) from None
    what = f"lm-eval cannot run {', '.join(spec.tasks)}"
    with told(what, RecipeError):
        manager = TaskManager(include_path=spec.include, include_defaults=False)
        if not set(spec.tasks) <= set(manager.all_subtasks):
            manager = TaskManager(include_path=spec.include)  # reads thousands of files
        unknown = [name for name in spec.tasks if not manager.match_tasks([name])]
    if unknown:
        raise RecipeError(
            f"lm-eval has no task {unknown[0]!r}. `lm-eval ls tasks` lists them; add yours with --include."
        )
    judged = _as_harness_model(loaded, model.tokenizer(), longest(model, spec), progress)
    with told(what, RecipeError):
        answer = lm_eval.simple_evaluate(
            model=judged,
            tasks=list(spec.tasks),
            task_manager=manager,
            num_fewshot=spec.num_fewshot,
            limit=spec.limit,
            log_samples=False,
            apply_chat_template=spec.chat_template,
        )
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


def longest(model: Model, spec: TaskSpec) -> int:
    """The longest text in tokens: as `spec` says, else the model's context."""
    return spec.n_ctx or context_of(model.config)


def _as_harness_model(loaded: LoadedModel, tokenizer: Any, max_length: int, progress: Progress) -> Any:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class HarnessModel(TemplateLM):
        """What the harness asks of a model, answered by one of our engines."""

        tokenizer_name = "quantkit"

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer
            self.max_length = max_length

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
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return text

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return _continuations(loaded, pairs, max_length, progress)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs, owners = [], []
            for number, request in enumerate(requests):
                rolled = get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, max_length, context_len=1
                )
                for pair in map(make_disjoint_window, rolled):
                    pairs.append(pair)
                    owners.append(number)
            scored = [value for value, _ in _continuations(loaded, pairs, max_length, progress)]
            return np.bincount(owners, weights=scored, minlength=len(requests)).tolist()

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            with progress.step("generating answers", len(requests)) as advance:
                answers = []
                for request in requests:
                    answers.append(
                        _answer(loaded, tokenizer, self.tok_encode(request.args[0]), request.args[1], max_length)
                    )
                    advance()
                return answers

    return HarnessModel()


def _continuations(
    loaded: LoadedModel, pairs: list[tuple[list[int], list[int]]], max_length: int, progress: Progress
) -> list[tuple[float, bool]]:
    """Log-probability of each continuation after its context, and whether it is the greedy one."""
    windows = []
    for context, continuation in pairs:
        whole = np.asarray([*context, *continuation][-(max_length + 1) :], dtype=np.int64)
        first = max(len(whole) - 1 - len(continuation), 0)
        windows.append(Window(whole[:-1], first, whole[first + 1 :]))
    # Neighbours of one length are computed together; the longest first, so that too little memory shows at once.
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids))
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
    pieces = loaded.pieces([windows[i] for i in order])
    with progress.step("scoring continuations", len(windows)) as advance:
        for i in order:
            total, greedy = 0.0, True
            for logits, targets in windows[i].judged(pieces):
                total -= float(score(logits, targets)["nll"].sum())
                greedy = greedy and bool((logits.argmax(1) == targets).all())
            scores[i] = (total, greedy)
            advance()
    return scores


def _answer(loaded: LoadedModel, tokenizer: Any, ids: list[int], settings: dict[str, Any], max_length: int) -> str:
    """The greedy continuation of `ids` up to the first of the texts in ``until``, or EOS."""
    if settings.get("do_sample") and float(settings.get("temperature") or 0) > 0:
        raise UnsupportedError("this task samples its answers, and engines here generate greedily")
    until = settings.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    limit = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW_TOKENS)
    if limit >= max_length:
        raise UnsupportedError(f"this task generates {limit} tokens, and the context has {max_length}")
    made: list[int] = []
    for token in loaded.stream(ids[-(max_length - limit) :], limit):
        if token == tokenizer.eos_token_id:
            break
        made.append(token)
        text = tokenizer.decode(made)
        if any(stop and stop in text for stop in stops):
            break
    text = tokenizer.decode(made)
    return min((text.partition(stop)[0] for stop in stops if stop), key=len, default=text)
