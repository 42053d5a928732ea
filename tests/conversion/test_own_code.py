"""Checkpoints that name code of their own beside a model type of transformers: its class is taken, the code is not."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_models import CALIBRATION, FLOAT_METHODS, changed_copy, save_tiny
from transformers import AutoModelForCausalLM

from quantkit.conversion.convert import convert
from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.config import load_tokenizer, open_config

CODE = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
TOKENIZER_CODE = {"AutoTokenizer": ["tokenization_own.Own", None]}
RUNS = "raise SystemExit('the code of the checkpoint was run')"


def named(folder: Path) -> set[str]:
    """The JSON files of a folder that name code."""
    return {path.name for path in folder.glob("*.json") if "auto_map" in json.loads(path.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("plain") / "tiny")


@pytest.fixture(scope="module")
def with_code(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = changed_copy(plain, tmp_path_factory.mktemp("code") / "tiny", auto_map=CODE)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": TOKENIZER_CODE}))
    for name in ("configuration_own", "modeling_own", "tokenization_own"):
        (folder / f"{name}.py").write_text(RUNS)
    assert named(folder) == {"config.json", "tokenizer_config.json"}
    return folder


@pytest.mark.parametrize("method", FLOAT_METHODS)
def test_no_artifact_names_the_code_and_its_weights_are_those_without(
    method: str, with_code: Path, plain: Path, tmp_path: Path
) -> None:
    made = []
    for folder, out in ((with_code, tmp_path / "code"), (plain, tmp_path / "plain")):
        given = CALIBRATION if method in ("gptq", "awq") else None
        made.append(convert(str(folder), method, out=out, calibration=given))
    ours, theirs = made
    assert named(ours.folder) == set()
    assert not list(ours.folder.glob("*.py"))
    assert {name: ours.manifest.files[name].sha256 for name in ours.manifest.weight_files} == {
        name: theirs.manifest.files[name].sha256 for name in theirs.manifest.weight_files
    }
    [note] = [note for note in ours.manifest.notes if "auto_map" in note]
    assert "not run" in note
    assert "llama" in note
    assert not [note for note in theirs.manifest.notes if "auto_map" in note]


def test_transformers_opens_the_artifact_without_code(with_code: Path, tmp_path: Path) -> None:
    made = convert(str(with_code), "float", "bfloat16", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype="auto")  # asks nobody whether code may run
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.state_dict().keys() >= load_file(with_code / "model.safetensors").keys()


def test_the_tokenizer_that_is_used_is_the_one_that_the_artifact_gets(with_code: Path, tmp_path: Path) -> None:
    made = convert(str(with_code), "float", "bfloat16", tmp_path / "out")
    ours, theirs = load_tokenizer(made.folder), load_tokenizer(with_code)
    assert type(ours) is type(theirs)
    assert ours("A text, and 12 more.")["input_ids"] == theirs("A text, and 12 more.")["input_ids"]
    kept = json.loads((made.folder / "tokenizer_config.json").read_text())
    assert kept | {"auto_map": TOKENIZER_CODE} == json.loads((with_code / "tokenizer_config.json").read_text())


def test_a_tokenizer_is_taken_as_its_files_are_without_the_code(with_code: Path, tmp_path: Path) -> None:
    """transformers refuses one of an unknown class that names code, and takes tokenizer.json where it names none."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(with_code / name, folder / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [load_tokenizer(place)("A text, and 12 more.")["input_ids"] for place in (folder, with_code)]
    assert ids[0] == ids[1]


def test_a_tokenizer_that_names_no_code_is_copied_as_it_is(plain: Path, tmp_path: Path) -> None:
    made = convert(str(plain), "float", "bfloat16", tmp_path / "out")
    name = "tokenizer_config.json"
    assert (made.folder / name).read_bytes() == (plain / name).read_bytes()


def test_a_tokenizer_that_cannot_be_had_without_its_code_is_refused(with_code: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(with_code, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match="no tokenizer"):
        convert(str(folder), "rtn", out=tmp_path / "out")


def test_code_without_a_class_of_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="brings its own code, which quantkit does not run"):
        open_config({"model_type": "zamboni", "auto_map": CODE})
    with pytest.raises(UnsupportedError, match="brings its own code"):
        open_config({"model_type": None, "auto_map": CODE})
    assert open_config({"model_type": "phi3", "auto_map": CODE}).model_type == "phi3"
