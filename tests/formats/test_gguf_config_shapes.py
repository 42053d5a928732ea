"""A file is written only of tensors that are those of the source's config.json, and of numbers that a file can hold."""

import json

import pytest
from gguf_files import job_for, saved, slow_but
from test_gguf_architectures import CONVERTED, QUICK
from tiny_architectures import PLAIN
from tiny_models import changed_copy

from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.plan import make_plan
from quantkit.formats.source import open_source

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


@pytest.fixture(scope="module")
def untied(tiny_with):
    return tiny_with(tie_word_embeddings=False)


def test_biases_that_config_json_has_not_or_an_architecture_always_has(architecture, tmp_path):
    changed = changed_copy(architecture("llama, tied"), tmp_path / "llama", attention_bias=False)
    with pytest.raises(UnsupportedError, match=r"no place .*self_attn\.\w_proj\.bias"):
        plan(changed)
    lacking = [f"model.layers.{block}.self_attn.k_proj.bias" for block in range(3)]
    folder = changed_copy(architecture("qwen2"), tmp_path / "qwen2", lambda t: [t.pop(name) for name in lacking])
    with pytest.raises(SourceError, match=r"lacks 3 tensors .*layers\.0\.self_attn\.k_proj\.bias"):
        plan(folder)


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
def test_numbers_that_a_file_cannot_hold_are_refused(setting, untied, tmp_path):
    values, says = NUMBERS[setting]
    folder = changed_copy(untied, tmp_path / "model")
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


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("mixtral", {"num_local_experts": 512}, r"counts 3 blocks of 512 experts|512"),
        ("mixtral", {"num_experts_per_tok": 5}, "use 5 of 4 experts"),
        ("mistral", {"sliding_window": "16"}, "sliding_window"),
    ],
)
def test_experts_and_windows_that_cannot_be_are_refused(name, changes, says, architecture, tmp_path):
    folder = changed_copy(architecture(name), tmp_path / "model", **changes)
    with pytest.raises((UnsupportedError, SourceError), match=says):
        job_for(folder, "Q8_0", tmp_path / "out").check()
