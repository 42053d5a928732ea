"""The output head in codes: written where readers find it, computed as they do, refused where none does."""

import pytest
import torch
from engine_logits import TWO_TEXTS, logits_by
from safetensors.torch import load_file
from tiny_llama import HIDDEN, VOCABULARY, converted
from trials import read_back

from quantkit.conversion.verify import verify
from quantkit.errors import QuantkitError
from quantkit.formats import _grouped_codes
from quantkit.formats.source import open_source

CT = "compressed-tensors"


@pytest.fixture(scope="session")
def untied(tiny_with):
    return tiny_with(num_hidden_layers=1, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("method", "kind", "head", "group"), [("rtn", CT, 8, 32), ("awq", CT, 4, 64), ("gptq", "gptq", 4, 32)]
)
def test_a_head_in_codes_is_read_back_and_computed_as_transformers_does(method, kind, head, group, untied, tmp_path):
    options = {"format": kind, "group_size": group, "head_bits": head, "sym": True}
    artifact = converted(untied, tmp_path / "out", method, "4", **options)
    verify(artifact)
    value = read_back(artifact)["lm_head.weight"]
    assert (value.bits, value.shape) == (head, (VOCABULARY, HIDDEN))
    exact = open_source(str(untied)).tensor("lm_head.weight").float()
    error = float((value.dense() - exact).norm() / exact.norm())
    assert error < (0.01 if head == 8 else 0.13)
    types = artifact.manifest.tensor_types
    assert types[f"int{head}"] == (8 if head == 4 else 1)
    [note] = [note for note in artifact.manifest.notes if note.startswith("the output head has")]
    assert f"has {head + 16 / group:.2f} bits per weight" in note
    if kind == CT:
        pytest.importorskip("compressed_tensors", reason="the package is the reference of this test")
        ours, theirs = (logits_by(name, artifact, TWO_TEXTS, dtype="float32") for name in ("reference", "transformers"))
        assert (theirs - ours).abs().max() < 1e-3 * ours.abs().max()
    again = open_source(str(artifact.folder)).tensor("lm_head.weight").float()
    assert torch.equal(again, value.dense())


@pytest.mark.parametrize(
    ("method", "bits", "options", "said"),
    [
        ("awq", "4", {"head_bits": 8}, "format awq has no quantized output head.*compressed-tensors"),
        ("gptq", "4", {"head_bits": 4, "desc_act": True}, "format gptq has no quantized output head"),
        ("rtn", "4", {"head_bits": 6}, "head_bits = 6 cannot be used"),
    ],
)
def test_a_head_that_a_format_does_not_hold_is_refused(method, bits, options, said, untied, one_block, tmp_path):
    with pytest.raises(QuantkitError, match=said):
        converted(untied, tmp_path / "out", method, bits, **options)
    with pytest.raises(QuantkitError, match=r"tied to its embedding.*Use the method gguf.*token_embedding_type"):
        converted(one_block, tmp_path / "out", "rtn", "4", format=CT, head_bits=8)


@pytest.mark.parametrize("kind", [CT, "gptq"])
def test_a_head_in_pieces_is_the_head_in_one(kind, untied, tmp_path, monkeypatch):
    options = {"format": kind, "group_size": 32, "head_bits": 4, "sym": False}
    whole = converted(untied, tmp_path / "whole", "rtn", "4", **options)
    monkeypatch.setattr(_grouped_codes, "PIECE", HIDDEN * 96)  # three pieces, and a rest
    pieces = converted(untied, tmp_path / "pieces", "rtn", "4", **options)
    ours, theirs = (load_file(made.folder / "model.safetensors") for made in (pieces, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
