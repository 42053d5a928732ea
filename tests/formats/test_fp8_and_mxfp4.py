"""FP8 and MXFP4 checkpoints as sources: values as transformers dequantizes them, and what is refused."""

import numpy as np
import pytest
import torch
from engine_logits import IDS, far_apart, logits_of_llama_cpp, logits_of_transformers
from gguf_files import file_in
from quantized_folders import LAYERS, change_folder, refuse_source
from safetensors.torch import load_file, save_file
from tiny_architectures import YARN, save_architecture
from tiny_models import changed_copy
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bench.fuzz.quantized_bases import save_fp8, save_mxfp4
from quantkit import convert
from quantkit.formats._quantized_checkpoint import QuantizedCheckpoint
from quantkit.formats.mxfp4 import FORMAT
from quantkit.formats.source import open_source

UP = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{UP}_scale_inv"
DEQUANTIZE = Fp8Dequantize(None)


def saved(source, folder, block, change):
    save_fp8(source, folder, block)
    return change_folder(folder, change)


@pytest.fixture(scope="module")
def fp8(one_block, once):
    return once("fp8-source", lambda folder: save_fp8(one_block, folder, (128, 128)))


def read_as_by_transformers(folder, quantized):
    """The source, whose values are those of transformers, and its tensors as they are stored."""
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    source = open_source(str(folder))
    assert isinstance(source, QuantizedCheckpoint)
    assert source.quantized == set(quantized)
    assert theirs.keys() - source.tensors.keys() <= {"lm_head.weight"}  # where it is tied
    for name in source.tensors:
        assert torch.equal(torch.from_numpy(source.floats(name)).to(theirs[name].dtype), theirs[name]), name
    return source, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("block", [(32, 64), None], ids=str)
def test_the_values_are_transformers(block, one_block, tmp_path):
    """Blocks that are cut off at the end, too: test_source_target_matrix.py."""
    folder = tmp_path / "fp8"
    save_fp8(one_block, folder, block)
    source, stored = read_as_by_transformers(folder, LAYERS)
    for name in LAYERS:
        exact = DEQUANTIZE._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
        assert np.array_equal(source.floats(name), exact.numpy()), name
    assert np.array_equal(source.floats(UP, 5, 200), source.floats(UP)[5:200])


@pytest.mark.parametrize("block", [(48, 40), None], ids=str)
def test_a_stack_of_matrices_is_read(block, one_block, tmp_path):
    gate = UP.replace("up_proj", "gate_proj")

    def stack(_, tensors):
        tensors["experts"] = torch.stack([tensors[UP], tensors[gate]])
        scales = torch.stack([tensors[SCALE], tensors[f"{gate}_scale_inv"]])
        tensors["experts_scale_inv"] = scales if block else scales.reshape(2, 1, 1)

    source = open_source(str(saved(one_block, tmp_path / "fp8", block, stack)))
    assert np.array_equal(source.floats("experts")[0], source.floats(UP))
    assert np.array_equal(source.floats("experts", 1, 2)[0], source.floats(gate))


def powers(tensors, dtype):
    for name in LAYERS:
        scales = tensors[f"{name}_scale_inv"].log2().round().exp2()
        tensors[f"{name}_scale_inv"] = scales.to(torch.float8_e8m0fnu).view(dtype)


def old_names(_, tensors):
    """AutoFP8's."""
    for name in LAYERS:
        tensors[f"{name}_scale"] = tensors.pop(f"{name}_scale_inv").reshape(1)
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        tensors[name.removesuffix("weight") + "k_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("block", "change", "reads"),
    [
        ((64, 64), lambda c, t: powers(t, torch.float8_e8m0fnu), SCALE),
        ((64, 64), lambda c, t: (c.update(scale_fmt="ue8m0"), powers(t, torch.uint8)), SCALE),
        ((64, 64), lambda c, t: t.update({k: v.bfloat16() for k, v in t.items() if k.endswith("_inv")}), SCALE),
        (None, old_names, f"{UP}_scale"),
    ],
    ids=["e8m0", "ue8m0 bytes", "bfloat16", "AutoFP8"],
)
def test_scales_of_other_kinds_are_read(block, change, reads, one_block, tmp_path):
    folder = saved(one_block, tmp_path / "fp8", block, change)
    source, stored = open_source(str(folder)), load_file(folder / "model.safetensors")
    expected = DEQUANTIZE._dequantize_one(stored[UP], stored[reads], torch.float32).reshape(stored[UP].shape)
    assert np.array_equal(source.floats(UP), expected.numpy())
    assert not any("scale" in name for name in source.tensors)


# MXFP4

PARTS = ("_blocks", "_scales")
STACKS = [f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")]
GATE_UP = STACKS[0]
SCALES = f"{GATE_UP}_scales"
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Tiny, with random codes."""
    folder = tmp_path_factory.mktemp("models") / "gpt-oss"
    changes = {"num_hidden_layers": 2, "intermediate_size": 96, "layer_types": None, "max_position_embeddings": 4096}
    plain = save_architecture(folder.with_name("plain"), "gpt_oss", changes=changes)
    save_mxfp4(plain, folder)
    return folder


def test_values_by_hand(tmp_path):
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = torch.stack([codes, codes << 4]).reshape(1, 2, 1, 16)
    scales = torch.tensor([127, 130], dtype=torch.uint8).reshape(1, 2, 1)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    reader = FORMAT.open(tmp_path, ("model.safetensors",), {})
    values = reader.read("x")
    assert not isinstance(values, torch.Tensor)
    first, second = np.array([[v, 0] for v in VALUES]).reshape(-1), np.array([[0, 8 * v] for v in VALUES]).reshape(-1)
    assert np.array_equal(values.whole(), np.stack([first, second], -1)[None])


def every_power(tensors):
    """Up to 2^63."""
    tensors[SCALES].reshape(-1)[:191] = torch.arange(191, dtype=torch.uint8)


def test_values_of_mxfp4_are_transformers(gpt_oss, tmp_path):
    source, stored = read_as_by_transformers(changed_copy(gpt_oss, tmp_path / "changed", every_power), STACKS)
    for name in STACKS:
        exact = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert np.array_equal(source.floats(name), exact.numpy()), name
        assert np.array_equal(source.floats(name, 1, 2), exact[1:2].numpy()), name


@pytest.mark.usefixtures("any_tokenizer")
def test_llama_cpp_computes_what_transformers_computes_of_codes(gpt_oss, tmp_path):
    folder = changed_copy(gpt_oss, tmp_path / "copy", rope_parameters=YARN)
    file = file_in(convert(str(folder), "gguf", "F32", tmp_path / "out").folder)
    assert far_apart(logits_of_llama_cpp(file, IDS[:87]), logits_of_transformers(folder, IDS[:87])) < 1e-5


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("fp8", lambda c, _: c.update(weight_block_size=[64, 64]), r"64 x 64 the codes .* of the shape \(2, 4\)"),
        ("fp8", lambda c, _: c.pop("weight_block_size"), "with weight_block_size null"),
        ("fp8", lambda c, _: c.update(expert_dtype="fp4"), "expert_dtype is 'fp4'"),
        ("fp8", lambda _, t: t.pop(SCALE), f"lacks the tensor {SCALE}"),
        ("fp8", lambda _, t: t[SCALE].fill_(float("nan")), "are not finite"),
        ("fp8", lambda _, t: t[UP].view(torch.uint8).fill_(127), "NaN"),
        ("fp8", lambda _, t: t.update({UP: t[UP][:0], SCALE: t[SCALE][:0]}), "not a matrix of codes"),
        ("gpt_oss", lambda _, t: t.pop(SCALES), f"lacks the tensor {SCALES}"),
        ("gpt_oss", lambda _, t: t[SCALES].fill_(255), "are not finite"),
        ("gpt_oss", lambda _, t: t.update({SCALES: t[SCALES][:, 1:]}), r"shapes .*, not \(experts, N"),
        ("gpt_oss", lambda _, t: t.update({GATE_UP + p: t[GATE_UP + p][:1] for p in PARTS}), "requires"),
        ("gpt_oss", lambda _, t: t.update({GATE_UP: torch.ones(1)}), "twice"),
        ("gpt_oss", lambda _, t: [t.pop(name + part) for name in STACKS for part in PARTS], "but no tensor is"),
    ],
)
def test_what_lies_is_refused(kind, change, says, request, tmp_path):
    folder = changed_copy(request.getfixturevalue(kind), tmp_path / "changed")
    refuse_source(change_folder(folder, change), says, tmp_path / "out")
