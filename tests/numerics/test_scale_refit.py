import pytest
import torch

from quantkit.calibration.channel_scales import search_scale
from quantkit.calibration.moments import LinearGroup
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.scale_refit import refit
from quantkit.methods.awq import PlainRounding
from quantkit.methods.gptq import Options, Solver
from quantkit.numerics import scale_refit as module
from quantkit.numerics.grid import fit_grid, round_to_grid
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups
from quantkit.numerics.scale_refit import PartedHessian, Refit, better_rows, normal_equations

ROWS, COLUMNS, GROUP = 12, 96, 32
WIDTH, RUN = 64, 16  # columns and a group of `tiny_layer`


def case(desc_act=False, bits=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    weight, hessian = torch.randn(ROWS, COLUMNS, generator=generator) * 0.05, x.T @ x / 400
    solver = Solver(LinearGroup([], hessian.clone()), bits, GROUP, Options(desc_act=desc_act, refit=False))
    return weight, x, hessian, solver.quantize(weight)


def refit_scales(target, hessian, layer):
    return Refit(target, PartedHessian(hessian, layer.group_order()))(layer)[0]


def output_error(change, hessian):
    """E |change x|^2 of each row."""
    return torch.einsum("nk,kl,nl->n", change.double(), hessian.double(), change.double())


def test_scales_equal_those_of_least_squares_on_the_outputs():
    for desc_act in (False, True):
        weight, x, hessian, layer = case(desc_act)
        got = refit_scales(weight, hessian, layer)
        centred = layer.codes.double() - layer.zeros.double()[:, layer.g_idx]
        for row in range(ROWS):
            parts = [x.double()[:, layer.g_idx == g] @ centred[row, layer.g_idx == g] for g in range(COLUMNS // GROUP)]
            aim = (x.double() @ weight[row].double())[:, None]
            best = torch.linalg.lstsq(torch.stack(parts, 1), aim).solution[:, 0]
            assert torch.allclose(got.scales[row].double(), best, rtol=3e-3)
        hessian[:GROUP], hessian[:, :GROUP] = 0, 0  # A group that no input reaches keeps its scales.
        got = refit_scales(weight, hessian, layer)
        assert torch.isfinite(got.dense()).all()
        assert desc_act or torch.equal(got.scales[:, 0], layer.scales[:, 0])


@pytest.mark.parametrize(("count", "together"), [(1, 2), (2, 1), (2, 2)])
def test_equations_are_the_same_however_products_are_cut(count, together, monkeypatch):
    """Of three units, which are computed one by one, or two and one."""
    weight, _, hessian, layer = case()
    monkeypatch.setattr(module, "TILE_ELEMENTS", together * GROUP * ROWS)
    parts = [layer.steps(), weight][:count]
    got = normal_equations(parts, hessian, COLUMNS // GROUP)
    cut = torch.stack(parts, 1).double().view(ROWS, -1, GROUP)  # of each part the three units
    inner = hessian.double().view(-1, GROUP, COLUMNS // GROUP, GROUP).repeat(count, 1, count, 1)
    want = torch.einsum("ngi,gihj,nhj->ngh", cut, inner, cut)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bits", [3, 4])
def test_from_4_bits_on_a_layer_is_fitted_by_the_equations_of_the_first(bits, units):
    """What that costs is little of what fitting gains."""
    weight, _, hessian, first = case(bits=bits)
    layer = Solver(LinearGroup([], hessian.clone()), bits, GROUP, Options(refit=False, shrinkage=0.0)).quantize(
        weight * 1.001
    )
    refit = Refit(weight, PartedHessian(hessian))
    refit(first)
    got, alone = refit(layer)[0], refit_scales(weight, hessian, layer)
    assert torch.equal(got.scales, alone.scales) == (bits == 3)
    before, best, after = (output_error(weight - each.dense(), hessian).sum() for each in (layer, alone, got))
    assert best < before
    assert after - best <= 0.1 * (before - best)


@pytest.mark.parametrize("desc_act", [False, True])
def test_slopes_that_are_known_fit_as_those_that_are_not(desc_act, units, monkeypatch):
    """Of several slabs of rows."""
    weight, _, hessian, layer = case(desc_act)
    monkeypatch.setattr(module, "SLAB_ELEMENTS", (ROWS // 2 + 1) * COLUMNS)
    slopes = ((weight - layer.dense()).double() @ hessian.double()).float()
    refit = Refit(weight, PartedHessian(hessian, layer.group_order()))
    (got, error), (want, other) = refit(layer, slopes), refit(layer)
    near = 2e-3 if units else 1e-4
    torch.testing.assert_close(got.scales, want.scales, rtol=near, atol=0)
    torch.testing.assert_close(error, other, rtol=0.01 if units else 1e-4, atol=0)
    assert not torch.equal(refit(layer, -slopes)[0].scales, want.scales)


@pytest.mark.parametrize(
    ("bits", "loud", "gain", "near"), [(3, False, 0.98, 2e-3), (8, False, 0.98, 2e-3), (4, True, 0.5, 0.02)]
)
def test_products_in_bfloat16_fit_as_well(bits, loud, gain, near, set_units):
    """Also at 8 bits, and where a few directions are 10^5 times as large as others, as in models' first layers."""
    weight, _, hessian, layer = case(bits=bits)
    if loud:
        turn = torch.linalg.qr(torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(7)))[0]
        hessian = (turn * torch.cat([torch.tensor([1e5, 2e4, 8e3, 2e3]), torch.ones(COLUMNS - 4)])) @ turn.T
    errors = [output_error(weight - layer.dense(), hessian).sum()]
    for units in (False, True):
        set_units(units)
        errors.append(output_error(weight - refit_scales(weight, hessian, layer).dense(), hessian).sum())
    assert errors[1] < gain * errors[0]
    assert errors[2] == pytest.approx(float(errors[1]), rel=near)


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
    weight = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)) * size
    grid = fit_grid(weight, RUN, 3, symmetric=True)
    codes = round_to_grid(weight, grid, RUN)
    return weight, GroupedWeight(codes, grid.scales, grid.zeros, contiguous_groups(WIDTH, RUN), 3)


def test_scales_that_float16_rounds_badly_do_not_replace_better_ones():
    """The best scales of such small weights lie between two float16s: rounded, they can be worse than those before."""
    hessian = moments(WIDTH)
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
    got = Refit(target, PartedHessian(torch.eye(WIDTH)))(layer)[0].scales
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
    codes = torch.randint(0, 16, (32, WIDTH), generator=torch.Generator().manual_seed(0))
    codes[:, ::RUN], codes[:, 1::RUN] = 0, 15
    weight = (codes - 8) * 0.25
    rounding = PlainRounding(RUN)
    hessian = torch.diag(torch.rand(WIDTH, generator=torch.Generator().manual_seed(1)) * 10 + 0.1)
    assert torch.equal(rounding.round(weight, hessian.diagonal()).dense(), weight)
    scale = search_scale([weight], hessian, [rounding.tried], 20, (1, 1))
    assert torch.equal(scale, torch.ones(WIDTH))
