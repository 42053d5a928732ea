"""Everything that a GGUF file would silently get wrong is refused, with the name of what is wrong."""

import json

import numpy as np
import pytest
import torch
from engine_logits import IDS, logits_of_llama_cpp
from gguf_files import file_in, job_for, saved, slow_but, tensors_of, written
from test_gguf_architectures import CONVERTED, QUICK
from tiny_architectures import PLAIN
from tiny_llama import calibration
from tiny_models import changed_copy

from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError, SourceError, UnsupportedError
from quantkit.formats.gguf.hyperparameters import read_shape
from quantkit.formats.gguf.plan import make_plan
from quantkit.formats.source import open_source

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
    assert trial.notes == ["llama.cpp ignores the sliding window: beyond 64 tokens its output differs from the source"]


MORE = "model.layers.0.mlp.adapter.weight"
BIASES = [f"model.layers.{block}.self_attn.k_proj.bias" for block in range(3)]


@pytest.mark.parametrize(
    ("name", "change", "config", "kind", "says"),
    [
        ("llama", lambda t: t.pop(UP), {}, SourceError, f"lacks 1 tensors .* {UP}"),
        ("qwen2", lambda t: [t.pop(name) for name in BIASES], {}, SourceError, f"lacks 3 tensors .* {BIASES[0]}"),
        ("llama", lambda t: t.update({MORE: torch.zeros(4)}), {}, UnsupportedError, f"do not belong .* {MORE}"),
        ("llama, tied", None, {"attention_bias": False}, UnsupportedError, r"do not belong .*self_attn\.\w_proj\.bias"),
    ],
)
def test_missing_and_unknown_tensors_are_refused(name, change, config, kind, says, architecture, tmp_path):
    folder = changed_copy(architecture(name), tmp_path / "changed", change, **config)
    with pytest.raises(kind, match=says):
        plan(folder)


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize(("name", "part"), [("llama", "mlp.up_proj"), ("qwen2", "self_attn.o_proj")])
def test_biases_of_zeros_without_a_place_are_left_out_and_told(name, part, tmp_path):
    bias, held = f"model.layers.0.{part}.bias", BIASES[0]  # qwen2 has a place for the second

    def add(tensors):
        tensors[bias] = torch.zeros(len(tensors[bias.replace(".bias", ".weight")]))
        tensors |= {held: torch.zeros_like(tensors[held])} if held in tensors else {}

    folder = changed_copy(saved(tmp_path / "model", name), tmp_path / "zeros", add)
    plain = changed_copy(folder, tmp_path / "plain", lambda tensors: tensors.pop(bias))
    trial = job_for(folder, "F16", tmp_path / "out")
    one, two = (tensors_of(written(job)) for job in (trial, job_for(plain, "F16", tmp_path / "other")))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    told = "zero biases are left out, since a GGUF file cannot store them: 1, such as "
    assert trial.source.notes == (told + bias,)
    other = changed_copy(folder, tmp_path / "one", lambda tensors: tensors[bias][:1].fill_(1))
    with pytest.raises(UnsupportedError, match=rf"do not belong in a GGUF file .*, such as {bias}"):
        job_for(other, "F16", tmp_path / "refused").check()


@pytest.mark.parametrize("bits", ["F16", "Q4_K_M"])
def test_values_beyond_float16_are_refused_and_kept_in_bf16(tiny, tmp_path, bits):
    folder = changed_copy(tiny, tmp_path / "copy", lambda tensors: tensors[UP][3, 5:6].fill_(1e19))
    with pytest.raises(SourceError, match=rf"{UP} cannot be stored as \w+: .* up to 65504, got 1e\+19"):
        written(job_for(folder, bits, tmp_path / "out"))
    assert written(job_for(folder, "BF16", tmp_path / "bf16")).is_file()


def test_importance_of_zero_keeps_weights_and_what_is_unusable_missing_or_needless_is_refused(tiny, tmp_path):
    trial = job_for(tiny, "Q4_K_M", tmp_path, imatrix=True)
    shapes = {name: info.shape for name, info in trial.source.tensors.items() if "_proj" in name}
    importance = {name: np.ones(shape[1], np.float32) for name, shape in shapes.items()}
    importance[UP][16:48] = 0.0
    values, source = tensors_of(written(trial, importance))[UP], trial.source.tensor(UP).float()
    assert (values - source)[:, 16:48].norm() < 0.2 * source[:, 16:48].norm()
    with pytest.raises(SourceError, match=r"no importance for model\.layers\.0\.self_attn\.k_proj"):
        written(trial, {UP: importance[UP]})
    importance[UP][7] = -1.0
    with pytest.raises(SourceError, match=rf"{UP} cannot be stored as Q4_K: importance .*finite and not negative"):
        written(trial, importance)
    with pytest.raises(RecipeError, match="imatrix has no effect"):
        job_for(tiny, "Q8_0", tmp_path, imatrix=True).check()
    with pytest.raises(RecipeError, match="vocab_only writes no tensors, so imatrix has no effect"):
        job_for(tiny, None, tmp_path, vocab_only=True, imatrix=True).check()


@pytest.mark.parametrize(("columns", "options"), [(33, {"imatrix": True}), (255, {"rounding": "gptq"})])
def test_odd_rows_fall_back_are_told_and_load(tmp_path, tiny_with, columns, options):
    folder = tiny_with(**WIDE | {"intermediate_size": columns})
    artifact = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), **options)
    assert any("1 of" in note and "-> F16" in note for note in artifact.manifest.notes)
    assert artifact.manifest.tensor_types["F16"] == 1
    path, down = file_in(artifact.folder), "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(tensors_of(path)[down], open_source(str(folder)).tensor(down).half().float())
    assert logits_of_llama_cpp(path, IDS[:40]).isfinite().all()


# Numbers of config.json, held against the tensors and what a file can hold

# Settings whose value decides a shape, and another value.
CHANGED = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), lambda value: 2 * value),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size"),
        lambda value: [one - 1 for one in value] if isinstance(value, list) else value - 1,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), lambda value: value - 1),
    **dict.fromkeys(("vocab_size", "num_local_experts", "num_experts"), lambda value: value + 1),
    **dict.fromkeys(("head_dim", "num_key_value_heads", "num_kv_heads"), lambda value: 2 * value),
}
# Of one architecture they decide nothing.
IDLE = {
    "qwen3_moe": ("intermediate_size",),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe", "solar_open"), ("intermediate_size",)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), ("head_dim", "num_key_value_heads")),
    "nemotron_h": ("moe_intermediate_size",),
    "nemotron_h, experts": ("intermediate_size",),
    "falcon, one key-value head": ("num_kv_heads", "intermediate_size"),
    **dict.fromkeys(("falcon, grouped", "falcon, one norm"), ("intermediate_size",)),
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


def plan(folder):
    return make_plan(open_source(str(folder)), "Q8_0")


@pytest.mark.parametrize("name", slow_but(QUICK, CONVERTED))
def test_every_number_of_config_json_is_held_against_the_tensors(name, tmp_path):
    folder = saved(tmp_path / "model", name)
    assert plan(folder).tensors
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = [key for key in CHANGED if config.get(key) is not None and key not in IDLE.get(name, ())]
    assert len(settings) >= 3
    for key in settings:
        changed = {key: CHANGED[key](config[key])}
        if key == "head_dim" and "query_pre_attn_scalar" in config:
            changed["query_pre_attn_scalar"] = changed[key]
        if "layer_types" in config and key == "num_hidden_layers":
            changed["layer_types"] = config["layer_types"][:-1]
        path.write_text(json.dumps(config | changed))
        with pytest.raises((UnsupportedError, SourceError), match=r"config\.json|heads") as refused:
            plan(folder)
        assert "lacks what" not in str(refused.value), key


# Of each setting values that no file holds, and what the refusal says.
NUMBERS = {
    "max_position_embeddings": ((0, 10**18, "128"), "max_position"),
    "rms_norm_eps": ((-1e-5, "1e-5", float("nan"), 1e300), "eps"),
    "num_attention_heads": ((0, 3, 2**62), "heads|num_attention_heads"),
    "num_key_value_heads": ((3, -1, 10**9), "key heads|num_key_value_heads"),
    "num_hidden_layers": ((0, 513, 2.5), "num_hidden_layers|blocks"),
    "rope_parameters": ((5, [1]), "rope_parameters"),
    "rope_theta": ((0, 1e-300, 1e300, float("nan"), "much"), "rope"),
    "linear factor": ((0, float("inf"), "x"), "rope|factor"),
    "llama3 factor": ((0, float("nan"), [8.0]), "rope|factor"),
}


@pytest.mark.parametrize("setting", NUMBERS)
def test_numbers_that_a_file_cannot_hold_are_refused(setting, tiny_with, tmp_path):
    values, says = NUMBERS[setting]
    folder = changed_copy(tiny_with(tie_word_embeddings=False), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for value in values:
        changed = {
            "rope_theta": {"rope_parameters": {**PLAIN, "rope_theta": value}},
            "linear factor": {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": value}},
            "llama3 factor": {"rope_parameters": {**PLAIN, **LLAMA3, "factor": value}},
        }.get(setting, {setting: value})
        (folder / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises((UnsupportedError, SourceError), match=says) as refused:
            plan(folder)
        assert "\n" not in str(refused.value)


def test_experts_and_windows_that_cannot_be_are_refused(architecture, tmp_path):
    for name, key, value, says in (
        ("mixtral", "num_local_experts", 512, "512"),
        ("mixtral", "num_experts_per_tok", 5, "use 5 of 4 experts"),
        ("mistral", "sliding_window", "16", "sliding_window"),
    ):
        folder = changed_copy(architecture(name), tmp_path / key, **{key: value})
        with pytest.raises((UnsupportedError, SourceError), match=says):
            plan(folder)
