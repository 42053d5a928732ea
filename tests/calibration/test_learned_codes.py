import math
from dataclasses import replace

import pytest
import torch

from quantkit.calibration.learned_codes import Adam, Sharpening, SoftCodes, staircase
from quantkit.calibration.moments import LinearGroup
from quantkit.methods.gptq import Options, Solver
from quantkit.methods.rtn import round_layer

ROWS, COLUMNS, BITS = 8, 16, 2


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("top", "sharpness"), [(3, 1.0), (3, 6.0), (7, 20.0), (255, 100.0)])
def test_the_staircase_is_exact_at_codes_rises_and_has_this_slope(top, sharpness):
    codes = torch.arange(top + 1.0)
    assert torch.allclose(staircase(codes, top, sharpness)[0], codes, atol=1e-5)
    places = torch.linspace(0.01, top - 0.01, 999).requires_grad_()
    values, slope = staircase(places, top, sharpness)
    assert bool((values.diff() >= -1e-5).all())
    smooth = places.detach().floor() + (
        0.5 + torch.tanh((places - places.detach().floor() - 0.5) * sharpness / 2) / (2 * math.tanh(sharpness / 4))
    )
    assert torch.allclose(slope, torch.autograd.grad(smooth.sum(), places)[0], atol=1e-3)
    far = (places.detach() - places.detach().round()).abs() < 0.4
    assert torch.allclose(staircase(places.detach()[far], top, 200.0)[0], places.detach()[far].round(), atol=1e-4)


def rounded(symmetric):
    """A layer and its weight; every second row of a symmetric one has negative scales."""
    weight = drawn(6, 64) * 0.1
    layer = round_layer(weight, 3, 32, symmetric)
    if symmetric:
        layer.codes[::2], layer.scales[::2] = (8 - layer.codes[::2].int()).clamp(max=7).byte(), -layer.scales[::2]
    return weight, layer


@pytest.mark.parametrize("symmetric", [True, False])
def test_training_starts_at_the_layers_codes_even_off_the_nearest(symmetric):
    weight, layer = rounded(symmetric)
    for start in (layer, replace(layer, codes=(layer.codes + 1).clamp(max=7))):
        assert torch.equal(SoftCodes(start, weight, Sharpening()).value(), start.dense())


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_step_is_adams_on_the_gradients_that_autograd_gives(symmetric):
    weight, layer = rounded(symmetric)
    training = Sharpening(steps=10, warm_up=1)
    soft = SoftCodes(layer, weight, training)
    position = soft.position.clone().requires_grad_()
    stretch = torch.zeros_like(soft.stretch, requires_grad=True)
    below = position.detach().floor().clamp_(max=7 - 1)
    sharpness = training.sharpness_at(0)
    codes = below + 0.5 + torch.tanh((position - below - 0.5) * sharpness / 2) / (2 * math.tanh(sharpness / 4))
    value = (codes - layer.spread(layer.zeros)) * layer.spread(soft.factors * (1 + stretch))
    assert torch.allclose(value, soft.value(0), atol=1e-6)
    loss = (value - 2 * weight).pow(2).sum() + value.sum()
    gradient = torch.autograd.grad(loss, value, retain_graph=True)[0]
    loss.backward()
    soft.step(gradient.clone(), 0)
    for got, start, slope, rate in (
        (soft.position, position.detach(), position.grad, training.code_rate),
        (soft.stretch, torch.zeros_like(stretch), stretch.grad, training.scale_rate),
    ):
        want = start - rate * Adam(slope).direction(slope, 1)
        if got is soft.position:
            want.clamp_(0, 7)
        assert torch.allclose(got, want, atol=1e-5)


def least_error(row, factor, scales, zeros, top):
    """The least |factor (row - value)|^2, `factor` upper triangular: depth-first, without what already costs more."""
    best = math.inf

    def descend(at, apart, cost):
        nonlocal best
        if at < 0:
            best = min(best, cost)
            return
        later = sum(a * b for a, b in zip(factor[at][at + 1 :], apart, strict=True))
        steps = [row[at] - (code - zeros[at]) * scales[at] for code in range(top + 1)]
        for step in sorted(steps, key=lambda step: abs(later + factor[at][at] * step)):
            more = (later + factor[at][at] * step) ** 2
            if cost + more < best:
                descend(at - 1, [step, *apart], cost + more)

    descend(len(row) - 1, [], 0.0)
    return best


def test_codes_come_near_the_best_of_all_on_a_small_layer():
    weight = drawn(ROWS, COLUMNS) * 0.1
    x = drawn(400, COLUMNS, seed=1) @ (torch.eye(COLUMNS) + 0.2 * drawn(COLUMNS, COLUMNS, seed=2))
    hessian = x.T @ x / len(x)
    settings = replace(Options().feedback, shrinkage=0.0, refit=False)
    start = Solver(LinearGroup(["w"], hessian.clone()), BITS, COLUMNS, settings).quantize(weight)
    soft = SoftCodes(start, weight, Sharpening(steps=400, scale_rate=0.0))

    def error(value):
        return float(((value - weight) @ hessian * (value - weight)).sum())

    for number in range(400):
        soft.step(2 * (soft.value(number) - weight) @ hessian, number)
    factor = torch.linalg.cholesky(hessian.double()).T.tolist()
    of_rows = (values.tolist() for values in (weight, start.spread(start.scales), start.spread(start.zeros)))
    least = sum(least_error(row, factor, *grid, (1 << BITS) - 1) for row, *grid in zip(*of_rows, strict=True))
    assert least <= error(soft.value()) < 0.95 * error(start.dense())
    assert error(soft.value()) < 1.25 * least
