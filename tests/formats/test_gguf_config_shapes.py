"""A file is written only of tensors that are those of the source's config.json, and of numbers that a file can hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES, save_architecture
from tiny_models import changed_copy, save_tiny

from quantkit.conversion.convert import convert
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.plan import make_plan
from quantkit.formats.source import open_source

CONVERTED = [name for name, tiny in ARCHITECTURES.items() if tiny.kind in KNOWN and not tiny.not_gguf]
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
    "falcon, grouped": ("intermediate_size",),
    "falcon, one norm": ("intermediate_size",),
}


def plan(folder: Path) -> Any:
    return make_plan(open_source(str(folder)), "Q8_0")


@pytest.mark.parametrize("name", CONVERTED)
def test_every_number_of_config_json_is_held_against_the_tensors(name: str, tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / "model", name, changes=ARCHITECTURES[name].for_gguf)
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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"hidden_size": 64},
            r"embed_tokens\.weight has the shape \(304, 128\), but config\.json asks for \(304, 64\)",
        ),
        ({"intermediate_size": 255}, r"gate_proj\.weight has the shape \(256, 128\), but .* \(255, 128\)"),
        ({"vocab_size": 305}, r"embed_tokens\.weight has the shape .* \(305, 128\)\. Give the config\.json"),
        ({"attention_bias": True}, r"lacks 12 tensors .*q_proj\.bias"),
        ({"mlp_bias": True}, r"lacks 9 tensors .*gate_proj\.bias"),
        ({"num_hidden_layers": 2}, r"9 tensors that have no place .* the 2 blocks .* model\.layers\.2\."),
        ({"num_hidden_layers": 4}, r"lacks 9 tensors"),
        ({"num_hidden_layers": 500}, r"counts 500 .*30 tensors"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_the_work(
    config: dict[str, Any], says: str, tiny: Path, tmp_path: Path
) -> None:
    folder = changed_copy(tiny, tmp_path / "model", **config)
    with pytest.raises((UnsupportedError, SourceError), match=says):
        convert(str(folder), "gguf", "Q8_0", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_biases_that_config_json_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / "model", "llama, tied")
    assert plan(folder).tensors
    changed = changed_copy(folder, tmp_path / "llama", attention_bias=False)
    with pytest.raises(UnsupportedError, match=r"no place .*self_attn\.\w_proj\.bias"):
        plan(changed)


def test_biases_that_an_architecture_always_has_are_asked_for(tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / "model", "qwen2")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.bias")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"lacks 3 tensors .*layers\.0\.self_attn\.k_proj\.bias"):
        plan(folder)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "olmo2", "qwen3_moe"])
def test_biases_that_llama_cpp_does_not_have_are_refused(name: str, tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / "model", name, changes={"attention_bias": True})
    with pytest.raises(UnsupportedError, match=r"attention_bias = True; llama\.cpp computes False"):
        plan(folder)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **values}}


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        *(({"max_position_embeddings": value}, "max_position") for value in (-1, 0, 10**18, 1.5, "128", None)),
        *(({"rms_norm_eps": value}, "eps") for value in (-1e-5, "1e-5", float("nan"), float("inf"), 1e300, [1e-5])),
        *(({"num_attention_heads": value}, "heads|num_attention_heads") for value in (0, -4, 3, 10**9, 2**62)),
        *(({"num_key_value_heads": value}, "key heads|num_key_value_heads") for value in (3, -1, 10**9)),
        *(({"num_hidden_layers": value}, "num_hidden_layers|blocks") for value in (0, 513, 10**9, 2.5)),
        *(({"hidden_size": value}, "hidden_size|shape") for value in (0, 2**62)),
        *(({"head_dim": value}, "head") for value in (31, 2**31, -2)),
        *((rope(rope_theta=value), "rope") for value in (0, -1.0, 1e-300, 1e300, float("nan"), "much", None)),
        *((rope(rope_type="linear", factor=value), "rope|factor") for value in (0, -1.0, float("inf"), "x", None)),
        *((rope(**LLAMA3, factor=value), "rope|factor") for value in (0, float("nan"), [8.0])),
        ({"rope_parameters": 5}, "rope_parameters"),
        ({"rope_parameters": [1]}, "rope_parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_a_file_cannot_hold_are_refused(
    config: dict[str, Any], says: str, tiny: Path, tmp_path: Path
) -> None:
    folder = changed_copy(tiny, tmp_path / "model", **config)
    with pytest.raises((UnsupportedError, SourceError), match=says) as refused:
        plan(folder)
    assert "\n" not in str(refused.value)


def test_more_experts_than_are_stored_or_used_are_refused(tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / "model", "mixtral")
    for changes, says in (
        ({"num_local_experts": 512}, r"counts 3 blocks of 512 experts|512"),
        ({"num_local_experts": 2**31}, "num_local_experts"),
        ({"num_experts_per_tok": 5}, "use 5 of 4 experts"),
        ({"num_experts_per_tok": 0}, "use 0 of 4 experts"),
    ):
        changed = changed_copy(folder, tmp_path / str(len(list(tmp_path.iterdir()))), **changes)
        with pytest.raises((UnsupportedError, SourceError), match=says):
            plan(changed)


def test_a_window_of_a_wrong_kind_is_refused(tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / "model", "mistral", changes={"sliding_window": 16})
    for number, window in enumerate(("16", -1, [16])):
        changed = changed_copy(folder, tmp_path / str(number), sliding_window=window)
        with pytest.raises((UnsupportedError, SourceError), match="sliding_window"):
            convert(str(changed), "gguf", "Q8_0", tmp_path / "out")


def test_layers_of_other_shapes_are_refused_wherever_they_lie(tiny: Path, tmp_path: Path) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.2.mlp.down_proj.weight"
        tensors[name] = tensors[name][:, :-32].contiguous()

    folder = changed_copy(tiny, tmp_path / "model", shorten)
    with pytest.raises(UnsupportedError, match=r"layers\.2\.mlp\.down_proj\.weight has the shape \(128, 224\)"):
        plan(folder)
