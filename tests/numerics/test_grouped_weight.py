"""Grouped weights, and permutations of moments, against indexing element by element."""

import pytest
import torch

from quantkit.numerics import second_moments as gram
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups
from quantkit.numerics.second_moments import permuted

ROWS, COLUMNS, GROUP = 5, 24, 8


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
    order = layer.beside()
    assert (order is None) is not scattered
    if order is not None:
        assert torch.equal(layer.g_idx[order], contiguous_groups(COLUMNS, GROUP))


@pytest.mark.parametrize("slab", [7, 64])
def test_permuted_takes_rows_and_columns_in_that_order(monkeypatch, slab):
    monkeypatch.setattr(gram, "SLAB_ROWS", slab)
    matrix, order = torch.randn(20, 20), torch.randperm(20)
    got = permuted(matrix, order, torch.float64)
    assert got.dtype == torch.float64
    assert torch.equal(got, matrix.double()[order][:, order])
    assert torch.equal(permuted(matrix.T, order), matrix[order][:, order].T)
