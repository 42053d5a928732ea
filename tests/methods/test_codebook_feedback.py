"""IQ2 and IQ3 types with error feedback: against an elimination in float64 that tries every point of the table."""

import numpy as np
import pytest
import torch

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS, Codebook
from quantkit.methods.gguf import codebook_feedback
from quantkit.methods.gguf.error_feedback import quantize_layer
from quantkit.numerics.error_feedback import Feedback

gguf = pytest.importorskip("gguf")

SHRINKAGE, DAMP = 0.5, 0.01
SLOW = ("IQ2_S", "IQ2_XS")  # whose tables take ggml seconds
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in sorted(CODEBOOKS)]


def layer_and_hessian(rows: int, columns: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    x = torch.randn(900, columns, generator=generator) @ mixing
    return torch.randn(rows, columns, generator=generator) * 0.05, x.T @ x / 900


def importance_of(hessian: torch.Tensor) -> np.ndarray:
    diagonal = hessian.diagonal()
    return (diagonal + 1e-6 * diagonal.mean() + 1e-30).numpy()


def nearest_points(kind: Codebook, x: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """What one row's x (columns,) becomes: its own signs, of every point in turn the one of the least error."""
    minus = x < 0
    if kind.even and int(minus.sum()) % 2:
        cheapest = int((x.abs() * metric.diagonal()).argmin())
        minus[cheapest] = ~minus[cheapest]
    signs = torch.where(minus, -1.0, 1.0).double()
    table, made = torch.from_numpy(kind.table()).double(), x.clone()
    parts = range(0, len(x), kind.size)
    for start in [*parts, *parts[:-1]]:
        part = slice(start, start + kind.size)
        tried = made.repeat(len(table), 1)
        tried[:, part] = signs[part] * table
        errors = x - tried
        made[part] = tried[((errors @ metric) * errors).sum(1).argmin(), part]
    return made


def slow_values(kind: Codebook, weight: torch.Tensor, hessian: torch.Tensor, packed: np.ndarray) -> torch.Tensor:
    """Round a group of columns, spread its error, eliminate the group from the inverse Hessian: one by one."""
    size = 8 if kind.even else kind.size
    scales = torch.from_numpy(kind.scales(packed)).double()
    h = hessian.double()
    mean = h.diagonal().mean()
    h = h + torch.diag(h.diagonal() * SHRINKAGE) + torch.eye(len(h)) * DAMP * mean
    h += torch.eye(len(h)) * DAMP / 3 * h.diagonal().mean()
    inverse, w, values = torch.linalg.inv(h), weight.double().clone(), torch.zeros(weight.shape, dtype=torch.float64)
    starts = range(0, len(h), size)
    for start in sorted(starts, key=lambda k: -float(hessian.diagonal()[k : k + size].sum())):
        group = slice(start, start + size)
        metric = torch.linalg.inv(inverse[group, group])
        for row in range(len(w)):
            scale = scales[row, start // kind.run]
            values[row, group] = scale * nearest_points(kind, w[row, group] / scale, metric)
        w -= (w[:, group] - values[:, group]) @ metric @ inverse[group]
        inverse -= inverse[:, group] @ metric @ inverse[group]
    return values


@pytest.mark.parametrize("name", NAMES)
def test_points_are_those_of_the_slow_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebook_feedback, "ROWS", 2)  # more than one part of the rows
    weight, hessian = layer_and_hessian(3)
    kind, grid = CODEBOOKS[name], ggml.quantize(name, weight.numpy(), importance_of(hessian))
    packed = quantize_layer(name, weight, Feedback(hessian.clone(), shrinkage=SHRINKAGE, damp_percent=DAMP))
    factors, values = kind.without_factors(packed, 512)
    ours = torch.from_numpy(kind.without_factors(grid, 512)[0].repeat(256, 1) * values)
    theirs = slow_values(kind, weight, hessian, grid)
    # A border of two points may be passed either way in float32; what follows it in the row then differs.
    assert torch.isclose(ours.double(), theirs, rtol=1e-4).double().mean() > 0.98
    assert not np.array_equal(factors, kind.without_factors(grid, 512)[0])


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_nearer_than_ggml_s_and_gguf_reads_the_same(name: str) -> None:
    weight, hessian = layer_and_hessian(64)

    def error(packed: np.ndarray) -> float:
        values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name])
        assert np.allclose(values, ggml.dequantize(name, packed, 512), rtol=1e-6)
        change = (torch.from_numpy(values) - weight).double()
        return float(((change @ hessian.double()) * change).sum())

    theirs = ggml.quantize(name, weight.numpy(), importance_of(hessian))
    ours = quantize_layer(name, weight, Feedback(hessian.clone()))
    assert ours.shape == theirs.shape
    assert error(ours) < 0.6 * error(theirs)


def test_points_keep_zero_rows_and_columns_whose_inputs_never_fire() -> None:
    weight, hessian = layer_and_hessian(12)
    weight[0], weight[1, :256] = 0, 0
    hessian[:32], hessian[:, :32] = 0, 0
    for name in ("IQ2_XXS", "IQ3_XXS", "IQ3_S"):
        values = ggml.dequantize(name, quantize_layer(name, weight, Feedback(hessian.clone())), 512)
        assert np.isfinite(values).all()
        assert not values[0].any()
        assert np.abs(values[2:, :32]).max() > 0
