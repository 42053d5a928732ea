"""The files of one pass against the two steps of llama.cpp, tensor by tensor and byte by byte."""

import ctypes
import json
from functools import cache

import numpy as np
import pytest
import torch

from quantkit.contracts.registry import Job
from quantkit.data.demo import FOLDER, cache_folder
from quantkit.formats.gguf import writer
from quantkit.formats.gguf.reader import read_file
from quantkit.formats.gguf.writer import write_file
from quantkit.formats.source import Source, open_source
from quantkit.methods.gguf import METHOD, Options, check
from quantkit.recipe import ConvertRecipe

gguf = pytest.importorskip("gguf")

MIXES = ["Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K"]
BYTES = 256


def job_for(model, bits, folder, **options):
    folder.mkdir(exist_ok=True)
    recipe = ConvertRecipe(model=str(model), method="gguf", bits=bits)
    return Job(open_source(str(model)), recipe, Options(**options), folder=folder)


def written(job, importance=None, threads=None):
    write_file(job, importance or {}, threads)
    return next(job.folder.glob("*.gguf"))


def tensors_of(path):
    """All tensors of a file, float32, as our reader gives them."""
    return {name: torch.from_numpy(rows.whole()) for name, rows in read_file(path)}


def save_tokenizer(folder):
    """A SentencePiece-like tokenizer of 270 tokens with byte fallback."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(BYTES))]
    texts += ["▁", "t", "h", "e", "a", "b", "▁t", "he", "▁the", "ab", "ba"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("b", "a"), ("a", "b")]
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True),
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in texts[:3]])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    made.save_pretrained(folder)


def save_model(folder, model_type="llama", dtype=torch.bfloat16, **changes):
    """A small random model with a tokenizer; weights are wide enough for attention to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        "vocab_size": 271,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **changes,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.5)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def demo():
    if not (cache_folder() / FOLDER / "config.json").is_file():
        pytest.skip("the demo model is not in the cache")
    return "demo"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """BF16 file of a model: the first of llama.cpp's two steps."""

    @cache
    def make(model):
        return written(job_for(model, "BF16", tmp_path_factory.mktemp("base")))

    return make


def quantized_by_llama_cpp(path, out, bits, importance=None):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(gguf.LlamaFileType[f"MOSTLY_{bits}"])
    params.nthread = 2
    if importance:
        entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
        for entry, (name, values) in zip(entries, importance.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    assert llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params)) == 0
    return out


def identical_tensors(ours, theirs):
    ours, theirs = gguf.GGUFReader(ours).tensors, gguf.GGUFReader(theirs).tensors
    assert [tensor.name for tensor in ours] == [tensor.name for tensor in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.tensor_type == b.tensor_type, a.name
        assert a.shape.tolist() == b.shape.tolist(), a.name
        assert np.array_equal(a.data, b.data), a.name
    return len(ours)


def keys(path):
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


@pytest.mark.parametrize("bits", [*MIXES, "Q3_K_S", "Q3_K_L", "Q5_K_S", "Q8_0"])
def test_tiny_file_equals_two_steps_of_llama_cpp(tmp_path, tiny, base, bits):
    ours = written(job_for(tiny, bits, tmp_path / "ours"))
    theirs = quantized_by_llama_cpp(base(tiny), tmp_path / "theirs.gguf", bits)
    assert identical_tensors(ours, theirs) == 3 + 10 * 9
    assert keys(ours) == keys(theirs)


@pytest.mark.parametrize("bits", MIXES)
def test_tiny_file_with_importance_equals_llama_cpp(tmp_path, tiny, base, bits):
    source = open_source(str(tiny))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 10)
    random = torch.Generator().manual_seed(1)
    importance = {
        name: (torch.rand(info.shape[1], generator=random) ** 4 + 1e-4).numpy()
        for name, info in source.tensors.items()
        if name.endswith("_proj.weight")
    }
    named = {table.get_name(name, (".weight",)): values for name, values in importance.items()}
    ours = written(job_for(tiny, bits, tmp_path / "ours", imatrix=True), importance)
    theirs = quantized_by_llama_cpp(base(tiny), tmp_path / "theirs.gguf", bits, named)
    assert identical_tensors(ours, theirs) == 3 + 10 * 9
    plain = written(job_for(tiny, bits, tmp_path / "plain"))
    assert ours.read_bytes() != plain.read_bytes()


@pytest.mark.parametrize("bits", [pytest.param(b, marks=[] if b == "Q4_K_M" else [pytest.mark.slow]) for b in MIXES])
def test_demo_file_equals_two_steps_of_llama_cpp(tmp_path, demo, base, bits):
    job = job_for(demo, bits, tmp_path / "ours")
    ours = written(job)
    theirs = quantized_by_llama_cpp(base(demo), tmp_path / "theirs.gguf", bits)
    assert identical_tensors(ours, theirs) == 272
    assert sum(job.tensor_types.values()) == 272


def test_bytes_do_not_depend_on_threads_or_slabs(tmp_path, tiny, monkeypatch):
    one = written(job_for(tiny, "Q4_K_M", tmp_path / "one"), threads=1)
    monkeypatch.setattr(writer, "SLAB_BYTES", 40 * 4 * 256)
    read = []
    floats = Source.floats
    monkeypatch.setattr(Source, "floats", lambda *a: read.append(a[3] - a[2] if a[2:] else 1) or floats(*a))
    many = written(job_for(tiny, "Q4_K_M", tmp_path / "many"), threads=5)
    assert one.read_bytes() == many.read_bytes()
    assert max(read) == 64, "whole heads of 64 rows are the largest pieces that are read"
    assert len(read) > 10 * 7


def test_check_foretells_the_size(tmp_path, tiny):
    for bits in METHOD.bits:
        options = {"tensor_type": {"attn": "Q5_K"}} if bits == "auto" else {"imatrix": bits == "Q2_K_S"}
        job = job_for(tiny, bits, tmp_path / bits, **options)
        promised = check(job)
        size = written(job).stat().st_size
        assert size <= promised <= size * 1.02 + 8192


def test_progress_and_counts_cover_every_tensor(tmp_path, tiny):
    steps = []
    job = job_for(tiny, "Q4_K_M", tmp_path / "out")
    job.progress._listener = lambda step: steps.append((step.done, step.total, step.ended))
    path = written(job)
    total = len(gguf.GGUFReader(path).tensors)
    assert steps[-1] == (total, total, True)
    assert job.tensor_types == {"F32": 21, "Q4_K": 61, "Q6_K": 11}


def test_metadata_of_a_file(tmp_path, tiny):
    path = written(job_for(tiny, "Q4_K_M", tmp_path / "out"))
    found = keys(path)
    config = json.loads((tiny / "config.json").read_text())
    assert path.name == f"{tiny.name}-Q4_K_M.gguf"
    assert found["general.architecture"] == "llama"
    assert found["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert found["general.quantization_version"] == 2
    assert found["llama.block_count"] == 10
    assert found["llama.attention.head_count_kv"] == 1
    assert found["llama.rope.dimension_count"] == 64
    assert found["llama.rope.freq_base"] == pytest.approx(config["rope_parameters"]["rope_theta"])
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert len(found["tokenizer.ggml.tokens"]) == 271
