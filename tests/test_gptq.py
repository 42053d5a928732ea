"""GPTQ against the paper's update in float64, one column at a time, and through whole conversions."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_llama import HIDDEN, INTERMEDIATE, LINEARS, SHAPES, converted, inputs_of, job_for, plain_model

from quantkit.artifact import Artifact
from quantkit.core.grid import fit_grid
from quantkit.core.grouped import GroupedWeight
from quantkit.methods.gptq import METHOD, Options, inverse_factor, quantize_layer
from quantkit.methods.rtn import round_layer
from quantkit.registry import Method, find_method
from quantkit.source import open_source
from quantkit.text import calibration_tokens

# float32 and float64 differ where a value lies on the border of two codes; the error that such a code feeds forward
# moves later columns of its row too.
TIES = 0.001


def layer_and_hessian(rows: int, columns: int, seed: int = 0, samples: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """A random weight, and H = E[x x^T] of strongly correlated inputs of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.linspace(3, 0.05, columns)[:, None]
    size = torch.rand(columns, generator=generator) * 2 + 0.1
    x = torch.randn(samples, columns, generator=generator) @ mixing * size / columns**0.5
    return torch.randn(rows, columns, generator=generator) * 0.05, x.T @ x / samples


def slow_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, bits: int, group_size: int, options: Options
) -> GroupedWeight:
    """Equations 2 and 3 of the paper: round a column, spread its error, eliminate the column from H^-1.

    All in float64, unblocked, without Cholesky; columns keep their places and are only visited in another order.
    """
    rows, columns = weight.shape
    group = columns if group_size == -1 else group_size
    diagonal = torch.diagonal(hessian)
    h = hessian.double().clone()
    h[range(columns), range(columns)] += options.damp_percent * diagonal.double().mean()
    inverse = torch.linalg.inv(h)
    by_importance = options.desc_act or (options.static_groups and group < columns)
    visits = sorted(range(columns), key=lambda k: -float(diagonal[k])) if by_importance else list(range(columns))
    members = visits if options.desc_act else list(range(columns))
    g_idx = torch.empty(columns, dtype=torch.int64)
    for place, column in enumerate(members):
        g_idx[column] = place // group
    groups = [members[start : start + group] for start in range(0, columns, group)]
    w = weight.double().clone()
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    scales = torch.zeros(rows, len(groups), dtype=torch.float16)
    zeros = torch.zeros(rows, len(groups), dtype=torch.uint8)

    def fit(g: int) -> None:
        grid = fit_grid(
            w[:, groups[g]].float(),
            len(groups[g]),
            bits,
            symmetric=options.sym,
            importance=diagonal[groups[g]],
            search=options.scale_search,
            least_zero=1,
        )
        scales[:, g], zeros[:, g] = grid.scales[:, 0], grid.zeros[:, 0]

    fixed = options.static_groups or group == columns
    if fixed:
        for g in range(len(groups)):
            fit(g)
    for place, column in enumerate(visits):
        g = int(g_idx[column])
        if not fixed and place % group == 0:
            fit(g)
        scale, zero = scales[:, g].double(), zeros[:, g].double()
        code = torch.clamp(torch.round(w[:, column] / scale) + zero, 0, 2**bits - 1)
        error = (w[:, column] - (code - zero) * scale) / inverse[column, column]
        w -= error[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        codes[:, column] = code.to(torch.uint8)
    return GroupedWeight(codes, scales, zeros, g_idx, bits)


def output_error(weight: torch.Tensor, quantized: GroupedWeight, hessian: torch.Tensor) -> float:
    change = (quantized.dense() - weight).double()
    return float(((change @ hessian.double()) * change).sum())


CASES = {
    "static groups, columns by importance": (4, 64, 192, Options()),
    "static groups over three blocks": (4, 64, 320, Options()),
    "groups of 32": (4, 32, 160, Options()),
    "asymmetric": (4, 64, 192, Options(sym=False)),
    "activation order": (4, 64, 192, Options(desc_act=True)),
    "activation order, asymmetric": (4, 64, 192, Options(desc_act=True, sym=False)),
    "whole row": (4, -1, 200, Options()),
    "whole row in activation order": (4, -1, 200, Options(desc_act=True)),
    "more damping": (4, 64, 192, Options(damp_percent=0.1)),
    "min and max": (4, 64, 192, Options(scale_search=False)),
    "2 bits": (2, 64, 192, Options()),
    "3 bits": (3, 64, 192, Options()),
    "8 bits": (8, 64, 192, Options()),
    "2 bits, asymmetric": (2, 64, 192, Options(sym=False)),
    "moving groups": (4, 64, 192, Options(static_groups=False)),
    "moving groups over three blocks": (4, 64, 320, Options(static_groups=False)),
    "moving groups of 96": (4, 96, 384, Options(static_groups=False)),
    "moving groups wider than a block": (4, 192, 384, Options(static_groups=False)),
    "moving groups in activation order": (4, 64, 192, Options(static_groups=False, desc_act=True)),
    "moving groups, asymmetric": (4, 64, 192, Options(static_groups=False, sym=False)),
    "moving groups, 3 bits": (3, 32, 160, Options(static_groups=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_gptq_equals_slow_reference(case: str) -> None:
    bits, group, columns, options = CASES[case]
    weight, hessian = layer_and_hessian(48, columns)
    fast = quantize_layer(weight, hessian, bits, group, options)
    slow = slow_gptq(weight, hessian, bits, group, options)
    different = fast.codes != slow.codes
    print(case, int(different.sum()), int((fast.scales != slow.scales).sum()))
    assert different.float().mean() <= TIES
    assert (fast.codes.int() - slow.codes.int()).abs().max() <= 1
    assert torch.equal(fast.g_idx, slow.g_idx)
    assert torch.equal(fast.zeros, slow.zeros)
    assert torch.equal(fast.scales, slow.scales)
