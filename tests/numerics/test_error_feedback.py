import pytest
import torch

from quantkit.errors import SourceError
from quantkit.numerics.error_feedback import (
    ColumnGrids,
    Feedback,
    RoundingErrors,
    feedback_factor,
    round_columns,
    round_groups,
)


def test_halves_go_to_the_even_code_and_what_is_beyond_is_cut():
    values = torch.tensor([[-4.5, -0.5, -9.0], [0.5, 1.5, 9.0]])
    scales, zeros, one = torch.ones(1, 3), torch.full((1, 3), 4.0), torch.zeros(2, dtype=torch.int64)
    codes = round_columns(values, torch.eye(2), ColumnGrids(scales, zeros, one, 7))
    # Beside a zero of 4: -4.5 is cut to 0, -0.5 goes to 4 (3.5 is as near to 3), 0.5 to 4, and 1.5 to 6.
    assert codes.tolist() == [[0, 4, 0], [4, 6, 7]]


def test_slopes_of_the_errors_are_those_of_a_product_with_the_moments(units):
    """Also where inputs never fire, one direction is far larger than others, and there are blocks of columns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 700, generator=generator) @ torch.randn(700, 700, generator=generator)
    x += 400 * torch.randn(900, 1, generator=generator) * torch.rand(700, generator=generator).clamp(min=0.5)
    x[:, 3] = x[:, 650] = 0
    moments = Feedback(x.T @ x / 900, damp_percent=0.5)
    weight = 3 * torch.randn(5, 700, generator=generator)
    columns, zeros = weight.T[moments.order].contiguous(), torch.full((1, 5), 128.0)
    made, one = RoundingErrors(columns), torch.zeros(700, dtype=torch.int64)
    grids = ColumnGrids(torch.ones(1, 5), zeros, one, 255)
    codes = round_columns(columns, moments.factor, grids, record=made)
    assert torch.equal(codes, round_columns(columns, moments.factor, grids))
    values = torch.empty_like(weight)
    values[:, moments.order] = codes.T - 128.0
    errors = (weight - values).double()
    near = 5e-2 if units else 1e-4
    want = errors @ moments.hessian.double()
    got = moments.slopes(made).double()
    assert float((got - want).norm() / want.norm()) < near
    torch.testing.assert_close((got * errors).sum(1), (want * errors).sum(1), rtol=near, atol=0)


def test_errors_of_a_group_move_the_columns_after_it_and_not_each_other():
    # The first two columns belong together; R_GG^-1 of the second two is [[1, -1], [0, 1]] / 2.
    factor = torch.tensor([[1.0, 0.5, 1.0, 0.0], [0.0, 1.0, 0.0, 3.0], [0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, 2.0]])
    moved = []
    metrics = []

    def nearest(_first, columns, metric):
        moved.append(columns[:, 0].tolist())
        metrics.append(metric.tolist())
        return columns.round()

    round_groups(torch.tensor([[0.25], [-0.25], [0.0], [0.0]]), factor, 2, nearest)
    # 0.25 * [1, 0] R^-1 = [0.125, -0.125]; -0.25 * [0, 3] R^-1 = [0, -0.375]
    assert moved == [[0.25, -0.25], [0.125, -0.5]]
    assert metrics == [[[1.25, 0.5], [0.5, 1.0]], [[8.0, 4.0], [4.0, 4.0]]]


@pytest.mark.parametrize("by_importance", [True, False])
def test_what_scales_are_refitted_on_is_shrunk_and_damped(by_importance):
    hessian = torch.tensor([[2.0, 1.0, 0.5], [1.0, 4.0, 0.25], [0.5, 0.25, 6.0]])
    moments = Feedback(hessian.clone(), by_importance=by_importance, shrinkage=0.5, damp_percent=0.1)
    # Diagonals half as much again, and a tenth of the mean of 2, 4 and 6 added to each.
    want = hessian.clone()
    want.diagonal().copy_(torch.tensor([3.4, 6.4, 9.4]))
    assert torch.allclose(moments.hessian, want)
    assert moments.importance.tolist() == [2.0, 4.0, 6.0]
    assert moments.order.tolist() == ([2, 1, 0] if by_importance else [0, 1, 2])


def test_inputs_that_nearly_depend_on_each_other_keep_their_digits():
    """In float32 alone the last pivots would be noise."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(96, 96, generator=generator, dtype=torch.float64)).Q
    hessian = (turn * torch.logspace(0, -6, 96, dtype=torch.float64)) @ turn.T
    hessian = ((hessian + hessian.T) / 2).float()
    order = torch.arange(96)
    upper = feedback_factor(hessian, order, 1e-9).double()
    exact = hessian.double()
    exact.diagonal().add_(1e-9 * exact.diagonal().mean())
    want = torch.linalg.cholesky(exact.flip(0, 1)).flip(0, 1)
    assert torch.allclose(upper.diagonal(), want.diagonal(), rtol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e30])
def test_damping_grows_for_any_finite_moments_and_ends_for_others(size):
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    one_token, indefinite = x.T @ x * size, torch.full((64, 64), size) - size / 2 * torch.eye(64)
    for hessian in (one_token, indefinite):
        moments = Feedback(hessian.clone(), cross=hessian.clone())
        assert all(bool(torch.isfinite(part).all()) for part in (moments.factor, moments.costs, moments.correction))
        assert bool((moments.factor.diagonal() > 0).all())
    for value in (float("nan"), float("inf")):
        hessian = one_token.clone()
        hessian[3, 5] = hessian[5, 3] = value
        with pytest.raises(SourceError, match="inputs of a layer are not finite"):
            Feedback(hessian)


def test_what_several_processes_make_in_parts_is_what_one_makes():
    generator = torch.Generator().manual_seed(3)
    x, exact = torch.randn(2, 400, 24, generator=generator)
    cross = (exact - x).T @ x / 400

    def made(by_rows):
        return Feedback(x.T @ x / 400, cross.clone(), x[:200].T @ x[:200] / 200, by_rows=by_rows)

    one = made(lambda function, values: function(values))
    other = made(lambda function, values: torch.cat([function(part) for part in values.split(7)]))
    assert one.correction is not None
    assert other.correction is not None
    torch.testing.assert_close(other.correction, one.correction)
    assert float(one.correction.abs().max()) > 0.5
    assert other.factor.equal(one.factor)
