"""The probes answers and throughput: their figures by hand, and measured on real engines."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from test_speed import Timed
from tiny_models import EVALUATION, changed_copy, quantkit, succeeds

from quantkit import evaluate
from quantkit.data.prompts import PROMPTS
from quantkit.probes._generation import Generation, generate
from quantkit.probes.answers import _measured


def test_the_figures_by_hand():
    answers = [Generation((0.5, 0.7, 1.0)), Generation((1.0, 2.0)), Generation((0.25,))]
    found = {m.name: m for m in _measured(answers, 2)}
    rates = [3 / 1.0, 2 / 2.0, 1 / 0.25]
    assert found["answers_tokens_per_second@2"].value == pytest.approx(np.mean(rates))
    assert found["answers_tokens_per_second@2"].stderr == pytest.approx(np.std(rates, ddof=1) / 3**0.5)
    assert found["answers_seconds@2"].value == pytest.approx((1.0 + 2.0 + 0.25) / 3)
    assert found["answers_tokens@2"].value == 2
    assert found["answers_ttft_ms@2"].value == pytest.approx(500)
    assert found["answers_ms_per_token@2"].value == pytest.approx((250 + 1000) / 2)  # the answer of one token has none
    assert found["answers_itl_ms@2"].value == pytest.approx(300)  # of 200, 300, 1000
    # Between the second and the third of 200, 300, 1000: at 0.8 and at 0.98 of the way.
    assert found["answers_itl_ms@2"].details == {
        "p50": pytest.approx(300),
        "p90": pytest.approx(860),
        "p99": pytest.approx(986),
    }
    assert [m.n for m in found.values()] == [3, 3, 3, 3, 2, 3]


def test_a_generation_ends_at_its_count_or_at_an_end_token(monkeypatch):
    job = SimpleNamespace(loaded=Timed([(1.0, 0.5), (2.0, 0.5)], monkeypatch))
    made = generate(job, [7], 4)
    assert made == Generation((1.0, 1.5, 2.0, 2.5))
    assert (made.seconds, made.ttft_ms, made.ms_per_token) == (2.5, 1000.0, 500.0)
    assert made.tokens_per_second == 4 / 2.5
    assert made.gaps_ms == [500.0] * 3
    assert generate(job, [7, 7], 4, frozenset({1, 3})) == Generation((2.0, 2.5))


def test_an_engine_answers_nine_prompts_and_its_throughput_takes_what_the_context_has(gguf):
    report = evaluate(gguf, ("answers", "throughput", "memory"), **EVALUATION, repeats=2, max_tokens=6)
    tokens, rate, ttft = (report.find(f"answers_{name}@1") for name in ("tokens", "tokens_per_second", "ttft_ms"))
    assert tokens.n == rate.n == len(PROMPTS) == 9
    assert 1 <= tokens.value <= 6
    assert rate.value > 0
    assert 0 < float(ttft.details["p50"]) <= float(ttft.details["p90"]) <= float(ttft.details["p99"])
    read, made = report.find("pp511@1"), report.find("tg128@1")  # of a context of 512
    assert read.n == made.n == 2
    assert read.value > made.value > 0  # a prompt is read many tokens at a time
    assert float(read.details["stdev"]) >= 0


def test_an_answer_ends_where_the_model_ends_it(tiny, tmp_path):
    """With every token an end token, every answer has one token."""
    folder = changed_copy(tiny, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(config["vocab_size"]))}))
    report = evaluate(str(folder), ("answers",), **EVALUATION, max_tokens=6)
    tokens = report.find("answers_tokens@1")
    assert tokens.value == 1
    assert report.find("answers_ms_per_token@1") is None


def test_the_command(gguf, tmp_path):
    flags = ["--threads", 1, "--max-tokens", 3, "--price-per-hour", 2, "--json", tmp_path / "report.json"]
    done = succeeds("bench", gguf.folder, *flags)
    for part in ("prompt tokens/s", "generated tokens/s", "answers: tokens/s", "ms to first token", "cost per 1,000"):
        assert part in done.out, part
    assert (tmp_path / "report.json").is_file()
    assert quantkit("bench", "demo", "--endpoint", "http://x/v1").code == 2
