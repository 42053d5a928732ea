"""Answers: nine prompts one after the other at batch 1, greedy, until the model ends its answer.

Prompts of code, literature and arithmetic, after one to warm up; they go in as plain text, without a chat template.
Figures: tokens a second, seconds and tokens of an answer (mean and standard error over the prompts), and the median,
90th and 99th percentile of the time to the first token, of the time per output token of an answer, and of the time
between two tokens. Formulas: docs/probes.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.data.prompts import PROMPTS, WARM_UP
from quantkit.data.texts import encode
from quantkit.errors import EngineError
from quantkit.report.records import Measurement
from quantkit.report.statistics import mean_and_error, percentiles

N_CTX = 384  # our longest prompt and 200 tokens


@dataclass(frozen=True)
class _Answer:
    """Seconds from the prompt to each token."""

    times: tuple[float, ...]

    @property
    def gaps(self) -> list[float]:
        return np.diff(self.times).tolist()


def _answer(job: ProbeJob, prompt: list[int], ends: frozenset[int]) -> _Answer:
    most = min(job.spec.answer_tokens, job.n_ctx - len(prompt))
    if most < 2:
        raise EngineError(f"the context of {job.subject.label} is {job.n_ctx} tokens: too short for the probe answers")
    begin = time.perf_counter()
    times = []
    for token in job.model.stream(prompt, most):
        times.append(time.perf_counter() - begin)
        if token in ends:
            break
    return _Answer(tuple(times))


def _run(job: ProbeJob) -> list[Measurement]:
    tokenizer, ends = job.subject.tokenizer(), job.subject.end_tokens
    answers = []
    with job.progress.step(f"answers at {job.threads} threads", len(PROMPTS) + 1) as advance:
        for number, prompt in enumerate((WARM_UP, *PROMPTS)):
            answer = _answer(job, encode(tokenizer, prompt).tolist(), ends)
            if number:
                answers.append(answer)
            advance(remark=f"{len(answer.times) / answer.times[-1]:.1f} tokens/s")
    return _measured(answers, job.threads)


def _measured(answers: list[_Answer], threads: int) -> list[Measurement]:
    found = []

    def mean(name: str, unit: str, values: list[float]) -> None:
        value, error = mean_and_error(np.array(values))
        found.append(Measurement(name=f"{name}@{threads}", value=value, unit=unit, n=len(values), stderr=error))

    def spread(name: str, seconds: list[float]) -> None:
        if seconds:
            at = percentiles([1000 * value for value in seconds])
            name = f"{name}@{threads}"
            found.append(Measurement(name=name, value=float(at["p50"]), unit="ms", n=len(seconds), details=at))

    mean("tokens_per_second", "tokens/s", [len(a.times) / a.times[-1] for a in answers])
    mean("seconds_per_answer", "s", [a.times[-1] for a in answers])
    mean("tokens_per_answer", "tokens", [float(len(a.times)) for a in answers])
    spread("ttft_ms", [a.times[0] for a in answers])
    spread("tpot_ms", [(a.times[-1] - a.times[0]) / (len(a.times) - 1) for a in answers if len(a.times) > 1])
    spread("itl_ms", [gap for a in answers for gap in a.gaps])
    return found


PROBE = Probe(
    name="answers",
    summary="tokens/s, time to first token and time per output token of nine answers, for each thread count",
    run=_run,
    order=16,
    per_threads=True,
    n_ctx=N_CTX,
    usual=False,
)
