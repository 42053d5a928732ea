"""GGUF files of models whose blocks differ, as Gemma 3n's and 4's, and of such with factors in config.json."""

import gguf
import pytest
import torch
from engine_logits import IDS, far_apart, logits_by, logits_of_llama_cpp, logits_of_transformers
from gguf_files import file_in, job_for, saved, tensors_of, written
from safetensors.torch import load_file, save_file
from test_gguf_architectures import DEEP, LIMIT, logits_as_in_ggml
from tiny_llama import VOCABULARY, calibration
from tiny_models import changed_copy
from transformers import Gemma3nTextConfig, Gemma4TextConfig

from quantkit import convert, verify
from quantkit.conversion.convert import import_gguf
from quantkit.errors import ArtifactError, QuantkitError
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.formats.gguf.check_manifest import refuse_tensors
from quantkit.formats.source import open_source
from quantkit.models.skeleton import open_skeleton

pytestmark = pytest.mark.usefixtures("any_tokenizer")
SLOW = pytest.mark.slow
IDS = IDS[:100]


def types_of(folder, bits, out, **options):
    plan = job_for(folder, bits, out, **options).check().checked.plan.plan
    return {tensor.name: tensor.type for tensor in plan.tensors}


@pytest.mark.parametrize(
    ("name", "bits", "options"),
    [
        ("gemma4", "Q4_K_M", {}),
        ("gemma3n", "Q4_K_M", {"imatrix": True}),
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
    ours = logits_by("reference", made, torch.tensor([IDS]), 128, dtype="float32")[0]
    assert far_apart(ours, theirs) < 1e-5
    # llama.cpp rounds what quantized layers are given to 8 bits.
    far = float((logits_of_llama_cpp(file, IDS) - theirs).square().mean().sqrt() / theirs.std())
    assert far < (0.3 if "experts" in name else 0.15)  # some tokens get other experts


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({}, ("Q6_K", "Q6_K", "BF16")),
        ({"token_embedding_type": "Q8_0"}, ("Q8_0", "Q8_0", "BF16")),
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
    assert any(note.startswith("3 tensors of blocks that reuse the keys") for note in trial.source.notes)
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


@pytest.mark.parametrize("sizes", [Gemma3nTextConfig(), Gemma4TextConfig(hidden_size_per_layer_input=0)])
def test_models_of_a_published_size_have_a_place_for_every_tensor(sizes):
    config = {**sizes.to_dict(), "architectures": ["CausalLM"]}
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    model = open_skeleton(config, native=True).model
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    shapes |= {name: tuple(value.shape) for name, value in model.named_buffers() if name.endswith("layer_scalar")}
    refuse_tensors(config, shapes)
    shapes.pop("model.layers.1.self_attn.k_norm.weight")
    with pytest.raises(ArtifactError, match="lacks"):
        refuse_tensors(config, shapes)


def test_a_tied_head_with_another_factor_gets_weights_of_its_own(tmp_path):
    for factor, own in ((0.6, True), (1.7, False)):  # the embedding's is 1.7
        folder = saved(tmp_path / str(own), "falcon_h1", tie_word_embeddings=True, lm_head_multiplier=factor)
        trial = job_for(folder, "F32", tmp_path / f"out {own}")
        file = written(trial)
        assert any("its factor differs from the embedding's" in note for note in trial.source.notes) == own
        assert ("lm_head.weight" in tensors_of(file)) == own
        assert far_apart(logits_of_llama_cpp(file, IDS), logits_of_transformers(folder, IDS)) < 1e-5


def test_other_factors_are_refused(tmp_path):
    folder = saved(tmp_path / "model", "falcon_h1")
    for change, said in (
        ({"key_multiplier": 0.0}, "multiplies .*k_proj.weight by 0.0"),
        ({"ssm_multipliers": [1.0, 2.0]}, "lacks the factors of its weights|is shorter"),
        ({"embedding_multiplier": float("inf")}, "embedding_multiplier is inf"),
    ):
        with pytest.raises(QuantkitError, match=said):
            job_for(changed_copy(folder, tmp_path / said[:3], **change), "F16", tmp_path / "out").check()


def test_a_calibrated_file_holds_the_multiplied_weights(tmp_path):
    folder = saved(tmp_path / "model", "falcon_h1", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    artifact = convert(str(folder), "gguf", "Q6_K", tmp_path / "gguf", calibration=calibration(), rounding="gptq")
    assert any("factors of config.json are folded into the weights" in note for note in artifact.manifest.notes)
    assert artifact.manifest.source.config["key_multiplier"] == 1.0
    read, source = tensors_of(file_in(artifact.folder)), GGUF.prepared(open_source(str(folder)))
    assert read.keys() == source.tensors.keys()
    rows = "model.layers.0.mamba.in_proj.weight"  # each with a factor of its own
    assert torch.equal(source.rows(rows, 250, 260), source.tensor(rows)[250:260])
    for name, values in read.items():
        assert far_apart(values, source.tensor(name).float().reshape(values.shape)) < 0.05, name
