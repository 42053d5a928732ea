import itertools

import numpy as np
import pytest

from quantkit.numerics.allocation import _within, fewest_bytes, least_damage


def instance(seed, tensors, kinds):
    """Random bytes, more of them for less damage, but not always."""
    rng = np.random.default_rng(seed)
    nbytes = np.sort(rng.integers(100, 10_000, (tensors, kinds)), axis=1)
    damage = np.sort(rng.exponential(1e-3, (tensors, kinds)), axis=1)[:, ::-1]
    damage[0] = damage[0][::-1]
    return nbytes.tolist(), damage.tolist()


def total(rows, chosen):
    return sum(row[k] for row, k in zip(rows, chosen, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_no_choice_is_better(seed):
    nbytes, damage = instance(seed, 6, 4)
    every = list(itertools.product(range(4), repeat=6))
    smallest, largest = sum(map(min, nbytes)), sum(map(max, nbytes))
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = int(smallest + share * (largest - smallest))
        best = min(total(damage, c) for c in every if total(nbytes, c) <= budget)
        chosen = least_damage(nbytes, damage, budget)
        assert total(nbytes, chosen) <= budget
        assert total(damage, chosen) == pytest.approx(best, rel=1e-5)
        limit = best * 1.1
        fewest = fewest_bytes(nbytes, damage, limit)
        assert total(damage, fewest) <= limit
        assert total(nbytes, fewest) == min(total(nbytes, c) for c in every if total(damage, c) <= limit)


def test_what_cannot_be_is_refused_with_the_figures():
    nbytes, damage = instance(0, 4, 3)
    with pytest.raises(ValueError, match=f"the smallest choice has {sum(map(min, nbytes))} bytes, more than 5"):
        least_damage(nbytes, damage, 5)
    with pytest.raises(ValueError, match="the lowest reachable damage is"):
        fewest_bytes(nbytes, damage, 1e-9)


def test_a_choice_above_the_limit_is_mended_at_the_least_cost():
    """As a solver leaves it whose tolerance is wider than a byte."""
    cost = [[0.0, 5.0, 9.0], [0.0, 1.0, 2.0], [0.0, 0.5, 7.0]]
    weight = [[100, 60, 10], [100, 99, 50], [100, 97, 20]]
    # 300 of 299: one byte is enough, and the third gives it for the least.
    assert _within([0, 0, 0], cost, weight, 299) == [0, 0, 1]
    assert _within([0, 0, 0], cost, weight, 300) == [0, 0, 0]
    # 40 more than allowed: only what gives so much at once counts, the cheapest of it.
    assert _within([0, 0, 0], cost, weight, 260) == [0, 2, 0]
    # More than one tensor can give.
    mended = _within([0, 0, 0], cost, weight, 85)
    assert sum(row[k] for row, k in zip(weight, mended, strict=True)) <= 85
    assert np.all(np.array(mended) > 0)
