"""llama.cpp's importance files through conversions, and what `inspect` tells of a file."""

import json

import numpy as np
import pytest
from gguf_files import (
    file_in,
    identical_tensors,
    job_for,
    keys,
    quantized_by_llama_cpp,
    save_model,
    written,
)
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit

from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError
from quantkit.formats.gguf.contents import contents_of
from quantkit.formats.gguf.imatrix import read_imatrix
from quantkit.methods.gguf.imatrix import make_imatrix
from quantkit.recipe import CalibrationSpec
from quantkit.system.files import sha256_of

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def model(once):
    return once("gguf-imatrix", lambda folder: save_model(folder, num_hidden_layers=2))


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("imatrix") / "tiny.imatrix.gguf"
    ended = quantkit("imatrix", model, "--out", path, *CALIBRATION_FLAGS)
    assert ended.code == 0, ended.err
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return path


def test_the_file_holds_sums_counts_and_what_llama_cpp_asks_for(measured):
    fields = keys(measured)
    assert fields["general.type"] == "imatrix"
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (8, 32)
    assert len(fields["imatrix.datasets"]) == 1
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(measured).tensors}
    assert len(tensors) == 2 * 2 * 7
    sums, counts = tensors["blk.1.ffn_down.weight.in_sum2"], tensors["blk.1.ffn_down.weight.counts"]
    assert (sums.tensor_type.name, sums.shape.tolist(), counts.shape.tolist()) == ("F32", [512, 1], [1, 1])
    assert float(counts.data.reshape(-1)[0]) == 8 * 32
    mean = read_imatrix(measured)["blk.1.ffn_down.weight"]
    assert np.allclose(mean, sums.data.reshape(-1) / 256, rtol=1e-6)


@pytest.mark.parametrize("bits", ["Q4_K_M", pytest.param("Q2_K", marks=pytest.mark.slow)])
def test_a_file_weights_like_the_measurement_and_like_llama_cpp(artifact_of, model, measured, tmp_path, bits):
    own = artifact_of("gguf", bits, model=model, imatrix=True)
    read = convert(str(model), "gguf", bits, tmp_path / "read", imatrix_file=str(measured))
    base = written(job_for(model, "BF16", tmp_path / "base"))
    theirs = quantized_by_llama_cpp(base, tmp_path / "theirs.gguf", bits, read_imatrix(measured))
    assert identical_tensors(file_in(read.folder), theirs) > 20
    # The file's sums are rounded to float32 once more than the measurement.
    a, b = (gguf.GGUFReader(file_in(artifact.folder)).tensors for artifact in (own, read))
    same = [np.array_equal(x.data, y.data) for x, y in zip(a, b, strict=True)]
    assert sum(same) > 0.8 * len(same)


def test_another_models_file_and_needless_ones_are_refused(model, measured, tmp_path):
    deeper = save_model(tmp_path / "deeper", num_hidden_layers=3)
    wider = save_model(tmp_path / "wider", num_hidden_layers=2, intermediate_size=768)
    refused = [
        (deeper, {}, r"no importance for blk\.2\."),
        (wider, {}, "has 512 values for .*, which needs 768"),
        (model, {"imatrix": True}, "imatrix_file changes nothing with imatrix"),
        (model, {"rounding": "gptq"}, "imatrix_file changes nothing with rounding gptq"),
        (model, {"imatrix_file": str(tmp_path / "none")}, "cannot be read as an importance file"),
    ]
    for folder, options, said in refused:
        with pytest.raises(RecipeError, match=said):
            job_for(folder, "Q4_K_M", tmp_path / "out", **{"imatrix_file": str(measured)} | options).check()
    with pytest.raises(RecipeError, match="is there already"):
        make_imatrix(str(model), measured)


def test_inspect_tells_keys_types_and_bits(artifact_of, model, tmp_path):
    artifact = artifact_of("gguf", "Q4_K_M", model=model)
    file, contents = file_in(artifact.folder), contents_of(artifact.folder)
    assert contents == contents_of(file)
    assert contents.keys["general.architecture"] == "llama"
    assert contents.keys["llama.block_count"] == 2
    assert "(271 in all)" in contents.keys["tokenizer.ggml.tokens"]
    counts = {name: share.tensors for name, share in contents.shares().items()}
    assert counts == artifact.manifest.tensor_types
    assert sum(share.weights for share in contents.shares().values()) == artifact.manifest.source.parameters
    ended = quantkit("inspect", file, "--tensors", "--json", tmp_path / "out.json")
    assert ended.code == 0
    assert "blk.1.ffn_down.weight" in ended.out
    own = 8 * sum(int(t.n_bytes) for t in gguf.GGUFReader(file).tensors) / artifact.manifest.source.parameters
    assert round(contents.bits_per_weight, 4) == artifact.manifest.bits_per_weight > own
    text = f"{artifact.manifest.bits_per_weight:.2f} bits per weight; without keys and tokenizer {own:.2f}, which"
    assert text in ended.out
    assert json.loads((tmp_path / "out.json").read_text())["types"]["Q4_K"]["tensors"] == counts["Q4_K"]


def test_the_command_and_the_function_write_the_same(model, measured, tmp_path):
    assert make_imatrix(str(model), tmp_path / "made.gguf", calibration=CalibrationSpec(**CALIBRATION)) == 2 * 7
    assert sha256_of(tmp_path / "made.gguf") == sha256_of(measured)
