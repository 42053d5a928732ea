import math

import pytest
import torch

from quantkit.models.adapted import merge_linear

OUT, COLUMNS, RANK, SCALE = 5, 7, 3, 0.75


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def slow(weight, a, b, magnitude):
    """W (out, in) + s B A, and DoRA's m (W + s B A) / ||W + s B A||, one number after the other in Python's floats."""
    rows = []
    for i in range(len(weight)):
        row = [
            float(weight[i, j]) + SCALE * sum(float(b[i, k]) * float(a[k, j]) for k in range(len(a)))
            for j in range(weight.shape[1])
        ]
        if magnitude is not None:
            length = math.sqrt(sum(value * value for value in row))
            row = [float(magnitude[i]) * value / length for value in row]
        rows.append(row)
    return rows


def test_a_case_worked_by_hand():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    a, b = torch.tensor([[10.0, 20.0]]), torch.tensor([[1.0], [2.0]])
    assert merge_linear(weight, a, b, 0.5).tolist() == [[6.0, 12.0], [13.0, 24.0]]
    assert merge_linear(weight, a, b, 0.5, transposed=True).tolist() == [[6.0, 12.0], [13.0, 24.0]]
    assert merge_linear(torch.zeros(2, 2), a, b, 1.0, transposed=True).tolist() == [[10.0, 20.0], [20.0, 40.0]]
    # The lengths of (3, 4) and (6, 8) are 5 and 10.
    still = torch.zeros(1, 2)
    weight = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    assert merge_linear(weight, still, b, 0.5, torch.tensor([10.0, 5.0])).tolist() == [[6.0, 8.0], [3.0, 4.0]]


@pytest.mark.parametrize("dora", [False, True])
def test_values_equal_sums_written_out(dora):
    weight, a, b = random(OUT, COLUMNS), random(RANK, COLUMNS), random(OUT, RANK)
    magnitude = random(OUT).abs() if dora else None
    expected = torch.tensor(slow(weight, a, b, magnitude), dtype=torch.float64)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(merge_linear(weight, a, b, SCALE, magnitude).double(), expected, **close)
    swapped = merge_linear(weight.T.contiguous(), a, b, SCALE, magnitude, transposed=True)
    torch.testing.assert_close(swapped.double(), expected.T, **close)
