"""ggml's packing of rows against the package gguf, our faster search of it against ggml, and blocks taken apart."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import gguf, layer_and_hessian, slow_but

from quantkit.formats.gguf.ggml import kquants, packing
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml.codebooks import CODEBOOKS
from quantkit.formats.gguf.ggml.kquants import KQUANTS, read_codes
from quantkit.formats.gguf.ggml.library import IMPORTANCE_ONLY, block_type, chunk, dequantize, quantize
from quantkit.formats.gguf.ggml.packing import PACKERS, pack
from quantkit.formats.gguf.ggml.scale_refit import refit

COMPILER = shutil.which("cc")
needs_search = pytest.mark.skipif(not packing.available(), reason="quantkit was installed without a C compiler")
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES += ["IQ3_S", "IQ4_XS", "IQ4_NL"]


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((5, 512), dtype=np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_packed_and_read_as_by_gguf(name, rows):
    packed = quantize(name, rows)
    assert packed.shape == (5, block_type(name).row_bytes(512))
    kind = gguf.GGMLQuantizationType[name]
    raw = packed.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    assert np.array_equal(dequantize(name, packed, 512), gguf.quants.dequantize(raw, kind))
    if name in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1"):
        theirs = gguf.quants.quantize(rows, kind)
        assert np.array_equal(packed, np.ascontiguousarray(theirs).view(np.uint8))
    for value in (np.nan, -np.inf):
        rows[2, 7] = value
        with pytest.raises(ValueError, match="supports finite values"):
            quantize(name, rows)


SLOW = {"IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS"}  # whose tables take ggml seconds


@pytest.mark.parametrize("name", slow_but(IMPORTANCE_ONLY - SLOW, sorted(IMPORTANCE_ONLY)))
def test_types_that_need_importance_are_refused_without_and_read_as_gguf_reads_them(name, rows):
    """Most of them would end the process: ggml asserts that there is an importance."""
    with pytest.raises(ValueError, match=f"{name} needs an importance matrix"):
        quantize(name, rows)
    importance = np.random.default_rng(1).random(512, dtype=np.float32) + np.float32(0.1)
    packed = quantize(name, rows, importance)
    values = dequantize(name, packed, 512)
    assert np.allclose(values, gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]), rtol=1e-6, atol=0)
    error = float((((values - rows) ** 2) * importance).sum() / ((rows**2) * importance).sum())
    assert error < {"1": 0.3, "2": 0.12, "3": 0.04}[name[2]]


def test_shapes_are_checked(rows):
    ones, zeros = np.ones(256, dtype=np.float32), np.zeros((1, 300), dtype=np.float32)
    for arguments, said in (
        ((zeros,), "multiple of 256 values, not 300"),
        ((rows[:, ::2],), "C-contiguous float32 matrix"),
        ((rows.astype(np.float64),), "C-contiguous float32 matrix"),
        ((rows, ones), r"shape \(512,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            quantize("Q4_K", *arguments)
    with pytest.raises(ValueError, match="take 288 bytes, not 144"):
        dequantize("Q4_K", np.zeros((1, 144), dtype=np.uint8), 512)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_llama_cpp_still_gets_its_own_ggml_after_ours():
    code = (
        "from quantkit.formats.gguf.ggml.library import block_type; block_type('Q4_K'); import llama_cpp; "
        "print(sorted({l.split('site-packages/')[1].split('/')[0] "
        "for l in open('/proc/self/maps') if 'libggml-base' in l}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['libggml', 'llama_cpp']", done.stderr


def odd_rows():
    """Ordinary rows, heavy tails, and what is rare: zeros of both signs, flat, one-sided, subnormal, huge values."""
    random = np.random.default_rng(3)
    yield (random.standard_normal((260, 1024)) * 0.02).astype(np.float32)
    yield (random.standard_t(1.5, (40, 512)) * 0.01).clip(-1000, 1000).astype(np.float32)
    rare = (random.standard_normal((24, 512)) * 0.02).astype(np.float32)
    rare[0], rare[1, :64], rare[2], rare[3], rare[4, ::2] = 0, 0, 0.5, -0.0, -0.0
    rare[5, 32:], rare[6] = np.abs(rare[5, 32:]), -np.abs(rare[6])
    rare[7], rare[8], rare[9], rare[10] = 1e-40, 65504, 1e-16, random.choice([-65504, 65504], 512)
    for row, size in ((11, 1e-42), (12, 1e-30), (13, 1e-15), (14, 1e-8)):
        rare[row] = random.standard_normal(512) * size
    rare[15], rare[16] = random.choice([0, 1e-38, -1e-38, 1.0], 512), random.standard_normal(512) ** 7
    yield rare


def odd_importances(columns):
    random = np.random.default_rng(4)
    yield random.random(columns) + 0.01
    yield 10.0 ** random.uniform(-6, 6, columns)
    yield random.random(columns) ** 8 * 1e-20 + 1e-30
    yield np.where(np.arange(columns) % 2, random.random(columns), 0)
    yield np.full(columns, 3e38)


@needs_search
@pytest.mark.parametrize(("name", "weighted"), PACKERS)
def test_bytes_are_those_of_ggml(name, weighted):
    for rows in odd_rows():
        for importance in odd_importances(rows.shape[1]) if weighted else [None]:
            given = None if importance is None else importance.astype(np.float32)
            assert np.array_equal(pack(name, rows, given), chunk(name, rows, given))


@pytest.fixture
def use(monkeypatch):
    """Put another library in the place of the compiled one, and forget what was held against ggml."""

    def put(library):
        monkeypatch.setattr(packing, "_library", lambda: library)
        ggml._same.cache_clear()

    yield put
    ggml._same.cache_clear()


def test_without_the_search_ggml_packs(use):
    rows = np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)
    importance = np.linspace(0.1, 1, 512, dtype=np.float32)
    given = [(name, rows, importance if weighted else None) for name, weighted in PACKERS]
    before = [quantize(*one) for one in given]
    assert COMPILER is None or all(ggml._same(name, weighted) for name, weighted in PACKERS)
    use(None)
    assert not any(ggml._same(name, weighted) for name, weighted in PACKERS)
    assert all(np.array_equal(quantize(*one), packed) for one, packed in zip(given, before, strict=True))


def _has_fma():
    place = Path("/proc/cpuinfo")
    return place.is_file() and " fma " in place.read_text()


@needs_search
@pytest.mark.skipif(COMPILER is None or not _has_fma(), reason="needs a C compiler and a processor with fma")
def test_a_search_that_rounds_otherwise_is_not_used(tmp_path, use):
    source, fused = Path(packing.__file__).with_name("search.c").read_text(), tmp_path / "fused.so"
    (tmp_path / "fused.c").write_text(source.replace("__linux__", "__other_system__"))
    flags = ["-O3", "-mfma", "-mavx2", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared"]
    subprocess.run([COMPILER, *flags, "-o", fused, tmp_path / "fused.c", "-lm"], check=True)
    use(packing.load(fused))
    assert not any(ggml._same(name, weighted) for name, weighted in PACKERS)


# Blocks of K-quants and IQ types taken apart, refitted and put together

ROWS, COLUMNS = 24, 1024
FEW, SHORT = 6, 512  # of layers that are refitted, and of codebooks
each_kquant = pytest.mark.parametrize("name", sorted(KQUANTS))


def odd_sizes(seed=0):
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
    packed = ggml.quantize(name, odd_sizes())
    assert packed.shape[1] == COLUMNS // 256 * kind.nbytes
    scales, minima = (part.repeat(kind.group, 1) for part in kquants.read_grid(name, packed))
    codes = read_codes(name, packed)
    assert codes.max() == (1 << kind.bits) - 1
    ours = scales * (np.array(kind.steps, np.float32)[codes] if kind.steps else codes) - minima
    assert np.allclose(ours, ggml.dequantize(name, packed, COLUMNS), rtol=1e-6, atol=1e-12)


@each_kquant
def test_other_codes_and_scales_come_back(name):
    kind, generator, packed = KQUANTS[name], np.random.default_rng(2), ggml.quantize(name, odd_sizes())
    before = packed.copy()
    codes = generator.integers(0, 1 << kind.bits, (ROWS, COLUMNS)).astype(np.uint8)
    changed = kquants.with_codes(name, packed, codes)
    assert np.array_equal(packed, before)
    assert np.array_equal(read_codes(name, changed), codes)
    assert np.array_equal(kquants.with_codes(name, changed, read_codes(name, packed)), packed)
    for ours, theirs in zip(kquants.read_grid(name, changed), kquants.read_grid(name, packed), strict=True):
        assert np.array_equal(ours, theirs)
    own = kquants.read_scales(name, packed)
    scales = generator.integers(kind.least, kind.largest + 1, own.scales.shape).astype(np.float32)
    minima = generator.integers(0, kind.largest_minimum + 1, own.minima.shape).astype(np.float32)
    factor, offset = (
        generator.standard_normal(own.factor.shape).astype(np.float16).astype(np.float32) for _ in range(2)
    )
    other = kquants.Scales(factor, offset if kind.largest_minimum else own.offset, scales, minima)
    rescaled = kquants.with_scales(name, packed, other)
    assert np.array_equal(read_codes(name, rescaled), read_codes(name, packed))
    assert np.array_equal(kquants.with_scales(name, rescaled, own), packed)
    got = kquants.read_scales(name, rescaled)
    for part in ("factor", "offset", "scales", "minima"):
        assert np.array_equal(getattr(got, part), getattr(other, part)), part


def errors(name, packed, weight, hessian):
    """Of each row, in float64, by ggml's own reading."""
    change = (torch.from_numpy(ggml.dequantize(name, packed, SHORT)) - weight).double()
    return ((change @ hessian.double()) * change).sum(1)


@each_kquant
def test_every_row_comes_nearer_whatever_its_neighbours_and_codes_stay(name):
    weight, hessian = layer_and_hessian(FEW, SHORT)
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
    weight, hessian = layer_and_hessian(2, SHORT)
    kind, packed = KQUANTS[name], ggml.quantize(name, weight.numpy())
    for _ in range(60):
        packed = refit(name, packed, weight, hessian)
    least = errors(name, packed, weight, hessian).sum()
    assert bool(torch.isfinite(least))
    generator = np.random.default_rng(0)
    for part, low, high in (("scales", kind.least, kind.largest), ("minima", 0, kind.largest_minimum)):
        for _ in range(40 if high else 0):
            scales = kquants.read_scales(name, packed)
            values = getattr(scales, part)
            i, j = generator.integers(values.shape[0]), generator.integers(values.shape[1])
            values[i, j] = np.clip(values[i, j] + generator.choice([-1, 1]), low, high)
            moved = errors(name, kquants.with_scales(name, packed, scales), weight, hessian).sum()
            assert float(moved) >= float(least) * (1 - 1e-6)


def read_by_gguf(name, packed):
    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name])


def any_rows(name):
    """Packed rows (FEW, bytes) of any bits, their factors finite."""
    kind = CODEBOOKS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (FEW * SHORT // 256, kind.nbytes), np.uint8)
    blocks[:, :2] = np.linspace(0.5, 2, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(FEW, -1)


@pytest.mark.parametrize("name", sorted(CODEBOOKS))
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
    ours = scales.repeat(kind.run, 1) * kind.table[indices].reshape(FEW, SHORT) * (1 - 2 * minus.reshape(FEW, -1))
    assert np.allclose(ours, read_by_gguf(name, changed), rtol=1e-6)
    assert np.array_equal(ggml.dequantize(name, changed, SHORT), read_by_gguf(name, changed))
    factors, values = kind.without_factors(before, SHORT)
    assert np.allclose(factors.repeat(256, 1) * values, read_by_gguf(name, before), rtol=1e-6)
    assert np.array_equal(kind.with_factors(before, factors), before)
    doubled = kind.with_factors(before, 2 * factors)
    assert np.array_equal(read_by_gguf(name, doubled), 2 * read_by_gguf(name, before))
