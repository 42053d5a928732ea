"""Every kind of tokenizer, trained here: llama.cpp gives the source's ids on 5,000 lines from the file alone."""

import json

import numpy as np
import pytest
from gguf_files import job_for, save_model, slow_but, written
from tokenizer_lines import ODD, lines, lines_of, shared, vocabulary_of
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.errors import UnsupportedError
from quantkit.formats.float import Checkpoint
from quantkit.formats.gguf.tokenizer.pretokenizers import CL100K, ONE_DIGIT
from quantkit.formats.gguf.tokenizer.vocabulary import read_vocabulary

SIZE = 2000
SPACE = "\u2581"


def training_text():
    return lines_of(shared("calibration", "groups_merged.txt"), 1300) + ODD


def byte_level(steps, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def split(regex):
    return [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


def sentencepiece_bpe():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # A splitter while it is trained, so that no piece crosses a word; without it afterwards, as published ones are.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=tokens, limit_alphabet=100, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = None
    data["added_tokens"] = data["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(data))


def gemma_like():
    tokenizer = sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def unigram(*steps, charsmap=None):
    tokenizer = Tokenizer(models.Unigram())
    first = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*first, *steps])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    data = json.loads(tokenizer.to_str())
    # float32, as SentencePiece keeps them.
    data["model"]["vocab"] = [[text, float(np.float32(score))] for text, score in data["model"]["vocab"]]
    return Tokenizer.from_str(json.dumps(data))


def trained_charsmap(tmp_path):
    """The character map that SentencePiece makes for NFKC: a field of its model behind the name of the rule."""
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece makes the character map")
    (tmp_path / "text.txt").write_text("\n".join(training_text()), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "spm"), vocab_size=500, model_type="unigram",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    content, name = (tmp_path / "spm.model").read_bytes(), b"\n\x08nmt_nfkc\x12"
    start = content.index(name) + len(name) + 3  # behind the length, of three bytes
    size = sum((byte & 127) << 7 * place for place, byte in enumerate(content[start - 3 : start]))
    charsmap = content[start : start + size]
    (tmp_path / "charsmap").write_bytes(charsmap)
    return charsmap


BLANKS = normalizers.Replace(Regex(" {2,}"), " ")
KINDS = {
    "gpt-2": lambda _: byte_level([pre_tokenizers.ByteLevel(False)]),
    "smollm": lambda _: byte_level([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    "llama-bpe": lambda _: byte_level(split(CL100K), ignore_merges=True),
    "dbrx": lambda _: byte_level(split(CL100K)),
    "qwen2": lambda _: byte_level(split(ONE_DIGIT)),
    "llama": lambda _: sentencepiece_bpe(),
    "llama, no space before": lambda _: gemma_like(),
    "t5": lambda _: unigram(),
    "t5, blanks merged": lambda _: unigram(BLANKS),
    "t5, NFKC": lambda folder: unigram(BLANKS, normalizers.Strip(), charsmap=trained_charsmap(folder)),
}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function: a tokenizer -> a checkpoint that has it; transformers must not replace its steps by a class's own."""

    def save(tokenizer):
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
        number = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", number)])
        folder = save_model(
            tmp_path / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=SIZE + 3
        )
        unknown = {"unk_token": "<unk>"} if tokenizer.token_to_id("<unk>") is not None else {}
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **unknown
        ).save_pretrained(folder)
        return folder

    monkeypatch.setattr(Checkpoint, "tokenizer", lambda source: PreTrainedTokenizerFast.from_pretrained(source.folder))
    return save


@pytest.mark.parametrize("name", slow_but(("llama-bpe", "llama", "t5, NFKC"), KINDS))
def test_llama_cpp_gives_the_source_s_ids(saved, tmp_path, name):
    folder = saved(KINDS[name](tmp_path))
    trial = job_for(folder, "F16", tmp_path / "out")
    tokenizer = trial.source.tokenizer()
    path = written(trial)
    vocabulary = read_vocabulary(trial.source, SIZE + 3)
    assert name.split(",")[0] in (vocabulary.algorithm.model, vocabulary.algorithm.pre)
    texts = lines()
    if name in ("t5", "t5, blanks merged"):
        texts = [line for line in texts if line == line.strip(" ")]  # of others llama.cpp differs, and it is told
    with vocabulary_of(path) as tokens:
        pairs = zip(texts, tokenizer(texts)["input_ids"], strict=True)
        different = [line for line, ids in pairs if tokens(line) != ids]
    assert any("begins or ends with a space" in note for note in trial.notes) == (
        name.startswith("t5") and "NFKC" not in name
    )
    assert not different, (len(different), different[:3])
    if name == "t5, NFKC":
        assert vocabulary.algorithm.unigram.charsmap == (tmp_path / "charsmap").read_bytes()


def test_what_unigram_of_llama_cpp_lacks_is_refused(saved, tmp_path):
    small = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0, False))
    folder = saved(small)
    data = json.loads((folder / "tokenizer.json").read_text())
    for change, said in (
        ({"normalizer": {"type": "Lowercase"}}, "step Lowercase"),
        ({"model": {**data["model"], "byte_fallback": True}}, "unigram with byte fallback"),
        ({"model": {**data["model"], "unk_id": None}}, "unigram without an unknown token"),
    ):
        (folder / "tokenizer.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(UnsupportedError, match=said):
            read_vocabulary(job_for(folder, "F16", tmp_path / "out").source, SIZE + 3)
