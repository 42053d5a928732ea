"""Models whose blocks cannot be computed one by one: refused where that is needed, and right where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_logits import engine_logits
from tiny_architectures import GROUPED, whole_model
from tiny_llama import VOCABULARY, converted, save_tokenizer
from trials import dense, read_back

from quantkit.calibration.passes import SourceValues, embed
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.errors import UnsupportedError
from quantkit.formats.source import open_source
from quantkit.models import stand_in
from quantkit.models.skeleton import open_skeleton

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TEXT = {
    **GROUPED,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "head_dim": 16,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GEMMA4 = {**TEXT, "global_head_dim": 16, "num_kv_shared_layers": 0}
NARROW = {"laurel_rank": 32, "intermediate_size": [128] * 4, "activation_sparsity_pattern": [0.0] * 4}
# By name: the configuration's class, settings, and what its blocks need.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma4": (
        "Gemma4TextConfig",
        {**GEMMA4, "hidden_size_per_layer_input": 32},
        r"depend on the text .*hidden_size_per_layer_input = 32",
    ),
    "gemma4, shared": (
        "Gemma4TextConfig",
        {**GEMMA4, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2},
        r"depend on the text .*hidden_size_per_layer_input = 32",
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {**TEXT, **NARROW, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2},
        r"several hidden states of a token side by side \(altup_num_inputs = 4\)",
    ),
}


def save(folder: Path, config: str, settings: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: save(place / name.replace(", ", "-"), *kind[:2]) for name, kind in KINDS.items()}


@pytest.mark.parametrize("method", ["gptq", "awq", "int8"])
@pytest.mark.parametrize("name", KINDS)
def test_calibrated_methods_refuse_them_before_the_work(
    name: str, method: str, models: dict[str, Path], tmp_path: Path
) -> None:
    takers = "Methods that take this model: fp8:8, nf4:4, rtn:[48]"
    with pytest.raises(UnsupportedError, match=rf"{KINDS[name][2]}.*one by one.*{takers}"):
        converted(models[name], tmp_path / "out", method, "8" if method == "int8" else "4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("method", "bits"), [("rtn", "8"), ("nf4", "4"), ("fp8", "8"), ("float", "float32")])
@pytest.mark.parametrize("name", KINDS)
def test_others_give_what_transformers_computes(
    name: str, method: str, bits: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Our reader, as the whole model, and transformers with the values that are read back."""
    made = converted(models[name], tmp_path / "out", method, bits)
    ids = torch.arange(40).reshape(2, 20) * 7 % 300
    theirs = whole_model(models[name])
    with torch.no_grad():
        before = theirs(input_ids=ids).logits
        values = {key: dense(value).float() for key, value in read_back(made).items()}
        assert not theirs.load_state_dict(values, strict=False).unexpected_keys
        theirs.tie_weights()
        want = theirs(input_ids=ids).logits
    engine = "reference"
    got = engine_logits(find_engine(engine).load(Model(made, None), LoadSpec(1, 64, "float32")), ids.numpy())
    tolerance = 0.3 if method == "fp8" else 1e-4  # our reader rounds inputs, too, as engines do
    assert (torch.from_numpy(got) - want).square().mean().sqrt() < tolerance * want.std()
    assert (want - before).square().mean().sqrt() < {"nf4": 1.0, "fp8": 0.5}.get(method, 0.1) * before.std()


def test_a_walk_that_is_not_told_by_settings_is_refused_too(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the values that blocks are called with, and by the shape of what flows through them."""
    monkeypatch.setattr(stand_in, "NOT_ALONE", {})
    for name, says in (("gemma4", "depend on the text"), ("gemma3n", r"the shape \(4, 1, 20, 64\)")):
        source = open_source(str(models[name]))
        skeleton = open_skeleton(source.config)
        ids = torch.arange(40).reshape(2, 20) * 7 % 300
        with pytest.raises(UnsupportedError, match=says):
            embed(SourceValues(source, skeleton), skeleton, ids, torch.device("cpu"), lambda _size: None)
