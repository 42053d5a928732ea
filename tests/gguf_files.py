"""GGUF files of tiny models, written by quantkit and by llama.cpp, and what is in them."""

import ctypes

import numpy as np
import pytest
import torch
from tiny_architectures import save_architecture, tiny_of
from tiny_more import as_published
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trials import prepared

from quantkit.formats.float import Checkpoint
from quantkit.formats.gguf.reader import read_file
from quantkit.formats.gguf.writer import write_file
from quantkit.models.config import load_tokenizer

gguf = pytest.importorskip("gguf")


def job_for(model, bits, folder, **options):
    """A trial that is not checked yet."""
    folder.mkdir(exist_ok=True)
    return prepared(model, "gguf", bits, folder, **options)


def written(trial, importance=None, threads=None):
    """The file as the writer alone makes it, with importance that is given."""
    write_file(trial.check().checked.plan, trial.run, importance or {}, threads)
    return next(trial.folder.glob("*.gguf"))


def finished(writer, path):
    """The file of a GGUFWriter that knows all it holds."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kind_of(value):
    kinds = gguf.GGUFValueType
    if isinstance(value, int) and not isinstance(value, bool):
        return kinds.UINT32 if 0 <= value < 1 << 32 else kinds.INT64  # which llama.cpp does not load
    return {bool: kinds.BOOL, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}[type(value)]


def changed(file, out, tensors=None, **keys):
    """A copy of a file with other `tensors` (name, data, type) or keys, `__` for a dot; None leaves a key out."""
    changes = {name.replace("__", "."): value for name, value in keys.items()}
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(out, "llama")
    writer.kv_data[0].clear()
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in changes:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for name, value in changes.items():
        if value is not None:
            writer.add_key_value(name, value, kind_of(value))
    for name, data, kind in tensors or ((tensor.name, tensor.data, tensor.tensor_type) for tensor in reader.tensors):
        writer.add_tensor(name, data, raw_dtype=kind)
    return finished(writer, out)


def tensors_of(path):
    """All tensors of a file, float32, as our reader gives them."""
    return {name: torch.from_numpy(rows.whole()) for name, rows in read_file(path)}


def save_tokenizer(folder):
    """A SentencePiece-like tokenizer of 270 tokens with byte fallback."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁", "t", "h", "e", "a", "b", "▁t", "he", "▁the", "ab", "ba"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("b", "a"), ("a", "b")]
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
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


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
)


def saved_tokenizer(folder, template=None):
    """The same with a chat template, as it is read back."""
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def save_model(folder, model_type="llama", dtype=torch.bfloat16, **changes):
    """A small random model with a tokenizer; weights are wide enough for attention to matter."""
    values = {
        "vocab_size": 271, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 10,
        "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.1,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.5)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def saved(folder, name, dtype=torch.float32, change=lambda _model: None, **changes):
    """A tiny checkpoint of an architecture, with settings that llama.cpp has and such as are given."""
    tiny = tiny_of(name)
    return as_published(save_architecture(folder, name, dtype, change, tiny.for_gguf | changes), tiny.kind)


def quantized_by_llama_cpp(path, out, bits, importance=None, **types):
    """`types` are llama-quantize's own of the embedding and the output head."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    params = llama_cpp.llama_model_quantize_default_params()
    lacking = {"F32": 0, "Q2_0": 41}  # of gguf 0.19, under these names
    params.ftype = lacking[bits] if bits in lacking else int(gguf.LlamaFileType[f"MOSTLY_{bits}"])
    params.nthread = 2
    for name, kind in types.items():
        setattr(params, name, int(gguf.GGMLQuantizationType[kind]))
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
        # llama-quantize writes a matrix of one row as a vector.
        assert [n for n in a.shape.tolist() if n > 1] == [n for n in b.shape.tolist() if n > 1], a.name
        assert np.array_equal(a.data.reshape(b.data.shape), b.data), a.name
    return len(ours)


def keys(path):
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


def layer_and_hessian(rows=12, columns=512):
    """A random weight, and the moments of correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    x = torch.randn(900, columns, generator=generator) @ mixing
    return torch.randn(rows, columns, generator=generator) * 0.05, x.T @ x / 900


def take_any_tokenizer(monkeypatch):
    """The tokenizers of tiny models were trained here; what pre-tokenizer llama.cpp takes does not matter.

    transformers gives every qwen2 checkpoint the steps of Qwen's tokenizer, whatever its file says.
    """
    monkeypatch.setattr("quantkit.formats.gguf.tokenizer.vocabulary._pre_tokenizer", lambda *_: ("gpt-2", ()))
    monkeypatch.setattr(Checkpoint, "tokenizer", lambda source: PreTrainedTokenizerFast.from_pretrained(source.folder))


def slow_but(quick, cases):
    """Parameters, of which all but some are slow; a case is a tuple where a test takes several."""
    marks = {case: [pytest.mark.slow] * (case not in quick) for case in cases}
    return [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=marks[case]) for case in marks]


def file_in(folder):
    """The only GGUF file of a folder."""
    [path] = folder.glob("*.gguf")
    return path
