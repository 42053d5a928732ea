"""Choose one option per tensor (bits or type) to trade total bytes against total damage, as an integer program.

Solved to optimality by scipy's HiGHS (branch and bound). Bytes and damage are summed over tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array

GAP = 1e-6  # relative to the best sum of damage or bytes


def least_damage(nbytes: Sequence[Sequence[int]], damage: Sequence[Sequence[float]], limit: int) -> list[int]:
    """Return each tensor's option index that minimizes total damage within `limit` total bytes.

    nbytes[i][k] and damage[i][k] belong to option k of tensor i. Raises ValueError if no choice fits the limit.
    """
    least = sum(min(row) for row in nbytes)
    if least > limit:
        raise ValueError(f"the smallest choice has {least} bytes, more than {limit}")
    return _solve(damage, nbytes, limit)


def fewest_bytes(nbytes: Sequence[Sequence[int]], damage: Sequence[Sequence[float]], limit: float) -> list[int]:
    """Return each tensor's option index that minimizes total bytes within `limit` total damage.

    Raises ValueError if no choice stays within the limit.
    """
    least = sum(min(row) for row in damage)
    if least > limit:
        raise ValueError(f"the lowest reachable damage is {least:.6g}, more than the target of {limit:.6g}")
    return _solve(nbytes, damage, limit)


def _solve(cost: Sequence[Sequence[float]], weight: Sequence[Sequence[float]], limit: float) -> list[int]:
    """Minimize total cost subject to a limit on total weight; return the option index of each tensor."""
    sizes = [len(row) for row in cost]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    costs = np.array([value for row in cost for value in row], dtype=np.float64)
    weights = np.array([value for row in weight for value in row], dtype=np.float64)
    # The solver's tolerances are absolute, so both sums are scaled to the number of tensors.
    costs *= len(sizes) / max(float(sum(max(row) for row in cost)), 1e-300)
    scale = len(sizes) / max(float(limit), 1e-300)
    one_each = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    solution = milp(
        costs,
        integrality=np.ones(len(owner)),
        bounds=(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(csr_array(weights[None] * scale), -np.inf, limit * scale),
        ],
        options={"mip_rel_gap": GAP},
    )
    if solution.x is None:
        raise ValueError(f"no choice of kinds was found: {solution.message}")
    starts = np.cumsum([0, *sizes[:-1]])
    chosen = [int(np.argmax(solution.x[start : start + size])) for start, size in zip(starts, sizes, strict=True)]
    return _within(chosen, cost, weight, limit)


def _within(
    chosen: list[int], cost: Sequence[Sequence[float]], weight: Sequence[Sequence[float]], limit: float
) -> list[int]:
    """Repair, at the least cost, a solution that exceeds the limit by the solver's tolerance."""
    total = sum(row[k] for row, k in zip(weight, chosen, strict=True))
    while total > limit:
        over = total - limit
        moves = [
            (cost[i][k] - cost[i][now], i, k)
            for i, now in enumerate(chosen)
            for k in range(len(cost[i]))
            if weight[i][k] < weight[i][now]
        ]
        enough = [move for move in moves if weight[move[1]][chosen[move[1]]] - weight[move[1]][move[2]] >= over]
        _, i, k = min(enough or moves)
        total += weight[i][k] - weight[i][chosen[i]]
        chosen[i] = k
    return chosen
