"""Where the text half of a multimodal checkpoint lies, and the config.json that it has alone."""

from typing import Any

import pytest

from quantkit.models.config import open_config
from quantkit.models.text_half import config_of, places_of, roots, with_text

UNLIKE = {
    "eos_token_id", "dtype", "tie_word_embeddings", "_name_or_path", "architectures", "rope_parameters", "model_type"
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "inner", "names"),
    [
        ("gemma3", {"model_type": "gemma3_text", "hidden_size": 2560}, ["language_model.model.norm.weight"]),
        ("mistral3", {"model_type": "mistral"}, ["language_model.model.norm.weight", "language_model.lm_head.weight"]),
        ("llava", {"model_type": "llama", "rms_norm_eps": 1e-5}, ["language_model.model.norm.weight"]),
        ("qwen3_5", {}, ["model.language_model.norm.weight", "mtp.norm.weight", "lm_head.weight"]),
        ("qwen2_5_vl", {"hidden_size": 512}, ["model.norm.weight", "visual.norm.weight"]),
    ],
)
def test_what_a_config_leaves_to_the_whole_is_the_same_alone(
    model: str, inner: dict[str, Any], names: list[str]
) -> None:
    """Published files state what differs from defaults, and those of a text half are not always its model's."""
    whole: dict[str, Any] = {"model_type": model, "text_config": inner, "eos_token_id": [1, 106]}
    places = places_of(whole, names)
    assert places is not None
    config = config_of(whole, places, names)
    alone, want = open_config(config).to_dict(), open_config(whole).get_text_config().to_dict()
    same = {name: value for name, value in want.items() if name not in UNLIKE and name in alone}
    assert {name: alone[name] for name in same} == same
    assert config["eos_token_id"] == [1, 106]
    assert config["vocab_size"] == want["vocab_size"]
    assert config["tie_word_embeddings"] is not any("lm_head" in name for name in names)


@pytest.mark.parametrize(
    ("names", "published", "alone"),
    [
        (["language_model.model.norm.weight"], "language_model.model.layers.0.a.qweight", "model.layers.0.a.qweight"),
        (["language_model.model.norm.weight"], "language_model.lm_head.weight", "lm_head.weight"),
        (["model.text_model.norm.weight", "model.connector.a"], "lm_head.weight", "lm_head.weight"),
        (["language_model.layers.0.a"], "language_model.layers.0.a", "model.layers.0.a"),
        (["model.norm.weight", "visual.a"], "model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_go_and_come_back(names: list[str], published: str, alone: str) -> None:
    places = places_of({"text_config": {}}, names)
    assert (places.text(published), places.published(alone)) == (alone, published)
    assert places.text("vision_tower.a.weight") is None
    assert places.alone(places.modules(alone)[0]) == places.alone(places.modules(alone)[-1]) == alone
    assert places_of({"model_type": "llama"}, ["model.norm.weight"]) is None


def test_settings_that_an_adapter_changes_are_those_of_the_whole() -> None:
    config = {"text_config": {"vocab_size": 7}, "vision_config": {}, "tie_word_embeddings": True}
    changed = with_text(config, {"vocab_size": 9, "tie_word_embeddings": False})
    assert changed["text_config"] == {"vocab_size": 9, "tie_word_embeddings": False}
    assert changed["tie_word_embeddings"] is False
    assert with_text({"model_type": "qwen2_vl", "vocab_size": 7}, {"vocab_size": 9})["vocab_size"] == 9


def test_roots_are_the_outermost_modules_that_hold_nothing_else() -> None:
    names = ["model.language_model.layers.0.a.weight", "lm_head.weight"]
    kept = ["model.visual.blocks.0.b", "model.visual.c", "mtp.d.weight", "model.language_model.layers.7.e", "model.f"]
    assert roots(kept, names) == ("model.language_model.layers.7", "model.visual", "mtp")
