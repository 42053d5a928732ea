import pytest
import torch

from quantkit.numerics import second_moments as module
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups
from quantkit.numerics.second_moments import Gram, permuted

PANEL, CHUNK = 16, 64
# A bfloat16 has 8 bits; one rounding of each difference and of each product is left.
HALF_STEP = 2**-8
ROWS, COLUMNS, GROUP = 5, 24, 8


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    monkeypatch.setattr(module, "PANEL", PANEL)
    monkeypatch.setattr(module, "CHUNK", CHUNK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [PANEL, 2 * PANEL + 5])
def test_moments_equal_those_of_float64(dtype, columns, units):
    generator = torch.Generator().manual_seed(0)
    gram = Gram(columns, torch.device("cpu"), cross=True)
    xs, ys = [], []
    for tokens in (3 * CHUNK + 17, 1, CHUNK):
        x = torch.randn(tokens, columns, generator=generator).to(dtype)
        y = x + 0.5 * torch.randn(tokens, columns, generator=generator).to(dtype)
        gram.add(x, y)
        xs.append(x.double())
        ys.append((y.double() - x.double()) if dtype == torch.float32 or not units else (y - x).double())
    x, change = torch.cat(xs), torch.cat(ys)
    mean = gram.mean(keep=True)
    assert torch.equal(mean, mean.T)
    for got, want in ((gram.mean(), x.T @ x / len(x)), (gram.cross(), change.T @ x / len(x))):
        assert got.dtype == torch.float32
        near = HALF_STEP if units and dtype == torch.bfloat16 else 1e-6
        assert (got.double() - want).norm() < near * want.norm()
    assert gram.tokens == len(x)


def test_moments_of_the_first_inputs_stand_beside_those_of_all():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 16 * CHUNK, PANEL + 8, generator=generator)
    gram = Gram(PANEL + 8, torch.device("cpu"), cross=True)
    gram.add(x[:700], y[:700])
    gram.add(x[700:800], y[700:800])
    assert gram.paired() is None
    gram.add(x[800:])
    cross, paired = gram.cross(), gram.paired()
    assert torch.allclose(gram.mean(), x.T @ x / len(x), atol=1e-4)
    assert torch.allclose(paired, x[:800].T @ x[:800] / 800, atol=1e-4)
    assert torch.allclose(cross, (y - x)[:800].T @ x[:800] / 800, atol=1e-4)


def weight(scattered):
    generator = torch.Generator().manual_seed(0)
    g_idx = contiguous_groups(COLUMNS, GROUP)
    if scattered:
        g_idx = g_idx[torch.randperm(COLUMNS, generator=generator)]
    shape = ROWS, COLUMNS // GROUP
    return GroupedWeight(
        codes=torch.randint(0, 16, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8),
        scales=torch.rand(shape, generator=generator).to(torch.float16),
        zeros=torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8),
        g_idx=g_idx,
        bits=4,
    )


@pytest.mark.parametrize("scattered", [False, True])
def test_values_and_sums_are_those_of_single_codes(scattered):
    layer = weight(scattered)
    for n in range(ROWS):
        for k in range(COLUMNS):
            g = int(layer.g_idx[k])
            step = float(layer.codes[n, k]) - float(layer.zeros[n, g])
            assert float(layer.steps()[n, k]) == step
            assert float(layer.dense()[n, k]) == step * float(layer.scales[n, g])
            assert float(layer.spread(layer.scales)[n, k]) == float(layer.scales[n, g])

    values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    for g in range(COLUMNS // GROUP):
        assert torch.equal(layer.sums(values)[:, g], values[:, layer.g_idx == g].sum(1))
    order = layer.group_order()
    assert (order is None) is not scattered
    if order is not None:
        assert torch.equal(layer.g_idx[order], contiguous_groups(COLUMNS, GROUP))


@pytest.mark.parametrize("slab", [7, 64])
def test_permuted_takes_rows_and_columns_in_that_order(monkeypatch, slab):
    monkeypatch.setattr(module, "SLAB_ROWS", slab)
    matrix, order = torch.randn(20, 20), torch.randperm(20)
    got = permuted(matrix, order, torch.float64)
    assert got.dtype == torch.float64
    assert torch.equal(got, matrix.double()[order][:, order])
    assert torch.equal(permuted(matrix.T, order), matrix[order][:, order].T)
