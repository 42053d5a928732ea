"""Architectures that no code knows of: the walk, the artifacts and the scalings of each, as those of the others.

Each takes 1 to 10 CPU seconds, so they run only when they are asked for (`pytest -m slow`).
"""

from pathlib import Path
from typing import Any

import pytest
import test_architectures as plain
import torch
from tiny_architectures import ARCHITECTURES, LAYERS, Tiny, save_architecture
from tiny_llama import converted
from tiny_more import MORE, settings_of
from transformers import CONFIG_MAPPING

from quantkit.contracts.proven import PROVEN
from quantkit.errors import UnsupportedError
from quantkit.models.skeleton import open_skeleton, set_parameter

REFORMER = {
    "attn_layers": ["local", "lsh", "local"], "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16],
    "feed_forward_size": 128, "attention_head_size": 16, "is_decoder": True,
}  # fmt: skip


def test_they_are_promised() -> None:
    assert MORE.keys() <= PROVEN
    assert not MORE.keys() & {tiny.kind for tiny in ARCHITECTURES.values()}


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


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("glm_moe_dsa", {"num_key_value_heads": 4, "index_n_heads": 8}, "more of the one before it"),
        ("reformer", REFORMER, "by name only"),
    ],
)
def test_blocks_that_give_each_other_more_are_refused(
    kind: str, settings: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny(CONFIG_MAPPING[kind].__name__, 1, settings_of(kind) | settings)
    monkeypatch.setitem(ARCHITECTURES, kind, tiny)
    with pytest.raises(UnsupportedError, match=why):
        converted(save_architecture(tmp_path / kind, kind), tmp_path / "out", "gptq", group_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_an_architecture_is_what_the_whole_model_computes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny(CONFIG_MAPPING[kind].__name__, MORE[kind] / LAYERS, settings_of(kind))
    monkeypatch.setitem(ARCHITECTURES, kind, tiny)
    folder = save_architecture(tmp_path / kind, kind)
    with monkeypatch.context() as exactly:
        plain.test_block_inputs_are_the_hidden_states_of_the_whole_model(kind, lambda _: folder, exactly)
    for method, options in (("gptq", {}), ("rtn", {}), ("awq", {"n_grid": 2})):
        artifact = converted(folder, tmp_path / method, method, group_size=16, **options)
        plain.proven(artifact, folder, tmp_path / f"{method}-plain", tiny.linears)
    plain.test_scales_without_rounding_leave_the_model_as_it_is(kind, lambda _: folder)
