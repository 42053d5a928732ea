import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_models import CALIBRATION

from quantkit import convert, verify
from quantkit.checkpoints.rows import STORED, count_unusable, to_float32
from quantkit.methods.gguf.imatrix import make_imatrix
from quantkit.records.recipe import CalibrationSpec

WITHOUT = """
import sys
from quantkit.cli.app import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = [name for name in ("torch", "scipy", "accelerate", "quantkit.models.skeleton") if name in sys.modules]
assert not heavy, heavy
"""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def without_torch(*arguments):
    command = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "PyTorch" not in ended.stderr


@pytest.mark.parametrize(
    "weighted", [pytest.param(False, id="plain"), pytest.param(True, id="imatrix file", marks=pytest.mark.slow)]
)
def test_no_torch_and_the_same_bytes(tiny, tmp_path, weighted):
    out, importance = tmp_path / "out", tmp_path / "tiny.imatrix.gguf"
    flags, options = [], {}
    if weighted:
        make_imatrix(str(tiny), importance, calibration=CalibrationSpec(**CALIBRATION))
        flags, options = ["--imatrix-file", importance], {"imatrix_file": str(importance)}
    without_torch("convert", tiny, "--method", "gguf", "--bits", "Q4_K_M", "--out", out, *flags)
    here = convert(str(tiny), "gguf", "Q4_K_M", tmp_path / "here", **options)
    [name] = here.manifest.weight_files
    assert (out / name).read_bytes() == (here.folder / name).read_bytes()
    assert verify(out).manifest.weight_error == here.manifest.weight_error
    if weighted:
        without_torch("verify", out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_floats_against_torch(dtype):
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e4
    values[0, :4] = torch.tensor([0.0, -0.0, 1e-40, 6e-8])
    values = values.to(DTYPES[dtype])
    stored = values.view(torch.uint8).numpy().view(STORED[dtype])
    assert np.array_equal(to_float32(stored, dtype), values.float().numpy())
    assert np.array_equal(to_float32(stored[:, 3:7].T, dtype), values[:, 3:7].T.float().numpy())
    assert count_unusable(stored, dtype) == 0
    values[1, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert count_unusable(stored, dtype) == 3
    if dtype != "F16":
        values[2, :3] = torch.tensor([1.8e19, 1.9e19, -3e38])  # 2^64 is 1.845e19
        assert count_unusable(stored, dtype) == 5
