"""Everything that a file would silently get wrong is refused, with the name of what is wrong."""

import json

import numpy as np
import pytest
import torch
from gguf_files import file_in, job_for, tensors_of, written
from tiny_llama import calibration
from tiny_models import changed_copy

from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError, SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.hyperparameters import read_shape
from quantkit.formats.source import open_source
from quantkit.methods.gguf import METHOD

UP = "model.layers.0.mlp.up_proj.weight"
WIDE = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def tiny(tiny_with):
    return tiny_with(**WIDE)


def test_old_and_new_rope_spelling_mean_the_same(tiny, tmp_path):
    new = {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}
    folder = changed_copy(tiny, tmp_path / "copy", rope_parameters=new)
    shape = read_shape(open_source(str(folder)))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    for key in ("rope_type", "type"):
        config.update(rope_theta=5e5, rope_scaling={key: "llama3", **SCALING})
        (folder / "config.json").write_text(json.dumps(config))
        old = read_shape(open_source(str(folder)))
        assert old.keys == shape.keys
        assert old.keys["rope.freq_base"] == 5e5
        assert (old.factors["rope_freqs.weight"] == shape.factors["rope_freqs.weight"]).all()


def test_sliding_window_is_told(tiny, tmp_path):
    folder = changed_copy(tiny, tmp_path / "copy", model_type="mistral", sliding_window=64)
    trial = job_for(folder, "Q4_K_M", tmp_path / "out")
    trial.check()
    assert trial.notes == ["llama.cpp ignores the sliding window: beyond 64 tokens it differs from the source"]


def test_missing_and_unknown_tensors_are_refused(tiny, tmp_path):
    unknown = {"model.layers.0.mlp.adapter.weight": torch.zeros(4)}
    lacking = changed_copy(tiny, tmp_path / "lacking", lambda tensors: tensors.pop(UP))
    with pytest.raises(SourceError, match=rf"lacks 1 tensors .* {UP}"):
        job_for(lacking, "Q4_K_M", tmp_path / "out").check()
    more = changed_copy(tiny, tmp_path / "more", lambda tensors: tensors.update(unknown))
    with pytest.raises(UnsupportedError, match=r"mlp\.adapter\.weight"):
        job_for(more, "Q4_K_M", tmp_path / "out").check()


@pytest.mark.parametrize("bits", ["F16", "Q4_K_M"])
def test_values_beyond_float16_are_refused_and_kept_in_bf16(tiny, tmp_path, bits):
    folder = changed_copy(tiny, tmp_path / "copy", lambda tensors: tensors[UP][3, 5:6].fill_(1e19))
    with pytest.raises(SourceError, match=rf"{UP} cannot be stored as \w+: .* up to 65504, got 1e\+19"):
        written(job_for(folder, bits, tmp_path / "out"))
    assert written(job_for(folder, "BF16", tmp_path / "bf16")).is_file()


@pytest.fixture
def trial(tiny, tmp_path):
    return job_for(tiny, "Q4_K_M", tmp_path, imatrix=True)


@pytest.fixture
def importance(trial):
    """Of one for every column."""
    return {name: np.ones(info.shape[1], np.float32) for name, info in trial.source.tensors.items() if "_proj" in name}


def test_unusable_importance_is_refused(trial, importance):
    importance[UP][7] = -1.0
    with pytest.raises(SourceError, match=rf"{UP} cannot be stored as Q4_K: importance .*finite and not negative"):
        written(trial, importance)


def test_inputs_that_never_fire_do_not_turn_weights_to_zero(trial, importance):
    importance[UP][16:48] = 0.0
    values = tensors_of(written(trial, importance))[UP]
    source = trial.source.tensor(UP).float()
    assert (values - source)[:, 16:48].norm() < 0.2 * source[:, 16:48].norm()
    importance[UP][:] = 0.0
    values = tensors_of(written(trial, importance))[UP]
    assert (values - source).norm() < 0.2 * source.norm()


def test_missing_importance_and_such_that_changes_nothing_are_refused(trial, tmp_path):
    with pytest.raises(SourceError, match=r"no importance for model\.layers\.0\.self_attn\.k_proj"):
        written(trial, {UP: np.ones(256, np.float32)})
    with pytest.raises(RecipeError, match="imatrix changes nothing"):
        job_for(trial.source.folder, "Q8_0", tmp_path, imatrix=True).check()


def test_a_misspelled_option_is_told_with_the_nearest():
    assert METHOD.parse_bits("q4_k_m") == METHOD.parse_bits(None) == "Q4_K_M"
    with pytest.raises(RecipeError, match="Did you mean 'imatrix'"):
        METHOD.parse_options({"imatrx": True})


@pytest.mark.parametrize(("columns", "options"), [(33, {"imatrix": True}), (255, {"rounding": "gptq"})])
def test_odd_rows_fall_back_are_told_and_load(tmp_path, tiny_with, columns, options):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    folder = tiny_with(**WIDE | {"intermediate_size": columns})
    artifact = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), **options)
    assert any("1 of" in note and "-> F16" in note for note in artifact.manifest.notes)
    assert artifact.manifest.tensor_types["F16"] == 1
    path, down = file_in(artifact.folder), "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(tensors_of(path)[down], open_source(str(folder)).tensor(down).half().float())
    engine = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    engine.eval(list(range(3, 40)))
    assert np.isfinite(np.array(engine.scores[:37])).all()
    engine.close()
