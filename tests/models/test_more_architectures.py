"""Architectures that no code knows of: the walk, the artifacts and the scalings of each, as those of the others.

Each takes 1 to 10 CPU seconds, so they run in the slow lane.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import test_architectures as plain
import torch
from engine_logits import engine_logits
from test_awq_folds import scaled_without_rounding
from tiny_architectures import ARCHITECTURES, LAYERS, Tiny, save_architecture
from tiny_llama import converted
from tiny_more import MORE, as_published, settings_of
from transformers import CONFIG_MAPPING

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.errors import UnsupportedError
from quantkit.models.architectures.origins import cut
from quantkit.models.awq_folds import provable_scalings
from quantkit.models.skeleton import Skeleton, open_skeleton, set_parameter

Publish = Callable[..., tuple[Tiny, Path]]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Tells `ARCHITECTURES` of a model type, and saves such a tiny model as published checkpoints are."""

    def make(kind: str, settings: Mapping[str, Any] = MappingProxyType({})) -> tuple[Tiny, Path]:
        tiny = Tiny(CONFIG_MAPPING[kind].__name__, MORE.get(kind, 0) / LAYERS, settings_of(kind) | settings)
        monkeypatch.setitem(ARCHITECTURES, kind, tiny)
        return tiny, as_published(save_architecture(tmp_path / kind, kind), kind)

    return make


def test_parts_stand_where_published_checkpoints_have_them() -> None:
    config = CONFIG_MAPPING["laguna"](**settings_of("laguna")).to_dict() | {"architectures": ["CausalLM"]}
    skeleton = open_skeleton(config)
    names = skeleton.parameter_names()
    bias = "model.layers.1.mlp.experts.e_score_correction_bias"
    assert bias in names
    assert "model.layers.1.mlp.shared_expert.up_proj.weight" in names
    assert not [name for name in names if "shared_experts" in name or "gate.e_score" in name]
    set_parameter(skeleton.model, bias, torch.arange(4.0))
    assert skeleton.blocks[1].mlp.gate.e_score_correction_bias is skeleton.model.get_parameter(bias)


REFORMER = {
    "attn_layers": ["local", "lsh", "local"], "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16],
    "feed_forward_size": 128, "attention_head_size": 16, "is_decoder": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("glm_moe_dsa", {"num_key_value_heads": 4, "index_n_heads": 8}, "more of the one before it"),
        ("reformer", REFORMER, "by name only"),
    ],
)
def test_blocks_that_give_each_other_more_are_refused(
    kind: str, settings: dict[str, Any], why: str, published: Publish, tmp_path: Path
) -> None:
    _, folder = published(kind, settings)
    with pytest.raises(UnsupportedError, match=why):
        converted(folder, tmp_path / "out", "gptq", group_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_an_architecture_is_what_the_whole_model_computes(
    kind: str, published: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, folder = published(kind)
    with monkeypatch.context() as exactly:
        plain.test_block_inputs_are_the_hidden_states_of_the_whole_model(kind, lambda _: folder, exactly)
    for method, options in (("gptq", {}), ("rtn", {}), ("awq", {"n_grid": 2})):
        artifact = converted(folder, tmp_path / method, method, group_size=16, **options)
        plain.proven(artifact, folder, tmp_path / f"{method}-plain", tiny.linears)
    scaled_without_rounding(folder)


def test_code_finds_the_kernel_that_stands_where_a_layer_was_moved_to(published: Publish, tmp_path: Path) -> None:
    """In bfloat16 layers of 4 bits are replaced by others; where the former one is found, it computes with nothing."""
    _, folder = published("lfm3")
    artifact = converted(folder, tmp_path / "rtn", "rtn", group_size=32)
    spec, ids = LoadSpec(threads=1, n_ctx=64, dtype="bfloat16"), np.arange(40).reshape(2, 20) * 7 % 300
    loaded: Any = find_engine("reference").load(Model(artifact, None), spec)
    inside = dict(loaded._model.named_modules())
    aliases = [
        (place, name)
        for place, part in inside.items()
        for name in vars(type(part))
        if isinstance(vars(type(part))[name], property) and isinstance(getattr(part, name, None), torch.nn.Module)
    ]
    assert aliases
    assert all(getattr(inside[place], name) in inside.values() for place, name in aliases)
    exact = engine_logits(find_engine("reference").load(Model(artifact, None), replace(spec, dtype="float32")), ids)
    far = np.linalg.norm(engine_logits(loaded, ids) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert np.median(far) < 0.1


def skeleton_of(kind: str, **changes: Any) -> Skeleton:
    config = CONFIG_MAPPING[kind](**settings_of(kind) | changes).to_dict()
    return open_skeleton(config | {"architectures": ["CausalLM"]})


@pytest.mark.parametrize(
    ("method", "kind", "key"),
    [("rtn", "gptq", "dynamic"), ("awq", "awq", "modules_to_not_convert"), ("rtn", "compressed-tensors", "ignore")],
)
def test_layers_that_stay_as_they_are_are_told_and_named(
    method: str, kind: str, key: str, published: Publish, tmp_path: Path
) -> None:
    """Both as files and as transformers' modules call them: readers ask by either."""
    _, folder = published("axk2")
    options: dict[str, Any] = {"n_grid": 2} if method == "awq" else {}
    artifact = converted(folder, tmp_path / "out", method, group_size=16, format=kind, **options)
    [note] = [note for note in artifact.manifest.notes if "unquantized" in note]
    assert note.startswith("13 layers stay unquantized")
    said = json.dumps(json.loads((artifact.folder / "config.json").read_text())["quantization_config"][key])
    said = said.replace("\\", "")
    for layer in ("self_attn.indexer.weights_proj", "input_layernorm.W_up", "input_layernorm.mlp.fc2"):
        assert f"layers.2.{layer}" in said
    assert "wq_b" not in said


def test_a_joined_convolution_is_read_from_its_parts_or_whole() -> None:
    skeleton = skeleton_of("olmo_hybrid")
    place = "model.layers.0.linear_attn"
    names = [f"{place}.{part}_conv1d.weight" for part in "qkv"]
    sizes = [len(skeleton.model.get_parameter(name)) for name in names]
    assert sizes == [48, 48, 96]
    whole = torch.arange(192 * 4.0).reshape(192, 1, 4)
    for name in names:
        origin = skeleton.origins[name]
        assert origin.name == f"{place}.conv1d.weight"
        set_parameter(skeleton.model, name, cut(origin, lambda _name, start, stop: whole[start:stop]))
    assert torch.equal(skeleton.blocks[0].linear_attn.conv1d.weight, whole)
    copied = copy.deepcopy(skeleton.blocks[0])
    set_parameter(copied, "linear_attn.q_conv1d.weight", torch.zeros(48, 1, 4))
    assert copied.linear_attn.conv1d.weight[:48].abs().max() == 0
    assert torch.equal(skeleton.blocks[0].linear_attn.conv1d.weight, whole)


def test_an_indexer_without_a_choice_is_not_scaled() -> None:
    """Of as many tokens as it may keep it keeps all, so that nothing depends on what it computes."""
    skeleton = skeleton_of("axk2")
    scalings = provable_scalings(skeleton, skeleton.model.config.to_dict() | {"architectures": ["CausalLM"]})
    assert scalings[0]
    assert not [one for block in scalings for one in block if any("indexer.wk" in layer for layer in one.layers)]
