"""What refusals advise is followed word by word, and works."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import CALIBRATION_FLAGS, SAMPLE, changed_copy, fails, succeeds
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.models.config import ADD_ROWS

INDEX = "model.safetensors.index.json"
SILENT = "--calibration-text", SAMPLE, "--calibration-length", 32, "--calibration-sequences"
GGUF = "--method", "gguf", "--bits"
# The options of a refused conversion, what it says, and the options that it advises.
ADVICE = [
    pytest.param((*GGUF, "IQ1_S"), "Add --imatrix,", (*GGUF, "IQ1_S", "--imatrix"), marks=pytest.mark.slow),
    ((*GGUF, "IQ2_XS"), "or --rounding gptq", (*GGUF, "IQ2_XS", "--rounding", "gptq")),
    ((*GGUF, "Q2_K_S"), "Add --imatrix,", (*GGUF, "Q2_K_S", "--imatrix")),
    ((*GGUF, "Q8_0", "--imatrix"), "Leave it out, or choose Q2_K", (*GGUF, "Q2_K", "--imatrix")),
    ((*GGUF, "Q8_0", "--imatrix"), "Leave it out", (*GGUF, "Q8_0")),
    ((*GGUF, "Q4_K_M", "--token-embedding-type", "IQ2_XXS"), "set another type", (*GGUF, "Q4_K_M")),
    (("--method", "rtn", "--format", "gguf", "--no-sym"), "(--sym)", ("--method", "rtn", "--format", "gguf", "--sym")),
    (("--method", "gptq", *SILENT, 1 << 20), "or fewer sequences", ("--method", "gptq", *SILENT, 8)),
    (
        ("--method", "gptq", *SILENT, 8, "--calibration-length", 1 << 20),
        "or shorter sequences",
        ("--method", "gptq", *SILENT, 8),
    ),
    (("--method", "rtn", "--revision", "main"), "Leave --revision out.", ("--method", "rtn")),
]


@pytest.mark.parametrize(("options", "says", "advised"), ADVICE, ids=lambda value: str(value)[:60])
def test_options_that_a_refusal_advises(options, says, advised, wide, tmp_path):
    fails("convert", wide, "--out", tmp_path / "out", *CALIBRATION_FLAGS, *options, says=says)
    succeeds("convert", wide, "--out", tmp_path / "out", *CALIBRATION_FLAGS, *advised)


def shards(folder, tensors, metadata):
    """The weights in two files, in the first of them also `tensors` of the second."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    save_file({name: weights[name] for name in tensors}, folder / "a.safetensors")
    where = dict.fromkeys(weights, "b.safetensors") | dict.fromkeys(tensors, "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": where, **metadata}))
    return weights


def test_files_that_are_mended_as_a_refusal_advises(tiny, tmp_path):
    folder, convert = (
        changed_copy(tiny, tmp_path / "model"),
        ("convert", tmp_path / "model", "--method", "rtn", "--out"),
    )
    weights = shards(folder, ["model.norm.weight"], {})
    fails(*convert, tmp_path / "out", says='Add "metadata": {}.')
    where = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(where | {"metadata": {}}))
    fails(*convert, tmp_path / "out", says="Remove one of the two.")
    save_file({name: weights[name] for name in weights if name != "model.norm.weight"}, folder / "b.safetensors")
    succeeds(*convert, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(folder).model.norm.weight.equal(weights["model.norm.weight"])


@pytest.mark.parametrize("gap", [0, 100])
def test_rows_that_are_added_as_a_refusal_advises(gap, tiny, tmp_path):
    """Also where ids of the vocabulary are left out, so that it has fewer tokens than the highest id."""
    folder, convert = (
        changed_copy(tiny, tmp_path / "model"),
        ("convert", tmp_path / "model", "--method", "rtn", "--out"),
    )
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"] |= {"<more>": 310 + gap}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    fails(*convert, tmp_path / "out", says=ADD_ROWS)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for line in ADD_ROWS.partition(": ")[2].split("; "):
        exec(line, {"model": model, "tokenizer": tokenizer, "folder": folder})
    succeeds(*convert, tmp_path / "out")


def test_a_gguf_file_becomes_what_ctranslate2_takes_as_its_refusal_advises(artifact_of, tiny, tmp_path):
    [file] = artifact_of("gguf", "Q8_0").folder.glob("*.gguf")
    convert = ("convert", file, "--method", "ctranslate2", "--out", tmp_path / "out")
    said = fails(*convert).err
    assert re.search(r"`quantkit import` of a GGUF file", said), said
    succeeds("import", file, "--out", tmp_path / "made", "--tokenizer", tiny, "--config", tiny / "config.json")
    succeeds("convert", tmp_path / "made", *convert[2:])
    assert Path(tmp_path / "out").is_dir()
