"""Refitted scales against a general least-squares solver, row by row."""

import pytest
import torch

from quantkit.methods.gptq import Options, Solver
from quantkit.numerics import scale_refit as module
from quantkit.numerics.scale_refit import PartedHessian, Refit, normal_equations

ROWS, COLUMNS, GROUP = 12, 96, 32


def case(desc_act=False, bits=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    weight, hessian = torch.randn(ROWS, COLUMNS, generator=generator) * 0.05, x.T @ x / 400
    solver = Solver(hessian.clone(), bits, GROUP, Options(desc_act=desc_act, refit=False))
    return weight, x, hessian, solver.quantize(weight)


def refit_scales(target, hessian, layer):
    return Refit(target, PartedHessian(hessian, layer.beside()))(layer)[0]


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
    layer = Solver(hessian.clone(), bits, GROUP, Options(refit=False, shrinkage=0.0)).quantize(weight * 1.001)
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
    refit = Refit(weight, PartedHessian(hessian, layer.beside()))
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
