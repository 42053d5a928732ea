"""ggml's packing of rows against the package gguf, and our faster search of it against ggml."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml import search
from quantkit.formats.gguf.ggml.library import IMPORTANCE_ONLY, WEIGHTED, block_type, chunk, dequantize, quantize
from quantkit.formats.gguf.ggml.packing import PACKERS, pack

gguf = pytest.importorskip("gguf")

SOURCE = Path(search.__file__).with_name("search.c")
COMPILER = shutil.which("cc")
needs_search = pytest.mark.skipif(not search.available(), reason="quantkit was installed without a C compiler")
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
        with pytest.raises(ValueError, match="holds finite values"):
            quantize(name, rows)


SLOW = ("IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS")  # whose tables take ggml seconds
NARROW = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in sorted(IMPORTANCE_ONLY)]


@pytest.mark.parametrize("name", NARROW)
def test_types_that_need_importance_are_refused_without_and_read_as_gguf_reads_them(name, rows):
    """Most of them would end the process: ggml asserts that there is an importance."""
    with pytest.raises(ValueError, match=f"{name} is made only with an importance"):
        quantize(name, rows)
    importance = np.random.default_rng(1).random(512, dtype=np.float32) + np.float32(0.1)
    packed = quantize(name, rows, importance)
    values = dequantize(name, packed, 512)
    assert np.allclose(values, gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]), rtol=1e-6, atol=0)
    error = float((((values - rows) ** 2) * importance).sum() / ((rows**2) * importance).sum())
    assert error < {"1": 0.3, "2": 0.12, "3": 0.04}[name[2]]


def test_importance_lowers_the_weighted_error_of_types_that_take_it(rows):
    importance = np.random.default_rng(1).random(512, dtype=np.float32) ** 6 + np.float32(1e-3)

    def error(name, *given):
        return float((((dequantize(name, quantize(name, rows, *given), 512) - rows) ** 2) * importance).sum())

    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_S", "IQ4_NL", "IQ4_XS"):
        assert name in WEIGHTED
        assert error(name, importance) < error(name), name
    for name in ("F16", "Q8_0"):
        assert np.array_equal(quantize(name, rows, np.zeros(512, np.float32)), quantize(name, rows))


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


# The search


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
        monkeypatch.setattr(search, "_library", lambda: library)
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
    fused = tmp_path / "fused.so"
    (tmp_path / "fused.c").write_text(SOURCE.read_text().replace("__linux__", "__other_system__"))
    flags = ["-O3", "-mfma", "-mavx2", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared"]
    subprocess.run([COMPILER, *flags, "-o", fused, tmp_path / "fused.c", "-lm"], check=True)
    use(search.load(fused))
    assert not any(ggml._same(name, weighted) for name, weighted in PACKERS)
