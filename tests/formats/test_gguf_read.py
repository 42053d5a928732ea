"""What is written is read back, by llama.cpp, by our reader and as a checkpoint; ropes; files of several parts."""

import shutil

import numpy as np
import pytest
import torch
from engine_logits import logits_by, logits_of_llama_cpp, logits_of_transformers
from gguf_files import file_in, gguf, job_for, save_model, tensors_of, written
from tiny_models import quantkit
from transformers import AutoTokenizer

from quantkit import convert, verify
from quantkit.conversion.import_gguf import import_gguf
from quantkit.data.demo import FOLDER
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.source import open_source
from quantkit.system.cache import cache_folder

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "initializer_range": 0.25,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
MODELS = {
    "llama, llama3 rope": {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "llama, linear rope": {"rope_parameters": LINEAR, "tie_word_embeddings": True, "head_dim": 32},
}


@pytest.mark.parametrize("name", MODELS)
def test_halves_in_llama_cpp_and_back(name, tmp_path):
    model = save_model(tmp_path / "model", name.split(",")[0], dtype=torch.float32, **{**SMALL, **MODELS[name]})
    ids = torch.randint(3, 271, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = logits_of_transformers(model, ids).log_softmax(-1)
    ours = logits_of_llama_cpp(written(job_for(model, "BF16", tmp_path / "bf16")), ids).log_softmax(-1)
    # llama.cpp rounds activations to bfloat16 before it multiplies them with bfloat16 weights.
    assert (ours - theirs).abs().mean() < 0.05
    assert theirs.abs().mean() > 2
    source = open_source(str(model))
    read = tensors_of(written(job_for(model, "F16", tmp_path / "f16")))
    assert set(read) == set(source.tensors) - {"lm_head.weight" if source.config["tie_word_embeddings"] else ""}
    for tensor, values in read.items():
        expected = source.tensor(tensor)
        assert values.dtype == torch.float32
        assert torch.equal(values, (expected.half() if expected.ndim == 2 else expected).float()), tensor


@pytest.fixture(scope="module")
def two_blocks(once):
    return once("gguf-read", lambda folder: save_model(folder, num_hidden_layers=2))


@pytest.mark.parametrize(("bits", "most"), [("Q8_0", 0.01), ("Q4_K_M", 0.1), ("Q2_K", 0.4)])
def test_quantized_file_reads_back_as_gguf_dequantizes_it(two_blocks, tmp_path, bits, most):
    path = written(job_for(two_blocks, bits, tmp_path / "out"))
    read, source = tensors_of(path), open_source(str(two_blocks))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert set(read) == set(source.tensors)
    for name, values in read.items():
        tensor = tensors[table.get_name(name, (".weight",))]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # pairs (2i, 2i + 1) of a head of 64 back to halves
            order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
            expected = expected.reshape(-1, 64, expected.shape[-1])[:, order].reshape(expected.shape)
        assert np.array_equal(values.numpy(), expected.reshape(values.shape)), name
        error = (values - source.tensor(name).float()).norm() / source.tensor(name).float().norm()
        assert error < most, name


def test_a_tensor_of_a_type_without_floats_is_refused(two_blocks, tmp_path):
    data = written(job_for(two_blocks, "F32", tmp_path)).read_bytes()
    for name in ("output_norm.weight", "blk.0.attn_q.weight"):
        place = data.index(name.encode()) + len(name)
        place += 4 + 8 * int.from_bytes(data[place : place + 4], "little")
        assert data[place : place + 4] == (0).to_bytes(4, "little")
        (tmp_path / "other.gguf").write_bytes(data[:place] + (26).to_bytes(4, "little") + data[place + 4 :])
        with pytest.raises(ArtifactError, match=rf"the tensor {name} cannot be read: ggml cannot turn I32 back"):
            tensors_of(tmp_path / "other.gguf")


def test_a_split_model_is_the_same_model(two_blocks, artifact_of, tmp_path):
    whole = artifact_of("gguf", "Q4_K_M", model=two_blocks)
    split = convert(str(two_blocks), "gguf", "Q4_K_M", tmp_path / "split", split_max_size="200KB")
    names = sorted(path.name for path in split.folder.glob("*.gguf"))
    assert names == [f"gguf-read-Q4_K_M-{i + 1:05d}-of-{len(names):05d}.gguf" for i in range(len(names))]
    assert len(names) > 2
    for path in split.folder.glob("*.gguf"):
        tensors = gguf.GGUFReader(path).tensors
        assert sum(int(tensor.n_bytes) for tensor in tensors) <= 200_000 or len(tensors) == 1
    ours, theirs = tensors_of(split.folder / names[0]), tensors_of(file_in(whole.folder))
    assert list(ours) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    verify(split)
    tokens = np.arange(20)[None] % 200 + 5
    assert torch.equal(*(logits_by("llamacpp", made, tokens) for made in (whole, split)))
    with pytest.raises(ArtifactError, match="is not the first of its"):
        tensors_of(split.folder / names[1])
    (split.folder / names[1]).unlink()
    with pytest.raises(ArtifactError, match="is missing; the model has"):
        tensors_of(split.folder / names[0])


# As checkpoints and sources

pytest.importorskip("llama_cpp", reason="llama-cpp-python proves the tokenizer")

TYPES = {"attn_q": "IQ3_XXS", "attn_k": "IQ4_XS", "ffn_up": "IQ2_XXS", "ffn_down": "IQ4_NL"}


@pytest.fixture(scope="module")
def model(once):
    return once("gguf-import", lambda folder: save_model(folder, num_hidden_layers=1, rms_norm_eps=1e-5))


@pytest.fixture(scope="module")
def file(artifact_of, model, tmp_path_factory):
    """A file of Q4_K_M without the source's tokenizer beside it."""
    made = file_in(artifact_of("gguf", "Q4_K_M", model=model).folder)
    return shutil.copyfile(made, tmp_path_factory.mktemp("gguf") / made.name)


@pytest.fixture(scope="module")
def narrow(artifact_of, model):
    """An artifact with the types of the file type IQ3_S beside those given."""
    return artifact_of("gguf", "IQ3_S", model=model, rounding="gptq", tensor_type=TYPES)


@pytest.fixture(scope="module")
def checkpoint(file, tmp_path_factory):
    return import_gguf(file, tmp_path_factory.mktemp("float32") / "imported", dtype="float32")


def test_the_checkpoint_holds_the_files_values(file, model, checkpoint, tmp_path):
    ended = quantkit("import", file, "--out", tmp_path / "bfloat16", "--dtype", "bfloat16")
    assert ended.code == 0, ended.out
    values = tensors_of(file)
    for folder, dtype in ((checkpoint, "float32"), (tmp_path / "bfloat16", "bfloat16")):
        source = open_source(str(folder))
        assert set(source.tensors) == set(values)
        for name, value in values.items():
            assert torch.equal(source.tensor(name), value.to(getattr(torch, dtype))), name
        theirs, ours = open_source(str(model)).config, source.config
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
            assert ours[key] == theirs[key], key
        assert ours["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
        assert ours["dtype"] == dtype
        assert not any(str(file.parent) in text for text in map(str, ours.values()))


def test_a_tokenizer_that_comes_out_otherwise_is_refused_and_can_be_given(tmp_path):
    demo = cache_folder() / FOLDER
    if not (demo / "config.json").is_file():
        pytest.skip("the demo model is not in the cache")
    small = tmp_path / "small"
    save_model(small, num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=49152)
    for path in demo.glob("tokenizer*"):
        shutil.copyfile(path, small / path.name)
    made = file_in(convert(str(small), "gguf", "Q8_0", tmp_path / "gguf").folder)
    file = tmp_path / "alone" / made.name  # without the source's tokenizer beside it
    file.parent.mkdir()
    made.rename(file)
    with pytest.raises(UnsupportedError, match=r"other ids than llama\.cpp\. Make a checkpoint of it"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ours, theirs = map(AutoTokenizer.from_pretrained, (import_gguf(file, tmp_path / "out", tokenizer=demo), demo))
    assert ours("a  1  22   333")["input_ids"] == theirs("a  1  22   333")["input_ids"]


def test_what_cannot_be_read_is_refused_and_leaves_nothing(file, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ArtifactError, match=r"ends inside the tensor|can be read"):
        import_gguf(cut, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf"]


def test_a_file_is_a_source_as_its_checkpoint_is(file, checkpoint, narrow, tmp_path):
    floats = convert(str(file_in(narrow.folder)), "float", "float32", tmp_path / "floats").folder
    for number, (one, other) in enumerate(((file, checkpoint), (file_in(narrow.folder), floats))):
        source, values = open_source(str(other)), tensors_of(one)
        assert all(torch.equal(source.tensor(name), value) for name, value in values.items())
        ours, theirs = (convert(str(m), "rtn", "4", tmp_path / f"{i}-{number}") for i, m in enumerate((one, other)))
        for name in ours.manifest.weight_files:
            assert (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes()
        assert list(ours.manifest.source.hashes) == [one.name]


def test_iq_types_are_verified_inspected_and_read_as_gguf_reads_them(narrow):
    verify(narrow)
    ended = quantkit("inspect", file_in(narrow.folder), "--tensors")
    assert ended.code == 0, ended.out
    assert all(kind in ended.out for kind in {*TYPES.values(), "IQ3_S"})
    path = file_in(narrow.folder)
    tensors, read = {t.name: t for t in gguf.GGUFReader(path).tensors}, tensors_of(path)
    names = {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate"}
    for ours, theirs in (names | {"self_attn.o_proj": "attn_output"}).items():
        tensor = tensors[f"blk.0.{theirs}.weight"]
        assert tensor.tensor_type.name == TYPES.get(theirs, "IQ3_S")
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.allclose(read[f"model.layers.0.{ours}.weight"].numpy(), expected, rtol=1e-6, atol=0)
