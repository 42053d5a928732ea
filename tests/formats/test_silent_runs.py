"""Runs of 16 columns that ggml would silently turn to zero: where their importance is zero, or vanishes in float32."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CALIBRATION, changed_copy
from trials import dense_values

from quantkit.conversion.convert import convert
from quantkit.formats.gguf.ggml.library import FAINTEST, IMPORTANCE_ONLY, LOUDEST, WEIGHTED, dequantize, quantize
from quantkit.formats.gguf.imatrix import SILENT, without_silent_runs
from quantkit.formats.source import open_source

COLUMNS, RUN = 512, 16
# The first column of a run, and an importance: silent, and faint.
SILENCES = ((0, 0.0), (16, 1e-44), (240, 1e-30), (COLUMNS - RUN, 0.0))
every_type = pytest.mark.parametrize("name", sorted(WEIGHTED - IMPORTANCE_ONLY))


def rows(seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((6, COLUMNS)) * 0.05
    return made.astype(np.float32)


def importance_with(value: float, place: int, count: int = RUN) -> np.ndarray:
    """Between 1 and 2, but `value` in some columns."""
    importance = np.random.default_rng(1).random(COLUMNS).astype(np.float32) + np.float32(1)
    importance[place : place + count] = value
    return importance


def error(name: str, values: np.ndarray, packed: np.ndarray, columns: slice) -> float:
    """Relative error of some columns."""
    change = dequantize(name, packed, COLUMNS) - values
    return float(np.linalg.norm(change[:, columns]) / np.linalg.norm(values[:, columns]))


@every_type
def test_one_run_of_16_is_enough_to_be_refused_and_so_is_what_overflows_in_sums(name: str) -> None:
    for place, value in SILENCES:
        with pytest.raises(ValueError, match="zero over 16 neighbouring columns"):
            quantize(name, rows(), importance_with(value, place))
        importance = importance_with(value, place)
        importance[place + 5] = FAINTEST  # one column that counts a little
        assert error(name, rows(), quantize(name, rows(), importance), slice(None)) < 0.5
    with pytest.raises(ValueError, match=rf"importance goes up to 1e\+36, and {name} is computed right up to 1e\+20"):
        quantize(name, rows(), importance_with(1e36, 32))
    whole = np.full(COLUMNS, 0.9 * LOUDEST, np.float32)
    largest = np.full((1, COLUMNS), 65504, np.float32) * np.random.default_rng(0).choice([-1, 1], COLUMNS)
    for values in (rows(), largest.astype(np.float32)):
        assert error(name, values, quantize(name, values, whole), slice(None)) < 0.5


@pytest.mark.parametrize(("place", "value"), SILENCES)
def test_a_silent_run_counts_a_millionth_of_the_mean(place: int, value: float) -> None:
    importance = importance_with(value, place)
    before = importance.copy()
    lifted = without_silent_runs(importance)
    inside = np.zeros(COLUMNS, bool)
    inside[place : place + RUN] = True
    assert np.allclose(lifted[inside], importance.mean() * SILENT, rtol=1e-6)
    assert np.array_equal(lifted[~inside], importance[~inside])
    assert np.array_equal(importance, before)
    # Fewer than 16, or 16 that belong to two runs, are not silent.
    for count, start in ((RUN - 1, place), (RUN, place + 8 if place + 24 <= COLUMNS else place - 8)):
        importance = importance_with(value, start, count)
        assert np.array_equal(without_silent_runs(importance), importance)


@every_type
def test_runs_of_weights_without_size_harm_no_other(name: str) -> None:
    run, rest = slice(16, 32), np.r_[0:16, 32:COLUMNS]
    for size in (0.0, 1e-30, 1e-9):
        for importance in (None, importance_with(1.5, 0)):
            values = rows()
            values[:, run] = rows(2)[:, run] * np.float32(size)
            got = dequantize(name, quantize(name, values, importance), COLUMNS)
            assert np.isfinite(got).all()
            # Within half a step of zero, where a step is the least that a block's scale tells apart.
            assert np.abs(got[:, run]).max() <= 0.5 * np.abs(values).max() / (2 ** int(name.removeprefix("I")[1]) - 1)
            change = np.linalg.norm((got - values)[:, rest]) / np.linalg.norm(values[:, rest])
            whole = dequantize(name, quantize(name, rows(), importance), COLUMNS)
            assert change < 1.1 * np.linalg.norm((whole - rows())[:, rest]) / np.linalg.norm(rows()[:, rest])


def test_inputs_that_never_fire_keep_their_weights_in_a_conversion(
    tiny_with: Callable[..., Path], tmp_path: Path
) -> None:
    def silence(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.input_layernorm.weight"][32:48] = 0

    model = changed_copy(tiny_with(num_hidden_layers=1, hidden_size=256), tmp_path / "model", silence)
    artifact = convert(str(model), "gguf", "Q3_K_M", tmp_path / "out", calibration=CALIBRATION, rounding="gptq")
    name = "model.layers.0.self_attn.k_proj.weight"
    got, exact = dense_values(artifact)[name], open_source(str(model)).tensor(name).float()
    assert artifact.manifest.tensor_types["Q3_K"] > 0
    assert (got - exact)[:, 32:48].norm() < 0.5 * exact[:, 32:48].norm()
