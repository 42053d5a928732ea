import json
from types import SimpleNamespace

import pytest
import torch
from engine_logits import logits_of
from safetensors.torch import load_file
from tiny_llama import LINEARS, converted
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trials import read_back

from quantkit.formats.source import open_source
from quantkit.numerics import normal_float
from quantkit.numerics.normal_float import NormalFloatWeight

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the reference of these tests")

NAMES = LINEARS[:7]
IDS = torch.arange(2, 60)[None]
CASES = {
    "tied, biases": ({"attention_bias": True, "mlp_bias": True}, True, "bfloat16"),
    "untied, plain block scales": ({"tie_word_embeddings": False}, False, "bfloat16"),
    "float32": ({}, True, "float32"),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tiny_with, tmp_path_factory):
    """The source, our artifact, the folder that transformers saved, and the logits of its model in memory."""
    changes, double_quant, dtype = CASES[request.param]
    source, folder = tiny_with(num_hidden_layers=1, **changes), tmp_path_factory.mktemp("nf4")
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double_quant}
    settings = BitsAndBytesConfig(**how, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=settings, dtype=getattr(torch, dtype))
    model.save_pretrained(folder / "theirs")  # before it is run: then bitsandbytes repacks the weights for the CPU
    ours = converted(source, folder / "ours", "nf4", double_quant=double_quant, compute_dtype=dtype)
    return SimpleNamespace(source=source, ours=ours, theirs=folder / "theirs", logits=logits_of(model, IDS))


def test_tensors_and_config_are_those_of_transformers_byte_for_byte_and_it_loads_ours(pair):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (pair.ours.folder, pair.theirs))
    assert set(ours) == set(theirs)
    assert sum(name.endswith("quant_state.bitsandbytes__nf4") for name in ours) == len(NAMES)
    for name, tensor in theirs.items():
        assert (name, ours[name].dtype, ours[name].shape) == (name, tensor.dtype, tensor.shape)
        assert bytes(ours[name].view(torch.uint8).numpy()) == bytes(tensor.view(torch.uint8).numpy())
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (pair.ours.folder, pair.theirs))
    assert ours == theirs
    loaded = AutoModelForCausalLM.from_pretrained(pair.ours.folder)
    assert torch.equal(logits_of(loaded, IDS), pair.logits)


@pytest.mark.parametrize("nested", [True, False])
def test_values_that_are_unpacked_in_pieces_are_those_of_the_whole(nested, monkeypatch):
    # 5 x 27 values are two whole runs of 64 and a part of one, in an odd number of bytes.
    weight = torch.randn((5, 27), generator=torch.Generator().manual_seed(3))
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    ours = NormalFloatWeight(packed, state.as_dict(packed=True))
    whole = ours.dense()
    monkeypatch.setattr(normal_float, "PIECE", 100)  # one pair of runs
    assert torch.equal(ours.dense(), whole)
    assert torch.equal(whole, functional.dequantize_4bit(packed, state))


def test_our_reader_gives_exactly_what_bitsandbytes_gives(pair):
    source, options, read = open_source(str(pair.source)), pair.ours.manifest.options, read_back(pair.ours)
    dtype = getattr(torch, str(options["compute_dtype"]))
    assert set(read) == set(source.tensors)
    for name, value in read.items():
        weight = source.tensor(name).to(dtype)
        if name not in NAMES:
            assert torch.equal(value, weight)
            continue
        nested = options["double_quant"]
        packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
        assert torch.equal(value.to(dtype), functional.dequantize_4bit(packed, state))
        assert (value - weight.float()).norm() < 0.11 * weight.float().norm()
