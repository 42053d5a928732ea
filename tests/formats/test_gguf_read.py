import contextlib

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from gguf_files import job_for, save_model, tensors_of, written

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.conversion.convert import convert
from quantkit.conversion.verify import verify
from quantkit.errors import ArtifactError
from quantkit.formats.gguf.architectures.hyperparameters import read_shape
from quantkit.formats.gguf.reader import read_file
from quantkit.formats.source import open_model, open_source

gguf = pytest.importorskip("gguf")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama, llama3 rope": {"rope_parameters": LLAMA3},
    "llama, linear rope": {"rope_parameters": LINEAR, "tie_word_embeddings": True},
    "llama, wide heads": {"head_dim": 32},
    "mistral": {"sliding_window": None},
    "qwen2": {"rope_parameters": LINEAR},
    "qwen3": {"head_dim": 32},
}


def job_with_own_tokenizer(model, bits, folder):
    """transformers gives every qwen2 checkpoint the steps of Qwen's tokenizer, whatever its file says."""
    from transformers import PreTrainedTokenizerFast

    job = job_for(model, bits, folder)
    job.source.tokenizer = lambda: PreTrainedTokenizerFast.from_pretrained(model)
    return job


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    kind = request.param.split(",")[0]
    return save_model(folder, kind, dtype=torch.float32, **{**SMALL, **MODELS[request.param]})


def test_llama_cpp_computes_what_transformers_computes(model, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    from transformers import AutoModelForCausalLM

    path = written(job_with_own_tokenizer(model, "BF16", tmp_path))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for value in reference.parameters():
        if value.ndim == 2:
            value.data = value.data.bfloat16().float()
    ids = torch.randint(3, 271, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        theirs = reference(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    with contextlib.closing(
        llama_cpp.Llama(
            str(path),
            n_ctx=128,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            verbose=False,
            type_k=0,
            type_v=0,
        )
    ) as engine:
        engine.eval(ids)
        ours = torch.tensor(np.array(engine.scores[: len(ids)])).log_softmax(-1).numpy()
    # llama.cpp rounds activations to bfloat16 before it multiplies them with bfloat16 weights.
    assert np.abs(ours - theirs).mean() < 0.05
    assert np.abs(theirs).mean() > 2


def test_f16_file_reads_back_as_the_rounded_source(model, tmp_path):
    source = open_source(str(model))
    read = tensors_of(written(job_with_own_tokenizer(model, "F16", tmp_path)))
    assert set(read) == set(source.tensors) - {"lm_head.weight" if source.config["tie_word_embeddings"] else ""}
    for name, values in read.items():
        expected = source.tensor(name)
        if expected.ndim == 2:
            expected = expected.half()
        assert values.dtype == torch.float32
        assert torch.equal(values, expected.float()), name


@pytest.mark.parametrize("bits", ["Q8_0", "Q4_K_M", "Q2_K"])
def test_quantized_file_reads_back_as_gguf_dequantizes_it(tmp_path, bits):
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    path = written(job_for(model, bits, tmp_path / "out"))
    read = tensors_of(path)
    source = open_source(str(model))
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
        assert error < {"Q8_0": 0.01, "Q4_K_M": 0.1, "Q2_K": 0.4}[bits], name


def test_rope_factors_equal_transformers(tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama import LlamaConfig

    save_model(tmp_path, **{**SMALL, "head_dim": 64, "rope_parameters": LLAMA3})
    factors = read_shape(open_source(str(tmp_path))).factors["rope_freqs.weight"]
    config = LlamaConfig.from_pretrained(tmp_path)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    assert factors.dtype == np.float32
    assert factors.min() == 1.0
    assert factors.max() == 8.0
    torch.testing.assert_close(torch.from_numpy(factors), plain / scaled)


def test_broken_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a file of llama.cpp" * 10)
    with pytest.raises(ArtifactError, match=r"broken\.gguf"):
        list(read_file(path))
    writer = gguf.GGUFWriter(tmp_path / "foreign.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match="'mamba'"):
        list(read_file(tmp_path / "foreign.gguf"))


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q.weight"])
def test_a_tensor_of_a_type_without_floats_is_refused(name, tmp_path):
    data = written(job_for(save_model(tmp_path / "model"), "F32", tmp_path)).read_bytes()
    place = data.index(name.encode()) + len(name)
    place += 4 + 8 * int.from_bytes(data[place : place + 4], "little")
    assert data[place : place + 4] == (0).to_bytes(4, "little")
    (tmp_path / "other.gguf").write_bytes(data[:place] + (26).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(ArtifactError, match=rf"the tensor {name} cannot be read: ggml cannot turn I32 back"):
        tensors_of(tmp_path / "other.gguf")


def test_a_split_model_is_the_same_model(tmp_path):
    tiny = save_model(tmp_path / "model", num_hidden_layers=3)
    whole = convert(str(tiny), "gguf", "Q4_K_M", tmp_path / "whole")
    split = convert(str(tiny), "gguf", "Q4_K_M", tmp_path / "split", split_max_size="300KB")
    names = sorted(path.name for path in split.folder.glob("*.gguf"))
    assert names == [f"model-Q4_K_M-{i + 1:05d}-of-{len(names):05d}.gguf" for i in range(len(names))]
    assert len(names) > 2
    for path in split.folder.glob("*.gguf"):
        tensors = gguf.GGUFReader(path).tensors
        assert sum(int(tensor.n_bytes) for tensor in tensors) <= 300_000 or len(tensors) == 1
    ours, theirs = tensors_of(split.folder / names[0]), tensors_of(whole.folder / "model-Q4_K_M.gguf")
    assert list(ours) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    verify(split)
    tokens = np.arange(20)[None] % 200 + 5
    logits = [
        engine_logits(find_engine("llamacpp").load(open_model(artifact), LoadSpec(1, 64)), tokens)
        for artifact in (whole, split)
    ]
    assert np.array_equal(*logits)
    with pytest.raises(ArtifactError, match="is not the first of its"):
        tensors_of(split.folder / names[1])
    (split.folder / names[1]).unlink()
    with pytest.raises(ArtifactError, match="is missing; the model has"):
        tensors_of(split.folder / names[0])
