"""Throughput: tokens a second when a prompt of 512 tokens is read (pp512), and when 128 are generated (tg128).

What llama.cpp's llama-bench measures, for every engine: random tokens, batch 1, after a warm-up the mean and the
standard deviation of the repeats. https://github.com/ggml-org/llama.cpp/tree/master/tools/llama-bench
"""

from __future__ import annotations

import statistics

import numpy as np

from quantkit.contracts.probe import Probe, ProbeJob
from quantkit.models.config import vocabulary_of
from quantkit.probes._generation import generate
from quantkit.report.records import Measurement
from quantkit.system.processor import threads

PROMPT, GENERATED = 512, 128


def _run(job: ProbeJob) -> list[Measurement]:
    tokens = len(job.model.tokenizer())
    vocabulary = min(tokens, vocabulary_of(job.model.config) or tokens)
    # A model with a shorter context is measured on what it has; the figure's name tells it.
    read, made = min(PROMPT, job.n_ctx - 1), min(GENERATED, job.n_ctx - 1)
    prompt = np.random.default_rng(0).integers(0, vocabulary, read).tolist()
    measured = []
    with job.progress.step(f"throughput at {threads(job.threads)}", 2 * (job.spec.repeats + 1)) as advance:
        for name, ids, count, tokens in (("pp", prompt, 1, read), ("tg", prompt[:1], made, made)):
            rates = []
            for repeat in range(job.spec.repeats + 1):
                rate = tokens / generate(job, ids, count).seconds
                if repeat:
                    rates.append(rate)
                advance(remark=f"{name}{tokens}: {rate:.1f} tokens/s")
            spread = statistics.stdev(rates) if len(rates) > 1 else None
            measured.append(
                Measurement(
                    name=f"{name}{tokens}@{job.threads}",
                    value=statistics.fmean(rates),
                    unit="tokens/s",
                    n=len(rates),
                    stderr=None if spread is None else spread / len(rates) ** 0.5,
                    details={} if spread is None else {"stdev": spread},
                )
            )
    return measured


PROBE = Probe(
    name="throughput",
    summary="tokens/s of reading 512 tokens and of generating 128, as llama-bench has them, for each thread count",
    run=_run,
    order=14,
    generates=True,
    per_threads=True,
    n_ctx=PROMPT + 1,
    usual=False,
)
