"""Second moments against float64 sums."""

import pytest
import torch

from quantkit.numerics import second_moments as module
from quantkit.numerics.second_moments import Gram

PANEL, CHUNK = 16, 64
# A bfloat16 has 8 bits; one rounding of each difference and of each product is left.
HALF_STEP = 2**-8


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
