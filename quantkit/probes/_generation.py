"""Greedy generation at batch 1, timed: what the probes of speed have in common."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from quantkit.contracts.probe import ProbeJob

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Generation:
    """`times` are the seconds from the prompt to each token, one or more."""

    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From the prompt to the last token."""
        return self.times[-1]

    @property
    def tokens_per_second(self) -> float:
        """The prompt's time counts, too."""
        return len(self.times) / self.seconds

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
    """Generate `count` tokens after the prompt, fewer where one of `ends` comes."""
    begin = time.perf_counter()
    times = []
    for token in job.loaded.stream(prompt, count):
        times.append(time.perf_counter() - begin)
        if token in ends:
            break
    return Generation(tuple(times))


def first_prompt(job: ProbeJob) -> list[int]:
    """The first tokens of the text."""
    ids: list[int] = job.cut.windows[0].ids[:PROMPT_TOKENS].tolist()
    return ids
