"""Blocks of the IQ2 and IQ3 types taken apart and put together, against gguf's own reading of them."""

import numpy as np
import pytest

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS

gguf = pytest.importorskip("gguf")

ROWS, COLUMNS = 6, 512
NAMES = sorted(CODEBOOKS)


def read_by_gguf(name: str, packed: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name])


def any_rows(name: str) -> np.ndarray:
    """Packed rows (ROWS, bytes) of any bits, their factors finite."""
    kind = CODEBOOKS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (ROWS * COLUMNS // 256, kind.nbytes), np.uint8)
    blocks[:, :2] = np.linspace(0.5, 2, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_gguf_s_points(name: str) -> None:
    kind = CODEBOOKS[name]
    assert kind.table().shape == (kind.points, kind.size)
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    grid = theirs.grid.reshape(kind.points, kind.size)
    ratio = kind.table() / grid
    assert np.allclose(ratio, ratio[0, 0], rtol=1e-6)
    assert len(np.unique(kind.table(), axis=0)) == kind.points


@pytest.mark.parametrize("name", NAMES)
def test_points_and_signs_are_read_as_they_were_put(name: str) -> None:
    kind, generator, before = CODEBOOKS[name], np.random.default_rng(1), any_rows(name)
    packed = before.copy()
    indices = generator.integers(0, kind.points, (ROWS, COLUMNS // kind.size)).astype(np.uint16)
    minus = generator.integers(0, 2, (ROWS, COLUMNS // 8, 8))
    if kind.even:
        minus[:, :, 7] = minus[:, :, :7].sum(2) % 2
    signs = np.packbits(minus.astype(bool), axis=2, bitorder="little")[:, :, 0]
    changed = kind.with_points(packed, indices, signs)
    assert np.array_equal(packed, before)
    scales = kind.scales(packed)
    assert scales.shape == (ROWS, COLUMNS // kind.run)
    assert np.array_equal(kind.scales(changed), scales)
    assert len(np.unique(scales)) > 20
    ours = scales.repeat(kind.run, 1) * kind.table()[indices].reshape(ROWS, COLUMNS) * (1 - 2 * minus.reshape(ROWS, -1))
    assert np.allclose(ours, read_by_gguf(name, changed), rtol=1e-6)
    assert np.array_equal(ggml.dequantize(name, changed, COLUMNS), read_by_gguf(name, changed))


@pytest.mark.parametrize("name", NAMES)
def test_factors_are_taken_out_and_put_in(name: str) -> None:
    kind, packed = CODEBOOKS[name], any_rows(name)
    factors, values = kind.without_factors(packed, COLUMNS)
    assert np.allclose(factors.repeat(256, 1) * values, read_by_gguf(name, packed), rtol=1e-6)
    assert np.array_equal(kind.with_factors(packed, factors), packed)
    doubled = kind.with_factors(packed, 2 * factors)
    assert np.array_equal(read_by_gguf(name, doubled), 2 * read_by_gguf(name, packed))
