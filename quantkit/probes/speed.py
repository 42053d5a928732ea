"""Speed: milliseconds a token when generating greedily at batch 1, after one warm-up.

Prompt processing is left out: time runs from the first new token to the last. `first_token_ms` is the median time from
the prompt to the first new token.
"""

from __future__ import annotations

import statistics
import time

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.report.records import Measurement

PROMPT_TOKENS = 32


def first_prompt(job: ProbeJob) -> list[int]:
    """The first tokens of the text."""
    found: list[int] = job.cut.windows[0].ids[:PROMPT_TOKENS].tolist()
    return found


def _once(job: ProbeJob, prompt: list[int]) -> tuple[float, float]:
    start = time.perf_counter()
    stamps = []
    for _ in job.model.stream(prompt, job.spec.new_tokens):
        stamps.append(time.perf_counter())
    return (stamps[-1] - stamps[0]) * 1000 / (len(stamps) - 1), (stamps[0] - start) * 1000


def _run(job: ProbeJob) -> list[Measurement]:
    prompt = first_prompt(job)
    times, firsts = [], []
    with job.progress.step(f"speed at {job.threads} threads", job.spec.repeats + 1) as advance:
        _once(job, prompt)
        advance()
        for _ in range(job.spec.repeats):
            each, first = _once(job, prompt)
            times.append(each)
            firsts.append(first)
            advance(remark=f"{each:.1f} ms/token")
    stderr = statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else None
    each = statistics.median(times)
    found = [
        Measurement(
            name=f"ms_per_token@{job.threads}",
            value=each,
            unit="ms/token",
            n=len(times),
            stderr=stderr,
            details={
                "threads": job.threads,
                "prompt_tokens": len(prompt),
                "new_tokens": job.spec.new_tokens,
            },
        ),
        Measurement(
            name=f"first_token_ms@{job.threads}",
            value=statistics.median(firsts),
            unit="ms",
            n=len(firsts),
            details={"prompt_tokens": len(prompt)},
        ),
    ]
    if job.spec.price_per_hour is not None:
        # 1,000 tokens take as many seconds as one takes milliseconds.
        cost = job.spec.price_per_hour / 3600 * each
        found.append(Measurement(name=f"cost_per_1000_tokens@{job.threads}", value=cost, unit=""))
    return found


PROBE = Probe(
    name="speed",
    summary="ms/token at batch 1: median of the repeats after a warm-up, for each thread count",
    run=_run,
    order=10,
    per_threads=True,
)
