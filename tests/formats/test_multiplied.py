"""Factors of config.json in the weights: of the format's engine, of its file read back, and of every method."""

import json
from typing import Any

import pytest
import torch
from gguf_files import (
    job_for,
    logits_of_llama_cpp,
    logits_of_transformers,
    take_any_tokenizer,
    tensors_of,
    written,
)
from safetensors.torch import load_file, save_file
from tiny_architectures import save_architecture
from tiny_llama import VOCABULARY, calibration

from quantkit import convert
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.formats.source import open_source

pytest.importorskip("gguf")

IDS = torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(autouse=True)
def known_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_tokenizer(monkeypatch)


def falcon(place: Any, **changes: Any) -> Any:
    return save_architecture(place, "falcon_h1", dtype=torch.float32, changes=changes)


def away(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    "changes", [{"mamba_rms_norm": True, "mamba_n_groups": 2}, {"mamba_d_ssm": None, "mamba_n_heads": 8}]
)
def test_other_falcons(tmp_path, changes):
    folder = falcon(tmp_path / "model", **changes)
    file = written(job_for(folder, "F32", tmp_path / "out"))
    assert away(logits_of_llama_cpp(file, IDS), logits_of_transformers(folder, IDS)) < 1e-5


def test_a_tied_head_with_another_factor_gets_weights_of_its_own(tmp_path):
    folder = falcon(tmp_path / "model", tie_word_embeddings=True)
    trial = job_for(folder, "F32", tmp_path / "out")
    assert any("its factor is not the embedding's" in note for note in trial.source.notes)
    file = written(trial)
    assert "lm_head.weight" in tensors_of(file)
    assert away(logits_of_llama_cpp(file, IDS), logits_of_transformers(folder, IDS)) < 1e-5
    same = falcon(tmp_path / "same", tie_word_embeddings=True, lm_head_multiplier=1.7)
    file = written(job_for(same, "F32", tmp_path / "out"))
    assert "lm_head.weight" not in tensors_of(file)
    assert away(logits_of_llama_cpp(file, IDS), logits_of_transformers(same, IDS)) < 1e-5


def test_names_without_the_model_s_prefix(tmp_path):
    folder = falcon(tmp_path / "model")
    whole = tensors_of(written(job_for(folder, "F32", tmp_path / "out")))
    path = folder / "model.safetensors"
    save_file({name.removeprefix("model."): value for name, value in load_file(path).items()}, path)
    short = tensors_of(written(job_for(folder, "F32", tmp_path / "short")))
    assert short.keys() == whole.keys()
    assert all(torch.equal(short[name], whole[name]) for name in whole)


def test_each_factor_by_hand(tmp_path):
    folder = falcon(tmp_path / "model")
    plain, source = open_source(str(folder)), GGUF.prepared(open_source(str(folder)))
    stem = "model.layers.1."
    factors = {
        "self_attn.q_proj": 1.5, "self_attn.k_proj": 1.5 * 0.8, "self_attn.v_proj": 1.5, "self_attn.o_proj": 0.9,
        "mamba.out_proj": 0.7, "feed_forward.gate_proj": 0.9, "feed_forward.down_proj": 1.3, "feed_forward.up_proj": 1,
    }  # fmt: skip
    for name, factor in factors.items():
        weight = f"{stem}{name}.weight"
        assert torch.allclose(source.tensor(weight), plain.tensor(weight) * factor, rtol=1e-6, atol=0), name
    rows = [(128, 0.7), (128, 1.2), (16, 0.9), (16, 1.1), (8, 0.8)]
    columns = torch.cat([torch.full((count, 1), factor * 1.25) for count, factor in rows])
    weight = f"{stem}mamba.in_proj.weight"
    assert torch.allclose(source.tensor(weight), plain.tensor(weight) * columns, rtol=1e-6, atol=0)
    assert torch.equal(source.rows(weight, 250, 260), source.tensor(weight)[250:260])
    assert torch.allclose(source.tensor("lm_head.weight"), plain.tensor("lm_head.weight") * 0.6, rtol=1e-6, atol=0)
    assert away(logits_of_transformers(folder, IDS), logits_of_transformers(_saved(source, tmp_path), IDS)) < 1e-5


def _saved(source: Any, place: Any) -> Any:
    (place / "again").mkdir()
    (place / "again" / "config.json").write_text(json.dumps(source.config))
    tensors = {name: source.tensor(name).clone() for name in source.tensors}
    save_file(tensors, place / "again" / "model.safetensors", {"format": "pt"})
    return place / "again"


def test_ones_change_nothing(tmp_path):
    one = {f"{name}_multiplier": 1.0 for name in ("attention_in", "attention_out", "ssm_in", "ssm_out", "key")}
    one |= {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0}
    source = open_source(str(falcon(tmp_path / "m", **one, mlp_multipliers=[1.0] * 2, ssm_multipliers=[1.0] * 5)))
    assert GGUF.prepared(source) is source
    llama = open_source(str(save_architecture(tmp_path / "llama", "llama")))
    assert GGUF.prepared(llama) is llama


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key_multiplier": 0.0}, "multiplies .*k_proj.weight by 0.0"),
        ({"ssm_multipliers": [1.0, 2.0]}, "lacks what multiplies its weights|is shorter"),
        ({"lm_head_multiplier": "two"}, "two"),
        ({"embedding_multiplier": float("inf")}, "embedding_multiplier is inf"),
        ({"mamba_d_state": 8}, "rows, and config.json factors for"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "llama.cpp gates first|lacks"),
    ],
)
def test_other_factors_are_refused(tmp_path, change, said):
    folder = falcon(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError, match=said):
        job_for(folder, "F16", tmp_path / "out").check()


def test_a_calibrated_file_holds_the_multiplied_weights(tmp_path):
    folder = falcon(tmp_path / "model", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    artifact = convert(str(folder), "gguf", "Q6_K", tmp_path / "gguf", calibration=calibration(), rounding="gptq")
    assert any("factors of config.json put into the weights" in note for note in artifact.manifest.notes)
    assert artifact.manifest.source.config["key_multiplier"] == 1.0
    read, source = tensors_of(next(artifact.folder.glob("*.gguf"))), GGUF.prepared(open_source(str(folder)))
    assert read.keys() == source.tensors.keys()
    for name, values in read.items():
        assert away(values, source.tensor(name).float().reshape(values.shape)) < 0.05, name
