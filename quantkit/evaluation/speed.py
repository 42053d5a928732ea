"""Speed of greedy generation at batch 1, token by token. Formulas: docs/probes.md."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from quantkit.contracts.probe import ProbeJob
from quantkit.data.prompts import PROMPTS, WARM_UP
from quantkit.data.texts import encode
from quantkit.errors import EngineError
from quantkit.models.config import vocabulary_of
from quantkit.report.records import Measurement
from quantkit.report.statistics import mean_and_error, percentiles
from quantkit.system.processor import threads

PROMPT_TOKENS = 32
WARM_UP_TOKENS = 8  # caches, threads and an engine's set-up at its first call are final after a few
READ, GENERATED = 512, 128  # tokens, as in llama-bench
ANSWER_TOKENS = 384  # our longest prompt and 200 tokens


@dataclass(frozen=True)
class Generation:
    """`times` are the seconds from the prompt to each token, one or more."""

    times: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens by the time from the prompt to the last token."""
        return len(self.times) / self.times[-1]

    @property
    def ttft_ms(self) -> float:
        """Time to first token: from the prompt to the first token."""
        return 1000 * self.times[0]

    @property
    def gaps_ms(self) -> list[float]:
        """Inter-token latencies."""
        return (1000 * np.diff(self.times)).tolist()

    @property
    def ms_per_token(self) -> float:
        """(last token - first token) / (tokens - 1), without the prompt; of two tokens or more."""
        return 1000 * (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def generate(job: ProbeJob, prompt: list[int], count: int, ends: frozenset[int] = frozenset()) -> Generation:
    """Generate `count` tokens after the prompt, fewer if one of `ends` comes."""
    begin = time.perf_counter()
    times = []
    for token in job.loaded.stream(prompt, count):
        times.append(time.perf_counter() - begin)
        if token in ends:
            break
    return Generation(tuple(times))


def first_prompt(job: ProbeJob) -> list[int]:
    """Return the first tokens of the text."""
    ids: list[int] = job.cut.windows[0].ids[:PROMPT_TOKENS].tolist()
    return ids


def measure_speed(job: ProbeJob) -> list[Measurement]:
    """Return the median ms/token, from the first new token to the last, and the median time to the first new token."""
    prompt, repeats, each, firsts = first_prompt(job), job.spec.repeats, [], []
    with job.progress.step(f"speed at {threads(job.threads)}", repeats + 1) as advance:
        generate(job, prompt, min(WARM_UP_TOKENS, job.spec.new_tokens))
        advance()
        for _ in range(repeats):
            made = generate(job, prompt, job.spec.new_tokens)
            each.append(made.ms_per_token)
            firsts.append(made.ttft_ms)
            advance(remark=f"{made.ms_per_token:.1f} ms/token")
    stderr = statistics.stdev(each) / repeats**0.5 if repeats > 1 else None
    ms_per_token, first = statistics.median(each), statistics.median(firsts)
    of_prompt = {"prompt_tokens": len(prompt)}
    details = {"threads": job.threads, **of_prompt, "new_tokens": job.spec.new_tokens}
    measured = [
        Measurement(
            name=f"ms_per_token@{job.threads}", value=ms_per_token, unit="ms/token", n=repeats, stderr=stderr,
            details=details,
        ),
        Measurement(name=f"ttft_ms@{job.threads}", value=first, unit="ms", n=repeats, details=of_prompt),
    ]  # fmt: skip
    if job.spec.price_per_hour is not None:
        # 1,000 tokens take as many seconds as one takes milliseconds.
        cost = job.spec.price_per_hour / 3600 * ms_per_token
        measured.append(Measurement(name=f"cost_per_1000_tokens@{job.threads}", value=cost, unit=""))
    return measured


def measure_throughput(job: ProbeJob) -> list[Measurement]:
    """Return the tokens/s of reading a prompt of random tokens (pp512) and of generating tokens (tg128).

    As in llama.cpp's llama-bench: mean and standard deviation of the repeats after a warm-up.
    https://github.com/ggml-org/llama.cpp/tree/master/tools/llama-bench
    """
    known, repeats = len(job.model.tokenizer()), job.spec.repeats
    vocabulary = min(known, vocabulary_of(job.model.config) or known)
    # A model with a shorter context is measured on what it has; the figure's name has the number.
    read, made = min(READ, job.n_ctx - 1), min(GENERATED, job.n_ctx - 1)
    prompt = np.random.default_rng(0).integers(0, vocabulary, read).tolist()
    measured = []
    with job.progress.step(f"throughput at {threads(job.threads)}", 2 * (repeats + 1)) as advance:
        for name, ids, count, tokens in (("pp", prompt, 1, read), ("tg", prompt[:1], made, made)):
            rates = []
            for _ in range(repeats + 1):
                rates.append(tokens / generate(job, ids, count).times[-1])
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
    """Return figures of nine answers, after one to warm up; prompts are plain text, without a chat template."""
    tokenizer, ends, answers = job.model.tokenizer(), job.model.end_tokens, []
    with job.progress.step(f"answers at {threads(job.threads)}", len(PROMPTS) + 1) as advance:
        for text in (WARM_UP, *PROMPTS):
            prompt = encode(tokenizer, text).tolist()
            limit = min(job.spec.max_tokens, job.n_ctx - len(prompt))
            if limit < 2:
                raise EngineError(
                    f"the context of {job.model.label} is {job.n_ctx} tokens: too short for the probe answers"
                )
            answers.append(generate(job, prompt, limit, ends))
            advance(remark=f"{answers[-1].tokens_per_second:.1f} tokens/s")
    return figures_of(answers[1:], job.threads)


def figures_of(answers: list[Generation], count: int) -> list[Measurement]:
    """Return means with standard errors over the answers, and percentiles of latencies, at `count` threads."""
    measured = []
    for name, unit, values in (
        ("tokens_per_second", "tokens/s", [a.tokens_per_second for a in answers]),
        ("seconds", "s", [a.times[-1] for a in answers]),
        ("tokens", "tokens", [float(len(a.times)) for a in answers]),
    ):
        value, stderr = mean_and_error(np.array(values))
        name = f"answers_{name}@{count}"
        measured.append(Measurement(name=name, value=value, unit=unit, n=len(values), stderr=stderr))
    for name, values in (
        ("ttft_ms", [a.ttft_ms for a in answers]),
        ("ms_per_token", [a.ms_per_token for a in answers if len(a.times) > 1]),
        ("itl_ms", [gap for a in answers for gap in a.gaps_ms]),
    ):
        if values:
            at = percentiles(values)
            name = f"answers_{name}@{count}"
            measured.append(Measurement(name=name, value=float(at["p50"]), unit="ms", n=len(values), details=at))
    return measured
