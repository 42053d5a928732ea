"""Checkpoints that name code of their own beside a model type of transformers: its class is taken, the code is not."""

import json
import shutil

import pytest
from edits import edit_json, put
from safetensors.torch import load_file
from tiny_models import CALIBRATION, changed_copy
from transformers import AutoModelForCausalLM

from quantkit.conversion.convert import convert
from quantkit.errors import SourceError
from quantkit.models.config import load_tokenizer

CODE = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
TOKENIZER_CODE = {"AutoTokenizer": ["tokenization_own.Own", None]}
RUNS = "raise SystemExit('the code of the checkpoint was run')"


def named(folder):
    """The JSON files of a folder that name code."""
    return {path.name for path in folder.glob("*.json") if "auto_map" in json.loads(path.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def with_code(tiny, once):
    def make(folder):
        changed_copy(tiny, folder, auto_map=CODE)
        edit_json(folder / "tokenizer_config.json", put("auto_map", value=TOKENIZER_CODE))
        for name in ("configuration_own", "modeling_own", "tokenization_own"):
            (folder / f"{name}.py").write_text(RUNS)

    folder = once("with_code", make)
    assert named(folder) == {"config.json", "tokenizer_config.json"}
    return folder


@pytest.mark.parametrize("method", ["rtn", "nf4", "gguf", "ctranslate2"])
def test_no_artifact_names_the_code_and_its_weights_are_those_without(method, with_code, artifact_of, tmp_path):
    model = shutil.copytree(with_code, tmp_path / "tiny")  # GGUF files hold the name
    ours = convert(str(model), method, out=tmp_path / "code", calibration=CALIBRATION)
    theirs = artifact_of(method)
    assert named(ours.folder) == set()
    assert not list(ours.folder.glob("*.py"))
    assert {name: ours.manifest.files[name].sha256 for name in ours.manifest.weight_files} == {
        name: theirs.manifest.files[name].sha256 for name in theirs.manifest.weight_files
    }
    for made, count in ((ours, 1), (theirs, 0)):
        assert len([note for note in made.manifest.notes if "auto_map" in note and "not run" in note]) == count


def test_transformers_opens_the_artifact_and_its_tokenizer_without_code(with_code, tiny, artifact_of):
    folder = artifact_of("float", "bfloat16", model=with_code).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # asks nobody whether code may run
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.state_dict().keys() >= load_file(with_code / "model.safetensors").keys()
    ours, theirs = load_tokenizer(folder), load_tokenizer(with_code)
    assert type(ours) is type(theirs)
    assert ours("A text, and 12 more.")["input_ids"] == theirs("A text, and 12 more.")["input_ids"]
    kept = json.loads((folder / "tokenizer_config.json").read_text())
    assert kept | {"auto_map": TOKENIZER_CODE} == json.loads((with_code / "tokenizer_config.json").read_text())
    # One that names no code is copied as it is.
    plain, tokenizer = artifact_of("float", "bfloat16").folder, "tokenizer_config.json"
    assert (plain / tokenizer).read_bytes() == (tiny / tokenizer).read_bytes()


def test_a_tokenizer_is_taken_as_its_files_are_without_the_code(with_code, tmp_path):
    """transformers refuses one of an unknown class that names code, and takes tokenizer.json where it names none."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(with_code / name, folder / name)
    edit_json(folder / "tokenizer_config.json", put("tokenizer_class", value="OwnTokenizer"))
    ids = [load_tokenizer(place)("A text, and 12 more.")["input_ids"] for place in (folder, with_code)]
    assert ids[0] == ids[1]
    model = changed_copy(with_code, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match="no tokenizer"):
        convert(str(model), "rtn", out=tmp_path / "out")
