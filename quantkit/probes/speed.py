"""Speed: milliseconds a token when generating greedily at batch 1, after one warm-up.

Prompt processing is left out: time runs from the first new token to the last. `first_token_ms` in the details is the
median time from the prompt to the first new token.
"""

from __future__ import annotations

import statistics
import time

from quantkit.registry import Probe, ProbeJob
from quantkit.report import Measurement

PROMPT_TOKENS = 32


def _once(job: ProbeJob, prompt: list[int]) -> tuple[float, float]:
    start = time.perf_counter()
    stamps = []
    for _ in job.model.stream(prompt, job.spec.new_tokens):
        stamps.append(time.perf_counter())
    return (stamps[-1] - stamps[0]) * 1000 / (len(stamps) - 1), (stamps[0] - start) * 1000


def _run(job: ProbeJob) -> list[Measurement]:
    prompt = max((window.ids for window in job.cut.windows[:PROMPT_TOKENS]), key=len)[:PROMPT_TOKENS].tolist()
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
    return [
        Measurement(
            name=f"ms_per_token@{job.threads}",
            value=statistics.median(times),
            unit="ms/token",
            n=len(times),
            stderr=stderr,
            details={
                "threads": job.threads,
                "prompt_tokens": len(prompt),
                "new_tokens": job.spec.new_tokens,
                "first_token_ms": statistics.median(firsts),
            },
        )
    ]


PROBE = Probe(
    name="speed",
    summary="ms/token at batch 1: median of the repeats after a warm-up, for each thread count",
    run=_run,
    order=10,
    per_threads=True,
)
