"""GGUF files as checkpoints: their values, and that transformers computes what the file says; IQ types, too."""

import shutil

import numpy as np
import pytest
import torch
from gguf_files import file_in, gguf, save_model, tensors_of
from tiny_models import quantkit
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import verify
from quantkit.conversion.convert import convert
from quantkit.conversion.import_gguf import import_gguf
from quantkit.data.demo import FOLDER
from quantkit.errors import ArtifactError, RecipeError, UnsupportedError
from quantkit.formats.source import open_model, open_source
from quantkit.system.cache import cache_folder

pytest.importorskip("llama_cpp", reason="llama-cpp-python proves the tokenizer")

TYPES = {"attn_q": "IQ3_XXS", "attn_k": "IQ4_XS", "ffn_up": "IQ2_XXS", "ffn_down": "IQ4_NL"}


@pytest.fixture(scope="module")
def model(once):
    return once("gguf-import", lambda folder: save_model(folder, num_hidden_layers=1, rms_norm_eps=1e-5))


@pytest.fixture(scope="module")
def file(artifact_of, model, tmp_path_factory):
    """A file of Q4_K_M without the source's tokenizer beside it."""
    made = file_in(artifact_of("gguf", "Q4_K_M", model=model).folder)
    return shutil.copyfile(made, tmp_path_factory.mktemp("gguf") / made.name)


@pytest.fixture(scope="module")
def narrow(artifact_of, model):
    """An artifact with the types of the file type IQ3_S beside those given."""
    return artifact_of("gguf", "IQ3_S", model=model, rounding="gptq", tensor_type=TYPES)


@pytest.fixture(scope="module")
def checkpoint(file, tmp_path_factory):
    return import_gguf(file, tmp_path_factory.mktemp("float32") / "imported", dtype="float32")


def test_the_checkpoint_holds_the_files_values(file, model, checkpoint, tmp_path):
    ended = quantkit("import", file, "--out", tmp_path / "bfloat16", "--dtype", "bfloat16")
    assert ended.code == 0, ended.out
    values = tensors_of(file)
    for folder, dtype in ((checkpoint, "float32"), (tmp_path / "bfloat16", "bfloat16")):
        source = open_source(str(folder))
        assert set(source.tensors) == set(values)
        for name, value in values.items():
            assert torch.equal(source.tensor(name), value.to(getattr(torch, dtype))), name
        theirs, ours = open_source(str(model)).config, source.config
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
            assert ours[key] == theirs[key], key
        assert ours["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
        assert ours["dtype"] == dtype
        assert not any(str(file.parent) in text for text in map(str, ours.values()))


def test_transformers_computes_what_the_file_says(file, model, checkpoint):
    ours = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.load_state_dict(tensors_of(file), strict=False)
    text = "the bath ab  a\n the <s>"
    ids = AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")["input_ids"]
    assert ids.tolist() == AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")["input_ids"].tolist()
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-4)


def test_a_tokenizer_that_comes_out_otherwise_is_refused_and_can_be_given(tmp_path):
    demo = cache_folder() / FOLDER
    if not (demo / "config.json").is_file():
        pytest.skip("the demo model is not in the cache")
    small = tmp_path / "small"
    save_model(small, num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=49152)
    for path in demo.glob("tokenizer*"):
        shutil.copyfile(path, small / path.name)
    made = file_in(convert(str(small), "gguf", "Q8_0", tmp_path / "gguf").folder)
    file = tmp_path / "alone" / made.name  # without the source's tokenizer beside it
    file.parent.mkdir()
    made.rename(file)
    with pytest.raises(UnsupportedError, match=r"other ids than llama\.cpp\. Make a checkpoint of it"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ours, theirs = map(AutoTokenizer.from_pretrained, (import_gguf(file, tmp_path / "out", tokenizer=demo), demo))
    assert ours("a  1  22   333")["input_ids"] == theirs("a  1  22   333")["input_ids"]


def test_what_cannot_be_read_is_refused_and_leaves_nothing(file, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ArtifactError, match=r"ends inside the tensor|can be read"):
        import_gguf(cut, tmp_path / "out")
    with pytest.raises(RecipeError, match="unknown dtype 'float8'"):
        import_gguf(file, tmp_path / "out", dtype="float8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf"]


def test_a_file_is_a_source_as_its_checkpoint_is(file, checkpoint, narrow, tmp_path):
    floats = convert(str(file_in(narrow.folder)), "float", "float32", tmp_path / "floats").folder
    for number, (one, other) in enumerate(((file, checkpoint), (file_in(narrow.folder), floats))):
        source, values = open_source(str(other)), tensors_of(one)
        assert all(torch.equal(source.tensor(name), value) for name, value in values.items())
        ours, theirs = (convert(str(m), "rtn", "4", tmp_path / f"{i}-{number}") for i, m in enumerate((one, other)))
        for name in ours.manifest.weight_files:
            assert (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes()
        assert list(ours.manifest.source.hashes) == [one.name]


def test_where_a_file_is_no_source_the_fix_is_told(file, tmp_path):
    pytest.importorskip("ctranslate2")
    with pytest.raises(UnsupportedError, match=r"reads checkpoint folders of floats, and .* is none.*quantkit import"):
        convert(str(file), "ctranslate2", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert open_model(file).format == "gguf"  # it can be evaluated


def test_iq_types_are_verified_inspected_and_read_as_gguf_reads_them(narrow):
    verify(narrow)
    ended = quantkit("inspect", file_in(narrow.folder), "--tensors")
    assert ended.code == 0, ended.out
    assert all(kind in ended.out for kind in {*TYPES.values(), "IQ3_S"})
    tensors, read = (
        {t.name: t for t in gguf.GGUFReader(file_in(narrow.folder)).tensors},
        tensors_of(file_in(narrow.folder)),
    )
    names = {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate"}
    for ours, theirs in (names | {"self_attn.o_proj": "attn_output"}).items():
        tensor = tensors[f"blk.0.{theirs}.weight"]
        assert tensor.tensor_type.name == TYPES.get(theirs, "IQ3_S")
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.allclose(read[f"model.layers.0.{ours}.weight"].numpy(), expected, rtol=1e-6, atol=0)
