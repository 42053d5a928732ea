"""What is written is read back, by llama.cpp, by our reader and as a checkpoint; files of several parts."""

import shutil

import numpy as np
import pytest
import torch
from engine_logits import logits_by
from gguf_files import file_in, gguf, job_for, save_model, tensors_of, written
from tiny_models import succeeds
from transformers import AutoTokenizer

from quantkit import convert, verify
from quantkit.conversion.convert import import_gguf
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.source import open_source


@pytest.mark.parametrize(("bits", "most"), [("Q8_0", 0.01), ("Q4_K_M", 0.1), ("Q2_K", 0.4)])
def test_quantized_file_reads_back_as_gguf_dequantizes_it(wide, tmp_path, bits, most):
    path = written(job_for(wide, bits, tmp_path / "out"))
    read, source = tensors_of(path), open_source(str(wide))
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


def test_a_tensor_of_a_type_without_floats_is_refused(wide, tmp_path):
    data = written(job_for(wide, "F32", tmp_path)).read_bytes()
    for name in ("output_norm.weight", "blk.0.attn_q.weight"):
        place = data.index(name.encode()) + len(name)
        place += 4 + 8 * int.from_bytes(data[place : place + 4], "little")
        assert data[place : place + 4] == (0).to_bytes(4, "little")
        (tmp_path / "other.gguf").write_bytes(data[:place] + (26).to_bytes(4, "little") + data[place + 4 :])
        with pytest.raises(ArtifactError, match=rf"the tensor {name} cannot be read: ggml cannot turn I32 back"):
            tensors_of(tmp_path / "other.gguf")


def test_a_split_model_is_the_same_model(wide, artifact_of, tmp_path):
    whole = artifact_of("gguf", "Q4_K_M", model=wide)
    split = convert(str(wide), "gguf", "Q4_K_M", tmp_path / "split", split_max_size="200KB")
    names = sorted(path.name for path in split.folder.glob("*.gguf"))
    assert names == [f"{wide.name}-Q4_K_M-{i + 1:05d}-of-{len(names):05d}.gguf" for i in range(len(names))]
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


pytest.importorskip("llama_cpp", reason="llama-cpp-python proves the tokenizer")

TYPES = {"attn_q": "IQ3_XXS", "attn_k": "IQ4_XS", "ffn_up": "IQ2_XXS", "ffn_down": "IQ4_NL"}


@pytest.fixture(scope="module")
def file(artifact_of, wide, tmp_path_factory):
    """A file of Q4_K_M without the source's tokenizer beside it."""
    made = file_in(artifact_of("gguf", "Q4_K_M", model=wide).folder)
    return shutil.copyfile(made, tmp_path_factory.mktemp("gguf") / made.name)


@pytest.fixture(scope="module")
def checkpoint(file, tmp_path_factory):
    return import_gguf(file, tmp_path_factory.mktemp("float32") / "imported", dtype="float32")


def test_the_checkpoint_holds_the_files_values(file, wide, checkpoint, tmp_path):
    succeeds("import", file, "--out", tmp_path / "bfloat16", "--dtype", "bfloat16")
    values = tensors_of(file)
    for folder, dtype in ((checkpoint, "float32"), (tmp_path / "bfloat16", "bfloat16")):
        source = open_source(str(folder))
        assert set(source.tensors) == set(values)
        for name, value in values.items():
            assert torch.equal(source.tensor(name), value.to(getattr(torch, dtype))), name
        theirs, ours = open_source(str(wide)).config, source.config
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
            assert ours[key] == theirs[key], key
        assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
        assert ours["dtype"] == dtype
        assert not any(str(file.parent) in text for text in map(str, ours.values()))


def test_a_tokenizer_that_comes_out_otherwise_is_refused_and_can_be_given(cached_demo, tmp_path):
    small = tmp_path / "small"
    save_model(small, num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=49152)
    for path in cached_demo.glob("tokenizer*"):
        shutil.copyfile(path, small / path.name)
    made = file_in(convert(str(small), "gguf", "Q8_0", tmp_path / "gguf").folder)
    file = tmp_path / "alone" / made.name  # without the source's tokenizer beside it
    file.parent.mkdir()
    made.rename(file)
    with pytest.raises(UnsupportedError, match=r"other ids than llama\.cpp\. Import it"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    made = import_gguf(file, tmp_path / "out", tokenizer=cached_demo)
    ours, theirs = map(AutoTokenizer.from_pretrained, (made, cached_demo))
    assert ours("a  1  22   333")["input_ids"] == theirs("a  1  22   333")["input_ids"]


def test_a_file_is_a_source_as_its_checkpoint_is(file, checkpoint, wide, artifact_of, tmp_path):
    narrow = artifact_of("gguf", "IQ3_S", model=wide, rounding="gptq", tensor_type=TYPES)
    verify(narrow)
    floats = convert(str(file_in(narrow.folder)), "float", "float32", tmp_path / "floats").folder
    for number, (one, other) in enumerate(((file, checkpoint), (file_in(narrow.folder), floats))):
        source, values = open_source(str(other)), tensors_of(one)
        assert all(torch.equal(source.tensor(name), value) for name, value in values.items())
        ours, theirs = (convert(str(m), "rtn", "4", tmp_path / f"{i}-{number}") for i, m in enumerate((one, other)))
        for name in ours.manifest.weight_files:
            assert (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes()
        assert list(ours.manifest.source.hashes) == [one.name]
