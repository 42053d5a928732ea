"""llama.cpp's importance files against literal bytes and through conversions, and what `inspect` tells of a file."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import identical_tensors, job_for, quantized_by_llama_cpp, save_model, written
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, quantkit

from quantkit.checkpoints.rows import Rows
from quantkit.contracts.registry import find_format
from quantkit.contracts.stored import open_stored
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError, RecipeError
from quantkit.formats.gguf.contents import contents_of
from quantkit.formats.gguf.imatrix import read_imatrix
from quantkit.methods.gguf.imatrix import make_imatrix
from quantkit.recipe import CalibrationSpec
from quantkit.system.files import sha256_of

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imatrix") / "tiny.imatrix.gguf"
    assert make_imatrix(str(tiny), path, calibration=CalibrationSpec(**CALIBRATION)) == 2 * 7
    return path


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.gguf"))


def test_the_file_holds_sums_counts_and_what_llama_cpp_asks_for(measured: Path) -> None:
    reader = gguf.GGUFReader(measured)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields["general.type"] == "imatrix"
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (8, 32)
    assert len(fields["imatrix.datasets"]) == 1
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 * 2 * 7
    sums, counts = tensors["blk.1.ffn_down.weight.in_sum2"], tensors["blk.1.ffn_down.weight.counts"]
    assert (sums.tensor_type.name, sums.shape.tolist(), counts.shape.tolist()) == ("F32", [512, 1], [1, 1])
    assert float(counts.data.reshape(-1)[0]) == 8 * 32
    mean = read_imatrix(measured)["blk.1.ffn_down.weight"]
    assert np.allclose(mean, sums.data.reshape(-1) / 256, rtol=1e-6)


@pytest.mark.parametrize("bits", ["Q2_K", "Q4_K_M"])
def test_a_file_weights_like_the_measurement_and_like_llama_cpp(
    tiny: Path, measured: Path, tmp_path: Path, bits: str
) -> None:
    own = convert(str(tiny), "gguf", bits, tmp_path / "own", calibration=CALIBRATION, imatrix=True)
    read = convert(str(tiny), "gguf", bits, tmp_path / "read", imatrix_file=str(measured))
    base = written(job_for(tiny, "BF16", tmp_path / "base"))
    theirs = quantized_by_llama_cpp(base, tmp_path / "theirs.gguf", bits, read_imatrix(measured))
    assert identical_tensors(file_of(read.folder), theirs) > 20
    # The file's sums are rounded to float32 once more than the measurement.
    a, b = (gguf.GGUFReader(file_of(artifact.folder)).tensors for artifact in (own, read))
    same = [np.array_equal(x.data, y.data) for x, y in zip(a, b, strict=True)]
    assert sum(same) > 0.8 * len(same)


def test_an_old_file_is_read_from_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    name = b"blk.0.attn_q.weight"
    values = np.arange(1, 5, dtype=np.float32)
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", 2, 4) + (2 * values).tobytes()
    path.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<i", 7) + struct.pack("<i", 3) + b"abc")
    means = read_imatrix(path)
    assert list(means) == ["blk.0.attn_q.weight"]
    assert np.array_equal(means["blk.0.attn_q.weight"], values[None])
    for cut in (2, 10, 30, len(entry)):
        path.write_bytes((struct.pack("<i", 1) + entry)[:cut])
        with pytest.raises(RecipeError, match="cannot be read as an importance file"):
            read_imatrix(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_values_that_cannot_be_are_refused(tmp_path: Path, bad: float) -> None:
    name = b"blk.0.attn_q.weight"
    values = np.array([1, bad, 2, 3], dtype=np.float32)
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", 1, 4) + values.tobytes()
    (tmp_path / "old.dat").write_bytes(struct.pack("<i", 1) + entry)
    with pytest.raises(RecipeError, match=r"NaN, infinite or negative values for blk\.0\.attn_q\.weight"):
        read_imatrix(tmp_path / "old.dat")


def test_another_models_file_and_needless_ones_are_refused(tiny: Path, measured: Path, tmp_path: Path) -> None:
    deeper = save_model(tmp_path / "deeper", num_hidden_layers=3)
    wider = save_model(tmp_path / "wider", num_hidden_layers=2, intermediate_size=768)
    refused = [
        (deeper, {}, r"no importance for blk\.2\."),
        (wider, {}, "has 512 values for .*, which needs 768"),
        (tiny, {"imatrix": True}, "imatrix_file changes nothing with imatrix"),
        (tiny, {"rounding": "gptq"}, "imatrix_file changes nothing with rounding gptq"),
    ]
    for model, options, said in refused:
        with pytest.raises(RecipeError, match=said):
            convert(str(model), "gguf", "Q4_K_M", tmp_path / "out", imatrix_file=str(measured), **options)
    with pytest.raises(RecipeError, match="cannot be read as an importance file"):
        convert(str(tiny), "gguf", "Q4_K_M", tmp_path / "out", imatrix_file=str(tmp_path / "none"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="is there already"):
        make_imatrix(str(tiny), measured)


def test_inputs_that_never_fire_do_not_lose_their_weights(tiny: Path, measured: Path, tmp_path: Path) -> None:
    values = read_imatrix(measured)
    path = tmp_path / "silent.dat"
    parts = [struct.pack("<i", len(values))]
    for name, mean in values.items():
        silent = mean.copy()
        silent[:, :32] = 0
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", 1, mean.size), silent.tobytes()]
    path.write_bytes(b"".join(parts))
    artifact = convert(str(tiny), "gguf", "Q3_K_M", tmp_path / "out", imatrix_file=str(path))
    rows = open_stored(artifact, find_format("gguf")).read("model.layers.0.mlp.gate_proj.weight")
    assert isinstance(rows, Rows)
    value = np.abs(rows.whole())
    assert float(value[:, :32].mean()) > 0.2 * float(value[:, 32:].mean())


def test_inspect_tells_keys_types_and_bits(tiny: Path, tmp_path: Path) -> None:
    artifact = convert(str(tiny), "gguf", "Q4_K_M", tmp_path / "out")
    contents = contents_of(artifact.folder)
    assert contents == contents_of(file_of(artifact.folder))
    assert contents.keys["general.architecture"] == "llama"
    assert contents.keys["llama.block_count"] == 2
    assert "(271 in all)" in contents.keys["tokenizer.ggml.tokens"]
    counts = {name: share.tensors for name, share in contents.shares().items()}
    assert counts == artifact.manifest.tensor_types
    assert sum(share.weights for share in contents.shares().values()) == artifact.manifest.source.parameters
    ended = quantkit("inspect", file_of(artifact.folder), "--tensors", "--json", tmp_path / "out.json")
    assert ended.code == 0
    assert "blk.1.ffn_down.weight" in ended.out
    tensors = gguf.GGUFReader(file_of(artifact.folder)).tensors
    own = 8 * sum(int(tensor.n_bytes) for tensor in tensors) / artifact.manifest.source.parameters
    assert round(contents.bits_per_weight, 4) == artifact.manifest.bits_per_weight > own
    text = f"{artifact.manifest.bits_per_weight:.2f} bits per weight; without keys and tokenizer {own:.2f}, which"
    assert text in ended.out
    assert json.loads((tmp_path / "out.json").read_text())["types"]["Q4_K"]["tensors"] == counts["Q4_K"]
    (tmp_path / "none.gguf").write_bytes(b"GGUF?")
    for path in (tmp_path / "none.gguf", tmp_path / "nowhere.gguf"):
        with pytest.raises(ArtifactError, match="is no GGUF file that can be read"):
            contents_of(path)


def test_the_command_writes_the_file(tiny: Path, measured: Path, tmp_path: Path) -> None:
    ended = quantkit("imatrix", tiny, "--out", tmp_path / "made.gguf", *CALIBRATION_FLAGS)
    assert ended.code == 0
    assert sha256_of(tmp_path / "made.gguf") == sha256_of(measured)
    assert [path.name for path in tmp_path.iterdir()] == ["made.gguf"]
