"""What is beside the weights arrives in every artifact, and from the hub; what is not copied is named."""

import io
import re
import shutil

import pytest
from gguf_files import file_in, keys
from huggingface_hub.utils import filter_repo_objects
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiny_models import changed_copy
from transformers import AutoTokenizer

from quantkit import convert, verify
from quantkit.data.texts import sample_text
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.source import HUB_PATTERNS, open_source

COPIED = ("Licence.txt", "LICENSE-MODEL", "NOTICE.md", "USE_POLICY.md", "audio_tokenizer_config.json", "tekken.json")
ONLY_NAMED = ("emoji.json", "license.py", "reader.py")
TEMPLATES = {name: f"{name}: {{{{ messages }}}}" for name in ("default", "rag", "tool_use", "a-b", "think", "code")}


@pytest.fixture
def folder(tiny, tmp_path):
    """`tiny` with templates as transformers saves them, and files of many names."""
    folder = changed_copy(tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder)
    for name in (*COPIED, *ONLY_NAMED, "weights.bin", ".gitattributes"):
        (folder / name).write_text("{}")
    (folder / "LICENSES").mkdir()
    return folder


@pytest.mark.parametrize("method", ["rtn", "float", "gguf", "ctranslate2"])
def test_side_files_arrive(method, folder, tmp_path):
    made = convert(str(folder), method, out=tmp_path / "out")
    assert all((made.folder / name).read_text() == "{}" for name in COPIED)
    assert not any((made.folder / name).exists() for name in (*ONLY_NAMED, "weights.bin", ".gitattributes"))
    assert "not copied from the source: emoji.json, license.py, reader.py" in made.manifest.notes
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")  # a GGUF file's folder has none
    assert AutoTokenizer.from_pretrained(made.folder).chat_template == TEMPLATES
    verify(made)
    if method == "gguf":
        names = sorted(name.replace("-", "_") for name in TEMPLATES.keys() - {"default"})
        assert keys(file_in(made.folder))["tokenizer.chat_templates"] == names
        back = convert(str(file_in(made.folder)), "float", out=tmp_path / "back").folder
        found = AutoTokenizer.from_pretrained(back).chat_template
        assert found == {name.replace("-", "_"): text for name, text in TEMPLATES.items()}


def test_the_hub_gives_all_of_them(folder):
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    given = set(filter_repo_objects(names, allow_patterns=HUB_PATTERNS))
    assert open_source(str(folder)).side_files().keys() <= given
    assert not given & {"weights.bin", "reader.py", ".gitattributes"}


def test_templates_out_of_the_folder_or_too_large_or_of_one_name_are_refused(folder, tmp_path):
    templates = folder / "additional_chat_templates"
    (templates / "a_b.jinja").write_text("")
    with pytest.raises(UnsupportedError, match=r"'a-b', 'a_b'.* would have one name in a GGUF file"):
        convert(str(folder), "gguf", out=tmp_path / "out")
    (templates / "a_b.jinja").write_text("x" * (1 << 20) + "x")
    with pytest.raises(SourceError, match=r"a_b\.jinja has 1,048,577 bytes"):
        open_source(str(folder))
    (templates / "a_b.jinja").unlink()
    templates.rename(tmp_path / "elsewhere")
    templates.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"a-b\.jinja is a link out of its folder"):
        open_source(str(folder))


def test_a_tokenizer_of_a_sentencepiece_model_alone(tiny, tmp_path):
    folder, path = changed_copy(tiny, tmp_path / "model"), tmp_path / "model" / "tokenizer.model"
    (folder / "tokenizer.json").unlink()
    text = sample_text("calibration").content
    SentencePieceTrainer.train(
        sentence_iterator=iter(re.sub("[^a-z\n]", " ", text).splitlines()), model_writer=(file := io.BytesIO()),
        model_type="bpe", vocab_size=300, byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    path.write_bytes(file.getvalue())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    made = convert(str(folder), "rtn", out=tmp_path / "out").folder
    ids = AutoTokenizer.from_pretrained(made).encode(text[:500], add_special_tokens=False)
    assert ids == SentencePieceProcessor(model_file=str(path)).encode(text[:500])
    for damaged in (b"version https://git-lfs.github.com/spec/v1", file.getvalue()[:999]):
        path.write_bytes(damaged)
        with pytest.raises(SourceError, match=r"tokenizer.model may be damaged: fetch it again"):
            convert(str(folder), "rtn", out=tmp_path / "none")
