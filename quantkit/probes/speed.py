"""Speed: milliseconds a token when generating greedily at batch 1, after a short warm-up.

Prompt processing is left out of ms_per_token: time runs from the first new token to the last. `ttft_ms` is the median
time from the prompt to the first new token.
"""

from __future__ import annotations

import statistics

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.probes._generation import first_prompt, generate
from quantkit.report.records import Measurement
from quantkit.system.processor import threads

WARM_UP_TOKENS = 8  # caches, threads and what an engine sets up at its first call are as they stay after few


def _run(job: ProbeJob) -> list[Measurement]:
    prompt = first_prompt(job)
    times, firsts = [], []
    with job.progress.step(f"speed at {threads(job.threads)}", job.spec.repeats + 1) as advance:
        generate(job, prompt, min(WARM_UP_TOKENS, job.spec.new_tokens))
        advance()
        for _ in range(job.spec.repeats):
            made = generate(job, prompt, job.spec.new_tokens)
            times.append(made.ms_per_token)
            firsts.append(made.ttft_ms)
            advance(remark=f"{made.ms_per_token:.1f} ms/token")
    stderr = statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else None
    each = statistics.median(times)
    measured = [
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
            name=f"ttft_ms@{job.threads}",
            value=statistics.median(firsts),
            unit="ms",
            n=len(firsts),
            details={"prompt_tokens": len(prompt)},
        ),
    ]
    if job.spec.price_per_hour is not None:
        # 1,000 tokens take as many seconds as one takes milliseconds.
        cost = job.spec.price_per_hour / 3600 * each
        measured.append(Measurement(name=f"cost_per_1000_tokens@{job.threads}", value=cost, unit=""))
    return measured


PROBE = Probe(
    name="speed",
    summary="ms/token at batch 1: median of the repeats after a warm-up, for each thread count",
    run=_run,
    order=10,
    generates=True,
    per_threads=True,
)
