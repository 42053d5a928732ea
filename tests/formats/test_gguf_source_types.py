"""Block types that quantkit only reads have llama.cpp's values, times the scales next to matrices."""

import ctypes

import numpy as np
import pytest
import torch
from engine_logits import far_apart, logits_by, logits_of_llama_cpp
from gguf_files import changed, gguf, job_for, quantized_by_llama_cpp, save_model, tensors_of, written

from quantkit.errors import ArtifactError
from quantkit.formats.gguf.ggml import library as ggml
from quantkit.formats.gguf.header import read_header

pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of these tests")
IDS = list(range(5, 25))


def by_llama_cpp(name, packed):
    if name == "F32":
        return packed.view(np.float32)
    library = ctypes.CDLL(str(ggml._find("llama_cpp")))
    library.ggml_get_type_traits.restype = ctypes.POINTER(ggml._Traits)
    traits = library.ggml_get_type_traits(ggml.type_numbers()[name]).contents
    values = np.empty(packed.size // traits.block_bytes * traits.block, np.float32)
    traits.to_float(packed.ctypes.data, values.ctypes.data, values.size)
    return values


@pytest.mark.parametrize(("name", "block", "first"), [
    ("Q1_0", "0038" + "05" + 15 * "00", [0.5, -0.5, 0.5, -0.5]),
    ("Q2_0", "0038" + "e4" + 15 * "00", [-0.5, 0, 0.5, 1]),
    ("NVFP4", "3c000000" + "72e1" + 30 * "00", [1.5, 0.75, *6 * [0], 9, -6]),  # 1.5 times 1, 0.5; 6, -4
])  # fmt: skip
def test_blocks(name, block, first):
    kind, packed = ggml.block_type(name), np.frombuffer(bytes.fromhex(block), np.uint8)[None]
    assert ggml.dequantize(name, packed, kind.block)[0, : len(first)].tolist() == first
    blocks = np.random.default_rng(0).integers(0, 256, (1 << 16, kind.block_bytes), np.uint8)  # scales of every kind
    bits = ggml.dequantize(name, blocks, kind.block).view(np.uint32)
    assert np.array_equal(bits.reshape(-1), by_llama_cpp(name, blocks).view(np.uint32))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder, sizes = tmp_path_factory.mktemp("mixture"), {"num_hidden_layers": 2, "num_experts_per_tok": 4}
    model = save_model(folder / "model", "mixtral", num_local_experts=4, **sizes)
    return written(job_for(model, "F32", folder / "out"))


def as_nvfp4(file, out, scaled, count):
    """The file with NVFP4 blocks; a matrix whose name ends in `scaled` has scales, `count` or one per expert."""
    tensors = []
    for tensor in gguf.GGUFReader(file).tensors:
        data, kind, matrices = tensor.data, tensor.tensor_type, len(tensor.data) if tensor.data.ndim > 2 else 1
        if tensor.name.endswith(scaled):
            scales = np.float32(0.001) * np.arange(1, (count or matrices) + 1, dtype=np.float32)
            tensors += [(tensor.name.replace("weight", end), scales, None) for end in ("scale", "input_scale")]
            data = (data.reshape(len(scales), -1) / scales[:, None]).reshape(data.shape)
        if data.ndim > 1:
            packed = ggml.chunk("NVFP4", data.reshape(-1, data.shape[-1]))
            data, kind = packed.reshape(*data.shape[:-1], -1), gguf.GGMLQuantizationType.NVFP4
        tensors.append((tensor.name, data, kind))
    return changed(file, out, tensors)


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0", "NVFP4"])
def test_a_file_has_the_values_that_llama_cpp_computes_with(name, mixture, tmp_path):
    file = tmp_path / "file.gguf"
    if name == "NVFP4":
        as_nvfp4(mixture, file, ("q.weight", "exps.weight"), None)
    else:
        quantized_by_llama_cpp(mixture, file, name)
    found = {tensor.name: tensor for tensor in read_header(file).tensors}
    assert found["blk.1.attn_q.weight"].type == name
    values = {
        name: by_llama_cpp(tensor.type, np.fromfile(file, np.uint8, tensor.nbytes, offset=tensor.start))
        for name, tensor in found.items()
    }
    for scaled in [name for name in found if name.endswith(".scale")]:
        values[scaled.replace("scale", "weight")].reshape(len(values[scaled]), -1)[:] *= values[scaled][:, None]
    plain = [(name, value.reshape(found[name].shape), None) for name, value in values.items() if "scale" not in name]
    ours, expected = tensors_of(file), tensors_of(changed(mixture, tmp_path / "plain.gguf", plain))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(value, expected[part]) for part, value in ours.items())
    ours = logits_by("reference", file, [IDS], dtype="float32")[0]
    assert far_apart(ours, logits_of_llama_cpp(file, IDS)) < 0.1  # which rounds activations


@pytest.mark.parametrize(("scaled", "count", "says"), [
    ("exps.weight", 1, r"exps\.(input_)?scale has the shape \(1,\), but .* require \(4,\)"),
    ("norm.weight", 1, r"holds the tensor .*norm\.(input_)?scale, which llama does not have"),
])  # fmt: skip
def test_scales_that_llama_cpp_does_not_load_are_refused(scaled, count, says, mixture, tmp_path):
    with pytest.raises(ArtifactError, match=says):
        tensors_of(as_nvfp4(mixture, tmp_path / "file.gguf", scaled, count))
