"""llama.cpp's importance files through conversions, and what importance of zero does."""

import json
import struct

import numpy as np
import pytest
from gguf_files import file_in, identical_tensors, job_for, keys, quantized_by_llama_cpp, save_model, written
from tiny_models import CALIBRATION, CALIBRATION_FLAGS, changed_copy, succeeds
from trials import dense_values

from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError
from quantkit.formats.gguf.ggml.library import FAINTEST, IMPORTANCE_ONLY, LOUDEST, WEIGHTED, dequantize, quantize
from quantkit.formats.gguf.header import contents_of
from quantkit.formats.gguf.imatrix import SILENT, read_imatrix, without_silent_runs
from quantkit.formats.source import open_source
from quantkit.methods.gguf.imatrix import make_imatrix

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def measured(wide, tmp_path_factory):
    path = tmp_path_factory.mktemp("imatrix") / "tiny.imatrix.gguf"
    succeeds("imatrix", wide, "--out", path, *CALIBRATION_FLAGS)
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
def test_a_file_weights_like_the_measurement_and_like_llama_cpp(artifact_of, wide, measured, tmp_path, bits):
    own = artifact_of("gguf", bits, model=wide, imatrix=True)
    read = convert(str(wide), "gguf", bits, tmp_path / "read", imatrix_file=str(measured))
    base = written(job_for(wide, "BF16", tmp_path / "base"))
    theirs = quantized_by_llama_cpp(base, tmp_path / "theirs.gguf", bits, read_imatrix(measured))
    assert identical_tensors(file_in(read.folder), theirs) > 20
    # The file's sums are rounded to float32 once more than the measurement.
    a, b = (gguf.GGUFReader(file_in(artifact.folder)).tensors for artifact in (own, read))
    same = [np.array_equal(x.data, y.data) for x, y in zip(a, b, strict=True)]
    assert sum(same) > 0.8 * len(same)


def dat(path, measured, lacking):
    """An older file without the tensors whose names hold some text; none of the model's where all do."""
    values = {name: row for name, row in read_imatrix(measured).items() if lacking not in name}
    rows = (values or {"blk.0.other.weight": np.ones(8)}).items()
    entries = [
        struct.pack(f"<i{len(n)}sii", len(n), n.encode(), 1, v.size) + v.astype("<f4").tobytes() for n, v in rows
    ]
    path.write_bytes(struct.pack("<i", len(entries)) + b"".join(entries))
    return str(path)


@pytest.mark.parametrize(
    ("bits", "lacking", "count"),
    [("Q4_K_M", "blk.1.attn_k.", 1), ("Q2_K", "blk.0.", 7), pytest.param("IQ3_S", "down", 2, marks=pytest.mark.slow)],
)
def test_a_file_may_lack_tensors_as_for_llama_quantize(wide, measured, tmp_path, bits, lacking, count):
    path = dat(tmp_path / "partial.dat", measured, lacking)
    artifact = convert(str(wide), "gguf", bits, tmp_path / "out", imatrix_file=path)
    base = written(job_for(wide, "BF16", tmp_path / "base"))
    theirs = quantized_by_llama_cpp(base, tmp_path / "theirs.gguf", bits, read_imatrix(tmp_path / "partial.dat"))
    assert identical_tensors(file_in(artifact.folder), theirs) > 20
    [note] = [note for note in artifact.manifest.notes if "without importance" in note]
    assert note.startswith(f"{count} of 21 tensors")
    assert lacking in note


def test_another_models_file_and_needless_ones_are_refused(wide, measured, tmp_path):
    deeper = save_model(tmp_path / "deeper", num_hidden_layers=3)
    wider = save_model(tmp_path / "wider", num_hidden_layers=2, intermediate_size=768)
    refused = [
        (deeper, {"bits": "IQ2_XXS"}, r"no entry for blk\.2\..* needs"),
        (wide, {"bits": "Q2_K_S", "imatrix_file": dat(tmp_path / "a", measured, "ffn_up")}, "for blk.0.ffn_up.weight"),
        (wide, {"imatrix_file": dat(tmp_path / "b", measured, "")}, "names no tensor of this model"),
        (wider, {}, "has 512 values for .*, which needs 768"),
        (wide, {"imatrix": True}, "imatrix_file has no effect with imatrix"),
        (wide, {"rounding": "gptq"}, "imatrix_file has no effect with rounding gptq"),
        (wide, {"imatrix_file": str(tmp_path / "none")}, "cannot be read as an importance file"),
    ]
    for folder, options, said in refused:
        with pytest.raises(RecipeError, match=said):
            job_for(folder, **{"bits": "Q4_K_M", "folder": tmp_path, "imatrix_file": str(measured)} | options).check()
    with pytest.raises(RecipeError, match="already exists"):
        make_imatrix(str(wide), measured)


def test_inspect_tells_keys_types_and_bits(artifact_of, wide, tmp_path):
    artifact = artifact_of("gguf", "Q4_K_M", model=wide)
    file, contents = file_in(artifact.folder), contents_of(artifact.folder)
    assert "(271 in all)" in contents.keys["tokenizer.ggml.tokens"]
    counts = {name: share.tensors for name, share in contents.shares().items()}
    assert counts == artifact.manifest.tensor_types
    assert sum(share.weights for share in contents.shares().values()) == artifact.manifest.source.parameters
    ended = succeeds("inspect", file, "--tensors", "--json", tmp_path / "out.json")
    assert "blk.1.ffn_down.weight" in ended.out
    own = 8 * sum(int(t.n_bytes) for t in gguf.GGUFReader(file).tensors) / artifact.manifest.source.parameters
    text = f"{artifact.manifest.bits_per_weight:.2f} bits per weight; without keys and tokenizer {own:.2f}, which"
    assert text in ended.out
    assert json.loads((tmp_path / "out.json").read_text())["types"]["Q4_K"]["tensors"] == counts["Q4_K"]


# Runs of 16 columns that ggml would silently turn to zero

COLUMNS, RUN = 512, 16
# The first column of a run, and an importance: silent, and faint.
SILENCES = ((0, 0.0), (16, 1e-44), (240, 1e-30), (COLUMNS - RUN, 0.0))


def rows():
    return (np.random.default_rng(0).standard_normal((6, COLUMNS)) * 0.05).astype(np.float32)


def importance_with(value, place, count=RUN):
    """Between 1 and 2, but `value` in some columns."""
    importance = np.random.default_rng(1).random(COLUMNS).astype(np.float32) + np.float32(1)
    importance[place : place + count] = value
    return importance


def error(name, values, importance):
    """Relative, of what is packed."""
    change = dequantize(name, quantize(name, values, importance), COLUMNS) - values
    return float(np.linalg.norm(change) / np.linalg.norm(values))


@pytest.mark.parametrize("name", sorted(WEIGHTED - IMPORTANCE_ONLY))
def test_one_run_of_16_is_enough_to_be_refused_and_so_is_what_overflows_in_sums(name):
    for place, value in SILENCES:
        with pytest.raises(ValueError, match="zero over 16 neighbouring columns"):
            quantize(name, rows(), importance_with(value, place))
        importance = importance_with(value, place)
        importance[place + 5] = FAINTEST  # one column that counts a little
        assert error(name, rows(), importance) < 0.5
    with pytest.raises(ValueError, match=rf"importance is up to 1e\+36, but {name} is correct only up to 1e\+20"):
        quantize(name, rows(), importance_with(1e36, 32))
    whole = np.full(COLUMNS, 0.9 * LOUDEST, np.float32)
    largest = np.full((1, COLUMNS), 65504, np.float32) * np.random.default_rng(0).choice([-1, 1], COLUMNS)
    for values in (rows(), largest.astype(np.float32)):
        assert error(name, values, whole) < 0.5


@pytest.mark.parametrize(("place", "value"), SILENCES)
def test_a_silent_run_counts_a_millionth_of_the_mean(place, value):
    importance = importance_with(value, place)
    before = importance.copy()
    lifted = without_silent_runs(importance)
    inside = np.zeros(COLUMNS, bool)
    inside[place : place + RUN] = True
    assert np.allclose(lifted[inside], importance.mean() * SILENT, rtol=1e-6)
    assert np.array_equal(lifted[~inside], importance[~inside])
    assert np.array_equal(importance, before)
    # Fewer than 16, or 16 that belong to two runs, are not silent.
    for count, start in ((RUN - 1, place), (RUN, place + 8 if place + 24 <= COLUMNS else place - 8)):
        importance = importance_with(value, start, count)
        assert np.array_equal(without_silent_runs(importance), importance)


@pytest.mark.parametrize("silent", [slice(32, 48), slice(None)], ids=["some", "all"])
def test_inputs_that_never_fire_keep_their_weights_in_a_conversion(tiny_with, tmp_path, silent):
    def silence(tensors):
        tensors["model.layers.0.input_layernorm.weight"][silent] = 0

    model = changed_copy(tiny_with(num_hidden_layers=1, hidden_size=256), tmp_path / "model", silence)
    artifact = convert(str(model), "gguf", "Q3_K_M", tmp_path / "out", calibration=CALIBRATION, rounding="gptq")
    name = "model.layers.0.self_attn.k_proj.weight"
    got, exact = dense_values(artifact)[name], open_source(str(model)).tensor(name).float()
    assert artifact.manifest.tensor_types["Q3_K"] > 0
    assert (got - exact)[:, silent].norm() < 0.5 * exact[:, silent].norm()
