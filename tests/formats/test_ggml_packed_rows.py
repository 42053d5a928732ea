"""Rows of ggml's types under training, against ggml's own values and autograd's gradients."""

import numpy as np
import pytest
import torch
from gguf_files import slow_but

from quantkit.calibration.learned_codes import Sharpening, SoftCodes
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS
from quantkit.formats.gguf.ggml.kquants import KQUANTS
from quantkit.formats.gguf.ggml.packed_rows import LEARNED, trainable

COLUMNS = 512
CPU = torch.device("cpu")
TYPES = [*sorted(KQUANTS), *slow_but(CODEBOOKS.keys() - {"IQ2_S", "IQ2_XS"}, sorted(CODEBOOKS))]


def rows_of(name, order=None):
    weight = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(3)) * 0.1
    weight[0, :256] = 0  # a block whose factor is zero
    packed = ggml.quantize(name, weight.numpy(), np.ones(COLUMNS, np.float32))
    return weight, packed, trainable(name, packed, order, CPU)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("permuted", [False, True])
def test_values_are_ggmls_and_slopes_are_autograds(name, permuted):
    order = np.random.default_rng(0).permutation(COLUMNS) if permuted else None
    _, packed, rows = rows_of(name, order)
    values = torch.from_numpy(ggml.dequantize(name, packed, COLUMNS))
    values = values if order is None else values[:, np.argsort(order)]
    assert torch.allclose(rows.dense(), values, rtol=1e-5, atol=1e-7)
    factors = rows.factors.clone().requires_grad_()
    gradient = torch.randn(values.shape, generator=torch.Generator().manual_seed(4))
    rows.values(rows.codes.float(), factors).backward(gradient)
    assert torch.allclose(rows.factor_slopes(gradient, rows.codes.float()), factors.grad, rtol=1e-4, atol=1e-4)
    doubled = rows.with_factors((rows.factors * 2).half().float())
    there = torch.from_numpy(ggml.dequantize(name, doubled.packed, COLUMNS))
    assert torch.allclose(doubled.dense(), there if order is None else there[:, np.argsort(order)], rtol=1e-5)
    assert torch.allclose(doubled.dense(), 2 * values, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_learned_codes_are_stored_as_they_were_trained(name):
    order = np.random.default_rng(0).permutation(COLUMNS)
    weight, packed, rows = rows_of(name, order)
    weight = weight[:, np.argsort(order)]
    soft = SoftCodes(rows, weight, Sharpening(steps=4))
    assert torch.equal(soft.value(), rows.dense())
    steps = rows.values(rows.codes.float() + 1, rows.factors) - rows.dense()
    assert torch.allclose(steps, rows.code_steps(), atol=1e-5)
    assert torch.allclose(rows.positions(rows.dense()), rows.codes.float(), atol=1e-2)
    # Where scales are zero, codes stay.
    no_effect = rows.code_steps() == 0
    assert bool(no_effect.any())
    assert torch.equal(rows.positions(weight + 1)[no_effect], rows.codes.float()[no_effect])
    for number in range(4):
        soft.step((soft.value(number) - 1.5 * weight), number)
    soft.keep()
    made = soft.finished()
    assert not np.array_equal(made.packed, packed)
    assert torch.equal(made.dense(), soft.value())
    values = torch.from_numpy(ggml.dequantize(name, made.packed, COLUMNS))[:, np.argsort(order)]
    assert torch.allclose(values, soft.value(), rtol=1e-5, atol=1e-7)
    assert float((values - weight).abs().mean()) < float(weight.abs().mean())
