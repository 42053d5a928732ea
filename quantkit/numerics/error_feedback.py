"""Rounding with error feedback: later columns compensate for the rounding errors of earlier columns.

Paper: Frantar et al., GPTQ, arXiv:2210.17323, algorithm 1, in the equivalent form of Chee et al., QuIP,
arXiv:2307.13304, section 4 (LDLQ; theorem 6 proves the equivalence). With H = R R^T and R upper triangular in
rounding order, column k is rounded at
w_k + sum over j < k of (w_j - w^_j) R_jk / R_kk. This needs one Cholesky factor and no inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from quantkit.errors import SourceError
from quantkit.numerics.matmul import product_in, quick_dtype, quick_product
from quantkit.numerics.second_moments import permuted

BLOCK_COLUMNS = 128
SOLVED_COLUMNS = 512  # columns of a triangular system solved together
PARALLEL_ELEMENTS = 1 << 19
LARGEST_DOUBLE = 4096  # columns up to which the factor is computed in float64
MOST_DAMPING = 1e12  # times the mean diagonal; the squared number of columns suffices for any finite moments


def feedback_factor(
    hessian: torch.Tensor, order: torch.Tensor, damp_percent: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the upper triangular factor R of the damped H = R R^T, float32 (K, K), columns in `order`, int64 (K,).

    Written to `out` if given, which may be `hessian`. Inputs that are always zero get the mean diagonal. Damping grows
    tenfold until the factorization succeeds. Raises SourceError if the moments are not finite.
    """
    # The upper factor is the lower one of the matrix turned by 180 degrees.
    back = order.flip(0)
    turned = permuted(hessian, back, torch.float64 if len(order) <= LARGEST_DOUBLE else torch.float32)
    diagonal = torch.diagonal(turned)
    mean = diagonal.mean().clamp(min=1e-30)
    diagonal[diagonal <= 0] = mean
    undamped = diagonal.clone()
    damp = damp_percent
    while damp < MOST_DAMPING:
        diagonal.copy_(undamped + damp * mean)
        lower, failed = torch.linalg.cholesky_ex(turned)
        if not failed and bool(torch.isfinite(lower.sum())):
            del turned, diagonal
            upper = lower.flip(0, 1)
            return upper.to(torch.float32) if out is None else out.copy_(upper)
        damp *= 10
    raise SourceError("the inputs of a layer are not finite on the calibration text; the model overflows")


ByRows = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


def _at_once(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    return function(values)


@dataclass(frozen=True)
class FeedbackSettings:
    """Settings of rounding with error feedback; manifests record those that are not method options.

    `damp_percent`: share of the mean diagonal added to the Hessian. `shrinkage`: share of each diagonal entry added to
    it. `gptaq_share`: share of sequences that also run through the unquantized model. `ample_tokens`: use every second
    token if this many per column remain (0: use all). `sym`: symmetric grids. `scale_search`: search scales. `refit`:
    refit them after each of `rounds` roundings. `static_groups`: fix scales first and order columns by importance.
    `desc_act`: form groups along that order.
    """

    damp_percent: float
    shrinkage: float
    gptaq_share: float
    ample_tokens: int
    sym: bool = True
    scale_search: bool = True
    refit: bool = True
    rounds: int = 2
    static_groups: bool = True
    desc_act: bool = False


def _divided(order: torch.Tensor, factor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part` (n, K) times H^-1 = R^-T R^-1, by two triangular solves; `order` is the factor's column order."""
    solved = part.index_select(1, order).T
    solved = _solved(factor.T, _solved(factor, solved, upper=True), upper=False)
    return solved.T.index_select(1, torch.argsort(order))


def _solved(triangle: torch.Tensor, sides: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """Solve T X = sides in place for X (K, n), with T (K, K) triangular; float32.

    Blocks are solved in sequence (from the end if T is upper), with fast low-precision products for the
    contributions of solved blocks.
    """
    count = len(triangle)
    found = torch.empty(sides.shape, dtype=quick_dtype(sides.device), device=sides.device)
    starts = range(0, count, SOLVED_COLUMNS)
    for start in reversed(starts) if upper else starts:
        own = slice(start, min(start + SOLVED_COLUMNS, count))
        before = slice(own.stop, count) if upper else slice(start)
        sides[own] -= product_in(triangle[own, before], found[before])
        sides[own] = torch.linalg.solve_triangular(triangle[own, own], sides[own], upper=upper)
        found[own] = sides[own]
    return sides


class Feedback:
    """Second moments of a layer's inputs, prepared for rounding its weight with error feedback.

    `importance` (K,): diagonal of H. `order` (K,) int64: rounding order, optionally by descending importance. `factor`:
    result of `feedback_factor`. `costs` (K,): its squared diagonal, the output error per squared rounding error of a
    column after later columns have compensated. `hessian`: H plus `shrinkage` of each diagonal entry and `damp_percent`
    of their mean. The moments passed in are (K, K) float32; they are owned and modified.

    With `cross` C = E[(exact - x) x^T], `target` shifts a weight W so that its outputs approximate those of the exact
    (unquantized) inputs: min over W' of E |W exact - W' x|^2 gives W' = W + W C H^-1. Here H is `paired`, E[x x^T] over
    the inputs of C, if these are a subset. Rounding W' is GPTAQ's asymmetric calibration (Li et al., arXiv:2504.02692)
    solved for all columns at once. `correction` (K, K) is C H^-1. With fewer `rows` than columns, rows are shifted
    directly, which takes fewer products (but more memory with `paired`, so not then). `by_rows` applies a row-wise
    function to all rows of (n, K), possibly distributed over ranks.
    """

    def __init__(
        self,
        hessian: torch.Tensor,
        cross: torch.Tensor | None = None,
        paired: torch.Tensor | None = None,
        *,
        by_importance: bool = True,
        shrinkage: float = 0.5,
        damp_percent: float = 0.01,
        by_rows: ByRows = _at_once,
        rows: int | None = None,
    ) -> None:
        self.importance = torch.diagonal(hessian).clamp(min=0)  # of the undamped inputs
        natural = torch.arange(len(hessian), device=hessian.device)
        self.order = torch.argsort(self.importance, descending=True, stable=True) if by_importance else natural
        self.correction = self._cross = None
        torch.diagonal(hessian).mul_(1 + shrinkage)
        if cross is not None and paired is not None:
            torch.diagonal(paired).mul_(1 + shrinkage)
            paired = feedback_factor(paired, self.order, damp_percent, paired)
            self.correction = cross.copy_(by_rows(partial(_divided, self.order, paired), cross))
        self.factor = feedback_factor(hessian, self.order, damp_percent)
        self.costs = torch.empty_like(self.importance)
        self.costs[self.order] = torch.diagonal(self.factor).square()
        if cross is not None and paired is None:
            if rows is not None and rows < len(hessian):
                self._cross = cross
            else:
                self.correction = cross.copy_(by_rows(partial(_divided, self.order, self.factor), cross))
        torch.diagonal(hessian).add_(damp_percent * self.importance.mean())
        self.hessian = hessian
        self._damp_percent = damp_percent
        self._more: torch.Tensor | None = None  # d of `slopes`, in `order`
        self._by_group: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def by_group(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return order (K,) and factor (K, K) in which each `size` adjacent columns stay together."""
        if size not in self._by_group:
            groups = torch.argsort(self.importance.view(-1, size).sum(1), descending=True, stable=True)
            order = (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()
            # `hessian` is already damped, by about two thirds of the damping of `factor`.
            self._by_group[size] = order, feedback_factor(self.hessian, order, self._damp_percent / 3)
        return self._by_group[size]

    def slopes(self, errors: RoundingErrors) -> torch.Tensor:
        """Return E H, float32 (N, K), for the rounding errors E (N, K), with H = `hessian`.

        Since R R^T = H + diag(d), E H = (E R) R^T - E diag(d), which halves the products. E R has no dominant
        direction, unlike E H, so bfloat16 is precise enough.
        """
        if self._more is None:
            squares = sum(part.square().sum(1) for part in self.factor.split(SOLVED_COLUMNS, 1))
            self._more = squares - torch.diagonal(self.hessian)[self.order]
        found = torch.empty(errors.residual.shape, device=errors.residual.device)
        for start in range(0, len(found), SOLVED_COLUMNS):
            own = slice(start, start + SOLVED_COLUMNS)
            part = product_in(self.factor[own, start:], errors.residual[start:])
            found[self.order[own]] = part.sub_(errors.errors[own] * self._more[own, None])
        return found.T.contiguous()

    def target(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight that rounding should approximate, for `weight`, float32 (N, K)."""
        if self._cross is not None:
            return weight + _divided(self.order, self.factor, quick_product(weight, self._cross))
        return weight if self.correction is None else weight + quick_product(weight, self.correction)


class RoundingErrors:
    """Errors of rounding columns (K, N): `errors` is E^T, `residual` is (E R)^T, with R the factor.

    Both are (K, N) in `quick_dtype`. A column of E R is its error after compensation for earlier columns, times
    R_kk.
    """

    def __init__(self, columns: torch.Tensor) -> None:
        self.errors, self.residual = (
            torch.empty(columns.shape, dtype=quick_dtype(columns.device), device=columns.device) for _ in range(2)
        )


@contextmanager
def _threads_for(elements: int) -> Iterator[None]:
    """Use one thread for column updates of small blocks, where starting threads costs more than it saves."""
    before = torch.get_num_threads()
    if elements < PARALLEL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _blocks(
    columns: torch.Tensor, unit: Callable[[slice], torch.Tensor], step: int, past: torch.Tensor | None = None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield, per `step` columns: range, values with earlier errors added, a buffer for errors, their feedback weights.

    `columns` is (K, N). unit(a:b) returns the weights (b, b - a) by which columns a..b take over errors of columns
    0..b. The caller fills the error buffer before requesting the next block; `past` (K, N), if given, receives all
    errors.
    """
    if past is None:
        past = torch.empty(columns.shape, dtype=quick_dtype(columns.device), device=columns.device)
    room = torch.empty(min(step, len(columns)), columns.shape[1], device=columns.device)
    for start in range(0, len(columns), step):
        stop = min(start + step, len(columns))
        own = slice(start, stop)
        block, errors, shares = columns[own].clone(), room[: stop - start], unit(own)
        if start:
            block += product_in(shares[:start].T, past[:start])
        yield own, block, errors, shares[start:]
        past[own] = errors


class ColumnGrids(NamedTuple):
    """Integer grids by group and row: value = (code - zero) * scale, codes 0 to `top`; zeros may be fractions.

    scales and zeros are float32 (G, N); group_of (K,) is each column's group.
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    group_of: torch.Tensor
    top: int


def round_columns(
    columns: torch.Tensor,
    factor: torch.Tensor,
    grids: ColumnGrids,
    fit: Callable[[int, torch.Tensor], None] | None = None,
    group: int = 1,
    nearest: Callable[[torch.Tensor], torch.Tensor] | None = None,
    record: RoundingErrors | None = None,
) -> torch.Tensor:
    """Round columns in order with error feedback; return codes, uint8 (K, N).

    `columns`, float32 (K, N), is the transposed weight in rounding order; `factor` (K, K), from `feedback_factor`, and
    `grids.group_of` have the same order. If scales are not fixed in advance, `fit` is called at the first column of
    each `group` consecutive columns, with their values (group, N) after feedback of earlier groups, and must set the
    group's scales and zeros. `nearest` rounds column / scale to (code - zero) if some integers are not codes. `record`,
    if given, receives the errors.
    """
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    diagonal = torch.diagonal(factor)
    groups, scale_of, zero_of, top = grids.group_of.tolist(), grids.scales.unbind(), grids.zeros.unbind(), grids.top
    step = max(group, BLOCK_COLUMNS // group * group)
    # The loop's inputs are split beforehand: for a small layer, splitting costs as much as the sums.
    wide = torch.empty(min(step, len(columns)), columns.shape[1], device=columns.device)
    past = None if record is None else record.errors
    blocks = _blocks(columns, lambda own: factor[: own.stop, own] / diagonal[own], step, past)
    for whole, block, errors, inner in blocks:
        cut = (columns[whole], block, wide[: len(block)], errors, inner)
        with _threads_for(block.numel()):
            for i, (plain, moved, code, error, shares) in enumerate(zip(*(t.unbind() for t in cut), strict=True)):
                column, left = whole.start + i, len(block) - i - 1
                if fit is not None and column % group == 0:
                    _fit_ahead(fit, column, columns[column : column + group], block[i:], inner[i:, i:])
                scale, zero = scale_of[groups[column]], zero_of[groups[column]]
                torch.div(moved, scale, out=code)
                if nearest is None:
                    code.add_(zero).round_().clamp_(0, top)
                else:
                    code.copy_(nearest(code)).add_(zero)
                # The error of the weight itself, not of the compensated weight.
                torch.addcmul(plain, torch.sub(code, zero, out=error), scale, value=-1, out=error)
                block.narrow(0, i + 1, left).addr_(shares.narrow(0, i + 1, left), error)
        codes[whole] = wide[: len(block)]
        if record is not None:
            record.residual[whole] = block.sub_(columns[whole]).add_(errors).mul_(diagonal[whole, None])
    return codes


def _fit_ahead(
    fit: Callable[[int, torch.Tensor], None], column: int, plain: torch.Tensor, block: torch.Tensor, unit: torch.Tensor
) -> None:
    """Call `fit` with the group's values after feedback of all earlier errors, but without errors within the group.

    `plain` are the group's original columns, `block` its columns with all errors, `unit` their feedback weights.
    """
    ahead = slice(len(plain))
    moved = torch.linalg.solve_triangular(unit[ahead, ahead].T, block[ahead] - plain, upper=False, unitriangular=True)
    fit(column, plain + moved)


def round_groups(
    columns: torch.Tensor,
    factor: torch.Tensor,
    size: int,
    nearest: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Round `size` columns at a time: block LDLQ (Tseng et al., QuIP#, arXiv:2402.04396, section 4).

    `columns`, float32 (K, N), is the transposed weight in rounding order; `factor` (K, K), from `feedback_factor`, has
    that order. nearest(first, moved (size, N), metric (size, size)) rounds the columns from `first` on; its values
    (size, N) should minimize e metric e^T, e being the change of a row of `moved`.
    """
    count = len(columns)
    diagonal = torch.stack([factor[k : k + size, k : k + size] for k in range(0, count, size)])
    metrics = diagonal @ diagonal.mT
    # R_jG R_GG^-1 for each group G of columns.
    wide = factor.view(count, -1, size).transpose(0, 1)
    unit = torch.linalg.solve_triangular(diagonal, wide, upper=True, left=False).transpose(0, 1).reshape(count, count)
    step = max(size, BLOCK_COLUMNS // size * size)
    for whole, block, errors, inner in _blocks(columns, lambda own: unit[: own.stop, own], step):
        plain = columns[whole]
        with _threads_for(block.numel()):
            for i in range(0, len(block), size):
                part, first = slice(i, i + size), whole.start + i
                values = nearest(first, block[part], metrics[first // size])
                # The error of the weight itself, not of the compensated weight.
                torch.sub(plain[part], values, out=errors[part])
                block[i + size :].addmm_(inner[part, i + size :].T, errors[part])
