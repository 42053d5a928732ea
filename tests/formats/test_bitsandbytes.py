"""bitsandbytes: NF4 artifacts that transformers loads, and FP4 and LLM.int8 checkpoints as it saves them."""

import re

import numpy as np
import pytest
import torch
from engine_logits import TWO_TEXTS, logits_by, logits_of
from gguf_files import slow_but
from quantized_folders import LAYERS, refuse_source
from safetensors.torch import load_file
from tiny_architectures import LAYERS as BLOCKS
from tiny_architectures import save_architecture
from tiny_llama import converted
from tiny_models import changed_copy
from transformers import AutoModelForCausalLM

from bench.fuzz.quantized_bases import save_with_transformers
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.conversion.verify import verify
from quantkit.errors import EngineError, UnsupportedError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats.bitsandbytes import has_bfloat16_units
from quantkit.formats.source import open_source
from quantkit.records.recipe import EngineSpec

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is the reference of these tests")

# By architecture the layers of 4 bits, for one of each kind: dense, transposed, experts by their published names,
# stacked ones with biases, renamed stacks, a shared expert beside a plain gate, experts that transformers unstacks.
KINDS = {
    "llama": 7 * BLOCKS, "gpt2": 4 * BLOCKS, "mixtral": 4 * BLOCKS, "gpt_oss": 4 * BLOCKS, "granitemoe": 4 * BLOCKS,
    "qwen2_moe": 7 * BLOCKS, "llama4": 11 * BLOCKS,
}  # fmt: skip
WIDE = {"qwen2_moe": {"shared_expert_intermediate_size": 128}, "llama4": {"intermediate_size": 64}}


def in_transformers(folder):
    """transformers' own model of a folder, with every tensor in it used, and its logits."""
    model, about = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):  # is dequantized, so that nothing but its values is rounded
            module.support_avx512bf16_for_cpu = False
    return model, logits_of(model, TWO_TEXTS)


@pytest.mark.parametrize("name", slow_but(KINDS.keys() - {"llama", "gpt_oss", "mixtral"}, KINDS))
def test_transformers_loads_it_and_computes_what_our_reader_does(name, tmp_path):
    source = save_architecture(tmp_path / "model", name, changes=WIDE.get(name))
    artifact = converted(source, tmp_path / "out", "nf4", compute_dtype="float32", min_quantized=0)
    verify(artifact)
    model, logits = in_transformers(artifact.folder)
    held = [path for path, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(held) == artifact.manifest.tensor_types["nf4"] == KINDS[name]
    want = logits_by("reference", artifact, TWO_TEXTS, dtype="float32")
    assert (logits - want).abs().max() < 1e-4 * want.abs().max()


def test_a_mixture_of_which_little_is_quantized_is_refused_with_its_bits(architecture, tmp_path):
    folder = architecture("mixtral")
    told = r"12 of 48 linear layers of 'mixtral' \(not .*experts.*stacked.*awq:4, fp8:8, gguf:Q4_K_M, gptq:4, int8:8"
    with pytest.raises(UnsupportedError, match=told) as refusal:
        converted(folder, tmp_path / "out", "nf4")
    with pytest.raises(UnsupportedError, match=r"no layer of 'falcon' .*keeps in a FalconLinear"):
        converted(architecture("falcon, grouped"), tmp_path / "falcon", "nf4", min_quantized=0)
    says = str(refusal.value)
    share = float(re.search(r"([\d.]+)% of their weights", says)[1])
    least = re.search(r"Give --min-quantized ([\d.]+) to accept", says)[1]
    artifact = converted(folder, tmp_path / "out", "nf4", min_quantized=float(least))
    weights = load_file(folder / "model.safetensors")
    assert artifact.manifest.tensor_types["nf4"] == BLOCKS * 4
    with pytest.raises(EngineError, match=r"vllm-bnb-plugin would round \S*experts\S* to NF4.*--engine reference"):
        find_engine("vllm").refuse_model(Model(artifact, None), None, "cuda")
    attention = BLOCKS * (64 * 64 * 2 + 64 * 32 * 2)
    experts = sum(tensor.numel() for name, tensor in weights.items() if "experts" in name)
    assert share == round(100 * attention / (attention + experts), 1)


def test_shapes_that_processors_do_not_compute_are_told_and_refused_there(tiny_with, tmp_path):
    sizes = {inner: tiny_with(intermediate_size=inner, num_hidden_layers=1) for inner in (192, 172)}
    fits, odd = (converted(model, tmp_path / f"{inner}", "nf4") for inner, model in sizes.items())
    assert not any("on GPUs only" in note for note in fits.manifest.notes)
    assert choose(Model(fits, None), EngineSpec()).name == "transformers"
    [told] = [note for note in odd.manifest.notes if "on GPUs only" in note]
    assert told.startswith("3 of 7 quantized layers, such as ")
    assert "gate_proj.weight (172 x 128 weights)" in told
    assert logits_by("reference", odd, TWO_TEXTS, dtype="float32").isfinite().all()
    if has_bfloat16_units():
        with pytest.raises(EngineError, match=r"down_proj|gate_proj.*on GPUs only.*--engine reference"):
            find_engine("transformers").load(Model(odd, None), LoadSpec(threads=1, n_ctx=64))
        with pytest.raises(EngineError, match="on GPUs only"):
            find_engine("vllm").refuse_model(Model(odd, None), None, "cpu")


UP = "model.layers.0.mlp.up_proj."
SETTINGS = {
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "fp4 double": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
    "nf4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
}
SETTINGS["fp4 in float32"] = SETTINGS["fp4"] | {"bnb_4bit_quant_storage": "float32"}
SETTINGS["nf4 in float16"] = SETTINGS["nf4 in bfloat16"] | {"bnb_4bit_quant_storage": "float16"}
CALLED = {"int8": "LLM.int8", "fp4": "4-bit floats (FP4)", "nf4": "4-bit NormalFloat"}


@pytest.fixture(scope="module")
def saved(one_block, once):
    return lambda kind: once(
        f"by-transformers-{kind}", lambda folder: save_with_transformers(one_block, folder, SETTINGS[kind])
    )


def their_values(tensors, name):
    scales = tensors.get(f"{name.removesuffix('weight')}SCB")
    if scales is not None:
        return bitsandbytes.functional.int8_vectorwise_dequant(tensors[name], scales)
    parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    state = bitsandbytes.functional.QuantState.from_dict(parts, torch.device("cpu"))
    state.dtype = torch.float32
    return bitsandbytes.functional.dequantize_4bit(tensors[name], state)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_values_are_those_of_bitsandbytes(kind, saved):
    folder = saved(kind)
    source, tensors = open_source(str(folder)), load_file(folder / "model.safetensors")
    assert source.quantization == f"bitsandbytes, {CALLED[kind.split()[0]]}"
    storage = {str(tensors[name].dtype).removeprefix("torch.") for name in LAYERS}
    assert storage == {kind.split(" in ")[1] if " in " in kind else "int8" if kind == "int8" else "uint8"}
    for name in LAYERS:
        assert np.array_equal(source.floats(name), their_values(tensors, name).numpy()), name
    assert np.array_equal(source.floats(LAYERS[0], 3, 9), source.floats(LAYERS[0])[3:9])
    assert not any(name.endswith(("SCB", "weight_format", "absmax")) for name in source.tensors)


@pytest.mark.parametrize("kind", ["fp4", "int8"])
def test_layers_that_transformers_has_the_other_way_round_come_as_it_has_them(kind, architecture, tmp_path):
    save_with_transformers(architecture("gpt2"), tmp_path / "saved", SETTINGS[kind])
    source = open_source(str(tmp_path / "saved"))
    exact = open_source(str(architecture("gpt2")))
    name = "transformer.h.0.mlp.c_fc.weight"
    assert source.tensors[name].shape == (64, 256)
    ours, theirs = source.floats(name), exact.floats(name)
    assert np.linalg.norm(ours - theirs) < 0.2 * np.linalg.norm(theirs)
    assert np.array_equal(source.floats(name, 5, 7), ours[5:7])


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("int8", lambda t: t.pop(f"{UP}SCB"), f"lacks the tensor {UP}SCB"),
        ("int8", lambda t: t.update({f"{UP}SCB": t[f"{UP}SCB"][1:]}), r"SCB is float32 of the shape \(255,\)"),
        ("int8", lambda t: t[f"{UP}SCB"].fill_(float("inf")), "SCB are not finite"),
        ("fp4", lambda t: t.pop(f"{UP}weight.absmax"), "absmax is missing"),
        ("fp4", lambda t: t[f"{UP}weight.quant_map"].mul_(2), "not the table of fp4"),
        ("fp4", lambda t: other_words(t[f"{UP}weight.quant_state.bitsandbytes__fp4"]), "is not of fp4"),
        ("fp4", lambda t: as_nf4(t), "config.json says that codes are fp4"),
    ],
)
def test_a_checkpoint_that_lies_is_refused(kind, change, says, saved, tmp_path):
    refuse_source(changed_copy(saved(kind), tmp_path / "changed", change), says, tmp_path / "out")


def other_words(state):
    state.copy_(torch.tensor(list(bytes(state.tolist()).replace(b"fp4", b"nf4")), dtype=torch.uint8))


def as_nf4(tensors):
    for name in [name for name in tensors if name.endswith("__fp4")]:
        tensors[name.replace("fp4", "nf4")] = tensors.pop(name)
