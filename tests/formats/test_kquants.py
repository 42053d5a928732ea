"""K-quant blocks taken apart and put together, against ggml's own choices and its own reading of them."""

import numpy as np
import pytest

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.kquants import (
    KQUANTS,
    Scales,
    read_codes,
    read_grid,
    read_scales,
    with_codes,
    with_scales,
)

ROWS, COLUMNS = 24, 1024


def rows(seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, one of zeros, one block of one sign, one block constant."""
    made = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    made *= np.logspace(-4, 1, ROWS, dtype=np.float32)[:, None]
    made[3] = 0
    made[4, :256] = np.abs(made[4, :256])
    made[5, 256:512] = -0.25
    return made


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_what_is_read_gives_the_values_that_ggml_reads(name: str) -> None:
    kind = KQUANTS[name]
    packed = ggml.quantize(name, rows())
    assert packed.shape[1] == COLUMNS // 256 * kind.nbytes
    scales, minima = (part.repeat(kind.group, 1) for part in read_grid(name, packed))
    codes = read_codes(name, packed)
    assert codes.max() == (1 << kind.bits) - 1
    ours = scales * (np.array(kind.steps, np.float32)[codes] if kind.steps else codes) - minima
    assert np.allclose(ours, ggml.dequantize(name, packed, COLUMNS), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_ggmls_own_choices_give_its_own_bytes(name: str, weighted: bool) -> None:
    importance = np.random.default_rng(1).random(COLUMNS).astype(np.float32) + 0.01 if weighted else None
    packed = ggml.quantize(name, rows(), importance)
    emptied = with_codes(name, packed, np.zeros((ROWS, COLUMNS), np.uint8))
    assert not read_codes(name, emptied).any()
    assert np.array_equal(with_codes(name, emptied, read_codes(name, packed)), packed)


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_other_codes_come_back_and_leave_the_scales(name: str) -> None:
    packed = ggml.quantize(name, rows())
    before = packed.copy()
    codes = np.random.default_rng(2).integers(0, 1 << KQUANTS[name].bits, (ROWS, COLUMNS)).astype(np.uint8)
    changed = with_codes(name, packed, codes)
    assert np.array_equal(packed, before)
    assert np.array_equal(read_codes(name, changed), codes)
    for ours, theirs in zip(read_grid(name, changed), read_grid(name, packed), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_ggmls_own_scales_give_its_own_bytes(name: str) -> None:
    packed = ggml.quantize(name, rows())
    own = read_scales(name, packed)
    nothing = Scales(*(np.zeros_like(part) for part in (own.factor, own.offset, own.scales, own.minima)))
    emptied = with_scales(name, packed, nothing)
    assert not ggml.dequantize(name, emptied, COLUMNS).any()
    assert np.array_equal(read_codes(name, emptied), read_codes(name, packed))
    assert np.array_equal(with_scales(name, emptied, own), packed)


@pytest.mark.parametrize("name", sorted(KQUANTS))
def test_other_scales_come_back(name: str) -> None:
    kind, generator = KQUANTS[name], np.random.default_rng(3)
    packed = ggml.quantize(name, rows())
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
