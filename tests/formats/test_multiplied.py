"""Factors of config.json in the weights: of the format's engine, of its file read back, and of every method."""

import json

import pytest
import torch
from gguf_files import (
    IDS,
    far_apart,
    file_in,
    job_for,
    logits_of_llama_cpp,
    logits_of_transformers,
    saved,
    take_any_tokenizer,
    tensors_of,
    written,
)
from tiny_llama import calibration

from quantkit import convert
from quantkit.errors import QuantkitError
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.formats.source import open_source

pytest.importorskip("gguf")

IDS = IDS[:100]


@pytest.fixture(autouse=True)
def known_tokenizer(monkeypatch):
    take_any_tokenizer(monkeypatch)


def test_a_tied_head_with_another_factor_gets_weights_of_its_own(tmp_path):
    folder = saved(tmp_path / "model", "falcon_h1", tie_word_embeddings=True)
    trial = job_for(folder, "F32", tmp_path / "out")
    assert any("its factor is not the embedding's" in note for note in trial.source.notes)
    file = written(trial)
    assert "lm_head.weight" in tensors_of(file)
    assert far_apart(logits_of_llama_cpp(file, IDS), logits_of_transformers(folder, IDS)) < 1e-5
    same = saved(tmp_path / "same", "falcon_h1", tie_word_embeddings=True, lm_head_multiplier=1.7)
    file = written(job_for(same, "F32", tmp_path / "out"))
    assert "lm_head.weight" not in tensors_of(file)
    assert far_apart(logits_of_llama_cpp(file, IDS), logits_of_transformers(same, IDS)) < 1e-5


def test_each_factor_by_hand(tmp_path):
    folder = saved(tmp_path / "model", "falcon_h1")
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


def test_ones_change_nothing(architecture, tmp_path):
    one = {f"{name}_multiplier": 1.0 for name in ("attention_in", "attention_out", "ssm_in", "ssm_out", "key")}
    one |= {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0}
    source = open_source(
        str(saved(tmp_path / "m", "falcon_h1", **one, mlp_multipliers=[1.0] * 2, ssm_multipliers=[1.0] * 5))
    )
    assert GGUF.prepared(source) is source
    llama = open_source(str(architecture("llama")))
    assert GGUF.prepared(llama) is llama


def test_other_factors_are_refused(tmp_path):
    folder = saved(tmp_path / "model", "falcon_h1")
    config = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"key_multiplier": 0.0}, "multiplies .*k_proj.weight by 0.0"),
        ({"ssm_multipliers": [1.0, 2.0]}, "lacks what multiplies its weights|is shorter"),
        ({"embedding_multiplier": float("inf")}, "embedding_multiplier is inf"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(QuantkitError, match=said):
            job_for(folder, "F16", tmp_path / "out").check()


def test_a_calibrated_file_holds_the_multiplied_weights(tmp_path):
    folder = saved(tmp_path / "model", "falcon_h1", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    artifact = convert(str(folder), "gguf", "Q6_K", tmp_path / "gguf", calibration=calibration(), rounding="gptq")
    assert any("factors of config.json put into the weights" in note for note in artifact.manifest.notes)
    assert artifact.manifest.source.config["key_multiplier"] == 1.0
    read, source = tensors_of(file_in(artifact.folder)), GGUF.prepared(open_source(str(folder)))
    assert read.keys() == source.tensors.keys()
    for name, values in read.items():
        assert far_apart(values, source.tensor(name).float().reshape(values.shape)) < 0.05, name
