import json
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_llama import VOCABULARY
from tiny_models import EVALUATION, changed_copy, quantkit, succeeds

from quantkit import evaluate
from quantkit.data.texts import PROMPTS
from quantkit.evaluation import probes
from quantkit.evaluation.probes import GENERATED, READ, answer_figures, find_probe, generate, ms_per_token
from quantkit.records.recipe import EvaluationSpec
from quantkit.system.progress import Progress

# The first generation is the warm-up, a hundred times as slow. Milliseconds a token: 40, 10, 20, 70, 30.
SPEEDS = [(9.0, 9.0), (0.5, 0.04), (0.1, 0.01), (0.2, 0.02), (0.7, 0.07), (0.3, 0.03)]


class Timed:
    """Makes the tokens 0, 1, 2, ... in known seconds: for the prompt, and for each further one, of each generation."""

    def __init__(self, seconds, monkeypatch):
        self.now, self.left, self.asked = 100.0, list(seconds), list[tuple[list[int], int]]()
        monkeypatch.setattr(probes.time, "perf_counter", lambda: self.now)

    def stream(self, ids, count):
        prompt, token = self.left.pop(0)
        self.asked.append((ids, count))
        for made in range(count):
            self.now += token if made else prompt
            yield made


def run(name, model, n_ctx=1000, **settings):
    job = SimpleNamespace(
        loaded=model, spec=EvaluationSpec(**settings), threads=3, n_ctx=n_ctx, progress=Progress(),
        cut=SimpleNamespace(windows=[SimpleNamespace(ids=np.arange(50))]),
        model=SimpleNamespace(tokenizer=lambda: range(70), config={"vocab_size": 60}),
    )  # fmt: skip
    found = {m.name: m for m in find_probe(name).run(job)}
    assert model.left == []
    return found


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


def test_throughput_by_hand_and_of_one_repeat_without_a_spread(monkeypatch):
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
    assert [(len(ids), count) for ids, count in model.asked] == [(READ, 1)] * 4 + [(1, GENERATED)] * 4
    assert all(0 <= token < 60 for ids, _ in model.asked for token in ids)
    found = run("throughput", Timed([(9.0, 9.0), (1.0, 0.0)] * 2, monkeypatch), n_ctx=101, repeats=1)
    assert list(found) == ["pp100@3", "tg100@3"]
    assert [(m.stderr, m.details) for m in found.values()] == [(None, {})] * 2


def test_the_figures_by_hand():
    answers = [[0.5, 0.7, 1.0], [1.0, 2.0], [0.25]]
    found = {m.name: m for m in answer_figures(answers, 2)}
    rates = [3 / 1.0, 2 / 2.0, 1 / 0.25]
    assert found["answers_tokens_per_second@2"].value == pytest.approx(np.mean(rates))
    assert found["answers_tokens_per_second@2"].stderr == pytest.approx(np.std(rates, ddof=1) / 3**0.5)
    assert found["answers_seconds@2"].value == pytest.approx((1.0 + 2.0 + 0.25) / 3)
    assert found["answers_tokens@2"].value == 2
    assert found["answers_ttft_ms@2"].value == pytest.approx(500)
    assert found["answers_ms_per_token@2"].value == pytest.approx((250 + 1000) / 2)  # the answer of one token has none
    assert found["answers_itl_ms@2"].value == pytest.approx(300)  # of 200, 300, 1000
    # Between the second and the third of 200, 300, 1000: at 0.8 and at 0.98 of the way.
    assert found["answers_itl_ms@2"].details == pytest.approx({"p50": 300, "p90": 860, "p99": 986})
    assert [m.n for m in found.values()] == [3, 3, 3, 3, 2, 3]


def test_a_generation_ends_at_its_count_or_at_an_end_token(monkeypatch):
    job = SimpleNamespace(loaded=Timed([(1.0, 0.5), (2.0, 0.5)], monkeypatch))
    assert generate(job, [7], 4) == [1.0, 1.5, 2.0, 2.5]
    assert ms_per_token([1.0, 1.5, 2.0, 2.5]) == 500.0
    assert generate(job, [7, 7], 4, frozenset({1, 3})) == [2.0, 2.5]


def test_an_engine_answers_nine_prompts_and_its_throughput_takes_what_the_context_has(artifact_of, one_block):
    gguf = artifact_of("gguf", "Q8_0", model=one_block)
    report = evaluate(gguf, ("answers", "throughput", "memory"), **EVALUATION, repeats=2, max_tokens=6)
    tokens, rate, ttft = (report.find(f"answers_{name}@1") for name in ("tokens", "tokens_per_second", "ttft_ms"))
    assert tokens.n == rate.n == len(PROMPTS) == 9
    assert 1 <= tokens.value <= 6
    assert rate.value > 0
    assert 0 < float(ttft.details["p50"]) <= float(ttft.details["p90"]) <= float(ttft.details["p99"])
    read, made = report.find("pp511@1"), report.find("tg128@1")  # of a context of 512
    assert read.n == made.n == 2
    assert read.value > made.value > 0  # a prompt is read many tokens at a time
    assert float(read.details["stdev"]) / 2**0.5 == pytest.approx(read.stderr)  # of two repeats


def test_an_answer_ends_where_the_model_ends_it(tiny, tmp_path):
    """With every token an end token, every answer has one token."""
    folder = changed_copy(tiny, tmp_path / "short")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(VOCABULARY))}))
    report = evaluate(str(folder), ("answers",), **EVALUATION, max_tokens=6)
    assert report.find("answers_tokens@1").value == 1
    assert report.find("answers_ms_per_token@1") is None


def test_the_command(artifact_of, one_block, tmp_path):
    gguf = artifact_of("gguf", "Q8_0", model=one_block)
    flags = ["--threads", 1, "--max-tokens", 3, "--price-per-hour", 2, "--json", tmp_path / "report.json"]
    done = succeeds("bench", gguf.folder, *flags)
    for part in ("prompt tokens/s", "generated tokens/s", "answers: tokens/s", "ms to first token", "cost per 1,000"):
        assert part in done.out, part
    assert (tmp_path / "report.json").is_file()
    assert quantkit("bench", "demo", "--endpoint", "http://x/v1").code == 2
