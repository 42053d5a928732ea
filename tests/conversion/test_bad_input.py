"""Every bad input ends as one line that names the value and the fix, and leaves nothing behind."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from resource import RLIMIT_FSIZE, setrlimit

import pytest
import transformers
from gguf_files import save_tokenizer
from killed import started
from tiny_models import CALIBRATION_FLAGS, EVALUATION_FLAGS, SAMPLE, command_line, quantkit

from quantkit.conversion.convert import convert
from quantkit.system.processor import usable_cores

pytestmark = pytest.mark.usefixtures("here")


def refused(*arguments, says):
    """Run a command that must end with code 1 and one line on standard error, leaving no output."""
    before = sorted(Path.cwd().rglob("*"))
    ended = quantkit(*arguments)
    assert_refusal(ended.code, ended.err, says)
    assert ended.out == ""
    assert sorted(Path.cwd().rglob("*")) == before


def assert_refusal(code, err, says):
    assert code == 1, err
    assert err.startswith("error: "), err
    assert err.strip().count("\n") == 0, err
    for part in says:
        assert part in err, err


TO_OUT = ("convert", "{tiny}", "--out", "out", "--method")
JUDGED = ("{tiny}", "--text", "{sample}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*TO_OUT, "gptk"), ("unknown method 'gptk'", "Did you mean 'gptq'?", "awq, ctranslate2")),
        ((*TO_OUT, "gptq", "--bits", 5), ("no bits '5'", "2, 3, 4, 6, 8")),
        ((*TO_OUT, "gguf", "--bits", "q4km"), ("no bits 'q4km'", "Did you mean 'Q4_K_M'?", "Q2_K, Q3_K_S")),
        ((*TO_OUT, "rtn", "--group-size", "perhaps"), ("= 'perhaps'", "valid integer")),
        ((*TO_OUT, "rtn", "--group-size", -64), ("group_size -64", "128, 64, 32", "-1 (the whole row)", "vLLM")),
        (("convert", "/nowhere", "--method", "rtn"), ("the folder /nowhere does not exist", "hub id, or 'demo'")),
        (("verify", "nowhere"), ("the artifact nowhere does not exist", "quantkit convert MODEL --out nowhere")),
        (("inspect", "{tiny}"), ("has no quantkit.json",)),
        (("eval", *JUDGED, "--probes", "size,perplexty"), ("unknown probe 'perplexty'", "Did you mean 'perplexity'?")),
        (("eval", *JUDGED, "--engine", "llama"), ("unknown engine", "Did you mean 'llamacpp'?")),
        (("eval-ppl", *JUDGED, "--protocol", "paper"), ("unknown protocol 'paper'", "Did you mean 'papers'?")),
        (("eval-ppl", *JUDGED, "--engine", "llamacpp"), ("cannot open bfloat16", "GGUF files")),
        (("eval", *JUDGED, "--threads", 9999), ("threads 9999:", "usable cores", f"from 1 to {usable_cores()}")),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(words, says, tiny):
    refused(*(str(word).format(tiny=tiny, sample=SAMPLE) for word in words), says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("convert", "--method", "gptq", "--grup-size", "64"), ("no such option --grup-size", "'--group-size'?")),
        (("convert", "--method", "rtn", "--out", "out", "--group-size"), ("--group-size", "requires an argument")),
        (("convert", "--method", "gptq", "--damp-percent", "much"), ("--damp-percent", "valid number")),
        (("convert", "--method", "rtn", "--json", "no/where.json"), ("the folder of no/where.json does not exist",)),
        (("frobnicate",), ("frobnicate",)),
    ],
)
def test_misuse_of_a_command_ends_with_code_2(arguments, says, tiny):
    ended = quantkit(arguments[0], tiny, *arguments[1:])
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    for part in says:
        assert part in ended.err, ended.err
    assert not Path("out").exists()


def test_architecture_that_a_method_lacks(architecture):
    says = ("'opt'", "mistral, ministral, ", ", qwen2, qwen3, ", "that take this model: ", "gptq:4")
    refused("convert", architecture("opt"), "--out", "out", "--method", "gguf", *CALIBRATION_FLAGS, says=says)
    sizes = {"vocab_size": 304, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=128, bos_token_id=1, eos_token_id=2)
    transformers.BertForMaskedLM(config).save_pretrained("bert")
    save_tokenizer(Path("bert"))
    for method in ("gptq", "nf4", "gguf", "ctranslate2"):
        flags = ("--method", method, *CALIBRATION_FLAGS)
        refused("convert", "bert", "--out", "out", *flags, says=("UnsupportedError",))


def test_shapes_that_get_other_types_are_told(tiny):
    ended = quantkit("convert", tiny, "--method", "gguf", "--bits", "Q4_K_M", "--out", "out")
    assert (ended.code, ended.err) == (0, "")
    manifest = json.loads(Path("out/quantkit.json").read_text())
    note = "wider types for 19 of 29 tensors, whose rows are not a multiple of 256: 17 Q4_K -> Q5_0, 2 Q6_K -> Q8_0"
    assert manifest["notes"] == [note]
    assert f"note: {note}" in ended.out
    assert manifest["tensor_types"].items() >= {"Q5_0": 17, "Q8_0": 2}.items()


def test_text_that_is_too_short(tiny):
    Path("short.txt").write_text("A short text. " * 20)
    says = ("short.txt is too short", "0 of 64 sequences of 512", "longer text or shorter sequences")
    refused("convert", tiny, "--method", "gptq", "--calibration-text", "short.txt", says=says)
    says = ("short.txt is too short", "2 windows of 512", "longer --text")
    refused("eval-ppl", tiny, "--text", "short.txt", says=says)


def test_text_that_cannot_be_read(tiny):
    Path("latin.txt").write_bytes("Blåbær".encode("latin-1"))
    Path("folder").mkdir()
    for name, *flags in (
        ("convert", "--out", "out", "--method", "gptq", "--calibration-text"),
        ("eval-ppl", "--text"),
        ("compare", "--methods", "gptq", "--calibration-text"),
    ):
        for text in ("missing.txt", "folder"):
            refused(name, tiny, *flags, text, says=(f"the text file {text} does not exist",))
        refused(name, tiny, *flags, "latin.txt", says=("latin.txt is not UTF-8 text (byte 2)", "Save it as UTF-8"))


def test_output_that_exists_is_kept_unless_it_is_an_artifact_and_forced(tiny):
    words = ("convert", tiny, "--out", "out", "--method", "rtn")
    Path("out").write_text("text")
    refused(*words, "--force", says=("out is not one", "Choose another --out"))
    assert Path("out").read_text() == "text"
    Path("out").unlink()
    Path("out").mkdir()
    Path("out/diary.txt").write_text("dear diary")
    refused(*words, says=("the output out exists", "--force"))
    refused(*words, "--force", says=("replaces only artifacts of quantkit, and out is not one",))
    assert Path("out/diary.txt").read_text() == "dear diary"
    shutil.rmtree("out")
    convert(str(tiny), "rtn", 8, "out")
    Path("out/stray.txt").write_text("gone with the artifact")
    refused(*words, says=("--force",))
    assert quantkit(*words, "--force").code == 0
    assert json.loads(Path("out/quantkit.json").read_text())["recipe"]["bits"] == "4"
    assert not Path("out/stray.txt").exists()


@pytest.mark.parametrize("method", ["gguf", "rtn", pytest.param("gptq", marks=pytest.mark.slow)])
def test_disk_that_fills_up_meanwhile(method, tiny, tmp_path):
    """A limit on the size of a file stands for a full disk; both come as an OSError of the write."""
    flags = ["--group-size", "32"] if method != "gguf" else ["--bits", "F16"]
    calibration = CALIBRATION_FLAGS if method == "gptq" else []
    command = ["convert", str(tiny), "--method", method, *flags, "--out", "out", *map(str, calibration)]
    child = started(command, tmp_path / "log", partial(setrlimit, RLIMIT_FSIZE, (100_000, 100_000)))
    stderr = " ".join(child.wait(1).split())
    assert "Traceback" not in stderr
    assert "is full: out.partial could not be written" in stderr
    assert "Free space" in stderr
    assert not Path("out").exists()
    assert Path("out.partial").exists() == (method != "gguf")  # finished tensors are kept, and it is told
    assert ("Run the same command to continue" in stderr) == (method != "gguf")


def test_corrupted_artifact(artifact_of):
    shutil.copytree(artifact_of("rtn").folder, "broken")
    config = Path("broken/config.json").read_bytes()
    Path("broken/config.json").write_bytes(config[:-9] + bytes([config[-9] ^ 1]) + config[-8:])
    for command in (("verify", "broken"), ("eval-ppl", "broken", *EVALUATION_FLAGS)):
        refused(*command, says=("ArtifactError", "config.json is corrupted", "Convert again"))


@pytest.fixture
def without_packages(tmp_path_factory):
    """The environment of a process where the optional packages are not installed."""
    hide = tmp_path_factory.mktemp("hide")
    hidden = ["bitsandbytes", "ctranslate2", "llama_cpp", "llama_cpp_python", "datasets"]
    (hide / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    return {"PYTHONPATH": os.pathsep.join([str(hide), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("convert", "{tiny}", "--method", "nf4"), ("the package bitsandbytes", "'quantkit-lm[bitsandbytes]'")),
        (("eval-ppl", "{gguf}", *EVALUATION_FLAGS), ("llamacpp", "'quantkit-lm[llamacpp]'", "--engine reference")),
        pytest.param(
            *(("compare", "{tiny}", "--methods", "rtn,gguf", *EVALUATION_FLAGS), ("'quantkit-lm[llamacpp]'",)),
            marks=pytest.mark.slow,  # it asks for every engine first
        ),
    ],
)
def test_missing_package(arguments, says, tiny, gguf, here, without_packages):
    words = [str(word).format(tiny=tiny, gguf=gguf.folder) for word in arguments]
    ended = command_line(*words, **without_packages)
    assert_refusal(ended.returncode, ended.stderr, (*says, "pip install"))
    assert list(here.iterdir()) == []
    ended = command_line("convert", "--method", "nf4", "--help", **without_packages)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--double-quant" in ended.stdout
    assert command_line("convert", "--methd", "rtn", **without_packages).returncode == 2
