"""The tokenizer of Gemma 4 in a GGUF file: llama.cpp splits text with it as the source does."""

import contextlib
import ctypes
import json

import pytest
from gguf_files import file_in, job_for, keys, saved
from tokenizer_lines import lines, vocabulary_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quantkit.conversion.convert import convert
from quantkit.conversion.verify import verify
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.tokenizer.pretokenizers import PROBE
from quantkit.formats.gguf.tokenizer.vocabulary import SUPPRESSED, VISIBLE, read_vocabulary
from quantkit.formats.source import open_source

pytest.importorskip("gguf")


def save_gemma4(folder, bos=True, name="gemma4"):
    """A tiny Gemma 4 with a tokenizer like its own: merges across spaces, bytes for what has no token."""
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["\n", "\n\n", "\n\n\n", "▁", "▁▁", *"theab", "he", "the", "▁the", "ab", "abab", "ab▁", *VISIBLE]
    merges = [("▁", "▁"), ("\n", "\n"), ("\n\n", "\n"), ("h", "e"), ("t", "he"), ("▁", "the"), ("a", "b"), ("ab", "ab")]
    merges += [("ab", "▁")]
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (*texts[:4], *VISIBLE)])
    changes = {"vocab_size": len(texts), "vocab_size_per_layer_input": len(texts), "bos_token_id": 2, "eos_token_id": 1}
    saved(folder, name, **changes, global_head_dim=32)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )
    made.save_pretrained(folder)
    return folder


TEXTS = ("the  the\nab ababab", "\n\n\n\n\n the\n \n", " ab the ", "ж🚀 thé\t<bos>", PROBE)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified_text"])
def test_llama_cpp_splits_text_as_the_source_does(name, tmp_path):
    trial = job_for(save_gemma4(tmp_path / "model", name=name), "F16", tmp_path / "out", vocab_only=True)
    algorithm = trial.check().checked.plan.vocabulary.algorithm
    assert (algorithm.model, algorithm.notes) == ("gemma4", ())
    trial.source.copy_side_files(trial.folder)
    trial.write()
    file = file_in(trial.folder)
    tokenizer = trial.source.tokenizer()
    with vocabulary_of(file) as tokens:
        for text in (*TEXTS, *lines()[:200]):
            assert tokens(text, special=True) == tokenizer.encode(text), text
    types = keys(file)["tokenizer.ggml.token_type"]
    shown = {types[number] for number in tokenizer.convert_tokens_to_ids(list(VISIBLE))}
    assert shown == {4}
    assert types[2] == 3


def suppressed_in_llama_cpp(file):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    ask = llama_cpp.llama_cpp._lib.llama_vocab_get_suppress_tokens
    ask.restype, ask.argtypes = ctypes.POINTER(ctypes.c_int32), [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)]
    engine, count = llama_cpp.Llama(str(file), vocab_only=True, verbose=False), ctypes.c_int32()
    with contextlib.closing(engine):
        found = ask(llama_cpp.llama_model_get_vocab(engine.model), ctypes.byref(count))
        return [found[index] for index in range(count.value)]


def test_tokens_that_are_never_generated(tmp_path):
    """Gemma 4's are those of images and sounds."""
    folder = save_gemma4(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [270, 5, -1, 99_999]}))
    out = convert(str(folder), "gguf", "F16", tmp_path / "out", vocab_only=True)
    file = file_in(out.folder)
    assert keys(file)[SUPPRESSED] == [270, 5]
    assert suppressed_in_llama_cpp(file) == [270, 5]
    verify(out.folder)  # the key is what generation_config.json beside the file says
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": None}))
    assert SUPPRESSED not in read_vocabulary(open_source(str(folder)), 290).keys


def test_what_is_no_list_of_ids_is_refused(tmp_path):
    folder = save_gemma4(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [True]}))
    with pytest.raises(UnsupportedError, match=r"suppress_tokens = .*, no list of ids"):
        job_for(folder, "F16", tmp_path / "out", vocab_only=True).check()


def test_without_bos_it_is_no_tokenizer_of_gemma_4(tmp_path):
    """llama.cpp puts BOS before every text that it splits as Gemma 4's."""
    folder = save_gemma4(tmp_path / "model", bos=False)
    plan = job_for(folder, "F16", tmp_path / "out", vocab_only=True).check().checked.plan
    assert (plan.vocabulary.algorithm.model, plan.vocabulary.add_bos) == ("llama", False)
