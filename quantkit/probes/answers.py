"""Answers: nine prompts one after the other at batch 1, greedy, until the model ends its answer.

Prompts of code, literature and arithmetic, after one to warm up; they go in as plain text, without a chat template.
Figures: tokens a second, seconds and tokens of an answer (mean and standard error over the prompts), and the median,
90th and 99th percentile of the time to the first token, of the milliseconds a token of an answer, and of the time
between two tokens. Formulas: docs/probes.md.
"""

from __future__ import annotations

import numpy as np

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.data.prompts import PROMPTS, WARM_UP
from quantkit.data.texts import encode
from quantkit.errors import EngineError
from quantkit.probes._generation import Generation, generate
from quantkit.report.records import Measurement
from quantkit.report.statistics import mean_and_error, percentiles
from quantkit.system.processor import threads

N_CTX = 384  # our longest prompt and 200 tokens


def _answer(job: ProbeJob, prompt: list[int], ends: frozenset[int]) -> Generation:
    limit = min(job.spec.max_tokens, job.n_ctx - len(prompt))
    if limit < 2:
        raise EngineError(f"the context of {job.model.label} is {job.n_ctx} tokens: too short for the probe answers")
    return generate(job, prompt, limit, ends)


def _run(job: ProbeJob) -> list[Measurement]:
    tokenizer, ends = job.model.tokenizer(), job.model.end_tokens
    answers = []
    with job.progress.step(f"answers at {threads(job.threads)}", len(PROMPTS) + 1) as advance:
        for number, prompt in enumerate((WARM_UP, *PROMPTS)):
            answer = _answer(job, encode(tokenizer, prompt).tolist(), ends)
            if number:
                answers.append(answer)
            advance(remark=f"{answer.tokens_per_second:.1f} tokens/s")
    return _measured(answers, job.threads)


def _measured(answers: list[Generation], threads: int) -> list[Measurement]:
    measured = []

    def mean(name: str, unit: str, values: list[float]) -> None:
        value, error = mean_and_error(np.array(values))
        name = f"answers_{name}@{threads}"
        measured.append(Measurement(name=name, value=value, unit=unit, n=len(values), stderr=error))

    def spread(name: str, values: list[float]) -> None:
        if values:
            at = percentiles(values)
            name = f"answers_{name}@{threads}"
            measured.append(Measurement(name=name, value=float(at["p50"]), unit="ms", n=len(values), details=at))

    mean("tokens_per_second", "tokens/s", [a.tokens_per_second for a in answers])
    mean("seconds", "s", [a.seconds for a in answers])
    mean("tokens", "tokens", [float(len(a.times)) for a in answers])
    spread("ttft_ms", [a.ttft_ms for a in answers])
    spread("ms_per_token", [a.ms_per_token for a in answers if len(a.times) > 1])
    spread("itl_ms", [gap for a in answers for gap in a.gaps_ms])
    return measured


PROBE = Probe(
    name="answers",
    summary="tokens/s, time to first token and ms/token of nine answers, for each thread count",
    run=_run,
    order=16,
    generates=True,
    per_threads=True,
    n_ctx=N_CTX,
    usual=False,
)
