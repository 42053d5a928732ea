import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.ggml import search
from quantkit.formats.gguf.ggml.library import chunk, quantize
from quantkit.formats.gguf.ggml.packing import PACKERS, pack

SOURCE = Path(search.__file__).with_name("search.c")
COMPILER = shutil.which("cc")
needs_search = pytest.mark.skipif(not search.available(), reason="quantkit was installed without a C compiler")


def _rows():
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


def _importances(columns):
    random = np.random.default_rng(4)
    yield random.random(columns) + 0.01
    yield 10.0 ** random.uniform(-6, 6, columns)
    yield random.random(columns) ** 8 * 1e-20 + 1e-30
    yield np.where(np.arange(columns) % 2, random.random(columns), 0)
    yield np.full(columns, 3e38)


@needs_search
@pytest.mark.parametrize(("name", "weighted"), PACKERS)
def test_bytes_are_those_of_ggml(name, weighted):
    for rows in _rows():
        for importance in _importances(rows.shape[1]) if weighted else [None]:
            given = None if importance is None else importance.astype(np.float32)
            assert np.array_equal(pack(name, rows, given), chunk(name, rows, given))


@needs_search
@pytest.mark.parametrize(("name", "weighted"), PACKERS)
def test_it_is_used_where_the_bytes_are_the_same(name, weighted):
    assert ggml._same(name, weighted)


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_a_compiler_gives_the_search():
    assert search.available()


@pytest.fixture
def use(monkeypatch):
    """Put another library in the place of the compiled one, and forget what was held against ggml."""

    def put(library):
        monkeypatch.setattr(search, "_library", lambda: library)
        ggml._same.cache_clear()

    yield put
    ggml._same.cache_clear()


@pytest.mark.parametrize(("name", "weighted"), PACKERS)
def test_without_the_search_ggml_packs(name, weighted, use):
    rows = np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)
    importance = np.linspace(0.1, 1, 512, dtype=np.float32) if weighted else None
    before = quantize(name, rows, importance)
    use(None)
    assert not ggml._same(name, weighted)
    assert np.array_equal(quantize(name, rows, importance), before)


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


@needs_search
@pytest.mark.parametrize(("name", "weighted"), PACKERS)
def test_no_rows_are_no_bytes(name, weighted):
    importance = np.ones(512, np.float32) if weighted else None
    packed = quantize(name, np.empty((0, 512), np.float32), importance)
    assert packed.shape == (0, ggml.block_type(name).row_bytes(512))


@needs_search
def test_shapes_are_checked():
    values = np.zeros((4, 32), np.float32)
    with pytest.raises(ValueError, match=r"expected C-contiguous float32 \(4, 32\)"):
        search.affine(values, np.zeros((4, 16), np.float32), 15, -1.0, 0.1, 20)
    with pytest.raises(ValueError, match="float32"):
        search.symmetric(values.astype(np.float64), values, 8)
