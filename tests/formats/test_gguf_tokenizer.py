import json
import shutil

import pytest
from gguf_files import job_for, keys, save_model, written
from tokenizer_lines import lines, lines_of, shared, vocabulary_of
from transformers import AutoTokenizer

from quantkit.conversion.convert import convert
from quantkit.data.demo import FOLDER
from quantkit.errors import RecipeError, UnsupportedError
from quantkit.formats.gguf.tokenizer.pretokenizers import NAMES, PROBE, fingerprint
from quantkit.formats.gguf.tokenizer.spm import spm_scores, spm_tokens
from quantkit.formats.gguf.tokenizer.vocabulary import read_vocabulary
from quantkit.formats.source import open_source
from quantkit.system.cache import cache_folder


def demo():
    if not (cache_folder() / FOLDER / "config.json").is_file():
        pytest.skip("the demo model is not in the cache")
    return "demo"


def test_demo_file_tokenizes_like_the_source(tmp_path):
    trial = job_for(demo(), "F16", tmp_path, vocab_only=True)
    trial.check()
    trial.source.copy_side_files(tmp_path)
    trial.write()
    tokenizer = trial.source.tokenizer()
    texts = lines()
    with vocabulary_of(next(tmp_path.glob("*.gguf"))) as tokens:
        pairs = zip(texts, tokenizer(texts)["input_ids"], strict=True)
        assert not [line for line, ids in pairs if tokens(line) != ids]
        assert tokens(PROBE) == tokenizer.encode(PROBE)
        chat = "<|im_start|>user\nHow do you do, 12 times?<|im_end|>\n"
        assert tokens(chat, special=True) == tokenizer.encode(chat)


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


def test_probe_of_the_demo_is_smollm(tmp_path):
    trial = job_for(demo(), "F16", tmp_path)
    assert NAMES[fingerprint(trial.source.tokenizer().encode(PROBE))] == "smollm"
    vocabulary = read_vocabulary(trial.source, 49152)
    algorithm = vocabulary.algorithm
    assert (algorithm.model, algorithm.pre, vocabulary.add_bos) == ("gpt2", "smollm", False)
    assert vocabulary.special_ids == {"bos": 1, "eos": 2, "unk": 0, "pad": 2}
    assert "<|im_start|>" in vocabulary.chat_template
    assert vocabulary.types[1] == 3
    assert len(algorithm.merges) == 48900


def test_fingerprints_are_well_formed():
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in NAMES)
    assert len(NAMES) > 75


def test_scores_order_merges_by_hand():
    model = {
        "merges": [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"]],
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, "<0xC3>": 6, "<0xA9>": 7},
    }
    scores = spm_scores(model)
    assert scores == {
        "a": -4.0, "b": -4.0, "c": -4.0, "ab": 0.0, "bc": -1.0, "abc": -2.0, "<0xC3>": -4.0, "<0xA9>": -4.0
    }  # fmt: skip
    assert spm_tokens("abcé", model["vocab"], scores, prefix=False) == [5, 6, 7]
    assert spm_tokens("bca", model["vocab"], scores, prefix=False) == [4, 0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def edited(tiny, folder, change):
    """A copy of the checkpoint whose tokenizer.json is changed by `change`."""
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    data = json.loads((folder / "tokenizer.json").read_text())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_token_types_and_padding(tiny, tmp_path):
    def add(data):
        extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        data["added_tokens"].append({"id": 270, "content": "<tool>", "special": False, **extra})

    trial = job_for(edited(tiny, tmp_path, add), "F16", tmp_path / "out")
    vocabulary = read_vocabulary(trial.source, 275)
    assert vocabulary.types[:4] == [2, 3, 3, 6]
    assert vocabulary.types[259:271] == [1] * 11 + [4]
    assert vocabulary.tokens[271:] == ["[PAD271]", "[PAD272]", "[PAD273]", "[PAD274]"]
    assert vocabulary.types[271:] == [5] * 4
    with vocabulary_of(written(trial)) as tokens:
        for text in ("the<tool>the", "ab aba the"):
            assert tokens(text) == trial.source.tokenizer().encode(text)


def test_unknown_pre_tokenizer_is_refused(tmp_path):
    trial = job_for(demo(), "F16", tmp_path)
    tokenizer = trial.source.tokenizer()
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trial.source.tokenizer = lambda: tokenizer
    with pytest.raises(UnsupportedError, match=r"fingerprint [0-9a-f]{16}"):
        read_vocabulary(trial.source, 49152)


def test_tokenizer_larger_than_the_embedding_is_refused(tiny, tmp_path):
    with pytest.raises(UnsupportedError, match="270 tokens and an embedding of 200 rows"):
        read_vocabulary(job_for(tiny, "F16", tmp_path).source, 200)


def test_merges_that_llama_cpp_would_not_follow_are_refused(tiny, tmp_path):
    # The token "he" stays in the vocabulary, so llama.cpp would still join h and e.
    def drop(data):
        data["model"]["merges"] = [m for m in data["model"]["merges"] if m != ["h", "e"]]

    with pytest.raises(UnsupportedError, match="would not follow"):
        read_vocabulary(job_for(edited(tiny, tmp_path, drop), "F16", tmp_path / "out").source, 271)


def test_normalizers_that_llama_cpp_lacks_are_refused(tiny, tmp_path):
    def add(data):
        data["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}

    with pytest.raises(UnsupportedError, match="step NFKC"):
        read_vocabulary(job_for(edited(tiny, tmp_path, add), "F16", tmp_path / "out").source, 271)


def test_other_kinds_of_tokenizer_are_refused(tiny, tmp_path):
    def change(data):
        data["model"] = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"}

    with pytest.raises(UnsupportedError, match="WordLevel"):
        read_vocabulary(job_for(edited(tiny, tmp_path, change), "F16", tmp_path / "out").source, 271)


def test_other_tokens_around_a_text_are_refused(tiny, tmp_path):
    def change(data):
        data["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})

    with pytest.raises(UnsupportedError, match="only BOS 1"):
        read_vocabulary(job_for(edited(tiny, tmp_path, change), "F16", tmp_path / "out").source, 271)


def test_chat_templates_and_names_reach_the_file(tiny, tmp_path):
    folder = edited(tiny, tmp_path, lambda data: None)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    values = keys(written(job_for(folder, "F16", tmp_path / "out")))
    assert values["tokenizer.chat_template"] == "{{ messages[0].content }}"
    assert values["general.name"] == open_source(str(folder)).folder.name.strip("-.")


def test_a_file_with_the_vocabulary_alone(tiny, tmp_path):
    artifact = convert(str(tiny), "gguf", None, tmp_path / "out", vocab_only=True)
    path = artifact.folder / artifact.manifest.weight_files[0]
    assert path.name.endswith("-vocab.gguf")
    assert path.stat().st_size < 100_000
    tokenizer = open_source(str(tiny)).tokenizer()
    with vocabulary_of(path) as tokens:
        assert tokens("the ab aba") == tokenizer.encode("the ab aba")
    with pytest.raises(RecipeError, match="vocab_only writes no tensor, so imatrix changes nothing"):
        convert(str(tiny), "gguf", None, tmp_path / "two", vocab_only=True, imatrix=True)


def test_the_tokenizer_beside_a_file_is_the_one_that_transformers_took_for_the_source(tmp_path):
    """It takes Qwen's steps for a qwen2, whatever the files name; beside a GGUF file no config.json says qwen2."""
    model = save_model(tmp_path / "model", "qwen2")
    alone = shutil.copytree(model, tmp_path / "alone", ignore=shutil.ignore_patterns("config.json"))
    source = AutoTokenizer.from_pretrained(model)
    assert type(source) is not type(AutoTokenizer.from_pretrained(alone))
    made = convert(str(model), "gguf", "Q8_0", tmp_path / "made")
    beside = AutoTokenizer.from_pretrained(made.folder)
    assert type(beside) is type(source)
    assert beside(PROBE).input_ids == source(PROBE).input_ids
