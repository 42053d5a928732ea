"""The probes speed and throughput on a model whose times are known, and the size of a process."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest

from quantkit.contracts.registry import find_probe
from quantkit.probes import _generation
from quantkit.probes.throughput import GENERATED, PROMPT
from quantkit.progress import Progress
from quantkit.recipe import EvaluationSpec


class Timed:
    """Makes the tokens 0, 1, 2, ... in known seconds: for the prompt, and for each further one, of each generation."""

    def __init__(self, seconds, monkeypatch):
        self.now, self.left, self.asked = 100.0, list(seconds), list[tuple[list[int], int]]()
        monkeypatch.setattr(_generation.time, "perf_counter", lambda: self.now)

    def stream(self, ids, count):
        prompt, token = self.left.pop(0)
        self.asked.append((ids, count))
        for made in range(count):
            self.now += token if made else prompt
            yield made


def run(name, model, n_ctx=1000, **settings):
    job = SimpleNamespace(
        loaded=model,
        spec=EvaluationSpec(**settings),
        threads=3,
        n_ctx=n_ctx,
        progress=Progress(),
        cut=SimpleNamespace(windows=[SimpleNamespace(ids=np.arange(50))]),
        model=SimpleNamespace(tokenizer=lambda: range(70), config={"vocab_size": 60}),
    )
    found = {m.name: m for m in find_probe(name).run(job)}
    assert model.left == []
    return found


# The first generation is the warm-up, a hundred times as slow. Milliseconds a token: 40, 10, 20, 70, 30.
SPEEDS = [(9.0, 9.0), (0.5, 0.04), (0.1, 0.01), (0.2, 0.02), (0.7, 0.07), (0.3, 0.03)]


def test_speed_by_hand(monkeypatch):
    model = Timed(SPEEDS, monkeypatch)
    found = run("speed", model, repeats=5, new_tokens=6, price_per_hour=7.2)
    assert list(found) == ["ms_per_token@3", "ttft_ms@3", "cost_per_1000_tokens@3"]
    each, first, cost = found.values()
    # Of 6 tokens 5 come after the first one; the mean would be 34, the best 10, the worst 70.
    assert each.value == pytest.approx(30)
    assert each.stderr == pytest.approx(statistics.stdev([40, 10, 20, 70, 30]) / 5**0.5)
    assert (each.unit, each.n) == ("ms/token", 5)
    assert each.details == {"threads": 3, "prompt_tokens": 32, "new_tokens": 6}
    assert first.value == pytest.approx(300)  # of 500, 100, 200, 700, 300
    assert (first.unit, first.n, first.details) == ("ms", 5, {"prompt_tokens": 32})
    # 1,000 tokens at 30 ms are 30 s; a second costs 0.002.
    assert cost.value == pytest.approx(0.06)
    assert [(len(ids), count) for ids, count in model.asked] == [(32, 6)] * 6


def test_speed_of_an_even_number_and_of_one(monkeypatch):
    model = Timed(SPEEDS[:3], monkeypatch)
    assert run("speed", model, repeats=2, new_tokens=20)["ms_per_token@3"].value == pytest.approx(25)
    assert [count for _, count in model.asked] == [8, 20, 20]  # the warm-up is short
    one = run("speed", Timed(SPEEDS[:2], monkeypatch), repeats=1, new_tokens=6)
    assert one["ms_per_token@3"].value == pytest.approx(40)
    assert one["ms_per_token@3"].stderr is None
    assert "cost_per_1000_tokens@3" not in one


def test_throughput_by_hand(monkeypatch):
    # A prompt alone is read in 1, 2 and 4 s; 128 tokens, the first in 1 s, take 1 + 127 * 1 and 1 + 127 * 3 s.
    read = [(99.0, 0.0), (1.0, 0.0), (2.0, 0.0), (4.0, 0.0)]
    made = [(99.0, 9.0), (1.0, 1.0), (1.0, 3.0), (1.0, 1.0)]
    model = Timed([*read, *made], monkeypatch)
    found = run("throughput", model, repeats=3)
    assert list(found) == ["pp512@3", "tg128@3"]
    rates = {"pp512@3": [512 / 1, 512 / 2, 512 / 4], "tg128@3": [128 / 128, 128 / 382, 128 / 128]}
    for name, want in rates.items():
        assert found[name].value == pytest.approx(statistics.fmean(want))
        assert found[name].n == 3
        # llama-bench gives the standard deviation; the standard error is smaller.
        assert found[name].details["stdev"] == pytest.approx(statistics.stdev(want))
        assert found[name].stderr == pytest.approx(statistics.stdev(want) / 3**0.5)
    assert [(len(ids), count) for ids, count in model.asked] == [(PROMPT, 1)] * 4 + [(1, GENERATED)] * 4
    assert all(0 <= token < 60 for ids, _ in model.asked for token in ids)


def test_throughput_of_one_repeat_has_no_spread(monkeypatch):
    found = run("throughput", Timed([(9.0, 9.0), (1.0, 0.0)] * 2, monkeypatch), n_ctx=101, repeats=1)
    assert list(found) == ["pp100@3", "tg100@3"]
    assert [(m.stderr, m.details) for m in found.values()] == [(None, {})] * 2
