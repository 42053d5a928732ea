import numpy as np
import pytest
import torch

from quantkit.numerics.grid import fit_grid, round_to_grid, stored_scale
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups


def weights_of(seed, rows=16, columns=128):
    """(rows, columns) weights with a heavy tail and the (columns,) importance of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    weight *= 1 + 3 * (torch.rand(rows, columns, generator=generator) < 0.03)
    importance = torch.rand(columns, generator=generator).square() * 5 + 0.01
    return weight, importance


def losses(weight, grid, group, importance):
    """Weighted squared error of every row and group, (rows, groups) float64, from the codes."""
    codes = round_to_grid(weight, grid, group)
    g_idx = contiguous_groups(weight.shape[1], group)
    dense = GroupedWeight(codes, grid.scales, grid.zeros, g_idx, grid.bits).dense()
    error = (weight.double() - dense.double()).square() * importance.double()
    return error.reshape(len(weight), -1, group).sum(-1).numpy()


def least_loss(weight, group, bits, importance, symmetric):
    """The loss of the best float16 scales of a fine line, of either sign or with every zero point, group by group."""
    half, top, total = 1 << (bits - 1), (1 << bits) - 1, 0.0
    for row in weight.double().numpy().reshape(len(weight), -1, group):
        for w, h in zip(row, importance.double().numpy().reshape(-1, group), strict=True):
            if symmetric:
                line = np.linspace(0.2, 1.2, 2000) * np.abs(w).max() * 2 / top
                scales, zeros = np.concatenate([line, -line]).astype(np.float16).astype(np.float64), np.array([half])
            else:
                scales, zeros = np.linspace(0.2, 1.2, 200) * (w.max() - w.min()) / top, np.arange(top + 1)
            scales, zeros = scales[:, None, None], zeros[None, :, None]
            values = (np.clip(np.rint(w / scales) + zeros, 0, top) - zeros) * scales
            total += ((w - values) ** 2 * h).sum(-1).min()
    return total


def test_grids_by_hand():
    weight = torch.tensor([[-7.5, 7.5, 0.4, -3.0]])
    grid = fit_grid(weight, 4, 4, symmetric=True)
    assert (grid.scales.tolist(), grid.zeros.tolist(), grid.top) == ([[1.0]], [[8]], 15)
    assert (grid.scales.dtype, grid.zeros.dtype) == (torch.float16, torch.uint8)
    # -8 + 8, 8 + 8 cut to 15, 0 + 8, -3 + 8
    assert round_to_grid(weight, grid, 4).tolist() == [[0, 15, 8, 5]]
    weight = torch.tensor([[-1.0, 0.0, 0.6, 2.0, 3.0, 6.0, 0.0, 3.1]])
    grid = fit_grid(weight, 4, 2, symmetric=False)
    # The first group spans -1..2 in three steps of 1, the second 0..6 in steps of 2.
    assert (grid.scales.tolist(), grid.zeros.tolist()) == ([[1.0, 2.0]], [[1, 0]])
    assert round_to_grid(weight, grid, 4).tolist() == [[0, 1, 2, 3, 2, 3, 0, 2]]


@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, True), (4, False), (8, True)])
def test_codes_equal_a_loop_over_single_weights(bits, symmetric):
    weight, importance = weights_of(bits, rows=4, columns=64)
    grid = fit_grid(weight, 32, bits, symmetric=symmetric, importance=importance, search=True)
    codes = round_to_grid(weight, grid, 32)
    for n, row in enumerate(weight.numpy()):
        for k, w in enumerate(row):
            scale, zero = np.float32(grid.scales[n, k // 32].item()), int(grid.zeros[n, k // 32])
            assert codes[n, k] == min(max(int(np.rint(w / scale)) + zero, 0), 2**bits - 1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_searched_grid_is_near_the_best_of_all(bits, symmetric):
    weight, importance = weights_of(bits - 2)
    grid = fit_grid(weight, 32, bits, symmetric=symmetric, importance=importance, search=True)
    near = 1.015 if symmetric else {2: 1.01, 3: 1.03, 4: 1.2}[bits]
    searched = losses(weight, grid, 32, importance).sum()
    assert searched < near * least_loss(weight, 32, bits, importance, symmetric)


def test_the_further_step_of_a_symmetric_grid_lies_where_it_is_needed():
    """-8 ... 7 times the scale: 1.0 is reached with a scale of -1/8, and -1.0 with one of 1/8."""
    weight = torch.tensor([[1.0, -0.875, 0.5, 0.125], [-1.0, 0.875, -0.5, -0.125]])
    grid = fit_grid(weight, 4, 4, symmetric=True, search=True)
    assert grid.scales.tolist() == [[-0.125], [0.125]]
    assert round_to_grid(weight, grid, 4).tolist() == [[0, 15, 4, 7]] * 2
    assert stored_scale(torch.tensor([-1e-9, 1e-9, -1e9, -0.04])).tolist() == [
        -(2.0**-24), 2.0**-24, -65504.0, -float(np.float16(0.04)),
    ]  # fmt: skip


@pytest.mark.parametrize(("bits", "search"), [(2, False), (4, True), (8, False)])
def test_zero_points_stay_where_the_gptq_layout_can_store_them(bits, search):
    weight = torch.linspace(0.1, 1, 64).reshape(2, 32)
    grid = fit_grid(torch.cat([weight, -weight]), 32, bits, symmetric=False, search=search, least_zero=1)
    assert grid.zeros[:2].tolist() == [[1], [1]]
    assert grid.zeros[2:].tolist() == [[2**bits - 1], [2**bits - 1]]
    if not search:  # a zero point of 1 leaves one code less, and cuts nothing off
        assert torch.allclose(grid.scales[:2, 0].float() * (2**bits - 2), weight.amax(1), rtol=1e-3)
    unbound = fit_grid(weight, 32, bits, symmetric=False, search=search)
    assert unbound.zeros.tolist() == [[0], [0]]


@pytest.mark.parametrize("size", [0.0, 1e-9, 3e5])
@pytest.mark.parametrize(("symmetric", "search"), [(True, True), (False, False)])
def test_scales_are_never_zero_or_infinite(size, symmetric, search):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * size
    grid = fit_grid(weight, 32, 4, symmetric=symmetric, importance=torch.zeros(64), search=search)
    assert torch.isfinite(grid.scales).all()
    assert (grid.scales != 0).all()
    assert (grid.scales > 0).all() or (symmetric and search)
    codes = round_to_grid(weight, grid, 32)
    dense = GroupedWeight(codes, grid.scales, grid.zeros, contiguous_groups(64, 32), 4).dense()
    assert torch.isfinite(dense).all()
    if size < 1:
        assert (dense - weight).abs().max() <= 2.0**-24  # the smallest float16 is the step
