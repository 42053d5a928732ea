"""Architectures that no code knows of: they are computed as the others, or refused in one line."""

import json
import re

import pytest
import test_architectures as plain
import torch
from engine_logits import TWO_TEXTS, logits_by, logits_of
from test_awq_mappings import scaled_without_rounding
from tiny_architectures import save_architecture, tiny_of, whole_model
from tiny_llama import converted
from tiny_more import MORE, as_published, settings_of
from torch import nn
from transformers import CONFIG_MAPPING, LlamaConfig, XLMConfig

from quantkit.errors import UnsupportedError
from quantkit.models.architectures import Signal, running
from quantkit.models.awq_mappings import provable_scalings
from quantkit.models.skeleton import open_skeleton
from quantkit.models.stand_in import Recorder

MORE_HEADS = {"glm_moe_dsa": {"num_key_value_heads": 4, "index_n_heads": 8}}


def saved(folder, kind, **settings):
    """A tiny decoder of any `model_type`."""
    decoder = {"is_decoder": True} if "is_decoder" in CONFIG_MAPPING[kind]().to_dict() else {}
    return save_architecture(folder / kind, kind, changes=decoder | settings)


@pytest.mark.parametrize(
    ("kind", "method", "says"),
    [
        ("xlm", "gptq", "changes hidden states between its blocks"),
        ("glm_moe_dsa", "gptq", "more from the previous block"),
        ("xlm", "awq", "'xlm' is untested, and .* in block 0 .MultiHeadAttention.: RuntimeError: The expanded size"),
    ],
)
def test_a_conversion_is_refused_in_one_line_and_leaves_nothing(kind, method, says, tmp_path):
    folder = saved(tmp_path, kind, **MORE_HEADS.get(kind, {}))
    with pytest.raises(UnsupportedError, match=says) as caught:
        converted(folder, tmp_path / "out", method, group_size=16)
    assert re.search(r"Methods that take this model: .*rtn:4\.$", str(caught.value))
    assert method != "gptq" or "awq:" not in str(caught.value).partition("Methods that")[2]  # which walks as well
    assert [path.name for path in tmp_path.iterdir()] == [kind]


@pytest.mark.parametrize(
    ("kind", "walk", "where"),
    [
        ("xmod", True, "XmodModel, around its blocks: ValueError: Input language unknown"),
        ("glm_moe_dsa", False, "GlmMoeDsaForCausalLM: RuntimeError: The size of tensor"),
    ],
)
def test_an_evaluation_is_refused_in_one_line(kind, walk, where, tmp_path):
    folder = saved(tmp_path, kind)
    with pytest.raises(UnsupportedError, match=f"'{kind}' is untested, and transformers' code .* in {where}"):
        logits_by("reference", folder, TWO_TEXTS, dtype="float32", walk=walk)


@pytest.mark.parametrize(("kind", "walk"), [("electra", False), ("rembert", True), ("roberta", True)])
def test_a_head_that_changes_the_states_before_its_output_layer_is_computed(kind, walk, tmp_path):
    """To another width in electra and rembert."""
    folder = saved(tmp_path, kind)
    want = logits_of(whole_model(folder), TWO_TEXTS)
    got = logits_by("reference", folder, TWO_TEXTS, dtype="float32", walk=walk)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_a_block_without_states_in_its_place_is_refused():
    with pytest.raises(UnsupportedError, match="by name only"):
        Recorder(nn.Identity(), last=True)(hidden_states=torch.zeros(1))


@pytest.mark.parametrize(
    ("config", "passes"),
    [
        *((XLMConfig(), error) for error in (MemoryError(), RuntimeError("can't allocate memory"), Signal())),
        (LlamaConfig(), TypeError("no such thing")),
    ],
)
def test_what_is_no_fault_of_the_architecture_or_of_a_proven_one_passes(config, passes):
    with pytest.raises(type(passes)) as caught, running(config, "block 0"):
        raise passes
    assert caught.value is passes


# Those that are proven as they are; each takes 1 to 10 CPU seconds, so they run in the slow lane


def published(folder, kind):
    return as_published(save_architecture(folder / kind, kind), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_an_architecture_is_what_the_whole_model_computes(kind, tmp_path, monkeypatch):
    folder = published(tmp_path, kind)
    with monkeypatch.context() as exactly:
        plain.test_block_inputs_are_the_hidden_states_of_the_whole_model(kind, lambda _: folder, exactly)
    for method, options in (("gptq", {}), ("rtn", {}), ("awq", {"n_grid": 2})):
        artifact = converted(folder, tmp_path / method, method, group_size=16, **options)
        plain.proven(artifact, folder, tmp_path / f"{method}-plain", tiny_of(kind).linears)
    scaled_without_rounding(folder)


def test_code_finds_the_kernel_that_stands_where_a_layer_was_moved_to(tmp_path):
    """In bfloat16 layers of 4 bits are replaced by others; where the former one is found, it computes with nothing."""
    folder = published(tmp_path, "lfm3")
    artifact = converted(folder, tmp_path / "rtn", "rtn", group_size=32)
    near, exact = (logits_by("reference", artifact, TWO_TEXTS, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert ((near - exact).norm(dim=-1) / exact.norm(dim=-1)).median() < 0.1


@pytest.mark.parametrize(
    ("kind", "key"), [("gptq", "dynamic"), ("awq", "modules_to_not_convert"), ("compressed-tensors", "ignore")]
)
def test_layers_that_stay_as_they_are_are_told_and_named(kind, key, tmp_path):
    """Both as files and as transformers' modules call them: readers ask by either."""
    folder = published(tmp_path, "axk2")
    artifact = converted(folder, tmp_path / "out", "rtn", group_size=16, format=kind)
    [note] = [note for note in artifact.manifest.notes if "unquantized" in note]
    assert note.startswith("13 layers stay unquantized")
    said = json.dumps(json.loads((artifact.folder / "config.json").read_text())["quantization_config"][key])
    said = said.replace("\\", "")
    for layer in ("self_attn.indexer.weights_proj", "input_layernorm.W_up", "input_layernorm.mlp.fc2"):
        assert f"layers.2.{layer}" in said
    assert "wq_b" not in said


def test_an_indexer_without_a_choice_is_not_scaled():
    """Of as many tokens as it may keep it keeps all, so that nothing depends on what it computes."""
    config = CONFIG_MAPPING["axk2"](**settings_of("axk2")).to_dict() | {"architectures": ["CausalLM"]}
    scalings = provable_scalings(open_skeleton(config), config)
    assert scalings[0]
    assert not [one for block in scalings for one in block if any("indexer.wk" in layer for layer in one.layers)]
