import math

import numpy as np
import pytest
import torch

from quantkit.evaluation.perplexity import RECORD, divergence_of, score, summarize, text_rates, wilson


def logits(seed, spread=3.0):
    return (np.random.default_rng(seed).normal(size=(60, 300)) * spread).astype(np.float32)


def test_perplexity_and_its_error_by_hand_and_the_interval_of_a_share():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 and 0 of 20.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    # mean 2, mean of squares 14/3, so the error is e^2 * sqrt((14/3 - 4) / 2).
    perplexity, stderr = summarize(np.array([1.0, 2.0, 3.0]))
    assert math.isclose(perplexity, math.exp(2), rel_tol=1e-12)
    assert math.isclose(stderr, math.exp(2) * math.sqrt(1 / 3), rel_tol=1e-12)


@pytest.mark.parametrize("log_probabilities", [False, True])
def test_nll_equals_cross_entropy(log_probabilities):
    values, targets = logits(2, 5.0), np.arange(60) * 3 % 300
    want = torch.nn.functional.cross_entropy(torch.tensor(values).double(), torch.tensor(targets), reduction="none")
    given = torch.log_softmax(torch.tensor(values), -1).numpy() if log_probabilities else values
    assert np.allclose(score(given, targets)["nll"], want.numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_the_divergence_equals_its_definition(shift):
    source = logits(0)
    ours = source + np.float32(0.1) * logits(1) + np.float32(shift)
    found = score(ours, np.arange(60), source)
    p, q = (torch.log_softmax(torch.tensor(x).double(), -1) for x in (source, ours))
    want = (p.exp() * (p - q)).sum(-1).numpy()
    assert np.allclose(found["divergence"], want, rtol=1e-4, atol=5e-6)  # of float32
    assert np.allclose(found["source_nll"], -p[range(60), range(60)].numpy(), rtol=1e-5)
    assert found["agrees"].tolist() == (p.argmax(-1) == q.argmax(-1)).double().tolist()
    assert 0 < found["agrees"].sum() < 60


def test_the_figures_of_divergence_equal_their_formulas():
    source = logits(0)
    found = score(source + 0.1 * logits(1), np.arange(60) % 300, source)
    figures = {m.name: m for m in divergence_of(found)}
    kld, n = found["divergence"], 60
    ordered, mean = sorted(kld), sum(kld) / n
    # llama.cpp's percentile: between the two values around share * (n - 1).
    for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)):
        place = share * (n - 1)
        between = (1 - place % 1) * ordered[int(place)] + place % 1 * ordered[int(place) + 1]
        assert figures["kld"].details[name] == pytest.approx(between, rel=1e-9)
    assert figures["kld"].details["max"] == ordered[-1]
    ours, theirs = np.exp(-found["nll"]), np.exp(-found["source_nll"])
    squares = (ours - theirs) ** 2
    covariance = np.cov(found["nll"], found["source_nll"])
    wanted = {
        "kld": mean,
        "delta_p": sum(ours - theirs) / n,
        "delta_p_rms": math.sqrt(sum(squares) / n),
        "nll_correlation": np.corrcoef(found["nll"], found["source_nll"])[0, 1],
        "ln_perplexity_ratio": math.log(summarize(found["nll"])[0] / summarize(found["source_nll"])[0]),
    }
    errors = {
        "kld": math.sqrt(sum((k - mean) ** 2 for k in kld) / (n - 1) / n),
        "delta_p_rms": np.std(squares, ddof=1) / math.sqrt(n) / (2 * math.sqrt(squares.mean())),
        "ln_perplexity_ratio": math.sqrt((covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]) / n),
    }
    assert {name: figures[name].value for name in wanted} == pytest.approx(wanted, rel=1e-9, abs=0)
    assert {name: figures[name].stderr for name in errors} == pytest.approx(errors, rel=1e-9, abs=0)
    assert figures["kld"].value == pytest.approx(mean, rel=1e-12)
    # A model has none from itself, and without a source none at all.
    assert np.abs(score(source, np.arange(60), source)["divergence"]).max() < 1e-6
    assert divergence_of(score(source, np.arange(60))) == []


def test_rates_of_a_text_by_hand():
    found = np.zeros(3, RECORD)
    found["nll"] = [1.0, 2.0, 3.0]
    words, nbytes = np.array([2, 1]), np.array([8, 4])
    rates = {m.name: m for m in text_rates(found, np.array([0, 0, 1]), words, nbytes)}
    assert rates["word_perplexity"].value == pytest.approx(math.exp(6 / 3))
    assert rates["byte_perplexity"].value == pytest.approx(math.exp(6 / 12))
    assert rates["bits_per_byte"].value == pytest.approx(6 / 12 / math.log(2))
    # Both documents have 3 nats; at 2 nats a word 4 and 2 were expected: rests -1 and 1.
    assert rates["word_perplexity"].stderr == pytest.approx(math.exp(2) * math.sqrt(2 * 2 / 1) / 3)
    assert rates["bits_per_byte"].stderr == pytest.approx(math.sqrt(2 * (1 + 1)) / 12 / math.log(2))
    assert (rates["word_perplexity"].n, rates["bits_per_byte"].n) == (3, 12)
