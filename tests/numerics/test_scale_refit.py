"""Refitted scales against a general least-squares solver, row by row."""

from dataclasses import replace

import pytest
import torch

from quantkit.methods.gptq import Options, Solver
from quantkit.numerics import scale_refit as module
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.scale_refit import Refit, normal_equations, refit_scales

ROWS, COLUMNS, GROUP = 12, 96, 32


def case(desc_act: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, GroupedWeight]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.05
    hessian = x.T @ x / 400
    return (
        weight,
        x,
        hessian,
        Solver(hessian.clone(), 3, GROUP, Options(desc_act=desc_act, refit=False)).quantize(weight),
    )


def output_error(change: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """E |change x|^2 of each row."""
    return torch.einsum("nk,kl,nl->n", change.double(), hessian.double(), change.double())


def test_scales_equal_those_of_least_squares_on_the_outputs() -> None:
    for desc_act in (False, True):
        weight, x, hessian, layer = case(desc_act)
        got = refit_scales(weight, hessian, layer)
        centred = layer.codes.double() - layer.zeros.double()[:, layer.g_idx]
        for row in range(ROWS):
            parts = [x.double()[:, layer.g_idx == g] @ centred[row, layer.g_idx == g] for g in range(COLUMNS // GROUP)]
            best = torch.linalg.lstsq(torch.stack(parts, 1), (x.double() @ weight[row].double())[:, None]).solution[
                :, 0
            ]
            assert torch.allclose(got.scales[row].double(), best, rtol=3e-3)


def test_the_error_of_no_row_grows_and_of_most_falls() -> None:
    weight, _, hessian, layer = case()
    before = output_error(weight - layer.dense(), hessian)
    after = output_error(weight - refit_scales(weight, hessian, layer).dense(), hessian)
    assert bool((after <= before).all())
    assert int((after < before).sum()) > ROWS // 2


def test_scales_that_fit_already_stay() -> None:
    _, _, hessian, layer = case()
    again = refit_scales(layer.dense(), hessian, layer)
    assert torch.equal(again.scales, layer.scales)


def test_groups_without_weight_or_input_keep_their_scales() -> None:
    weight, _, hessian, layer = case()
    hessian[:GROUP], hessian[:, :GROUP] = 0, 0
    got = refit_scales(weight, hessian, layer)
    assert torch.isfinite(got.dense()).all()
    assert torch.equal(got.scales[:, 0], layer.scales[:, 0])


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_a_row_is_refitted_alike_alone_and_among_others(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last slab of a layer has a single row."""
    weight, _, hessian, layer = case()
    together = refit_scales(weight, hessian, layer).scales
    monkeypatch.setattr(module, "SLAB_ELEMENTS", rows * COLUMNS)
    apart = refit_scales(weight, hessian, layer).scales
    assert torch.allclose(apart.float(), together.float(), rtol=2e-3)
    part = layer.split([ROWS - 1, 1])[1]
    alone = refit_scales(weight[-1:], hessian, part).scales
    assert torch.allclose(alone.float(), together[-1:].float(), rtol=2e-3)


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("count", [1, 2])
def test_equations_are_the_same_however_products_are_cut(
    count: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three units, which are computed one by one, or two and one."""
    weight, _, hessian, layer = case()
    monkeypatch.setattr(module, "TILE_ELEMENTS", units * GROUP * ROWS)
    parts = [layer.steps(), weight][:count]
    got = normal_equations(parts, hessian, COLUMNS // GROUP)
    cut = torch.stack(parts, 1).double().view(ROWS, -1, GROUP)  # of each part the three units
    inner = hessian.double().view(-1, GROUP, COLUMNS // GROUP, GROUP).repeat(count, 1, count, 1)
    want = torch.einsum("ngi,gihj,nhj->ngh", cut, inner, cut)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("desc_act", [False, True])
def test_layers_that_aim_at_one_weight_are_fitted_one_after_the_other(desc_act: bool) -> None:
    weight, _, hessian, layer = case(desc_act)
    other = replace(layer, codes=layer.codes.flip(0))
    refit = Refit(weight, hessian, layer.beside())
    for each in (layer, other, layer):
        assert torch.equal(refit(each)[0].scales, refit_scales(weight, hessian, each).scales)
        fitted, error = refit(each)
        whole = torch.einsum("nk,kl,nl->n", weight.double(), hessian.double(), weight.double())
        want = output_error(weight - fitted.dense(), hessian) - whole
        torch.testing.assert_close(error, want, rtol=1e-3, atol=1e-2 * float(whole.max()))
