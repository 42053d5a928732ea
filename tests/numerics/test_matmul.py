from contextlib import nullcontext

import pytest
import torch

from quantkit.numerics import matmul as products
from quantkit.numerics.matmul import FEW_ROWS, Linear, product, products_everywhere, quick, quick_product, use_products

N, K = 24, 320
HALF_STEP = 2**-8  # half of a bfloat16's last bit, relative, at most


@pytest.fixture(autouse=True)
def in_parts(monkeypatch):
    """Weights are widened in parts, the last one smaller."""
    monkeypatch.setattr(products, "SLAB_ELEMENTS", 7 * K)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("shape", "biased"), [((1,), True), ((FEW_ROWS,), False), ((FEW_ROWS + 1,), True), ((2, 40), False), ((0,), True)]
)
def test_a_product_is_rounded_once(units, shape, biased):
    x, weight = drawn(*shape, K), drawn(N, K, seed=1)
    bias = drawn(N, seed=2) * 30 if biased else None
    got = product(x, weight, bias)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (got.dtype, got.shape) == (torch.bfloat16, (*shape, N))
    # 1e-4: sums of 320 products in float32
    assert torch.all((got.double() - want).abs() <= HALF_STEP * want.abs() + 1e-4)


@pytest.mark.parametrize("shape", [(1,), (2, 40)])
def test_gradients_are_those_of_the_product(units, shape):
    given = [drawn(*shape, K), drawn(N, K, seed=1), drawn(N, seed=2)]
    slope = drawn(*shape, N, seed=3)
    half = [part.clone().requires_grad_() for part in given]
    exact = [part.double().requires_grad_() for part in given]
    torch.autograd.backward(product(half[0], half[1], half[2]), slope)
    torch.autograd.backward(torch.nn.functional.linear(exact[0], exact[1], exact[2]), slope.double())
    for ours, theirs in zip(half, exact, strict=True):
        assert (ours.grad.double() - theirs.grad).abs().max() <= 2 * HALF_STEP * theirs.grad.abs().max()


def test_wide_inputs_stay_wide_and_other_devices_multiply_float32_as_it_is(units):
    assert products.quick_dtype(torch.device("cuda")) == torch.float32
    x, weight = drawn(40, K).float(), drawn(N, K, seed=1).float()
    assert torch.equal(product(x, weight), torch.nn.functional.linear(x, weight))


def test_layers_of_a_model_change_their_class_and_nothing_else(units, monkeypatch):
    class Special(torch.nn.Linear):
        pass

    model, x = torch.nn.Sequential(torch.nn.Linear(K, N), Special(N, N)).bfloat16(), drawn(40, K)
    names, first, before = list(model.state_dict()), model[0].weight, model(x).double()
    use_products(model)
    assert [type(module) for module in model] == [Linear, Special]
    assert list(model.state_dict()) == names
    assert model[0].weight is first
    seen = []
    multiply = products.product
    monkeypatch.setattr(products, "product", lambda x, *given: (seen.append(given[0]), multiply(x, *given))[1])
    for everywhere in (False, True):  # layers of any class take the product while that is entered
        with torch.inference_mode(), products_everywhere() if everywhere else nullcontext():
            got = model(x).double()
        assert any(weight is model[0].weight for weight in seen)
        assert any(weight is model[1].weight for weight in seen) == everywhere
        assert (got - before).abs().max() <= 4 * HALF_STEP * before.abs().max()


def test_a_quick_product_is_of_bfloat16_where_that_is_quicker(units, monkeypatch):
    monkeypatch.setattr(products, "QUICK_COLUMNS", 7)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(30, K, generator=generator), torch.randn(K, N, generator=generator)
    assert quick(b).dtype == (torch.bfloat16 if units else torch.float32)
    want = a.double() @ b.double()
    for got in (quick_product(a, b), products.product_in(a, quick(b))):
        error = float((got - want).norm() / want.norm())
        assert got.dtype == torch.float32
        assert (5e-4 < error < HALF_STEP) if units else error < 1e-6
    assert products.product_in(a, b).equal(a @ b)


@pytest.mark.parametrize(
    ("name", "amx", "only"), [("Intel Xeon", False, True), ("Intel Xeon", True, False), ("AMD EPYC", False, False)]
)
def test_intel_without_amx_has_no_units_for_bfloat16(name, amx, only, monkeypatch):
    processor = {"cpu_name": name, "avx512_bf16": True, "amx_bf16": amx}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert products._has_units.__wrapped__(torch.bfloat16) is not only
    assert products._has_units.__wrapped__(torch.float32)
