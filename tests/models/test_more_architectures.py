"""Architectures that no code knows of: the walk, the artifacts and the scalings of each, as those of the others.

Each takes 1 to 10 CPU seconds, so they run in the slow lane.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import test_architectures as plain
from engine_logits import engine_logits
from test_awq_folds import scaled_without_rounding
from tiny_architectures import ARCHITECTURES, LAYERS, Tiny, save_architecture
from tiny_llama import converted
from tiny_more import MORE, as_published, settings_of
from transformers import CONFIG_MAPPING

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.models.awq_folds import provable_scalings
from quantkit.models.skeleton import open_skeleton

Publish = Callable[..., tuple[Tiny, Path]]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Tells `ARCHITECTURES` of a model type, and saves such a tiny model as published checkpoints are."""

    def make(kind: str, settings: Mapping[str, Any] = MappingProxyType({})) -> tuple[Tiny, Path]:
        tiny = Tiny(CONFIG_MAPPING[kind].__name__, MORE.get(kind, 0) / LAYERS, settings_of(kind) | settings)
        monkeypatch.setitem(ARCHITECTURES, kind, tiny)
        return tiny, as_published(save_architecture(tmp_path / kind, kind), kind)

    return make


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
    exact = engine_logits(find_engine("reference").load(Model(artifact, None), replace(spec, dtype="float32")), ids)
    far = np.linalg.norm(engine_logits(loaded, ids) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert np.median(far) < 0.1


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


def test_an_indexer_without_a_choice_is_not_scaled() -> None:
    """Of as many tokens as it may keep it keeps all, so that nothing depends on what it computes."""
    config = CONFIG_MAPPING["axk2"](**settings_of("axk2")).to_dict() | {"architectures": ["CausalLM"]}
    scalings = provable_scalings(open_skeleton(config), config)
    assert scalings[0]
    assert not [one for block in scalings for one in block if any("indexer.wk" in layer for layer in one.layers)]
