"""The allocation against trying every choice."""

import itertools

import numpy as np
import pytest

from quantkit.numerics.allocation import _within, fewest_bytes, least_damage


def instance(seed: int, tensors: int, kinds: int) -> tuple[list[list[int]], list[list[float]]]:
    """Random bytes, more of them for less damage, but not always."""
    rng = np.random.default_rng(seed)
    nbytes = np.sort(rng.integers(100, 10_000, (tensors, kinds)), axis=1)
    damage = np.sort(rng.exponential(1e-3, (tensors, kinds)), axis=1)[:, ::-1]
    damage[0] = damage[0][::-1]
    return nbytes.tolist(), damage.tolist()


def total(rows: list[list[float]] | list[list[int]], chosen: list[int] | tuple[int, ...]) -> float:
    return sum(row[k] for row, k in zip(rows, chosen, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_is_better(seed: int) -> None:
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


def test_a_large_one_is_better_than_taking_the_best_ratios() -> None:
    nbytes, damage = instance(3, 200, 6)
    budget = int(1.5 * sum(map(min, nbytes)))
    chosen = least_damage(nbytes, damage, budget)
    assert total(nbytes, chosen) <= budget
    greedy = [int(np.argmin(row)) for row in nbytes]
    while True:
        moves = [
            ((damage[i][now] - damage[i][k]) / (nbytes[i][k] - nbytes[i][now]), i, k)
            for i, now in enumerate(greedy)
            for k in range(6)
            if damage[i][k] < damage[i][now] and nbytes[i][k] > nbytes[i][now]
        ]
        fitting = [
            m for m in moves if total(nbytes, greedy) + nbytes[m[1]][m[2]] - nbytes[m[1]][greedy[m[1]]] <= budget
        ]
        if not fitting:
            break
        _, i, k = max(fitting)
        greedy[i] = k
    assert total(damage, chosen) < total(damage, greedy)


def test_what_cannot_be_is_refused_with_the_figures() -> None:
    nbytes, damage = instance(0, 4, 3)
    with pytest.raises(ValueError, match=f"the smallest choice takes {sum(map(min, nbytes))} bytes, more than 5"):
        least_damage(nbytes, damage, 5)
    with pytest.raises(ValueError, match="the best choice does a damage of"):
        fewest_bytes(nbytes, damage, 1e-9)


def test_a_choice_above_the_limit_is_mended_at_the_least_cost() -> None:
    nbytes = [[10, 20], [10, 20], [10, 30]]
    damage = [[0.5, 0.1], [0.3, 0.1], [0.9, 0.1]]
    assert _within([1, 1, 1], damage, nbytes, 61) == [1, 0, 1]
    assert _within([1, 1, 1], damage, nbytes, 52) == [1, 1, 0]
    assert _within([1, 1, 1], damage, nbytes, 70) == [1, 1, 1]
