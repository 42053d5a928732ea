"""What is written is read back, by llama.cpp and by our reader; ropes; files of several parts."""

import gguf
import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from gguf_files import (
    file_in,
    job_for,
    logits_of_llama_cpp,
    logits_of_transformers,
    save_model,
    tensors_of,
    written,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.conversion.convert import convert
from quantkit.conversion.verify import verify
from quantkit.errors import ArtifactError
from quantkit.formats.gguf.architectures.hyperparameters import read_shape
from quantkit.formats.source import open_model, open_source

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


def test_rope_factors_equal_transformers(tmp_path):
    save_model(tmp_path, **{**SMALL, "head_dim": 64, "rope_parameters": LLAMA3})
    factors = read_shape(open_source(str(tmp_path))).factors["rope_freqs.weight"]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(tmp_path), "cpu")
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    assert factors.dtype == np.float32
    assert factors.min() == 1.0
    assert factors.max() == 8.0
    torch.testing.assert_close(torch.from_numpy(factors), plain / scaled)


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
    engine = find_engine("llamacpp")
    logits = [engine_logits(engine.load(open_model(made), LoadSpec(1, 64)), tokens) for made in (whole, split)]
    assert np.array_equal(*logits)
    with pytest.raises(ArtifactError, match="is not the first of its"):
        tensors_of(split.folder / names[1])
    (split.folder / names[1]).unlink()
    with pytest.raises(ArtifactError, match="is missing; the model has"):
        tensors_of(split.folder / names[0])
