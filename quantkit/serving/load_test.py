"""Load test: send requests to a server at fixed concurrency or rate for a fixed time, and measure the answers.

Time to first token, time per output token and latency are based on complete answers; the token rate counts all tokens
that arrived in time. Formulas: docs/serving.md.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np

from quantkit.data.texts import PROMPTS, WARM_UP
from quantkit.errors import RecipeError
from quantkit.records.recipe import LoadTestSpec, Strict
from quantkit.records.report import Hardware, Measurement, this_machine
from quantkit.report.statistics import percentiles
from quantkit.serving.client import OK, UNFINISHED, Answer, Endpoint, send
from quantkit.system.progress import Progress
from quantkit.system.untrusted import path_of, read_text

FIRST_REST, LONGEST_REST = 0.05, 1.0  # seconds after a failure, doubled for each failure in a row
HOPELESS = ("refused", "connect timeout")  # failures of the warm-up that end the test
AT_A_RATE = 256  # requests at once by default, at a rate


class LoadReport(Strict):
    """Results of a load test: `counts` are requests by outcome, `examples` are failure messages."""

    endpoint: str
    model: str
    api: str
    settings: LoadTestSpec
    client: Hardware
    seconds: float
    counts: dict[str, int]
    examples: dict[str, str]
    notes: tuple[str, ...]
    measurements: tuple[Measurement, ...]

    @property
    def completed(self) -> int:
        return self.counts.get(OK, 0)

    @property
    def failed(self) -> int:
        return sum(count for kind, count in self.counts.items() if kind not in (OK, UNFINISHED))

    def find(self, name: str) -> Measurement | None:
        return next((m for m in self.measurements if m.name == name), None)


def prompts_of(path: Path) -> tuple[str, ...]:
    """Read prompts from a UTF-8 file, one per line; raise RecipeError."""
    path = path_of(path, RecipeError)
    prompts = tuple(line.strip() for line in read_text(path, RecipeError).splitlines() if line.strip())
    if not prompts:
        raise RecipeError(f"{path} has no prompts; write one per line")
    return prompts


def run_load_test(
    endpoint: Endpoint, spec: LoadTestSpec, prompts: tuple[str, ...] | None = None, progress: Progress | None = None
) -> LoadReport:
    """Run a load test on the endpoint and return its report; it always ends on time."""
    return asyncio.run(_LoadTest(endpoint, spec, prompts or PROMPTS, progress or Progress()).report())


class _LoadTest:
    def __init__(self, endpoint: Endpoint, spec: LoadTestSpec, prompts: tuple[str, ...], progress: Progress) -> None:
        self.endpoint, self.spec, self.progress = endpoint, spec, progress
        self.answers: list[Answer] = []
        self.limit = spec.concurrency or (1 if spec.request_rate is None else AT_A_RATE)
        self.client = endpoint.client(self.limit, spec.connect_timeout)
        self.order = itertools.cycle(prompts)
        self.left = itertools.count() if spec.requests is None else iter(range(spec.requests))
        self.in_flight = self.max_in_flight = self.waited = 0
        self.begin = 0.0

    async def report(self) -> LoadReport:
        async with self.client:
            hopeless = False
            for _ in range(self.spec.warm_up):  # before the measurement
                answer = Answer(due=time.perf_counter())
                await send(self.client, self.endpoint, WARM_UP, self.spec, answer)
                if hopeless := answer.kind in HOPELESS:
                    self.answers.append(answer)
                    break
            self.begin = time.perf_counter()
            if not hopeless:
                await self._send()
        seconds = min(max(time.perf_counter() - self.begin, 1e-9), self.spec.duration)
        notes = []
        if any(a.kind == OK and a.new_tokens is None for a in self.answers):
            notes.append("the server reports no token counts, so each chunk of text counts as one token")
        if self.waited:
            notes.append(f"{self.waited} requests waited since {self.limit} were open; their wait counts")
        return LoadReport(
            endpoint=self.endpoint.shown,
            model=self.endpoint.model,
            api=self.endpoint.api,
            settings=self.spec,
            client=this_machine(),
            seconds=seconds,
            counts=dict(Counter(answer.kind for answer in self.answers).most_common()),
            examples={answer.kind: answer.message for answer in reversed(self.answers) if answer.message},
            notes=tuple(notes),
            measurements=tuple(measured(self.answers, seconds, self.max_in_flight, self.spec.price_per_hour)),
        )

    async def _send(self) -> None:
        """Send requests until the time or number of requests is reached, then cancel open ones."""
        rate = self.spec.request_rate
        work = [self._caller() for _ in range(self.limit)] if rate is None else [self._arrivals(rate)]
        tasks, ticker = [asyncio.ensure_future(one) for one in work], asyncio.ensure_future(self._tick())
        await asyncio.wait(tasks, timeout=self.spec.duration)
        for task in (*tasks, ticker):
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _caller(self) -> None:
        """Send requests one after another; pause after a failure to avoid flooding a broken server."""
        rest = FIRST_REST
        for _ in self.left:
            if (await self._one(time.perf_counter())).kind == OK:
                rest = FIRST_REST
            else:
                await asyncio.sleep(rest)
                rest = min(2 * rest, LONGEST_REST)

    async def _arrivals(self, rate: float) -> None:
        """Send requests as a Poisson process. A request over the concurrency limit waits, and its wait counts."""
        times, room, due = random.Random(self.spec.seed), asyncio.Semaphore(self.limit), self.begin
        async with asyncio.TaskGroup() as group:
            for _ in self.left:
                due += times.expovariate(rate)
                await asyncio.sleep(due - time.perf_counter())
                self.waited += room.locked()
                await room.acquire()
                group.create_task(self._one(due)).add_done_callback(lambda _: room.release())

    async def _one(self, due: float) -> Answer:
        answer = Answer(due)
        self.answers.append(answer)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await send(self.client, self.endpoint, next(self.order), self.spec, answer)
        finally:
            self.in_flight -= 1
        return answer

    async def _tick(self) -> None:
        with self.progress.step(f"load on {self.endpoint.shown}", round(self.spec.duration)) as advance:
            while True:
                await asyncio.sleep(1)
                ended = sum(answer.kind == OK for answer in self.answers)
                advance(remark=f"{ended} answers, {sum(len(a.stamps) for a in self.answers)} chunks of text")


def measured(answers: list[Answer], seconds: float, max_in_flight: int, price: float | None) -> list[Measurement]:
    """Return the figures of all answers; `seconds`: time in which tokens were counted, `price`: per hour."""
    done = [a for a in answers if a.kind == OK]
    times = {
        "ttft_ms": [a.stamps[0] - a.due for a in done if a.stamps],
        "tpot_ms": [(a.stamps[-1] - a.stamps[0]) / (a.tokens - 1) for a in done if a.stamps and a.tokens > 1],
        "itl_ms": [gap for a in done for gap in np.diff(a.stamps).tolist()],
        "latency_ms": [a.ended - a.due for a in done],
    }
    figures: list[Measurement] = []
    for name, values in times.items():
        if values:
            values = [1000 * value for value in values]
            details = percentiles(values) | {"mean": statistics.fmean(values)}
            figures.append(
                Measurement(name=name, value=float(details["p50"]), unit="ms", n=len(values), details=details)
            )

    def add(name: str, value: float, unit: str = "", n: int | None = None) -> None:
        figures.append(Measurement(name=name, value=value, unit=unit, n=n))

    # A chunk of text can have several tokens; an unfinished answer has no count from the server.
    pieces, tokens = sum(len(a.stamps) for a in done), sum(a.tokens for a in done)
    new = tokens + (tokens / pieces if pieces else 1.0) * sum(len(a.stamps) for a in answers if a.kind != OK)
    add("requests_per_second", len(done) / seconds, "requests/s")
    add("output_tokens_per_second", new / seconds, "tokens/s")
    prompt_tokens = [a.prompt_tokens for a in done if a.prompt_tokens is not None]
    if done and len(prompt_tokens) == len(done):
        add("total_tokens_per_second", (new + sum(prompt_tokens)) / seconds, "tokens/s")
    if done:
        add("tokens_per_answer", tokens / len(done), "tokens", len(done))
    add("max_in_flight", max_in_flight, "requests")
    if price is not None and new:
        add("cost_per_1000_tokens", 1000 * price / 3600 * seconds / new)
        if done:
            add("cost_per_million_requests", 1e6 * price / 3600 * seconds / len(done))
    return figures
