"""Load: requests to a server at a fixed concurrency or a fixed rate for a fixed time, and what it answered.

Formulas are in docs/serving.md. Time to first token, time per output token and latency are those of answers that
came to their end; tokens are counted whenever they came within the time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import Field

from quantkit.data.prompts import PROMPTS, WARM_UP
from quantkit.errors import RecipeError
from quantkit.progress import Progress
from quantkit.recipe import Positive, Strict
from quantkit.report.records import Hardware, Measurement, this_machine
from quantkit.report.statistics import percentiles
from quantkit.serving.client import OK, UNFINISHED, Answer, Endpoint, Limits, ask

FIRST_REST, LONGEST_REST = 0.05, 1.0  # seconds after a failure, doubled with each in a row
HOPELESS = ("refused", "connect timeout")  # of the warm-up: nothing more is sent
MANY = 256  # requests at once, at a fixed rate


class LoadSpec(Strict):
    """What is sent for how long."""

    concurrency: int | None = Field(
        None, ge=1, le=4096, description="most requests at once; default: 1, or 256 at a rate"
    )
    rate: Positive | None = Field(None, description="requests a second, at random times; default: as answered")
    seconds: Positive = Field(30.0, description="how long requests are sent and tokens are counted")
    requests: int | None = Field(None, ge=1, description="most requests; default: no limit")
    new_tokens: int = Field(200, ge=1, description="most tokens of an answer")
    warm_up: int = Field(1, ge=0, description="requests before the clock starts")
    seed: int = Field(0, description="of the random times")
    connect_limit: Positive = Field(10.0, description="seconds for a connection")
    first_token_limit: Positive = Field(60.0, description="seconds for the first token")
    pause_limit: Positive = Field(30.0, description="seconds between two tokens")
    answer_limit: Positive = Field(300.0, description="seconds for an answer")
    price_per_hour: Positive | None = Field(None, description="of the server, in any currency")

    @property
    def limits(self) -> Limits:
        """The limits of one request."""
        return Limits(self.connect_limit, self.first_token_limit, self.pause_limit, self.answer_limit)

    @property
    def most(self) -> int:
        """Most requests at once."""
        return self.concurrency or (1 if self.rate is None else MANY)


class LoadReport(Strict):
    """What a server did under load. `counts` are requests by kind, with an example of what was said about some."""

    endpoint: str
    model: str
    api: str
    settings: LoadSpec
    client: Hardware
    seconds: float
    counts: dict[str, int]
    examples: dict[str, str]
    notes: tuple[str, ...]
    measurements: tuple[Measurement, ...]

    @property
    def completed(self) -> int:
        """Answers that came to their end."""
        return self.counts.get(OK, 0)

    @property
    def failed(self) -> int:
        """Requests that failed, of any kind."""
        return sum(count for kind, count in self.counts.items() if kind not in (OK, UNFINISHED))

    def find(self, name: str) -> Measurement | None:
        """The measurement of that name."""
        return next((m for m in self.measurements if m.name == name), None)


def prompts_of(path: Path) -> tuple[str, ...]:
    """The prompts in a UTF-8 file, one a line; raises RecipeError."""
    try:
        found = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the prompts {path} cannot be read: {error}") from None
    if not found:
        raise RecipeError(f"{path} has no prompts; write one a line")
    return found


def load(
    endpoint: Endpoint, spec: LoadSpec, prompts: tuple[str, ...] = PROMPTS, progress: Progress | None = None
) -> LoadReport:
    """Put the endpoint under load and report. It ends on time, whatever the server does."""
    return asyncio.run(_Run(endpoint, spec, prompts, progress or Progress()).report())


class _Run:
    def __init__(self, endpoint: Endpoint, spec: LoadSpec, prompts: tuple[str, ...], progress: Progress) -> None:
        self.endpoint, self.spec, self.prompts, self.progress = endpoint, spec, prompts, progress
        self.answers: list[Answer] = []
        self.client = endpoint.client(spec.most, spec.limits)
        self.order = itertools.cycle(prompts)
        self.open = self.most_open = self.waited = 0
        self.begin = self.deadline = 0.0

    async def report(self) -> LoadReport:
        async with self.client:
            warm = await self._warm_up()
            self.begin = time.perf_counter()
            self.deadline = self.begin + self.spec.seconds
            if warm is None:
                ticker = asyncio.ensure_future(self._tick())
                await self._send()
                ticker.cancel()
            else:
                self.answers.append(warm)
        seconds = max(min(time.perf_counter(), self.deadline) - self.begin, 1e-9)
        return self._summed(seconds)

    async def _warm_up(self) -> Answer | None:
        """Send what comes before the clock starts; the answer of one that shows that more is hopeless."""
        for _ in range(self.spec.warm_up):
            answer = Answer(due=time.perf_counter())
            await ask(self.client, self.endpoint, WARM_UP, self.spec.new_tokens, self.spec.limits, answer)
            if answer.kind in HOPELESS:
                return answer
        return None

    async def _send(self) -> None:
        """Send until the time is over or the number of requests is reached; what is open then is cut off."""
        left = itertools.count() if self.spec.requests is None else iter(range(self.spec.requests))
        if self.spec.rate is None:
            work = [self._caller(left) for _ in range(self.spec.most)]
        else:
            work = [self._arrivals(left, self.spec.rate)]
        tasks = [asyncio.ensure_future(one) for one in work]
        await asyncio.wait(tasks, timeout=max(0.0, self.deadline - time.perf_counter()))
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _caller(self, left: Iterator[int]) -> None:
        """One request after the other. After a failure it rests, so that a broken server is not overrun."""
        rest = FIRST_REST
        for _ in left:
            if (await self._one(time.perf_counter())).kind == OK:
                rest = FIRST_REST
            else:
                await asyncio.sleep(rest)
                rest = min(2 * rest, LONGEST_REST)

    async def _arrivals(self, left: Iterator[int], rate: float) -> None:
        """Requests at times drawn from a Poisson process. One that finds no room waits, and its wait counts."""
        times, room, due = random.Random(self.spec.seed), asyncio.Semaphore(self.spec.most), self.begin
        async with asyncio.TaskGroup() as group:
            for _ in left:
                due += times.expovariate(rate)
                await asyncio.sleep(due - time.perf_counter())
                self.waited += room.locked()
                await room.acquire()
                group.create_task(self._one(due)).add_done_callback(lambda _: room.release())

    async def _one(self, due: float) -> Answer:
        answer = Answer(due)
        self.answers.append(answer)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await ask(self.client, self.endpoint, next(self.order), self.spec.new_tokens, self.spec.limits, answer)
        finally:
            self.open -= 1
        return answer

    async def _tick(self) -> None:
        with self.progress.step(f"load on {self.endpoint.shown}", round(self.spec.seconds)) as advance:
            while True:
                await asyncio.sleep(1)
                ended = sum(answer.kind == OK for answer in self.answers)
                advance(remark=f"{ended} answers, {sum(len(a.stamps) for a in self.answers)} pieces of text")

    def _summed(self, seconds: float) -> LoadReport:
        counts = Counter(answer.kind for answer in self.answers)
        examples: dict[str, str] = {}
        for answer in self.answers:
            if answer.said:
                examples.setdefault(answer.kind, answer.said)
        return LoadReport(
            endpoint=self.endpoint.shown,
            model=self.endpoint.model,
            api=self.endpoint.api,
            settings=self.spec,
            client=this_machine(),
            seconds=seconds,
            counts=dict(counts.most_common()),
            examples=examples,
            notes=tuple(self._notes()),
            measurements=tuple(measured(self.answers, seconds, self.most_open, self.spec.price_per_hour)),
        )

    def _notes(self) -> Iterator[str]:
        if any(a.kind == OK and a.new_tokens is None for a in self.answers):
            yield "the server does not tell its count of tokens: each piece of text was taken for one"
        if self.waited:
            yield f"{self.waited} requests found {self.spec.most} others open and waited; their wait counts"


def measured(answers: list[Answer], seconds: float, most_open: int, price: float | None) -> list[Measurement]:
    """The figures of all answers. seconds: how long tokens were counted; price: of an hour."""
    done = [a for a in answers if a.kind == OK]
    found: list[Measurement] = []

    def spread(name: str, values: list[float]) -> None:
        if values:
            details = percentiles(values) | {"mean": statistics.fmean(values)}
            found.append(Measurement(name=name, value=float(details["p50"]), unit="ms", n=len(values), details=details))

    def rate(name: str, count: float, unit: str) -> None:
        found.append(Measurement(name=name, value=count / seconds, unit=unit))

    spread("ttft_ms", [1000 * (a.stamps[0] - a.due) for a in done if a.stamps])
    spread("tpot_ms", [1000 * (a.stamps[-1] - a.stamps[0]) / (a.tokens - 1) for a in done if a.stamps and a.tokens > 1])
    spread("itl_ms", [1000 * gap for a in done for gap in np.diff(a.stamps).tolist()])
    spread("latency_ms", [1000 * (a.ended - a.due) for a in done])
    # A piece of text can hold several tokens; what did not come to its end has no count of the server's.
    pieces = sum(len(a.stamps) for a in done)
    each = sum(a.tokens for a in done) / pieces if pieces else 1.0
    new = sum(a.tokens if a.kind == OK else each * len(a.stamps) for a in answers)
    rate("requests_per_second", len(done), "requests/s")
    rate("output_tokens_per_second", new, "tokens/s")
    told = [a.prompt_tokens for a in done if a.prompt_tokens is not None]
    if done and len(told) == len(done):
        rate("total_tokens_per_second", new + sum(told), "tokens/s")
    if done:
        mean = statistics.fmean(a.tokens for a in done)
        found.append(Measurement(name="tokens_per_answer", value=mean, unit="tokens", n=len(done)))
    found.append(Measurement(name="most_open", value=most_open, unit="requests"))
    if price is not None and new:
        second = price / 3600
        found.append(Measurement(name="cost_per_1000_tokens", value=1000 * second * seconds / new, unit=""))
        if done:
            cost = 1e6 * second * seconds / len(done)
            found.append(Measurement(name="cost_per_million_requests", value=cost, unit=""))
    return found
