import pytest
from tiny_models import EVALUATION, changed_copy

from quantkit import evaluate
from quantkit.errors import EngineError, UnsupportedError


def evaluated(folder):
    settings = {**EVALUATION, "divergence": False}
    return evaluate(folder, ("perplexity",), engine="transformers", **settings).engine.notes


@pytest.mark.parametrize("config", [{"num_hidden_layers": 4}, {"tie_word_embeddings": False}])
def test_a_parameter_without_a_tensor_is_refused(config, tiny, tmp_path):
    folder = changed_copy(tiny, tmp_path / "changed", **config)
    with pytest.raises(EngineError, match=r"has no tensor for \d+ parameters of LlamaForCausalLM, such as "):
        evaluated(folder)


def test_a_tensor_that_is_left_out_is_told(tiny, tmp_path):
    def add(tensors):
        tensors["model.extra.weight"] = tensors["model.norm.weight"].clone()

    folder = changed_copy(tiny, tmp_path / "changed", add)
    assert evaluated(tiny) == ()
    (note,) = evaluated(folder)
    assert note.startswith("transformers ignores ")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_block_more_than_config_json_counts_is_refused(prefix, tiny, tmp_path):
    def rename(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    folder = changed_copy(tiny, tmp_path / "changed", rename, num_hidden_layers=2)
    with pytest.raises(UnsupportedError, match=r"counts 2 decoder blocks, but the checkpoint has .*layers\.2\."):
        evaluated(folder)
