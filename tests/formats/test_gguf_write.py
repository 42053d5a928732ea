"""The files of one pass against the two steps of llama.cpp, tensor by tensor and byte by byte; their mixes of types."""

import itertools
import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf_files import finished, identical_tensors, job_for, keys, quantized_by_llama_cpp, save_model, slow_but, written

from quantkit.errors import RecipeError
from quantkit.formats.float import Checkpoint
from quantkit.formats.gguf import writer
from quantkit.formats.gguf.file_types import DEFAULT, IQ_MIXES, WEIGHTED_ONLY, ModelCounts, choose_types
from quantkit.formats.source import open_source

MIXES = ["Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K"]
PLAIN = [*MIXES, "Q3_K_S", "Q3_K_L", "Q5_K_S", "Q8_0"]
WEIGHTED = [*MIXES, *(name for name in IQ_MIXES if name != "IQ1_M")]
FILES = [*((bits, False) for bits in PLAIN), *((bits, True) for bits in WEIGHTED)]
QUICK_FILES = {("Q3_K_M", False), ("Q8_0", False), ("Q2_K", True), ("Q4_K_M", True), ("IQ3_M", True)}
BLOCKS = 4


@pytest.fixture(scope="module")
def tiny(once):
    return once("gguf-write", lambda folder: save_model(folder, num_hidden_layers=BLOCKS))


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """A BF16 file: the first of llama.cpp's two steps."""
    return written(job_for(tiny, "BF16", tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def importance(tiny):
    """By the source's names and by the file's."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, BLOCKS)
    random = torch.Generator().manual_seed(1)
    by_source = {
        name: (torch.rand(info.shape[1], generator=random) ** 4 + 1e-4).numpy()
        for name, info in open_source(str(tiny)).tensors.items()
        if name.endswith("_proj.weight")
    }
    return by_source, {table.get_name(name, (".weight",)): values for name, values in by_source.items()}


@pytest.mark.parametrize(("bits", "weighted"), slow_but(QUICK_FILES, FILES))
def test_tiny_file_equals_two_steps_of_llama_cpp(tmp_path, tiny, base, importance, bits, weighted):
    by_source, named = importance if weighted else (None, None)
    ours = written(job_for(tiny, bits, tmp_path / "ours", imatrix=weighted), by_source)
    theirs = quantized_by_llama_cpp(base, tmp_path / "theirs.gguf", bits, named)
    assert identical_tensors(ours, theirs) == 3 + BLOCKS * 9
    assert weighted or keys(ours) == keys(theirs)
    if weighted and bits not in WEIGHTED_ONLY:
        plain = written(job_for(tiny, bits, tmp_path / "plain"))
        assert ours.read_bytes() != plain.read_bytes()


@pytest.mark.slow
def test_iq1_m_equals_llama_cpp_but_for_a_few_blocks(tmp_path, tiny, base, importance):
    """Two builds of ggml round ties of this type otherwise, and then differ on the same rows."""
    by_source, named = importance
    ours = written(job_for(tiny, "IQ1_M", tmp_path / "ours", imatrix=True), by_source)
    theirs = quantized_by_llama_cpp(base, tmp_path / "theirs.gguf", "IQ1_M", named)
    same = []
    for a, b in zip(gguf.GGUFReader(ours).tensors, gguf.GGUFReader(theirs).tensors, strict=True):
        assert (a.name, a.tensor_type) == (b.name, b.tensor_type)
        if a.tensor_type == gguf.GGMLQuantizationType.IQ1_M:
            same += (a.data.reshape(-1, 56) == b.data.reshape(-1, 56)).all(1).tolist()
        else:
            assert np.array_equal(a.data, b.data), a.name
    assert len(same) > 1000
    assert np.mean(same) > 0.98


def test_iq_types_without_importance_are_refused_before_the_work(tmp_path, tiny):
    with pytest.raises(RecipeError, match="IQ3_XS needs an importance matrix"):
        job_for(tiny, "IQ3_XS", tmp_path / "none").check()
    types = {"ffn_up": "IQ3_XXS"}
    with pytest.raises(RecipeError, match=r"blk\.0\.ffn_up\.weight has none, nor have 3 more tensors\. Add --imatrix"):
        job_for(tiny, "Q4_K_M", tmp_path / "one", tensor_type=types).check()
    for options in ({"imatrix": True}, {"rounding": "gptq"}):
        assert job_for(tiny, "Q4_K_M", tmp_path / "given", tensor_type=types, **options).check()
        with pytest.raises(RecipeError, match=r"output\.weight has none\. quantkit measures none for it"):
            job_for(tiny, "Q4_K_M", tmp_path / "head", output_tensor_type="IQ2_S", **options).check()


@pytest.mark.parametrize("bits", slow_but(("Q4_K_M",), ("Q4_K_M", "IQ3_S", "IQ4_XS")))
def test_bytes_do_not_depend_on_threads_or_slabs(tmp_path, tiny, monkeypatch, bits):
    one = written(job_for(tiny, bits, tmp_path / "one"), threads=1)
    monkeypatch.setattr(writer, "SLAB_BYTES", 40 * 4 * 256)
    read = []
    floats = Checkpoint.floats
    monkeypatch.setattr(Checkpoint, "floats", lambda *a: read.append(a[3] - a[2] if a[2:] else 1) or floats(*a))
    many = written(job_for(tiny, bits, tmp_path / "many"), threads=5)
    assert one.read_bytes() == many.read_bytes()
    assert max(read) == 64, "whole heads of 64 rows are the largest pieces that are read"
    assert len(read) > BLOCKS * 7


def test_check_foretells_the_size(tmp_path, tiny):
    for bits in ("F32", "Q8_0", "Q4_K_M", "Q2_K_S", "IQ4_XS", "auto"):
        options = {"tensor_type": {"attn": "Q5_K"}} if bits == "auto" else {"imatrix": bits in WEIGHTED_ONLY}
        trial = job_for(tiny, bits, tmp_path / bits, **options)
        spec = trial.job.recipe.calibration
        between = spec.sequences * spec.length * trial.source.config["hidden_size"] * 2  # bytes between two blocks
        promised = trial.check().checked.nbytes - (between if bits in WEIGHTED_ONLY else 0)
        size = written(trial).stat().st_size
        assert size <= promised <= size * 1.02 + 8192


def test_metadata_of_a_file(tmp_path, tiny):
    path = written(job_for(tiny, "Q4_K_M", tmp_path / "out"))
    values = keys(path)
    config = json.loads((tiny / "config.json").read_text())
    assert path.name == f"{tiny.name}-Q4_K_M.gguf"
    expected = {
        "general.architecture": "llama", "general.file_type": gguf.LlamaFileType.MOSTLY_Q4_K_M,
        "general.quantization_version": 2, "llama.block_count": BLOCKS, "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": 64, "tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }  # fmt: skip
    assert values | expected == values
    assert values["llama.rope.freq_base"] == pytest.approx(config["rope_parameters"]["rope_theta"])
    assert len(values["tokenizer.ggml.tokens"]) == 271


ROWS = 8
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def shapes_of(blocks, columns, tied):
    shapes = {"token_embd.weight": (ROWS, columns), "output_norm.weight": (columns,)}
    if not tied:
        shapes["output.weight"] = (ROWS, columns)
    for block, part in itertools.product(range(blocks), PARTS):
        shapes[f"blk.{block}.{part}.weight"] = (ROWS, columns)
    for block in range(blocks):
        shapes[f"blk.{block}.attn_norm.weight"] = (columns,)
        shapes[f"blk.{block}.attn_q.bias"] = (ROWS,)
    return shapes


CASES = [
    (ModelCounts(1, 4, 4), 256, True),
    (ModelCounts(7, 4, 1), 256, False),
    (ModelCounts(16, 8, 4), 256, True),
    (ModelCounts(33, 6, 2), 256, True),
    (ModelCounts(80, 8, 1), 256, False),
    (ModelCounts(80, 8, 8), 256, False),
    (ModelCounts(12, 9, 3), 96, True),
    (ModelCounts(12, 9, 3), 96, False),
    (ModelCounts(4, 4, 2), 80, False),
    (ModelCounts(33, 4, 1, name="falcon"), 256, True),
    (ModelCounts(33, 4, 1, name="falcon"), 256, False),
    (ModelCounts(80, 8, 1, name="qwen2"), 256, False),
    (ModelCounts(80, 8, 8, name="qwen2"), 256, False),
]
QUICK = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "IQ3_M", "IQ4_XS")
TYPES = [name for name in DEFAULT if name not in ("F16", "BF16", "auto")]


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory):
    paths = []
    for number, (model, columns, tied) in enumerate(CASES):
        paths.append(tmp_path_factory.mktemp("base") / f"{number}.gguf")
        writer = gguf.GGUFWriter(paths[-1], model.name)
        writer.add_block_count(model.blocks)
        writer.add_context_length(32)
        writer.add_embedding_length(columns)
        writer.add_feed_forward_length(columns)
        writer.add_head_count(model.heads)
        writer.add_head_count_kv(model.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_layer_norm_eps(1e-5)
        values = np.random.default_rng(0)
        for name, shape in shapes_of(model.blocks, columns, tied).items():
            writer.add_tensor(name, values.standard_normal(shape, dtype=np.float32))
        finished(writer, paths[-1])
    return paths


@pytest.mark.parametrize("kind", slow_but(QUICK, TYPES))
def test_types_equal_those_of_llama_cpp(tmp_path, unquantized, kind):
    decisions = 0
    for number, (model, columns, tied) in enumerate(CASES):
        shapes = shapes_of(model.blocks, columns, tied)
        weighted = kind in WEIGHTED_ONLY or (kind in IQ_MIXES and number % 2 == 0)
        ones = dict.fromkeys(shapes, np.ones(columns, np.float32)) if weighted else None
        out = quantized_by_llama_cpp(unquantized[number], tmp_path / f"{number}.gguf", kind, ones)
        theirs = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
        choices = choose_types(shapes, kind, replace(model, weighted=weighted))
        ours = {name: choice.type for name, choice in choices.items()}
        assert ours == theirs, (model, columns, tied)
        assert list(ours) == list(theirs), "the order of the tensors"
        decisions += len(ours)
    assert decisions > 1500
