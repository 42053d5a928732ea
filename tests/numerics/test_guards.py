"""Nothing is taken that does not lower the error: cases in which the candidate is the worse one."""

import pytest
import torch
from test_scale_refit import output_error

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.scale_refit import refit
from quantkit.methods.awq import round_plainly, search_scale
from quantkit.numerics.grid import fit_grid, round_to_grid
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups
from quantkit.numerics.scale_refit import PartedHessian, Refit, better_rows

COLUMNS, GROUP = 64, 16


def moments(columns, seed=0):
    """H of strongly correlated inputs, (columns, columns) float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return x.T @ x / 400


def test_a_row_is_taken_only_where_it_is_better():
    # s^T N s - 2 a^T s with N = 1, a = 1: least at s = 1; 0.5 and 1.5 are as good as each other, 2 is as bad as 0.
    normal, aimed = torch.ones(5, 1, 1, dtype=torch.float64), torch.ones(5, 1, dtype=torch.float64)
    old = torch.tensor([[2.0], [0.5], [0.5], [1.0], [0.9]])
    new = torch.tensor([[1.0], [1.5], [2.0], [1.5], [1.05]])
    assert better_rows(normal, aimed, new, old).tolist() == torch.tensor([[1.0], [0.5], [0.5], [1.0], [1.05]]).tolist()


def tiny_layer(rows, size):
    """A weight of some size, rounded to 3 bits."""
    weight = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(1)) * size
    grid = fit_grid(weight, GROUP, 3, symmetric=True)
    codes = round_to_grid(weight, grid, GROUP)
    return weight, GroupedWeight(codes, grid.scales, grid.zeros, contiguous_groups(COLUMNS, GROUP), 3)


def test_scales_that_float16_rounds_badly_do_not_replace_better_ones():
    """The best scales of such small weights lie between two float16s: rounded, they can be worse than those before."""
    hessian = moments(COLUMNS)
    weight, layer = tiny_layer(200, 1e-6)
    before = output_error(layer.dense() - weight, hessian)
    refitted = Refit(weight, PartedHessian(hessian))(layer)[0]
    after = output_error(refitted.dense() - weight, hessian)
    assert bool((after <= before).all())
    kept = (refitted.scales == layer.scales).all(1)
    assert 10 < int(kept.sum()) < 190


@pytest.mark.parametrize(("factor", "moves"), [(1.9, True), (2.1, False), (0.55, True), (0.45, False), (-1.0, False)])
def test_a_scale_moves_by_a_factor_of_two_at_most(factor, moves):
    _, layer = tiny_layer(3, 0.1)
    wanted = layer.scales.clone()
    wanted[:, 1] *= factor
    target = GroupedWeight(layer.codes, wanted, layer.zeros, layer.g_idx, 3).dense()
    got = Refit(target, PartedHessian(torch.eye(COLUMNS)))(layer)[0].scales
    want = wanted if moves else layer.scales
    assert torch.allclose(got.float(), want.float(), rtol=2e-3)


@pytest.mark.parametrize(("size", "name"), [(1e-6, "Q4_K"), (1e-6, "Q6_K"), (1e-4, "Q3_K")])
def test_no_row_of_a_k_quant_of_small_weights_gets_worse(size, name):
    hessian = moments(512)
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(2)) * size
    packed = ggml.quantize(name, weight.numpy())
    values = (ggml.dequantize(name, rows, 512) for rows in (packed, refit(name, packed, weight, hessian)))
    before, after = (output_error(torch.from_numpy(each) - weight, hessian) for each in values)
    assert bool((after <= before * (1 + 1e-4)).all())


def test_awq_scales_nothing_where_that_only_harms():
    """Weights that lie on the grid as they are, and inputs of which some are far larger."""
    codes = torch.randint(0, 16, (32, COLUMNS), generator=torch.Generator().manual_seed(0))
    codes[:, ::GROUP], codes[:, 1::GROUP] = 0, 15
    weight = (codes - 8) * 0.25
    assert torch.equal(round_plainly(weight, GROUP).dense(), weight)
    hessian = torch.diag(torch.rand(COLUMNS, generator=torch.Generator().manual_seed(1)) * 10 + 0.1)
    scale = search_scale([weight], hessian, GROUP, 20, (1, 1))
    assert torch.equal(scale, torch.ones(COLUMNS))
