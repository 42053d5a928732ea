"""Where the text half of a multimodal checkpoint lies, and the config.json that it has alone."""

import pytest

from quantkit.models.config import open_config
from quantkit.models.text_half import config_of, prefixes_of

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
def test_what_a_config_leaves_to_the_whole_is_the_same_alone(model, inner, names):
    """Published files state what differs from defaults, and those of a text half are not always its model's."""
    whole = {"model_type": model, "text_config": inner, "eos_token_id": [1, 106]}
    places = prefixes_of(whole, names)
    assert places is not None
    config = config_of(whole, places, names)
    alone, want = open_config(config).to_dict(), open_config(whole).get_text_config().to_dict()
    same = {name: value for name, value in want.items() if name not in UNLIKE and name in alone}
    assert {name: alone[name] for name in same} == same
    assert config["eos_token_id"] == [1, 106]
    assert config["vocab_size"] == want["vocab_size"]
    assert config["tie_word_embeddings"] is not any("lm_head" in name for name in names)
