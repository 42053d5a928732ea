"""Adapters that somebody damaged, or of kinds that are not merged: one line of ours, before anything else is read."""

from __future__ import annotations

import shutil

import pytest
import torch
from edits import edit_json
from tiny_adapters import ALPHA, RANK, low_rank, save_adapter
from tiny_models import fails

from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.adapter import CONFIG, WEIGHTS, Adapter, open_adapter

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
LAST = torch.tensor([127])  # row, of which all but the first pieces are


@pytest.fixture
def adapter(tiny, tmp_path):
    return save_adapter(tmp_path / "adapter", low_rank(tiny, [Q, V]))


def with_config(adapter, **values):
    edit_json(adapter / CONFIG, lambda config: config.update(values))
    return adapter


def refused(adapter, says):
    with pytest.raises((SourceError, UnsupportedError), match=says) as raised:
        open_adapter(adapter)
    assert str(adapter) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_what_is_whole_is_taken(adapter):
    opened = Adapter(adapter)
    assert sorted(opened.updates) == [Q, V]
    assert opened.updates[Q].scale == ALPHA / RANK
    assert opened.entry.kind == "LoRA"
    assert sorted(opened.entry.hashes) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize(
    "values",
    [
        {"kasa_config": None, "use_qalora": False, "target_parameters": [], "loftq_config": {"loftq_bits": 4}},
        {"init_lora_weights": "gaussian", "peft_version": "0.21.2", "task_type": "CAUSAL_LM", "lora_dropout": 0.05},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    ],
    ids=str,
)
def test_settings_that_change_nothing_are_taken(values, adapter):
    assert Adapter(with_config(adapter, **values)).updates[V].scale == ALPHA / RANK


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"peft_type": "IA3"}, "of the kind .*IA3.*quantkit merges only LoRA"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 8}, r"lora_A' has the shape \(4, 128\), but adapter_config.json has the rank 8"),
        ({"r": 0}, "r is 0"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj.lora_A' has the shape \(4, 128\), but .* rank 2"),
        ({"alpha_pattern": {"(": 2}}, "is not a regular expression"),
        ({"target_modules": ["proj"]}, "q_proj.*target_modules"),
        ({"exclude_modules": ["v_proj"]}, "v_proj.*exclude_modules"),
        ({"layers_to_transform": 0}, "layers.1.*layers_to_transform"),
        ({"layers_to_transform": [0, -1]}, "layers_to_transform"),
        ({"target_modules": ["q_proj"], "ensure_weight_tying": True}, "v_proj.*target_modules"),
        ({"use_dora": True}, "lacks the tensor .*q_proj.lora_magnitude_vector'.*use_dora = true"),
    ],
    ids=str,
)
def test_a_config_that_lies(values, says, adapter):
    refused(with_config(adapter, **values), says)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({f"{V}.lora_B.weight": None}, "lacks the tensor .*v_proj.lora_B"),
        ({"model.norm.weight": torch.tensor([1.0, float("nan")])}, "model.norm.weight' has 1 NaN"),
        ({f"{Q}.lora_B.weight": torch.ones(128, 4).index_fill(0, LAST, torch.nan)}, "lora_B.weight' has 4 NaN"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 128, dtype=torch.int32)}, "is stored as I32"),
        ({f"{Q}.lora_C.weight": torch.ones(4)}, "lora_C.weight' is of a kind"),
        ({f"{Q}.lora_embedding_A": torch.ones(4, 128)}, "is of a linear layer, but others are of an embedding"),
        ({"lm_head.base_layer.weight": torch.ones(4, 4)}, "belongs to a layer that the adapter does not change"),
    ],
    ids=range(7),
)
def test_tensors_that_are_wrong(tensors, says, tiny, tmp_path):
    """None takes one away."""
    values = {name: value for name, value in (low_rank(tiny, [Q, V]) | tensors).items() if value is not None}
    refused(save_adapter(tmp_path / "adapter", values), says)


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, '{"peft_type": "LORA", "r": ' + "1" * 5000 + "}"])
def test_a_config_that_is_none(text, adapter):
    (adapter / CONFIG).write_text(text)
    refused(adapter, CONFIG)


def test_files_that_are_missing_cut_or_pickled(adapter):
    weights = adapter / WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(data[:-5])
    refused(adapter, "truncated")
    weights.unlink()
    refused(adapter, f"has no {WEIGHTS}")
    (adapter / "adapter_model.bin").write_bytes(b"\x80\x02")
    refused(adapter, r"only pickled weights \(adapter_model\.bin\)")
    (adapter / "new_embeddings.safetensors").write_bytes(data)
    refused(adapter, "adds rows to the embedding")
    shutil.rmtree(adapter)
    refused(adapter, "is not a folder.*hf download")


def test_links_out_of_the_folder_are_not_followed(adapter, tmp_path):
    (adapter / WEIGHTS).rename(tmp_path / WEIGHTS)
    (adapter / WEIGHTS).symlink_to(tmp_path / WEIGHTS)
    refused(adapter, "is a link out of the adapter's folder")


def test_files_of_the_hubs_cache_are_taken(adapter, tmp_path):
    """There a snapshot is a folder of links into a store beside it."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(adapter.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    assert sorted(Adapter(snapshot).updates) == [Q, V]


def test_a_tokenizer_that_is_a_link_is_not_copied(tiny, adapter, tmp_path):
    (adapter / "tokenizer.json").symlink_to(tiny / "tokenizer.json")
    words = ("convert", tiny, "--adapter", adapter, "--method", "rtn", "--out", tmp_path / "out")
    assert fails(*words, says="tokenizer.json is a link out of its folder").err.count("\n") == 1
    assert not (tmp_path / "out.partial").exists()


def test_a_hostile_expression_ends_in_a_line(adapter, monkeypatch):
    monkeypatch.setattr("quantkit.system.untrusted.SECONDS", 1.0)
    refused(with_config(adapter, rank_pattern={r"(.|.)*-": 4}), "rank_pattern: matching takes more")
