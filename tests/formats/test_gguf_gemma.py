"""GGUF files of Gemma 3n and Gemma 4, whose blocks differ: quantized ones, checkpoints as published, and lists."""

import gguf
import pytest
import torch
from engine_logits import engine_logits
from gguf_files import (
    IDS,
    far_apart,
    file_in,
    job_for,
    keys,
    logits_of_llama_cpp,
    logits_of_transformers,
    saved,
    take_any_tokenizer,
    tensors_of,
    written,
)
from safetensors.torch import load_file, save_file
from test_gguf_architectures import DEEP, LIMIT, Gelu, logits_as_in_ggml
from tiny_llama import VOCABULARY, calibration
from tiny_multimodal import save_multimodal
from transformers import AutoModelForImageTextToText, Gemma3nTextConfig, Gemma4TextConfig

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.conversion.convert import convert
from quantkit.conversion.import_gguf import import_gguf
from quantkit.conversion.verify import verify
from quantkit.errors import ArtifactError
from quantkit.formats.gguf.agreement import refuse_tensors
from quantkit.formats.gguf.reader import read_file
from quantkit.models.skeleton import open_skeleton

SLOW = pytest.mark.slow
IDS = IDS[:100]


@pytest.fixture(autouse=True)
def any_tokenizer(monkeypatch, tmp_path):
    take_any_tokenizer(monkeypatch)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))


def types_of(folder, bits, out, **options):
    """By name, the types that a file would have."""
    plan = job_for(folder, bits, out, **options).check().checked.plan.plan
    return {tensor.name: tensor.type for tensor in plan.tensors}


@pytest.mark.parametrize(
    ("name", "bits", "options"),
    [
        ("gemma4", "Q4_K_M", {}),
        ("gemma3n", "Q4_K_M", {"imatrix": True}),
        pytest.param("gemma4", "auto", {"target_bpw": 7.0}, marks=SLOW),
        pytest.param("gemma4, experts", "Q4_K_M", {"rounding": "gptq"}, marks=SLOW),
        pytest.param("gemma3n", "IQ2_M", {"imatrix": True}, marks=SLOW),
    ],
)
def test_llama_cpp_and_our_reader_compute_what_was_written(tmp_path, name, bits, options):
    """Both read the quantized file; transformers gets the values that are read back."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 256} if "experts" in name else {"hidden_size": 256}
    folder = saved(tmp_path / "model", name, torch.bfloat16, **wide)
    how = {"calibration": calibration()} if options else {}
    made = convert(str(folder), "gguf", bits, tmp_path / "out", **options, **how)
    verify(made)
    file = file_in(made.folder)
    back = import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder, config=folder / "config.json")
    theirs = logits_of_transformers(back, IDS)
    engine = find_engine("reference").load(Model(made, None), LoadSpec(1, 128, "float32"))
    ours = torch.from_numpy(engine_logits(engine, torch.tensor([IDS]).numpy()))[0]
    assert far_apart(ours, theirs) < 1e-5
    # llama.cpp rounds what quantized layers are given to 8 bits.
    far = float((logits_of_llama_cpp(file, IDS) - theirs).square().mean().sqrt() / theirs.std())
    assert far < (0.3 if "experts" in name else 0.15)  # some tokens get other experts


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({}, ("Q6_K", "Q6_K", "BF16")),
        ({"token_embedding_type": "Q8_0", "tensor_type": {"per_layer_token_embd": "Q4_0"}}, ("Q8_0", "Q4_0", "BF16")),
    ],
)
def test_inputs_of_blocks_have_the_type_of_the_embedding_unless_they_are_named(tmp_path, options, types):
    wide = {"hidden_size": 256, "hidden_size_per_layer_input": 64}
    found = types_of(saved(tmp_path / "model", "gemma4", torch.bfloat16, **wide), "Q4_K_M", tmp_path, **options)
    names = ("token_embd", "per_layer_token_embd", "per_layer_model_proj")
    assert tuple(found[f"{name}.weight"] for name in names) == types


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_keys_that_a_block_does_not_use_are_left_out(tmp_path, name):
    folder = saved(tmp_path / "model", name, **(DEEP if name == "gemma3n" else {}))
    plain = written(job_for(folder, "F32", tmp_path / "plain")).read_bytes()
    tensors = load_file(folder / "model.safetensors")
    last = max(int(tensor.split(".")[2]) for tensor in tensors if tensor.startswith("model.layers."))
    own, rows = f"model.layers.{last}.self_attn.", 64 if name == "gemma4" else 32
    unused = {f"{own}{part}_proj.weight": torch.ones(rows, 64) for part in "kv"}
    unused[f"{own}k_norm.weight"] = torch.ones(rows // 2)
    assert not unused.keys() & tensors.keys()
    save_file(tensors | unused, folder / "model.safetensors")
    trial = job_for(folder, "F32", tmp_path / "out")
    file = written(trial)
    assert any(note.startswith("3 tensors of blocks that take the keys") for note in trial.source.notes)
    assert file.read_bytes() == plain
    assert not unused.keys() & tensors_of(file).keys()
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert (f"blk.{last}.attn_k.weight" in there) == (name == "gemma3n")
    assert name == "gemma4" or not there[f"blk.{last}.attn_k.weight"].data.any()


def test_zeros_need_no_importance(tmp_path):
    folder = saved(tmp_path / "model", "gemma3n", torch.bfloat16, hidden_size=256, **DEEP)
    types = types_of(folder, "IQ1_S", tmp_path / "out", imatrix=True)
    assert (types["blk.0.attn_k.weight"], types["blk.21.attn_k.weight"]) == ("IQ1_S", "Q2_K")


def test_tokens_without_inputs_of_blocks_get_those_of_the_first(tmp_path):
    """So does transformers, for the tokens of images and sounds."""
    rows = VOCABULARY - 40
    folder = saved(tmp_path / "model", "gemma3n", vocab_size_per_layer_input=rows)
    ids = [*range(rows, VOCABULARY), *IDS[:40]]
    made = convert(str(folder), "gguf", "F32", tmp_path / "out")
    assert any("40 rows added to model.embed_tokens_per_layer.weight" in note for note in made.manifest.notes)
    file = file_in(made.folder)
    assert far_apart(logits_of_llama_cpp(file, ids), logits_as_in_ggml(folder, ids)) < LIMIT
    table = tensors_of(file)["model.embed_tokens_per_layer.weight"]
    assert len(table) == VOCABULARY
    assert all(torch.equal(row, table[0]) for row in table[rows:])
    verify(made)


def test_the_text_half_of_a_multimodal_folder(tmp_path):
    folder = save_multimodal(tmp_path / "model", "gemma4")
    made = convert(str(folder), "gguf", "F32", tmp_path / "out")
    assert any("are no part of its text half and are left out: model.embed_vision" in n for n in made.manifest.notes)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for module in whole.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = Gelu()
    with torch.no_grad():
        theirs = whole(input_ids=torch.tensor([IDS])).logits[0]
    assert far_apart(logits_of_llama_cpp(file_in(made.folder), IDS), theirs) < LIMIT


SIZES = {
    "Gemma 3n E4B": Gemma3nTextConfig(),
    "Gemma 4 with experts": Gemma4TextConfig(
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_models_of_a_published_size_have_a_place_for_every_tensor(size):
    config = {**SIZES[size].to_dict(), "architectures": ["CausalLM"]}
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    model = open_skeleton(config, native=True).model
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    shapes |= {name: tuple(value.shape) for name, value in model.named_buffers() if name.endswith("layer_scalar")}
    refuse_tensors(config, shapes)
    shapes.pop("model.layers.1.self_attn.k_norm.weight")
    with pytest.raises(ArtifactError, match="lacks"):
        refuse_tensors(config, shapes)


def test_a_list_that_is_none_of_each_block_is_refused(tmp_path):
    file = written(job_for(saved(tmp_path / "model", "gemma4"), "F16", tmp_path / "out"))
    reader, other = gguf.GGUFReader(file), tmp_path / "other.gguf"
    for values in ([2, -1, 2, 2], [2, 4, 2]):
        writer = gguf.GGUFWriter(other, "gemma4")
        for key, value in keys(file).items():
            if key.startswith("gemma4.") and not isinstance(value, list):
                writer.add_key_value(key, value, reader.fields[key].types[0])
        writer.add_array("gemma4.attention.head_count_kv", values)
        writer.add_array("gemma4.attention.sliding_window_pattern", [True, False] * 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ArtifactError, match=r"head_count_kv is .*; only blocks that are all alike"):
            list(read_file(other))
