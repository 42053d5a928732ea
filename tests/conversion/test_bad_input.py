"""Every bad input ends as one line that names the value and the fix, and leaves nothing behind."""

import json
import os
import re
import shutil
import struct
from functools import partial
from pathlib import Path
from resource import RLIMIT_FSIZE, setrlimit
from typing import Any

import pytest
import torch
import transformers
from gguf_files import save_tokenizer
from killed import started
from safetensors.torch import load_file, save_file
from tiny_models import (
    CALIBRATION_FLAGS,
    EVALUATION_FLAGS,
    FLOAT_METHODS,
    SAMPLE,
    Ended,
    changed_copy,
    command_line,
    quantkit,
    save_tiny,
)

from quantkit.artifact import Artifact
from quantkit.checkpoints.safetensors import read_header
from quantkit.contracts.registry import find_engine
from quantkit.conversion.convert import convert
from quantkit.conversion.staging import refuse_small_disk
from quantkit.errors import OutputError, RecipeError
from quantkit.system.files import sha256_of
from quantkit.system.processor import usable_cores

UP = "model.layers.1.mlp.up_proj.weight"
METHODS = FLOAT_METHODS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder; whatever is called `out` there must not survive a refusal."""
    monkeypatch.chdir(tmp_path)


def refused(*arguments: object, says: tuple[str, ...]) -> str:
    """Run a command that must end with code 1 and one line on standard error, leaving no output."""
    before = sorted(Path.cwd().rglob("*"))
    ended = quantkit(*arguments)
    assert_refusal(ended.code, ended.err, says)
    assert ended.out == ""
    assert sorted(Path.cwd().rglob("*")) == before
    return ended.err


def assert_refusal(code: int, err: str, says: tuple[str, ...]) -> None:
    assert code == 1, err
    assert err.startswith("error: "), err
    assert err.strip().count("\n") == 0, err
    for part in says:
        assert part in err, err


def refused_convert(model: object, *arguments: object, says: tuple[str, ...]) -> str:
    return refused("convert", model, "--out", "out", *arguments, says=says)


def misused(*arguments: object, says: tuple[str, ...]) -> Ended:
    """Run a command that must end with code 2 and name its fault."""
    ended = quantkit(*arguments)
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    for part in says:
        assert part in ended.err, ended.err
    assert not Path("out").exists()
    return ended


# What is asked for


def test_unknown_method(tiny: Path) -> None:
    refused_convert(
        tiny, "--method", "gptk", says=("unknown method 'gptk'", "Did you mean 'gptq'?", "awq, ctranslate2")
    )


@pytest.mark.parametrize(
    ("method", "bits", "says"),
    [
        ("gptq", "5", ("no bits '5'", "2, 3, 4, 8")),
        ("gguf", "q4km", ("no bits 'q4km'", "Did you mean 'Q4_K_M'?", "Q2_K, Q3_K_S")),
        ("ctranslate2", "int9", ("no bits 'int9'", "Did you mean 'int", "int8_float16")),
    ],
)
def test_bits_that_the_method_lacks(method: str, bits: str, says: tuple[str, ...], tiny: Path) -> None:
    refused_convert(tiny, "--method", method, "--bits", bits, says=says)


def test_unknown_option_of_a_method(tiny: Path) -> None:
    misused(
        *("convert", tiny, "--method", "gptq", "--out", "out", "--grup-size", "64"),
        says=("no such option --grup-size", "Did you mean '--group-size'?", "--desc-act"),
    )


def test_option_without_its_value(tiny: Path) -> None:
    says = ("--group-size", "requires an argument")
    misused("convert", tiny, "--method", "rtn", "--out", "out", "--group-size", says=says)


def test_option_with_a_wrong_value(tiny: Path) -> None:
    refused_convert(tiny, "--method", "rtn", "--group-size", "perhaps", says=("= 'perhaps'", "valid integer"))
    misused("convert", tiny, "--method", "gptq", "--damp-percent", "much", says=("--damp-percent", "valid number"))
    misused("convert", tiny, "--method", "rtn", "--sym", "perhaps", says=("unexpected extra argument", "perhaps"))


def test_unknown_option_of_a_command(tiny: Path) -> None:
    misused("eval", tiny, "--limt", "3", says=("--limt", "--limit"))


def test_unknown_command() -> None:
    misused("frobnicate", says=("frobnicate",))


def test_missing_method(tiny: Path) -> None:
    misused("convert", tiny, says=("--method",))


# The checkpoint


@pytest.mark.parametrize("model", ["./nowhere", "some/where/else", "/nowhere"])
def test_missing_folder(model: str) -> None:
    refused_convert(model, "--method", "rtn", says=(f"the folder {model} does not exist", "hub id, or 'demo'"))


def test_checkpoint_without_config(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / "config.json").unlink()
    refused_convert(folder, "--method", "rtn", says=("model has no config.json", "Give the folder that holds it"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no object of keys and values"),
        ('{"hidden_size": 128}', "names no model_type"),
    ],
)
def test_config_that_is_none(text: str, says: str, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / "config.json").write_text(text)
    refused_convert(folder, "--method", "rtn", says=(says, "config.json"))


def shard_index(folder: Path, content: object) -> Path:
    values = {"metadata": {}, **content} if isinstance(content, dict) else content
    (folder / "model.safetensors.index.json").write_text(json.dumps(values))
    return folder


def test_missing_shard(tiny: Path) -> None:
    folder = shard_index(changed_copy(tiny, Path("model")), {"weight_map": {"a": "model-00002-of-00002.safetensors"}})
    refused_convert(
        folder, "--method", "rtn", says=("lacks the shard model-00002-of-00002.safetensors", "Fetch it again")
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "outside its folder"),
        ({"weight_map": {"a": 3}}, "outside its folder"),
        ({"weight_map": {"a": "a" * 300}}, "outside its folder"),
        ({"weight_map": None}, "not a valid shard index"),
        ({"weight_map": {"a": "model.safetensors"}, "metadata": "none"}, "not a valid shard index"),
        ({"weight_map": {}}, "not a valid shard index"),
        ([], "holds no object of keys and values"),
    ],
)
def test_garbage_shard_index(content: object, says: str, tiny: Path) -> None:
    refused_convert(shard_index(changed_copy(tiny, Path("model")), content), "--method", "rtn", says=(says,))


def test_truncated_shard(tiny: Path) -> None:
    path = changed_copy(tiny, Path("model")) / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    says = (f"truncated: {size - 100} bytes", str(size), "Fetch the file again")
    refused_convert("./model", "--method", "rtn", says=says)


def test_tensor_in_two_shards(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    names = read_header(folder / "more.safetensors")
    shard_index(folder, {"weight_map": dict.fromkeys(names, "first.safetensors") | {"b": "more.safetensors"}})
    refused_convert(
        folder,
        "--method",
        "rtn",
        says=("model.embed_tokens.weight twice", "in first.safetensors and in more.safetensors"),
    )


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated (0 bytes)"),
        (b"abc", "truncated (3 bytes)"),
        (b"\xff" * 1000, "not a safetensors file"),
        (header(b'{"a": '), "broken safetensors header"),
        (header(b"\xff\xfe{}"), "broken safetensors header"),
        (header(b"[1, 2]"), "broken safetensors header"),
        (header(b'{"a": 1}'), "broken header entry for a"),
        (header(b'{"a": {"dtype": "F16", "shape": [2]}}'), "broken header entry for a"),
        (header(b'{"a": {"dtype": "F8", "shape": [2], "data_offsets": [0, 2]}}'), "the type F8"),
        (header(b'{"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 2]}}'), "do not match its shape"),
        (header(b'{"a": {"dtype": "F16", "shape": [2], "data_offsets": [-4, 0]}}'), "broken header entry for a"),
        (header(b'{"b": 1, "a": 2, "a": 3}'), "holds the tensor a twice"),
    ],
)
def test_garbage_shard_header(data: bytes, says: str, tiny: Path) -> None:
    path = changed_copy(tiny, Path("model")) / "model.safetensors"
    path.write_bytes(data)
    refused_convert("./model", "--method", "rtn", says=("model.safetensors", says))


def test_pickle_only_checkpoint(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused_convert(folder, "--method", "rtn", says=("pytorch_model.bin", "can run code", "safetensors"))


def test_checkpoint_without_weights(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / "model.safetensors").unlink()
    refused_convert(folder, "--method", "rtn", says=("holds no model.safetensors",))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(method: str, value: float, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"), lambda tensors: tensors[UP].view(-1)[5:7].fill_(value))
    refused_convert(
        *(folder, "--method", method, *CALIBRATION_FLAGS),
        says=(f"the tensor {UP} in model.safetensors holds 2 NaN or infinite values", "fetch it again"),
    )


def test_tensor_that_the_config_asks_for_is_missing(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"), lambda tensors: tensors.pop(UP))
    for method in METHODS:
        refused_convert(folder, "--method", method, *CALIBRATION_FLAGS, says=(UP,))


def test_config_of_another_model(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"), intermediate_size=128)
    refused_convert(folder, "--method", "rtn", says=("(256, 128)", "(128, 128)", "config.json that belongs"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "gptq"}, ("does not say how many bits", "Fetch the checkpoint again")),
        ({"quant_method": "mxfp4"}, ("quantized (mxfp4), and no tensor is", "Take quantization_config out")),
        ({"quant_method": "hqq"}, ("already quantized ('hqq'", "Give the unquantized model")),
        ({}, ("already quantized ({})", "Give the unquantized model")),
        ("nonsense", ("already quantized ('nonsense')", "Give the unquantized model")),
    ],
)
def test_source_that_is_quantized_in_a_way_that_is_not_known(
    settings: object, says: tuple[str, ...], tiny: Path
) -> None:
    folder = changed_copy(tiny, Path("model"), quantization_config=settings)
    refused_convert(folder, "--method", "rtn", says=says)


def test_empty_quantization_config_is_none(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"), quantization_config=None)
    assert quantkit("convert", folder, "--method", "rtn", "--out", "out").code == 0


@pytest.mark.parametrize("method", ["rtn", "gptq", "nf4", "ctranslate2"])
def test_config_that_brings_code(method: str, tiny: Path) -> None:
    code = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    folder = changed_copy(tiny, Path("model"), model_type="zamboni", auto_map=code)
    # What CTranslate2's converter takes is told before transformers is asked what it knows.
    says = ("no loader",) if method == "ctranslate2" else ("brings its own code", "does not run")
    refused_convert(folder, "--method", method, says=says)


@pytest.mark.parametrize(
    ("config", "says"),
    [({"model_type": "zamboni"}, "zamboni"), ({"num_hidden_layers": "many"}, "num_hidden_layers")],
)
def test_config_that_transformers_cannot_read(config: dict[str, Any], says: str, tiny: Path) -> None:
    refused_convert(changed_copy(tiny, Path("model"), **config), "--method", "rtn", says=(says,))


def foreign_model(kind: str) -> Path:
    sizes = {"vocab_size": 304, "bos_token_id": 1, "eos_token_id": 2}
    plain = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if kind == "opt":
        model = transformers.OPTForCausalLM(
            transformers.OPTConfig(**plain, ffn_dim=128, word_embed_proj_dim=64, **sizes)
        )
    elif kind == "mamba":
        model = transformers.MambaForCausalLM(
            transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, state_size=8, **sizes)
        )
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**plain, **sizes))
    else:
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, **sizes)
        )
    model.save_pretrained(kind)
    save_tokenizer(Path(kind))
    return Path(kind)


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [("opt", ["gguf"]), ("bert", METHODS), ("t5", METHODS)],
)
def test_architecture_that_a_method_lacks(kind: str, lacking: list[str]) -> None:
    folder = foreign_model(kind)
    for method in lacking:
        refused_convert(folder, "--method", method, *CALIBRATION_FLAGS, says=("UnsupportedError",))


def test_gguf_says_which_architectures_it_knows() -> None:
    says = ("'opt'", "mistral, ministral, ", ", qwen2, qwen3, ", "Methods that take this model: ", "gptq:4")
    refused_convert(foreign_model("opt"), "--method", "gguf", says=says)


def test_a_layer_whose_weight_is_read_past_it_is_refused() -> None:
    says = ("'mamba'", "dt_proj.weight past its layer")
    refused_convert(foreign_model("mamba"), "--method", "rtn", says=says)


# Shapes


@pytest.fixture(scope="module")
def model_of_576(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 576, "intermediate_size": 576, "num_hidden_layers": 1}
    folder = tmp_path_factory.mktemp("models") / "wide"
    return save_tiny(folder, num_attention_heads=9, num_key_value_heads=3, **sizes)


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_group_size_that_does_not_divide(method: str, model_of_576: Path) -> None:
    refused_convert(
        *(model_of_576, "--method", method, "--group-size", "128"),
        says=("group_size 128 does not divide the 576 input columns", ": 64, 32;", "-1 (the whole row)", "vLLM"),
    )


@pytest.mark.parametrize("size", ["0", "-64"])
def test_group_size_that_is_no_size(size: str, tiny: Path) -> None:
    refused_convert(tiny, "--method", "rtn", "--group-size", size, says=(f"group_size {size}", "128, 64, 32"))


def test_gguf_tells_how_many_tensors_fell_back(model_of_576: Path) -> None:
    ended = quantkit("convert", model_of_576, "--method", "gguf", "--bits", "Q4_K_M", "--out", "out")
    assert (ended.code, ended.err) == (0, "")
    note = "8 of 11 tensors have rows that are no multiple of 256: 5 Q4_K -> Q5_0, 3 Q6_K -> Q8_0"
    assert f"note: {note}" in ended.out
    manifest = json.loads(Path("out/quantkit.json").read_text())
    assert manifest["notes"] == [note]
    assert manifest["tensor_types"] == {"F32": 3, "Q5_0": 5, "Q8_0": 3}


# Texts


def test_calibration_text_that_is_too_short(tiny: Path) -> None:
    Path("short.txt").write_text("A short text. " * 20)
    refused_convert(
        *(tiny, "--method", "gptq", "--calibration-text", "short.txt"),
        says=("short.txt is too short", "0 of the asked 64 sequences of 512", "longer text or fewer sequences"),
    )


def test_evaluation_text_that_is_too_short(tiny: Path) -> None:
    Path("short.txt").write_text("hello")
    refused(
        "eval-ppl", tiny, "--text", "short.txt", says=("short.txt is too short", "2 windows of 512", "longer --text")
    )
    with_papers = ("short.txt is too short", "1 windows of 2048")
    refused("eval-ppl", tiny, "--text", "short.txt", "--protocol", "papers", says=with_papers)


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "--out", "out", "--method", "gptq", "--calibration-text"),
        ("eval-ppl", "--text"),
        ("eval", "--text"),
        ("compare", "--methods", "rtn", "--text"),
        ("compare", "--methods", "gptq", "--calibration-text"),
    ],
)
def test_text_that_cannot_be_read(command: tuple[str, ...], tiny: Path) -> None:
    Path("latin.txt").write_bytes("Blåbær".encode("latin-1"))
    Path("folder").mkdir()
    name, *flags = command
    refused(name, tiny, *flags, "missing.txt", says=("the text file missing.txt does not exist",))
    refused(name, tiny, *flags, "folder", says=("the text file folder does not exist",))
    refused(name, tiny, *flags, "latin.txt", says=("latin.txt is not UTF-8 text (byte 2)", "Save it as UTF-8"))


# The output


def test_output_that_exists_is_kept(tiny: Path) -> None:
    Path("out").mkdir()
    Path("out/diary.txt").write_text("dear diary")
    refused_convert(tiny, "--method", "rtn", says=("the output out exists", "--force"))
    refused_convert(tiny, "--method", "rtn", "--force", says=("replaces only artifacts of quantkit, and out is none",))
    assert Path("out/diary.txt").read_text() == "dear diary"


def test_output_that_is_a_file_is_kept(tiny: Path) -> None:
    Path("out").write_text("text")
    refused_convert(tiny, "--method", "rtn", "--force", says=("out is none", "Choose another --out"))
    assert Path("out").read_text() == "text"


def test_force_replaces_an_artifact(tiny: Path) -> None:
    convert(str(tiny), "rtn", 8, "out")
    Path("out/stray.txt").write_text("gone with the artifact")
    refused_convert(tiny, "--method", "rtn", says=("--force",))
    assert quantkit("convert", tiny, "--method", "rtn", "--out", "out", "--force").code == 0
    assert json.loads(Path("out/quantkit.json").read_text())["recipe"]["bits"] == "4"
    assert not Path("out/stray.txt").exists()


def test_json_file_in_a_missing_folder(tiny: Path) -> None:
    misused(
        *("convert", tiny, "--method", "rtn", "--out", "out", "--json", "no/where.json"),
        says=("the folder of no/where.json does not exist",),
    )


def test_disk_that_is_too_small(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    refuse_small_disk(tmp_path / "not" / "made", free // 2)
    with pytest.raises(OutputError, match=r"is too small: .* GB needed, .* GB free. Free some space"):
        refuse_small_disk(tmp_path / "not" / "made", free * 2)


@pytest.mark.parametrize("method", ["gguf", "rtn", "gptq"])
def test_disk_that_fills_up_meanwhile(method: str, tiny: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands for a full disk; both come as an OSError of the write."""
    flags = ["--group-size", "32"] if method != "gguf" else ["--bits", "F16"]
    calibration = CALIBRATION_FLAGS if method == "gptq" else []
    command = ["convert", str(tiny), "--method", method, *flags, "--out", "out", *map(str, calibration)]
    child = started(command, tmp_path / "log", partial(setrlimit, RLIMIT_FSIZE, (100_000, 100_000)))
    stderr = " ".join(child.wait().split())
    assert child.code == 1
    assert "Traceback" not in stderr
    assert "was full while out.partial was written" in stderr
    assert "Make room" in stderr
    assert not Path("out").exists()
    assert Path("out.partial").exists() == (method != "gguf")  # finished tensors are kept, and it is told
    assert ("kept in out.partial" in stderr) == (method != "gguf")


def test_artifact_that_no_disk_holds_is_refused_before_a_byte_is_read(tiny: Path) -> None:
    rows, blocks = 1 << 24, 100  # 4 GB for each tensor of the wide layers
    folder = changed_copy(tiny, Path("model"), intermediate_size=rows, num_hidden_layers=blocks)
    old = (folder / "model.safetensors").read_bytes()
    entries = json.loads(old[8 : 8 + struct.unpack("<Q", old[:8])[0]])
    wide = {"gate_proj": [rows, 128], "up_proj": [rows, 128], "down_proj": [128, rows]}
    names = [name for name in entries if not name.startswith(("model.layers.", "__metadata__"))]
    first = [name for name in entries if name.startswith("model.layers.0.")]
    names += [name.replace(".0.", f".{block}.") for block in range(blocks) for name in first]
    start, tensors = 0, {}
    for name in names:
        own = re.sub(r"layers\.\d+", "layers.0", name)
        shape = wide.get(name.split(".")[-2], entries[own]["shape"])
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = header(json.dumps(tensors).encode())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(text)
        try:
            file.truncate(len(text) + start)
        except OSError as error:
            pytest.skip(f"the file system takes no sparse file of {start / 1e12:.0f} TB: {error}")
    refused_convert(folder, "--method", "gguf", "--bits", "F16", says=("too small: 1288.5", "GB needed", "--out"))


# The artifact


@pytest.fixture(scope="module")
def artifact(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return convert(str(tiny), "rtn", out=tmp_path_factory.mktemp("artifacts") / "rtn")


def refused_artifact(folder: Path, says: tuple[str, ...]) -> None:
    refused("verify", folder, says=("ArtifactError", *says))
    refused("eval-ppl", folder, *EVALUATION_FLAGS, says=("ArtifactError", *says))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "config"])
def test_corrupted_artifact(damage: str, artifact: Artifact) -> None:
    folder = Path(shutil.copytree(artifact.folder, "broken"))
    path = folder / ("config.json" if damage == "config" else "model.safetensors")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data[:-1] if damage == "truncate" else data)
    if damage == "remove":
        path.unlink()
        refused_artifact(folder, ("broken lacks the file model.safetensors", "Convert again"))
    else:
        refused_artifact(folder, (f"{path.name} is corrupted", "Convert again"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (None, "{", "quantkit.json is not valid JSON"),
        (None, "[]", "quantkit.json holds no object"),
        (None, "{}", "'recipe' is missing"),
        ("files", {"../evil": {"bytes": 1, "sha256": "0" * 64}}, "'../evil' outside its folder"),
        ("weight_files", ["/etc/hosts"], "'/etc/hosts' outside its folder"),
        ("weight_files", ["other.safetensors"], "its weight files have no hashes"),
        ("weight_files", [], "its weight files have no hashes"),
        ("schema_version", 2, "schema_version = 2"),
        ("surprise", 1, "unknown key 'surprise'"),
    ],
)
def test_manifest_that_is_garbage(key: str | None, value: Any, says: str, artifact: Artifact) -> None:
    folder = Path(shutil.copytree(artifact.folder, "broken"))
    manifest = folder / "quantkit.json"
    text = value if key is None else json.dumps(json.loads(manifest.read_text()) | {key: value})
    manifest.write_text(text)
    refused_artifact(folder, (says,))


def test_weights_that_read_back_as_nan(artifact: Artifact) -> None:
    folder = Path(shutil.copytree(artifact.folder, "broken"))
    path, manifest = folder / "model.safetensors", folder / "quantkit.json"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})  # as many bytes as before
    values = json.loads(manifest.read_text())
    values["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest.write_text(json.dumps(values))
    refused("verify", folder, says=("the tensor model.norm.weight reads back with NaN",))
    refused("eval-ppl", folder, *EVALUATION_FLAGS, says=("EngineError", "rtn-4", "NaN or infinite values"))


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_folder_that_is_no_artifact(command: str, tiny: Path) -> None:
    refused(command, "nowhere", says=("the artifact nowhere does not exist", "quantkit convert MODEL --out nowhere"))
    refused(command, tiny, says=("holds no quantkit.json",))


# What is measured


def test_unknown_protocol(tiny: Path) -> None:
    says = ("unknown protocol 'paper'", "Did you mean 'papers'?", "llama.cpp")
    refused("eval-ppl", tiny, "--text", SAMPLE, "--protocol", "paper", says=says)


def test_unknown_probe(tiny: Path) -> None:
    says = ("unknown probe 'perplexty'", "Did you mean 'perplexity'?", "memory")
    refused("eval", tiny, "--text", SAMPLE, "--probes", "size,perplexty", says=says)


def test_unknown_runtime(tiny: Path) -> None:
    refused("eval", tiny, "--text", SAMPLE, "--engine", "llama", says=("unknown engine", "Did you mean 'llamacpp'?"))


def test_runtime_that_cannot_open_it(tiny: Path) -> None:
    refused("eval-ppl", tiny, "--text", SAMPLE, "--engine", "llamacpp", says=("cannot open bfloat16", "GGUF files"))


@pytest.mark.parametrize("name", ["transformers", "reference", "llamacpp"])
def test_unknown_dtype(name: str, tiny: Path) -> None:
    with pytest.raises(RecipeError, match=r"dtype 'float8'"):
        find_engine(name).refuse("float8", "cpu")


@pytest.mark.parametrize("threads", ["many", "1,,2", "1.5"])
def test_threads_that_are_no_numbers(threads: str, tiny: Path) -> None:
    misused("eval", tiny, "--threads", threads, says=(f"--threads {threads}", "whole numbers, such as 1,2"))


@pytest.mark.parametrize("count", [0, -1, 9999])
def test_more_threads_than_cores(count: int, tiny: Path) -> None:
    cores = usable_cores()
    says = (f"threads {count}:", f"{cores} usable cores", f"from 1 to {cores}")
    refused("eval", tiny, "--text", SAMPLE, "--threads", count, says=says)


@pytest.mark.parametrize(("flag", "value"), [("--limit", 0), ("--n-ctx", 4)])
def test_windows_of_no_size(flag: str, value: int, tiny: Path) -> None:
    says = (f"{flag.strip('-').replace('-', '_')} = {value}", "greater than or equal to")
    refused("eval-ppl", tiny, "--text", SAMPLE, flag, value, says=says)


# Recipes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modl: demo\nmethod: rtn", ("unknown key 'modl'", "Did you mean 'model'?")),
        ("model: demo", ("the key 'method' is missing",)),
        ("model: demo\nmethod: rtn\nbits: [4]", ("bits = [4] cannot be used",)),
        (
            "model: demo\nmethod: rtn\noptions: {grup_size: 4}",
            ("unknown key 'grup_size'", "Did you mean 'group_size'?"),
        ),
        (
            "model: demo\nmethod: rtn\ncalibration: {sequenses: 4}",
            ("unknown key 'calibration.sequenses'", "Did you mean 'sequences'?", "Known keys: text, sequences, length"),
        ),
        ("model: demo\nvariants: [{method: rtn, bit: 4}]", ("unknown key 'variants.0.bit'", "Did you mean 'bits'?")),
        ("model: demo\nvariants: [rtn]", ("variants.0 = 'rtn' cannot be used",)),
        ("model: [\n", ("not valid YAML",)),
        ("- a\n- b", ("must hold keys and values, such as 'model: demo'",)),
        ("", ("must hold keys and values",)),
    ],
)
def test_recipe_that_cannot_be_used(text: str, says: tuple[str, ...]) -> None:
    Path("recipe.yaml").write_text(text)
    refused("run", "recipe.yaml", says=("RecipeError", *says))


def test_missing_recipe() -> None:
    refused("run", "missing.yaml", says=("the recipe missing.yaml does not exist",))


# Missing packages, and the command in a process of its own

HIDDEN = '''
import os, sys

class Without:
    """A finder of modules and distributions that does not see some packages."""

    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN_MODULES"].split(","):
            return None
        return self._finder.find_spec(name, path, target)

    def find_distributions(self, context):
        if (context.name or "").replace("-", "_") in os.environ["HIDDEN_MODULES"].split(","):
            return iter(())
        return getattr(self._finder, "find_distributions", lambda _: iter(()))(context)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
'''


@pytest.fixture
def without_packages(tmp_path: Path) -> dict[str, str]:
    """The environment of a process where the optional packages are not installed."""
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDDEN)
    hidden = "bitsandbytes,ctranslate2,llama_cpp,llama_cpp_python,datasets"
    paths = [str(tmp_path / "hide"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "HIDDEN_MODULES": hidden}


def test_help_works_without_the_optional_packages(without_packages: dict[str, str]) -> None:
    ended = command_line("convert", "--help", **without_packages)
    assert (ended.returncode, ended.stderr) == (0, "")
    for method in METHODS:
        assert f"{method}: bits" in ended.stdout


@pytest.mark.parametrize(("method", "package"), [("nf4", "bitsandbytes"), ("ctranslate2", "ctranslate2")])
def test_missing_package_of_a_method(
    method: str, package: str, tiny: Path, tmp_path: Path, without_packages: dict[str, str]
) -> None:
    ended = command_line("convert", tiny, "--method", method, "--out", tmp_path / "out", **without_packages)
    assert_refusal(ended.returncode, ended.stderr, (f"the package {package}", f"pip install 'quantkit[{package}]'"))
    assert not (tmp_path / "out").exists()


def test_missing_engine(tiny: Path, tmp_path: Path, without_packages: dict[str, str]) -> None:
    made = convert(str(tiny), "gguf", out=tmp_path / "gguf")
    ended = command_line("eval-ppl", made.folder, *EVALUATION_FLAGS, **without_packages)
    assert_refusal(
        ended.returncode, ended.stderr, ("llamacpp", "pip install 'quantkit[llamacpp]'", "--engine reference")
    )


def test_compare_asks_for_every_engine_first(tiny: Path, tmp_path: Path, without_packages: dict[str, str]) -> None:
    ended = command_line(
        *("compare", tiny, "--methods", "rtn,gguf", *EVALUATION_FLAGS, "--out", tmp_path / "out"), **without_packages
    )
    assert_refusal(ended.returncode, ended.stderr, ("pip install 'quantkit[llamacpp]'",))
    assert not (tmp_path / "out").exists()


def test_the_command_ends_with_its_codes(tiny: Path, tmp_path: Path) -> None:
    ended = command_line("convert", tiny, "--method", "gptk", "--out", tmp_path / "out")
    assert_refusal(ended.returncode, ended.stderr, ("unknown method 'gptk'",))
    ended = command_line("convert", "--methd", "rtn")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []
