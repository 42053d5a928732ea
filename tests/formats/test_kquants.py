"""Blocks of K-quants and IQ types taken apart, refitted and put together, against how ggml and gguf read them."""

import numpy as np
import pytest
import torch

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS
from quantkit.formats.gguf.ggml.kquants import (
    KQUANTS,
    Scales,
    read_codes,
    read_grid,
    read_scales,
    with_codes,
    with_scales,
)
from quantkit.formats.gguf.ggml.scale_refit import refit

gguf = pytest.importorskip("gguf")

ROWS, COLUMNS = 24, 1024
FEW, SHORT = 6, 512  # of layers that are refitted, and of codebooks
each_kquant = pytest.mark.parametrize("name", sorted(KQUANTS))
each_codebook = pytest.mark.parametrize("name", sorted(CODEBOOKS))


def rows(seed=0):
    """Rows of very different sizes, one of zeros, one block of one sign, one block constant."""
    made = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    made *= np.logspace(-4, 1, ROWS, dtype=np.float32)[:, None]
    made[3] = 0
    made[4, :256] = np.abs(made[4, :256])
    made[5, 256:512] = -0.25
    return made


@each_kquant
def test_what_is_read_gives_the_values_that_ggml_reads(name):
    kind = KQUANTS[name]
    packed = ggml.quantize(name, rows())
    assert packed.shape[1] == COLUMNS // 256 * kind.nbytes
    scales, minima = (part.repeat(kind.group, 1) for part in read_grid(name, packed))
    codes = read_codes(name, packed)
    assert codes.max() == (1 << kind.bits) - 1
    ours = scales * (np.array(kind.steps, np.float32)[codes] if kind.steps else codes) - minima
    assert np.allclose(ours, ggml.dequantize(name, packed, COLUMNS), rtol=1e-6, atol=1e-12)


@each_kquant
def test_ggmls_own_codes_and_scales_give_its_own_bytes(name):
    importance = np.random.default_rng(1).random(COLUMNS).astype(np.float32) + 0.01
    for packed in (ggml.quantize(name, rows()), ggml.quantize(name, rows(), importance)):
        emptied = with_codes(name, packed, np.zeros((ROWS, COLUMNS), np.uint8))
        assert not read_codes(name, emptied).any()
        assert np.array_equal(with_codes(name, emptied, read_codes(name, packed)), packed)
        own = read_scales(name, packed)
        nothing = Scales(*(np.zeros_like(part) for part in (own.factor, own.offset, own.scales, own.minima)))
        emptied = with_scales(name, packed, nothing)
        assert not ggml.dequantize(name, emptied, COLUMNS).any()
        assert np.array_equal(read_codes(name, emptied), read_codes(name, packed))
        assert np.array_equal(with_scales(name, emptied, own), packed)


@each_kquant
def test_other_codes_and_scales_come_back(name):
    kind, generator, packed = KQUANTS[name], np.random.default_rng(2), ggml.quantize(name, rows())
    before = packed.copy()
    codes = generator.integers(0, 1 << kind.bits, (ROWS, COLUMNS)).astype(np.uint8)
    changed = with_codes(name, packed, codes)
    assert np.array_equal(packed, before)
    assert np.array_equal(read_codes(name, changed), codes)
    for ours, theirs in zip(read_grid(name, changed), read_grid(name, packed), strict=True):
        assert np.array_equal(ours, theirs)
    own = read_scales(name, packed)
    scales = generator.integers(kind.least, kind.largest + 1, own.scales.shape).astype(np.float32)
    minima = generator.integers(0, kind.largest_minimum + 1, own.minima.shape).astype(np.float32)
    factor, offset = (
        generator.standard_normal(own.factor.shape).astype(np.float16).astype(np.float32) for _ in range(2)
    )
    other = Scales(factor, offset if kind.largest_minimum else own.offset, scales, minima)
    got = read_scales(name, with_scales(name, packed, other))
    for part in ("factor", "offset", "scales", "minima"):
        assert np.array_equal(getattr(got, part), getattr(other, part)), part


# Scales that are refitted, against trying every neighbour


def layer(rows=FEW):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(SHORT, SHORT, generator=generator) * torch.rand(SHORT, generator=generator)
    x = torch.randn(900, SHORT, generator=generator) @ mixing
    return torch.randn(rows, SHORT, generator=generator) * 0.05, x.T @ x / 900


def errors(name, packed, weight, hessian):
    """Of each row, in float64, by ggml's own reading."""
    change = (torch.from_numpy(ggml.dequantize(name, packed, SHORT)) - weight).double()
    return ((change @ hessian.double()) * change).sum(1)


@each_kquant
def test_every_row_comes_nearer_whatever_its_neighbours_and_codes_stay(name):
    weight, hessian = layer()
    packed = ggml.quantize(name, weight.numpy())
    refitted = refit(name, packed, weight, hessian)
    assert np.array_equal(read_codes(name, refitted), read_codes(name, packed))
    before, after = (errors(name, part, weight, hessian) for part in (packed, refitted))
    assert bool((after < before).all())
    assert float(after.sum()) < 0.97 * float(before.sum())
    alone = np.concatenate([refit(name, packed[i : i + 1], weight[i : i + 1], hessian) for i in range(FEW)])
    values = [ggml.dequantize(name, part, SHORT) for part in (refitted, alone)]
    assert np.allclose(*values, atol=1e-3 * float(weight.abs().max()))


@each_kquant
def test_done_over_and_over_no_neighbour_is_better(name):
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


# Codebooks of IQ2 and IQ3


def read_by_gguf(name, packed):
    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name])


def any_rows(name) -> np.ndarray:
    """Packed rows (FEW, bytes) of any bits, their factors finite."""
    kind = CODEBOOKS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (FEW * SHORT // 256, kind.nbytes), np.uint8)
    blocks[:, :2] = np.linspace(0.5, 2, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(FEW, -1)


@each_codebook
def test_points_signs_and_factors_are_read_as_they_were_put(name):
    kind, generator, before = CODEBOOKS[name], np.random.default_rng(1), any_rows(name)
    packed = before.copy()
    indices = generator.integers(0, kind.points, (FEW, SHORT // kind.size)).astype(np.uint16)
    minus = generator.integers(0, 2, (FEW, SHORT // 8, 8))
    if kind.even:
        minus[:, :, 7] = minus[:, :, :7].sum(2) % 2
    signs = np.packbits(minus.astype(bool), axis=2, bitorder="little")[:, :, 0]
    changed = kind.with_points(packed, indices, signs)
    assert np.array_equal(packed, before)
    scales = kind.scales(packed)
    assert scales.shape == (FEW, SHORT // kind.run)
    assert np.array_equal(kind.scales(changed), scales)
    assert len(np.unique(scales)) > 20
    ours = scales.repeat(kind.run, 1) * kind.table()[indices].reshape(FEW, SHORT) * (1 - 2 * minus.reshape(FEW, -1))
    assert np.allclose(ours, read_by_gguf(name, changed), rtol=1e-6)
    assert np.array_equal(ggml.dequantize(name, changed, SHORT), read_by_gguf(name, changed))
    factors, values = kind.without_factors(before, SHORT)
    assert np.allclose(factors.repeat(256, 1) * values, read_by_gguf(name, before), rtol=1e-6)
    assert np.array_equal(kind.with_factors(before, factors), before)
    doubled = kind.with_factors(before, 2 * factors)
    assert np.array_equal(read_by_gguf(name, doubled), 2 * read_by_gguf(name, before))
