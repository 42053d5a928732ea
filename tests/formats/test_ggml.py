import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from quantkit.formats.gguf.ggml.library import IMPORTANCE_ONLY, WEIGHTED, block_type, dequantize, quantize

gguf = pytest.importorskip("gguf")

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES += ["IQ3_S", "IQ4_XS", "IQ4_NL"]


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((5, 512), dtype=np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_dequantized_rows_equal_those_of_gguf(name, rows):
    packed = quantize(name, rows)
    assert packed.shape == (5, block_type(name).row_bytes(512))
    kind = gguf.GGMLQuantizationType[name]
    raw = packed.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    assert np.array_equal(dequantize(name, packed, 512), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1"])
def test_packed_rows_equal_those_of_gguf(name, rows):
    theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
    assert np.array_equal(quantize(name, rows), np.ascontiguousarray(theirs).view(np.uint8))


def test_q8_0_by_hand():
    row = np.zeros((1, 32), dtype=np.float32)
    row[0, :3] = [127.0, -3.0, 0.4]
    packed = quantize("Q8_0", row)[0]
    assert packed[:2].view(np.float16)[0] == 1.0
    assert packed[2:].view(np.int8).tolist() == [127, -3, 0] + [0] * 29
    assert dequantize("Q8_0", packed.reshape(1, -1), 32)[0, :3].tolist() == [127.0, -3.0, 0.0]


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
    other = quantize(name, rows, np.ascontiguousarray(importance[::-1]))
    assert not np.array_equal(packed, other)


@pytest.mark.parametrize("name", sorted(WEIGHTED - IMPORTANCE_ONLY))
def test_importance_lowers_the_weighted_error(name, rows):
    importance = np.random.default_rng(1).random(512, dtype=np.float32) ** 6 + np.float32(1e-3)

    def error(packed):
        return float((((dequantize(name, packed, 512) - rows) ** 2) * importance).sum())

    assert error(quantize(name, rows, importance)) < error(quantize(name, rows))


@pytest.mark.parametrize("name", ["F16", "Q8_0"])
def test_types_without_weighting_ignore_importance(name, rows):
    assert np.array_equal(quantize(name, rows, np.zeros(512, np.float32)), quantize(name, rows))


@pytest.mark.parametrize("name", TYPES)
def test_not_a_number_is_refused(name, rows):
    for value in (np.nan, np.inf, -np.inf):
        rows[2, 7] = value
        with pytest.raises(ValueError, match="holds finite values"):
            quantize(name, rows)


def test_shapes_are_checked(rows):
    with pytest.raises(ValueError, match="multiple of 256 values, not 300"):
        quantize("Q4_K", np.zeros((1, 300), dtype=np.float32))
    with pytest.raises(ValueError, match="C-contiguous float32 matrix"):
        quantize("Q4_K", rows[:, ::2])
    with pytest.raises(ValueError, match="C-contiguous float32 matrix"):
        quantize("Q4_K", rows.astype(np.float64))
    with pytest.raises(ValueError, match=r"shape \(512,\)"):
        quantize("Q4_K", rows, np.ones(256, dtype=np.float32))
    with pytest.raises(ValueError, match="take 288 bytes, not 144"):
        dequantize("Q4_K", np.zeros((1, 144), dtype=np.uint8), 512)
    with pytest.raises(ValueError, match="no tensor type 'Q9'"):
        block_type("Q9")


def test_zero_importance_would_spoil_weights(rows):
    """Why the check is there: ggml itself returns zeros."""
    from quantkit.formats.gguf.ggml import library as ggml

    importance = np.ones(512, dtype=np.float32)
    importance[32:64] = 0
    packed = np.empty((5, block_type("Q3_K").row_bytes(512)), dtype=np.uint8)
    call = ggml._library().ggml_quantize_chunk
    call(block_type("Q3_K").number, rows.ctypes.data, packed.ctypes.data, 0, 5, 512, importance.ctypes.data)
    assert not dequantize("Q3_K", packed, 512)[:, 32:64].any()
    with pytest.raises(ValueError, match="zero over 16 neighbouring columns"):
        quantize("Q3_K", rows, importance)


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
