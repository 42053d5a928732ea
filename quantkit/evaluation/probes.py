"""The probes, in running order. Formulas: docs/evaluating/speed-and-memory.md.

How to add one: docs/contributing/add-a-figure.md.

Generation is greedy with one sequence. The times of a generation are seconds from the prompt to each generated token.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from quantkit.data.texts import PROMPTS, WARM_UP, encode
from quantkit.errors import EngineError, RecipeError, near_miss
from quantkit.evaluation.perplexity import Probe, ProbeJob, measure_perplexity
from quantkit.models.config import vocabulary_of
from quantkit.records.report import Measurement
from quantkit.report.statistics import mean_and_error, percentiles
from quantkit.system.memory import device_peak_bytes, peak_rss_bytes
from quantkit.system.processor import threads
from quantkit.system.sizes import bits_per_weight

PROMPT_TOKENS = 32
WARM_UP_TOKENS = 8  # enough to fill caches, start threads, and finish an engine's set-up at its first call
READ, GENERATED = 512, 128  # tokens, as in llama-bench
ANSWER_TOKENS = 384  # our longest prompt and 200 tokens


def measure_size(job: ProbeJob) -> list[Measurement]:
    """Return the total bytes of the weight files, and the bits per parameter of the source model."""
    total = sum(path.stat().st_size for path in job.model.weight_files)
    parameters = job.model.parameters
    return [
        Measurement(name="weight_bytes", value=total, unit="bytes", n=len(job.model.weight_files)),
        Measurement(name="bits_per_weight", value=bits_per_weight(total, parameters), unit="bits", n=parameters),
    ]


def generate(job: ProbeJob, prompt: list[int], count: int, ends: frozenset[int] = frozenset()) -> list[float]:
    """Generate `count` tokens after the prompt, or up to one of `ends`; return each token's time in seconds."""
    begin = time.perf_counter()
    times: list[float] = []
    for token in job.loaded.stream(prompt, count):
        times.append(time.perf_counter() - begin)
        if token in ends:
            break
    return times


def ms_per_token(times: list[float]) -> float:
    """Return (last time - first time) / (tokens - 1) in milliseconds, for at least two tokens."""
    return 1000 * (times[-1] - times[0]) / (len(times) - 1)


def first_prompt(job: ProbeJob) -> list[int]:
    """Return the first `PROMPT_TOKENS` tokens of the text."""
    ids: list[int] = job.cut.windows[0].ids[:PROMPT_TOKENS].tolist()
    return ids


def measure_memory(job: ProbeJob) -> list[Measurement]:
    """Return the peak resident memory of loading and generating, and the peak of torch's GPU allocator."""
    generate(job, first_prompt(job), job.spec.new_tokens)
    generating, on_gpu = peak_rss_bytes(), device_peak_bytes()
    details = {"loading": job.loading_peak, "generating": generating, "new_tokens": job.spec.new_tokens}
    peak = max(job.loading_peak, generating)
    return [
        *([Measurement(name="device_peak_bytes", value=on_gpu, unit="bytes")] if on_gpu else []),
        Measurement(name="peak_rss_bytes", value=peak, unit="bytes", details=details),
    ]


def measure_speed(job: ProbeJob) -> list[Measurement]:
    """Return the median time per token, first to last new token, and the median time to the first new token."""
    prompt, repeats, each, firsts = first_prompt(job), job.spec.repeats, [], []
    with job.progress.step(f"speed at {threads(job.threads)}", repeats + 1) as advance:
        generate(job, prompt, min(WARM_UP_TOKENS, job.spec.new_tokens))
        advance()
        for _ in range(repeats):
            times = generate(job, prompt, job.spec.new_tokens)
            each.append(ms_per_token(times))
            firsts.append(1000 * times[0])
            advance(remark=f"{each[-1]:.1f} ms/token")
    stderr = statistics.stdev(each) / repeats**0.5 if repeats > 1 else None
    median, first = statistics.median(each), statistics.median(firsts)
    of_prompt = {"prompt_tokens": len(prompt)}
    details = {"threads": job.threads, **of_prompt, "new_tokens": job.spec.new_tokens}
    measured = [
        Measurement(
            name=f"ms_per_token@{job.threads}", value=median, unit="ms/token", n=repeats, stderr=stderr,
            details=details,
        ),
        Measurement(name=f"ttft_ms@{job.threads}", value=first, unit="ms", n=repeats, details=of_prompt),
    ]  # fmt: skip
    if job.spec.price_per_hour is not None:
        # seconds for 1,000 tokens = milliseconds for one token
        cost = job.spec.price_per_hour / 3600 * median
        measured.append(Measurement(name=f"cost_per_1000_tokens@{job.threads}", value=cost, unit=""))
    return measured


def measure_throughput(job: ProbeJob) -> list[Measurement]:
    """Return the tokens/s of reading a prompt of random tokens (pp512) and of generating tokens (tg128).

    As in llama.cpp's llama-bench: mean and standard deviation of the repeats after a warm-up.
    https://github.com/ggml-org/llama.cpp/tree/master/tools/llama-bench
    """
    known, repeats = len(job.model.tokenizer()), job.spec.repeats
    vocabulary = min(known, vocabulary_of(job.model.config) or known)
    # A model with a shorter context is measured on fewer tokens; the figure's name has the number.
    read, made = min(READ, job.n_ctx - 1), min(GENERATED, job.n_ctx - 1)
    prompt = np.random.default_rng(0).integers(0, vocabulary, read).tolist()
    measured = []
    with job.progress.step(f"throughput at {threads(job.threads)}", 2 * (repeats + 1)) as advance:
        for name, ids, count, tokens in (("pp", prompt, 1, read), ("tg", prompt[:1], made, made)):
            rates = []
            for _ in range(repeats + 1):
                rates.append(tokens / generate(job, ids, count)[-1])
                advance(remark=f"{name}{tokens}: {rates[-1]:.1f} tokens/s")
            del rates[0]  # the warm-up
            spread = statistics.stdev(rates) if repeats > 1 else None
            measured.append(
                Measurement(
                    name=f"{name}{tokens}@{job.threads}", value=statistics.fmean(rates), unit="tokens/s", n=repeats,
                    stderr=None if spread is None else spread / repeats**0.5,
                    details={} if spread is None else {"stdev": spread},
                )
            )  # fmt: skip
    return measured


def measure_answers(job: ProbeJob) -> list[Measurement]:
    """Return speed figures of nine answers after a warm-up; prompts are plain text, without a chat template."""
    tokenizer, ends, answers = job.model.tokenizer(), job.model.end_tokens, []
    with job.progress.step(f"answers at {threads(job.threads)}", len(PROMPTS) + 1) as advance:
        for text in (WARM_UP, *PROMPTS):
            prompt = encode(tokenizer, text).tolist()
            limit = min(job.spec.max_tokens, job.n_ctx - len(prompt))
            if limit < 2:
                raise EngineError(
                    f"the context of {job.model.label} has {job.n_ctx} tokens, too few for the probe answers"
                )
            answers.append(generate(job, prompt, limit, ends))
            advance(remark=f"{len(answers[-1]) / answers[-1][-1]:.1f} tokens/s")
    return answer_figures(answers[1:], job.threads)


def answer_figures(answers: list[list[float]], count: int) -> list[Measurement]:
    """Return mean rates with standard errors, and percentiles of latencies, from the token times of `answers`."""
    measured = []
    for name, unit, values in (
        ("tokens_per_second", "tokens/s", [len(a) / a[-1] for a in answers]),
        ("seconds", "s", [a[-1] for a in answers]),
        ("tokens", "tokens", [float(len(a)) for a in answers]),
    ):
        value, stderr = mean_and_error(np.array(values))
        name = f"answers_{name}@{count}"
        measured.append(Measurement(name=name, value=value, unit=unit, n=len(values), stderr=stderr))
    for name, values in (
        ("ttft_ms", [1000 * a[0] for a in answers]),
        ("ms_per_token", [ms_per_token(a) for a in answers if len(a) > 1]),
        ("itl_ms", [gap for a in answers for gap in (1000 * np.diff(a)).tolist()]),
    ):
        if values:
            at = percentiles(values)
            name = f"answers_{name}@{count}"
            measured.append(Measurement(name=name, value=float(at["p50"]), unit="ms", n=len(values), details=at))
    return measured


PROBES = {
    probe.name: probe
    for probe in (
        Probe("size", measure_size),
        Probe("memory", measure_memory, generates=True),
        Probe("speed", measure_speed, generates=True, per_threads=True),
        Probe("throughput", measure_throughput, generates=True, per_threads=True, n_ctx=READ + 1, usual=False),
        Probe("answers", measure_answers, generates=True, per_threads=True, n_ctx=ANSWER_TOKENS, usual=False),
        Probe("perplexity", measure_perplexity, needs_source=True),
    )
}


def find_probe(name: str) -> Probe:
    """Return the probe `name`; raises RecipeError for an unknown name and suggests a similar one."""
    if name not in PROBES:
        raise RecipeError(f"unknown probe {name!r}.{near_miss(name, PROBES)} Known: {', '.join(sorted(PROBES))}.")
    return PROBES[name]
