"""Codes as Q4_0, Q8_0 and MXFP4: literal bytes, the package gguf, llama.cpp, and the codes of other layouts."""

from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
from engine_logits import logits_by
from gguf_files import quantized_by_llama_cpp, save_tokenizer, slow_but
from tiny_architectures import save_architecture
from tiny_models import changed_copy
from trials import dense, dense_values

from bench.fuzz.quantized_bases import save_scaled
from quantkit import convert, verify
from quantkit.contracts.format import Layout
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.run import Run
from quantkit.conversion.check import check, prepare
from quantkit.errors import RecipeError, SourceError, UnsupportedError
from quantkit.formats.gguf.grouped import TYPES, pack, pack_floats, unpack, unpack_floats
from quantkit.formats.source import open_source
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight, contiguous_groups
from quantkit.records.recipe import ConvertRecipe

HALF = [0x00, 0x38]  # 0.5 in float16


def layer(bits, rows, columns, group):
    """Random codes, scales of both signs, zero points in the middle."""
    make = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=make, dtype=torch.uint8)
    scales = torch.randn(rows, columns // group, generator=make).to(torch.float16)
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    return GroupedWeight(codes, scales, zeros, contiguous_groups(columns, group), bits)


def test_blocks_by_hand():
    """A scale and halves side by side, or a scale and signed bytes; an exponent and halves."""
    one, places = torch.tensor([[0.5]]), torch.zeros(32).long()
    codes = torch.arange(32, dtype=torch.uint8) % 16
    weight = GroupedWeight(codes[None], one, torch.tensor([[8]]), places, 4)
    assert pack(weight).tolist() == [HALF + [low | low << 4 for low in range(16)]]
    codes = torch.tensor([0, 127, 128, 255] * 8, dtype=torch.uint8)
    weight = GroupedWeight(codes[None], one, torch.tensor([[128]]), places, 8)
    assert pack(weight).tolist() == [HALF + [0x80, 0xFF, 0x00, 0x7F] * 8]
    codes = torch.cat([torch.arange(16), 15 - torch.arange(16)]).to(torch.uint8)
    weight = ScaledWeight(codes[None], torch.tensor([[130]], dtype=torch.uint8), (1, 32))
    assert pack_floats(weight).tolist() == [[130, *(low | (15 - low) << 4 for low in range(16))]]


@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("bits", TYPES)
def test_the_package_gguf_reads_the_same_values_and_codes_and_scales_come_back(bits, group):
    weight = layer(bits, 5, 192, 192 if group == -1 else group)
    kind = gguf.GGMLQuantizationType[TYPES[bits]]
    assert np.array_equal(gguf.quants.dequantize(pack(weight).numpy(), kind), weight.dense().numpy())
    back = unpack(pack(weight), bits, group)
    for name in ("codes", "scales", "zeros", "g_idx"):
        assert getattr(back, name).equal(getattr(weight, name)), name


def from_llama_cpp(made):
    """How far the reference is from llama.cpp, which rounds activations to 8 bits; blocks read wrongly are 1 apart."""
    ids = np.arange(1, 49)[None] % 200 + 3
    ours, theirs = logits_by("reference", made, ids, dtype="float32"), logits_by("llamacpp", made, ids)
    return float((ours - theirs).abs().mean() / ours.std())


@pytest.mark.parametrize("name", slow_but(("mixtral", "gpt2"), ("mixtral", "gpt2", "phi3")))
def test_experts_turned_and_fused_layers_find_their_rows(name, architecture, artifact_of):
    """A GGUF file gives the layers of GPT-2 back as the source has them: turned."""
    options = {"model": architecture(name), "group_size": 32}
    layers, blocks = (dense_values(artifact_of("rtn", "4", **options, **how)) for how in ({}, {"format": "gguf"}))
    assert layers.keys() == blocks.keys()
    for tensor, value in blocks.items():
        turned = ".c_" in tensor and value.ndim == 2
        assert layers[tensor].float().equal(value.float().T if turned else value.float()), tensor


def floats(rows, columns):
    """Every code, and exponents from the least to the largest that give finite values."""
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), generator=make, dtype=torch.uint8)
    scales = torch.randint(0, 253, (rows, columns // 32), generator=make, dtype=torch.uint8)
    scales.reshape(-1)[:3] = torch.tensor([0, 1, 252], dtype=torch.uint8)
    return ScaledWeight(codes, scales, (1, 32))


def test_the_package_gguf_reads_the_same_floats_and_they_come_back():
    weight = floats(7, 192)
    packed = pack_floats(weight)
    kind = gguf.GGMLQuantizationType.MXFP4
    with np.errstate(invalid="ignore"):
        assert np.array_equal(gguf.quants.dequantize(packed.numpy(), kind), weight.dense().numpy())
    back = unpack_floats(packed)
    assert all(getattr(back, name).equal(getattr(weight, name)) for name in ("values", "scales"))
    assert back.block == weight.block


def test_floats_of_compressed_tensors_are_kept(tiny, tmp_path):
    save_scaled(tiny, tmp_path / "foreign", {"": "mxfp4"})
    kept = convert(str(tmp_path / "foreign"), "keep", "mxfp4", tmp_path / "kept", format="gguf")
    verify(kept)
    assert kept.manifest.tensor_types["MXFP4"] == 21
    assert kept.manifest.weight_files == ("foreign-MXFP4.gguf",)
    assert kept.manifest.weight_error is None or kept.manifest.weight_error.worst < 1e-3  # the embedding's
    assert open_source(str(kept.folder / kept.manifest.weight_files[0])).quantization == "gguf, MXFP4"


def test_a_file_of_llama_cpps_own_is_a_source(tmp_path):
    """It has MXFP4 for experts, Q8_0 for the rest. Ours of the same model, all MXFP4, is loaded, too."""
    pytest.importorskip("llama_cpp")
    model = save_architecture(tmp_path / "model", "mixtral", changes={"bos_token_id": 1, "eos_token_id": 2})
    save_tokenizer(model)
    plain = convert(str(model), "gguf", "F16", tmp_path / "plain")
    theirs = quantized_by_llama_cpp(plain.folder / plain.manifest.weight_files[0], tmp_path / "own.gguf", "MXFP4_MOE")
    source = open_source(str(theirs))
    assert source.quantization == "gguf, MXFP4, Q8_0"
    stacked = {tensor.name: tensor for tensor in gguf.GGUFReader(theirs).tensors}["blk.1.ffn_down_exps.weight"]
    exact = gguf.quants.dequantize(stacked.data, stacked.tensor_type)
    for expert, value in enumerate(exact):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
        assert np.array_equal(source.floats(name), value)
    made = convert(str(theirs), "rtn", "mxfp4", tmp_path / "out", format="gguf")
    ours = dense_values(made)
    assert np.array_equal(ours[name].numpy(), source.floats(name))  # what is on the grid stays there
    assert from_llama_cpp(made) < 0.1


def test_floats_that_have_no_type_are_refused(tiny, tiny_with, tmp_path):
    job = prepare(ConvertRecipe(model=str(tiny), method="rtn", bits="mxfp4", format="gguf"))
    with pytest.raises(RecipeError, match=r"gguf cannot store nvfp4 with scales\. Use --format compressed-tensors"):
        job.check_layout(Layout(4, 16, values="nvfp4"))
    save_scaled(tiny, tmp_path / "foreign", {"": "mxfp4"})
    stem = "model.layers.1.mlp.up_proj.weight_scale"
    cut = changed_copy(tmp_path / "foreign", tmp_path / "cut", lambda t: t.update({stem: t[stem][1:]}))
    with pytest.raises(SourceError, match="which do not fit mxfp4-pack-quantized"):
        check(prepare(ConvertRecipe(model=str(cut), method="keep", bits="mxfp4")), tmp_path / "out")
    odd = tiny_with(num_hidden_layers=1, intermediate_size=144)
    with pytest.raises(UnsupportedError, match="does not divide the 144 input columns"):
        convert(str(odd), "rtn", "mxfp4", tmp_path / "out", format="gguf")


@pytest.mark.parametrize(("method", "bits"), [("gptq", "4"), ("awq", "4"), ("rtn", "mxfp4")])
def test_methods_write_blocks_that_llama_cpp_computes_with(method, bits, artifact_of):
    pytest.importorskip("llama_cpp")
    made = artifact_of(method, bits, format="gguf", **({"sym": True, "n_grid": 2} if method == "awq" else {}))
    assert made.manifest.options["group_size"] == 32
    assert from_llama_cpp(made) < 0.1


@pytest.mark.parametrize("name", slow_but(("gemma2",), ("gemma2", "mixtral")))
def test_what_awq_has_scaled_beside_layers_is_written_as_llama_cpp_counts_it(name, architecture, artifact_of):
    """gemma's norms are stored less one; mixtral's routers are scaled along."""
    options = {"sym": True, "n_grid": 2, "group_size": 32, "model": architecture(name)}
    plain, blocks = (dense_values(artifact_of("awq", "4", **options, **how)) for how in ({}, {"format": "gguf"}))
    for key, value in plain.items():
        assert torch.allclose(value.float(), blocks[key].float(), atol=2e-7), key


@pytest.mark.parametrize("bits", ["4", "mxfp4"])
def test_a_finished_block_comes_back_as_it_was_added(bits, tiny, tmp_path):
    options = {"group_size": 64} if bits == "4" else {}
    job = prepare(ConvertRecipe(model=str(tiny), method="rtn", bits=bits, format="gguf", options=options))
    job = CheckedJob.of(job, job.method.check(job))
    job.source.copy_side_files(tmp_path)
    weight, norm = layer(4, 128, 128, 64) if bits == "4" else floats(128, 128), torch.randn(128)
    names = [f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "input_layernorm")]
    with suppress(KeyboardInterrupt), job.open_writer(Run(tmp_path), job.checked.plan) as writer:
        for name, value in zip(names, (weight, norm), strict=True):
            writer.add(name, value)
        writer.finish_block(0)
        raise KeyboardInterrupt
    with suppress(KeyboardInterrupt), job.open_writer(Run(tmp_path), job.checked.plan) as writer:
        assert writer.finished == 1
        back = writer.block("model.layers.0.")
        raise KeyboardInterrupt
    assert sorted(back) == sorted(names)
    assert isinstance(back[names[0]], type(weight))
    assert all(dense(back[name]).equal(dense(value)) for name, value in zip(names, (weight, norm), strict=True))


@pytest.mark.parametrize(
    ("bits", "options", "kind", "says"),
    [
        ("3", {}, RecipeError, "4 bits .Q4_0. and 8 bits .Q8_0., not 3"),
        ("4", {"sym": False}, RecipeError, "no zero points"),
        ("4", {"group_size": 16}, UnsupportedError, "one per 16: give a group_size that is a multiple of 32"),
    ],
)
def test_what_no_block_holds_is_refused_at_once(bits, options, kind, says, tiny, tmp_path):
    with pytest.raises(kind, match=says):
        convert(str(tiny), "rtn", bits, tmp_path / "out", format="gguf", **options)
