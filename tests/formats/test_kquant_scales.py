"""Refitted K-quant scales against trying every neighbour, and against ggml's own."""

import numpy as np
import pytest
import torch

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.kquants import KQUANTS, read_codes, read_scales, with_scales
from quantkit.formats.gguf.ggml.scale_refit import refit

ROWS, COLUMNS = 6, 512


def layer(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator) * torch.rand(COLUMNS, generator=generator)
    x = torch.randn(900, COLUMNS, generator=generator) @ mixing
    return torch.randn(rows, COLUMNS, generator=generator) * 0.05, x.T @ x / 900


def errors(name: str, packed: np.ndarray, weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Of each row, in float64, by ggml's own reading."""
    change = (torch.from_numpy(ggml.dequantize(name, packed, COLUMNS)) - weight).double()
    return ((change @ hessian.double()) * change).sum(1)


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_every_row_comes_nearer_and_codes_stay(name: str) -> None:
    weight, hessian = layer()
    packed = ggml.quantize(name, weight.numpy())
    refitted = refit(name, packed, weight, hessian)
    assert np.array_equal(read_codes(name, refitted), read_codes(name, packed))
    before, after = (errors(name, part, weight, hessian) for part in (packed, refitted))
    assert bool((after < before).all())
    assert float(after.sum()) < 0.97 * float(before.sum())


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_blocks_whose_inputs_go_together_are_refitted_together(name: str) -> None:
    weight, hessian = layer()
    half = COLUMNS // 2
    hessian = hessian[:half, :half].repeat(2, 2)  # each input comes twice, once for each block
    hessian += 1e-3 * torch.eye(COLUMNS) * hessian.diagonal().mean()
    packed = ggml.quantize(name, weight.numpy())
    after, before = (errors(name, part, weight, hessian) for part in (refit(name, packed, weight, hessian), packed))
    assert bool((after < before).all())
    # One block's scales alone can make good what those of both did wrong.
    assert float(after.sum()) < 0.91 * float(before.sum())


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_done_over_and_over_no_neighbour_is_better(name: str) -> None:
    weight, hessian = layer(2)
    kind, packed = KQUANTS[name], ggml.quantize(name, weight.numpy())
    for _ in range(60):
        packed = refit(name, packed, weight, hessian)
    least = errors(name, packed, weight, hessian).sum()
    assert bool(torch.isfinite(least))
    generator = np.random.default_rng(0)
    for part, low, high in (("scales", kind.least, kind.largest), ("minima", 0, kind.largest_minimum)):
        for _ in range(40 if high else 0):
            scales = read_scales(name, packed)
            values = getattr(scales, part)
            i, j = generator.integers(values.shape[0]), generator.integers(values.shape[1])
            values[i, j] = np.clip(values[i, j] + generator.choice([-1, 1]), low, high)
            moved = errors(name, with_scales(name, packed, scales), weight, hessian).sum()
            assert float(moved) >= float(least) * (1 - 1e-6)
    for part in ("factor", "offset") if kind.largest_minimum else ("factor",):
        for step in (-1, 1):
            scales = read_scales(name, packed)
            values = getattr(scales, part).astype(np.float16)
            values[0] = (values[0].view(np.int16) + np.int16(step)).view(np.float16)
            setattr(scales, part, values.astype(np.float32))
            moved = errors(name, with_scales(name, packed, scales), weight, hessian).sum()
            # All factors of a row are solved for together and rounded each for itself.
            assert float(moved) >= float(least) * (1 - 1e-3)


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_zeros_and_silent_inputs_stay_finite(name: str) -> None:
    weight, hessian = layer()
    weight[0], weight[1, :256] = 0, 0
    hessian[:32], hessian[:, :32] = 0, 0
    packed = refit(name, ggml.quantize(name, weight.numpy()), weight, hessian)
    values = ggml.dequantize(name, packed, COLUMNS)
    assert np.isfinite(values).all()
    assert not values[0].any()


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    weight, hessian = layer()
    packed = ggml.quantize(name, weight.numpy())
    together = refit(name, packed, weight, hessian)
    alone = np.concatenate([refit(name, packed[i : i + 1], weight[i : i + 1], hessian) for i in range(ROWS)])
    values = [ggml.dequantize(name, part, COLUMNS) for part in (together, alone)]
    assert np.allclose(*values, atol=1e-3 * float(weight.abs().max()))
