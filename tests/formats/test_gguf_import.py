"""GGUF files as checkpoints: their values, and that transformers computes what the file says."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf_files import save_model, tensors_of
from tiny_models import EVALUATION, quantkit
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import evaluate
from quantkit.conversion.convert import convert
from quantkit.conversion.import_gguf import import_gguf
from quantkit.errors import ArtifactError, OutputError, QuantkitError, RecipeError, UnsupportedError
from quantkit.formats.source import open_model, open_source

pytest.importorskip("llama_cpp", reason="llama-cpp-python proves the tokenizer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    made = next(convert(str(model), "gguf", "Q4_K_M", folder / "out").folder.glob("*.gguf"))
    return made.rename(folder / made.name)  # without the source's tokenizer beside it


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_checkpoint_holds_the_files_values(file: Path, model: Path, tmp_path: Path, dtype: str) -> None:
    source = open_source(str(import_gguf(file, tmp_path / "out", dtype=dtype)))
    values = tensors_of(file)
    assert set(source.tensors) == set(values)
    for name, value in values.items():
        assert torch.equal(source.tensor(name), value.to(getattr(torch, dtype))), name
    theirs, ours = open_source(str(model)).config, source.config
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
        assert ours[key] == theirs[key], key
    assert ours["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
    assert ours["dtype"] == dtype
    assert not any(str(file.parent) in text for text in map(str, ours.values()))


def test_transformers_computes_what_the_file_says(file: Path, model: Path, tmp_path: Path) -> None:
    out = import_gguf(file, tmp_path / "out", dtype="float32")
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.load_state_dict(tensors_of(file), strict=False)
    text = "the bath ab  a\n the <s>"
    ids = AutoTokenizer.from_pretrained(out)(text, return_tensors="pt")["input_ids"]
    assert ids.tolist() == AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")["input_ids"].tolist()
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-4)


def test_a_round_trip_gives_the_same_file(file: Path, tmp_path: Path) -> None:
    out = import_gguf(file, tmp_path / file.stem.removesuffix("-Q4_K_M"), dtype="float32")
    again = convert(str(out), "gguf", "Q8_0", tmp_path / "again")
    values, first = tensors_of(next(again.folder.glob("*.gguf"))), tensors_of(file)
    assert set(values) == set(first)
    assert all((values[name] - value).norm() <= 0.01 * value.norm() for name, value in first.items())


def test_a_tokenizer_that_comes_out_otherwise_is_refused_and_can_be_given(tmp_path: Path) -> None:
    from quantkit.data.demo import FOLDER
    from quantkit.system.cache import cache_folder

    demo = cache_folder() / FOLDER
    if not (demo / "config.json").is_file():
        pytest.skip("the demo model is not in the cache")
    small = tmp_path / "small"
    save_model(small, num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=49152)
    for path in demo.glob("tokenizer*"):
        shutil.copyfile(path, small / path.name)
    made = next(convert(str(small), "gguf", "Q8_0", tmp_path / "gguf").folder.glob("*.gguf"))
    file = tmp_path / "alone" / made.name  # without the source's tokenizer beside it
    file.parent.mkdir()
    made.rename(file)
    with pytest.raises(UnsupportedError, match=r"other ids than llama\.cpp\. Make a checkpoint of it"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = import_gguf(file, tmp_path / "out", tokenizer=demo)
    text = "a  1  22   333"
    assert (
        AutoTokenizer.from_pretrained(out)(text)["input_ids"] == AutoTokenizer.from_pretrained(demo)(text)["input_ids"]
    )


def test_what_cannot_be_read_is_refused_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    (tmp_path / "there").mkdir()
    refused: list[tuple[type[QuantkitError], str, dict[str, object]]] = [
        (ArtifactError, "ends inside the tensor|can be read", {"path": cut, "out": tmp_path / "out"}),
        (OutputError, "there", {"path": file, "out": tmp_path / "there"}),
        (RecipeError, "unknown dtype 'float8'", {"path": file, "out": tmp_path / "out", "dtype": "float8"}),
    ]
    for kind, said, arguments in refused:
        with pytest.raises(kind, match=said):
            import_gguf(**arguments)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "there"]


def test_the_command(file: Path, tmp_path: Path) -> None:
    ended = quantkit("import", file, "--out", tmp_path / "out", "--dtype", "bfloat16")
    assert ended.code == 0, ended.out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_file_is_a_source_as_its_checkpoint_is(file: Path, tmp_path: Path) -> None:
    checkpoint = import_gguf(file, tmp_path / "checkpoint", dtype="float32")
    ours, theirs = (convert(str(m), "rtn", "4", tmp_path / f"{i}") for i, m in enumerate((file, checkpoint)))
    for name in ours.manifest.weight_files:
        assert (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes()
    assert list(ours.manifest.source.hashes) == [file.name]


def test_divergences_are_measured_from_a_file(file: Path, tmp_path: Path) -> None:
    floats = convert(str(file), "float", "float32", tmp_path / "floats")
    report = evaluate(floats, ("perplexity",), source=file, **EVALUATION)
    divergence = report.find("kld")
    assert divergence is not None
    assert divergence.value < 1e-5


def test_where_a_file_is_no_source_the_fix_is_told(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    with pytest.raises(UnsupportedError, match=r"reads checkpoint folders of floats, and .* is none.*quantkit import"):
        convert(str(file), "ctranslate2", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert open_model(file).format == "gguf"  # it can be judged
