"""Everything that a file would silently get wrong is refused, with the name of what is wrong."""

import json

import numpy as np
import pytest
import torch
from gguf_files import job_for, save_model, tensors_of, written
from safetensors.torch import load_file, save_file
from tiny_llama import calibration

from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError, SourceError, UnsupportedError
from quantkit.formats.float.checkpoint import Checkpoint
from quantkit.formats.gguf.architectures.hyperparameters import read_shape
from quantkit.formats.gguf.plan import file_name, make_plan
from quantkit.formats.source import open_source
from quantkit.methods.gguf import METHOD

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture
def copy(tiny, tmp_path):
    """A function (config changes, change of tensors) -> a changed copy of the checkpoint."""

    def make(change=lambda tensors: None, **config):
        folder = tmp_path / "copy"
        folder.mkdir()
        for path in tiny.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        values = json.loads((folder / "config.json").read_text())
        values.update(config)
        (folder / "config.json").write_text(json.dumps(values))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def test_a_good_model_passes(tiny, tmp_path):
    trial = job_for(tiny, "Q4_K_M", tmp_path)
    assert trial.check().checked.nbytes > 0
    assert trial.notes == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "opt"}, r"'opt', which .*\(llama.cpp has none\). Known: llama, "),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; llama.cpp computes 'silu' for llama"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "beta_slow": 2}}, "beta_slow"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (
            {"num_attention_heads": 8, "head_dim": 16},
            r"q_proj.weight has the shape \(256, 256\), but config.json asks for \(128, 256\)\. Give the config\.json",
        ),
    ],
)
def test_unsupported_configurations_are_refused(copy, tmp_path, config, message):
    with pytest.raises(UnsupportedError, match=message):
        job_for(copy(**config), "Q4_K_M", tmp_path / "out").check()


def test_old_and_new_rope_spelling_mean_the_same(copy, tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    new = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    shape = read_shape(open_source(str(copy(rope_parameters=new))))
    folder = tmp_path / "copy"
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    for key in ("rope_type", "type"):
        config.update(rope_theta=5e5, rope_scaling={key: "llama3", **scaling})
        (folder / "config.json").write_text(json.dumps(config))
        old = read_shape(open_source(str(folder)))
        assert old.keys == shape.keys
        assert old.keys["rope.freq_base"] == 5e5
        assert (old.factors["rope_freqs.weight"] == shape.factors["rope_freqs.weight"]).all()


def test_sliding_window_is_told(copy, tmp_path):
    folder = copy(model_type="mistral", sliding_window=64)
    trial = job_for(folder, "Q4_K_M", tmp_path / "out")
    trial.check()
    assert trial.notes == [
        "llama.cpp ignores the sliding window: beyond 64 tokens it differs from the source",
    ]


def test_missing_and_unknown_tensors_are_refused(copy, tmp_path):
    folder = copy(lambda tensors: tensors.pop(UP))
    with pytest.raises(SourceError, match=rf"lacks 1 tensors .* {UP}"):
        job_for(folder, "Q4_K_M", tmp_path / "out").check()
    tensors = load_file(folder / "model.safetensors")
    tensors[UP] = torch.zeros(512, 256)
    tensors["model.layers.0.mlp.adapter.weight"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"mlp\.adapter\.weight"):
        job_for(folder, "Q4_K_M", tmp_path / "out").check()


def test_head_of_a_tied_checkpoint_is_left_out(copy, tmp_path):
    trial = job_for(copy(tie_word_embeddings=True), "Q4_K_M", tmp_path / "out")
    assert "output.weight" not in {tensor.name for tensor in make_plan(trial.source, "Q4_K_M").tensors}


@pytest.mark.parametrize("bits", ["F16", "Q8_0", "Q4_K_M", "Q2_K"])
def test_values_beyond_float16_are_refused(copy, tmp_path, bits):
    def spoil(tensors):
        tensors[UP][3, 5] = 1e19

    with pytest.raises(SourceError, match=rf"{UP} cannot be stored as \w+: .* up to 65504, got 1e\+19"):
        written(job_for(copy(spoil), bits, tmp_path / "out"))


def test_values_beyond_float16_are_kept_in_bf16(copy, tmp_path):
    def spoil(tensors):
        tensors[UP][3, 5] = 1e19

    assert written(job_for(copy(spoil), "BF16", tmp_path / "out")).is_file()


def importance_of_one(trial):
    return {name: np.ones(info.shape[1], np.float32) for name, info in trial.source.tensors.items() if "_proj" in name}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda values: values.__setitem__(7, float("nan")), "finite and not negative"),
        (lambda values: values.__setitem__(7, float("inf")), "finite and not negative"),
        (lambda values: values.__setitem__(7, -1.0), "finite and not negative"),
    ],
)
def test_unusable_importance_is_refused(tiny, tmp_path, spoil, message):
    trial = job_for(tiny, "Q4_K_M", tmp_path, imatrix=True)
    importance = importance_of_one(trial)
    assert written(trial, importance).is_file()
    spoil(importance[UP])
    with pytest.raises(SourceError, match=rf"{UP} cannot be stored as Q4_K: importance .*{message}"):
        written(trial, importance)


def test_inputs_that_never_fire_do_not_turn_weights_to_zero(tiny, tmp_path):
    trial = job_for(tiny, "Q4_K_M", tmp_path, imatrix=True)
    importance = importance_of_one(trial)
    importance[UP][16:48] = 0.0
    values = tensors_of(written(trial, importance))[UP]
    source = trial.source.tensor(UP).float()
    assert (values - source)[:, 16:48].norm() < 0.2 * source[:, 16:48].norm()
    importance[UP][:] = 0.0
    values = tensors_of(written(trial, importance))[UP]
    assert (values - source).norm() < 0.2 * source.norm()


def test_missing_importance_is_refused(tiny, tmp_path):
    trial = job_for(tiny, "Q4_K_M", tmp_path, imatrix=True)
    with pytest.raises(SourceError, match=r"no importance for model\.layers\.0\.self_attn\.k_proj"):
        written(trial, {UP: np.ones(256, np.float32)})


@pytest.mark.parametrize("bits", ["F16", "BF16", "Q8_0"])
def test_importance_that_changes_nothing_is_refused(tiny, tmp_path, bits):
    with pytest.raises(RecipeError, match="imatrix changes nothing"):
        job_for(tiny, bits, tmp_path, imatrix=True).check()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo-Q6_K.gguf"),
        ("org/Some Model:v1", "Some-Model-v1-Q6_K.gguf"),
        ("/data/models/x/", "x-Q6_K.gguf"),
        ("..", "folder-Q6_K.gguf"),
    ],
)
def test_file_names(tmp_path, model, name):
    assert file_name(Checkpoint(tmp_path / "folder", model, None, {}, {}), "Q6_K") == name


def test_method_record():
    assert METHOD.parse_bits("q4_k_m") == "Q4_K_M"
    assert METHOD.parse_bits(None) == "Q4_K_M"
    assert METHOD.calibrated(METHOD.parse_options({"imatrix": True}))
    assert not METHOD.calibrated(METHOD.parse_options({}))
    with pytest.raises(RecipeError, match="Did you mean 'imatrix'"):
        METHOD.parse_options({"imatrx": True})


@pytest.mark.parametrize("columns", [31, 33, 255])
@pytest.mark.parametrize("options", [{}, {"imatrix": True}, {"rounding": "gptq"}], ids=["plain", "imatrix", "feedback"])
def test_odd_rows_fall_back_are_told_and_load(tmp_path, columns, options):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    folder = save_model(tmp_path / "model", num_hidden_layers=2, intermediate_size=columns)
    artifact = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), **options)
    assert any("2 of" in note and "-> F16" in note for note in artifact.manifest.notes)
    assert artifact.manifest.tensor_types["F16"] == 2
    path = artifact.folder / artifact.manifest.weight_files[0]
    read = tensors_of(path)["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(read, open_source(str(folder)).tensor("model.layers.1.mlp.down_proj.weight").half().float())
    engine = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    engine.eval(list(range(3, 40)))
    assert np.isfinite(np.array(engine.scores[:37])).all()
    engine.close()
