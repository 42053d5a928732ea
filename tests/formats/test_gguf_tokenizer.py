"""Vocabularies of GGUF files: llama.cpp splits text as the source does; what no file can hold is refused before."""

import contextlib
import ctypes
import json
import shutil

import pytest
from edits import edit_json, put
from gguf_files import file_in, job_for, keys, save_model, saved, written
from tiny_models import changed_copy
from tokenizer_lines import lines, lines_of, shared, vocabulary_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantkit import convert, verify
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.tokenizer.pretokenizers import PROBE
from quantkit.formats.gguf.tokenizer.vocabulary import SUPPRESSED, VISIBLE, read_vocabulary
from quantkit.formats.source import open_source


def test_stories_file_tokenizes_like_the_source(tmp_path):
    trial = job_for(shared("stories260k"), "F16", tmp_path)
    story = shared("stories260k", "tinystories.txt").read_text(encoding="utf-8")
    lines = lines_of(shared("wikitext2", "wiki.test.raw"), 500)
    pieces = [story, *story.split("."), *lines, PROBE, " two  spaces", "¡ñ 漢字 🚀"]
    tokenizer = trial.source.tokenizer()
    with vocabulary_of(written(trial)) as tokens:
        for piece in pieces:
            assert tokens(piece) == tokenizer.encode(piece), piece
    assert sum(map(len, pieces)) > 100_000


def test_probe_of_the_demo_is_smollm(cached_demo, tmp_path):
    source = job_for("demo", "F16", tmp_path).source
    tokenizer, vocabulary = source.tokenizer(), read_vocabulary(source, 49152)
    assert (vocabulary.algorithm.pre, vocabulary.add_bos) == ("smollm", False)
    assert vocabulary.special_ids == {"bos": 1, "eos": 2, "unk": 0, "pad": 2}
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    source.tokenizer = lambda: tokenizer
    with pytest.raises(UnsupportedError, match=r"fingerprint [0-9a-f]{16}"):
        read_vocabulary(source, 49152)


def test_token_types_padding_templates_and_names(one_block, tmp_path):
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tool = {"id": 270, "content": "<tool>", "special": False, **extra}
    folder = changed_copy(one_block, tmp_path / "model")
    edit_json(folder / "tokenizer.json", lambda data: data["added_tokens"].append(tool))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    trial = job_for(folder, "F16", tmp_path / "out")
    vocabulary = read_vocabulary(trial.source, 275)
    assert vocabulary.types[:4] == [2, 3, 3, 6]
    assert vocabulary.types[259:271] == [1] * 11 + [4]
    assert vocabulary.tokens[271:] == ["[PAD271]", "[PAD272]", "[PAD273]", "[PAD274]"]
    assert vocabulary.types[271:] == [5] * 4
    file = written(trial)
    with vocabulary_of(file) as tokens:
        for text in ("the<tool>the", "ab aba the"):
            assert tokens(text) == trial.source.tokenizer().encode(text)
    assert keys(file)["tokenizer.chat_template"] == "{{ messages[0].content }}"
    assert keys(file)["general.name"] == "model"


WORDS = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"}
NFKC = {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}
MERGES = [["▁", "t"], ["▁t", "he"], ["b", "a"], ["a", "b"]]  # without h and e; llama.cpp would still join them
TWICE = {"SpecialToken": {"id": "<s>", "type_id": 0}}
DAMAGED = {
    "equal ids": (put("model", "vocab", "ab", value=5), "'ab' and '<0x02>' both have the id 5|both have the id 5"),
    "cut at a zero": (put("model", "vocab", "ab\0c", value=271), "both have the text 'ab'"),
    "no bytes": (lambda data: [data["model"]["vocab"].pop(f"<0x{byte:02X}>") for byte in range(256)], "<0x0A>"),
    "beyond the embedding": (put("model", "vocab", "far", value=5000), "token ids 3 to 5000, but the embedding has"),
    "merges that llama.cpp would not follow": (put("model", "merges", value=MERGES), "gives other tokens"),
    "other steps": (put("normalizer", value=NFKC), "step NFKC"),
    "another kind": (put("model", value=WORDS), "WordLevel"),
    "other tokens around a text": (lambda data: data["post_processor"]["single"].insert(0, TWICE), "only BOS 1"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_vocabulary_that_a_file_cannot_hold_is_refused(damage, one_block, tmp_path):
    change, says = DAMAGED[damage]
    folder = changed_copy(one_block, tmp_path / "model")
    edit_json(folder / "tokenizer.json", change)
    with pytest.raises((UnsupportedError, SourceError), match=says) as refused:
        convert(str(folder), "gguf", "Q8_0", tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_the_tokenizer_beside_a_file_is_the_one_that_transformers_took_for_the_source(tmp_path):
    """It takes Qwen's steps for a qwen2, whatever the files name; beside a GGUF file no config.json says qwen2."""
    model = save_model(tmp_path / "model", "qwen2", num_hidden_layers=1)
    alone = shutil.copytree(model, tmp_path / "alone", ignore=shutil.ignore_patterns("config.json"))
    source = AutoTokenizer.from_pretrained(model)
    assert type(source) is not type(AutoTokenizer.from_pretrained(alone))
    made = convert(str(model), "gguf", "Q8_0", tmp_path / "made")
    beside = AutoTokenizer.from_pretrained(made.folder)
    assert type(beside) is type(source)
    assert beside(PROBE).input_ids == source(PROBE).input_ids


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
    assert file.name.endswith("-vocab.gguf")
    assert file.stat().st_size < 100_000
    assert keys(file)[SUPPRESSED] == [270, 5]
    assert suppressed_in_llama_cpp(file) == [270, 5]
    verify(out.folder)  # the key is what generation_config.json beside the file says
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": None}))
    assert SUPPRESSED not in read_vocabulary(open_source(str(folder)), 290).keys
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [True]}))
    with pytest.raises(UnsupportedError, match=r"suppress_tokens = .*, not a list of ids"):
        read_vocabulary(open_source(str(folder)), 290)


def test_without_bos_it_is_no_tokenizer_of_gemma_4(tmp_path):
    """llama.cpp puts BOS before every text that it splits as Gemma 4's."""
    folder = save_gemma4(tmp_path / "model", bos=False)
    plan = job_for(folder, "F16", tmp_path / "out", vocab_only=True).check().checked.plan
    assert (plan.vocabulary.algorithm.model, plan.vocabulary.add_bos) == ("llama", False)
