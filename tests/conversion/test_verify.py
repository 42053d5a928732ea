"""verify believes neither manifest nor files: what one says is held against the other, and against the model."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, save_tiny

from quantkit import verify
from quantkit.artifact import MANIFEST, open_artifact
from quantkit.conversion.agreement import refuse_untrue
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError
from quantkit.formats.gguf.header import BOOL, read_header
from quantkit.numerics.normal_float import STATE
from quantkit.system.files import sha256_of

METHODS = {
    "rtn": "4", "gptq": "4", "awq": "4", "nf4": "4", "gguf": "Q4_K_M", "ctranslate2": "int8", "float": "float16"
}  # fmt: skip
LAYER = "model.layers.1.mlp.up_proj"
NORM, EMBEDDING = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
Values = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An artifact of each method, `rtn` with zero points too, and files of other models and bits."""
    folder = tmp_path_factory.mktemp("artifacts")
    tiny, shorter = save_tiny(folder / "tiny"), save_tiny(folder / "shorter", num_hidden_layers=2)
    for method, bits in METHODS.items():
        convert(str(tiny), method, bits, folder / method, calibration=CALIBRATION)
    convert(str(tiny), "gguf", "Q8_0", folder / "gguf Q8_0")
    convert(str(tiny), "ctranslate2", "float16", folder / "ctranslate2 float16")
    for method in ("gguf", "ctranslate2"):
        convert(str(shorter), method, METHODS[method], folder / f"{method} shorter")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made[name], tmp_path / "out"))


def edit_json(path: Path, change: Callable[[Values], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def rehash(folder: Path) -> None:
    """Make the manifest fit the files' bytes again, as someone would who wants to be believed."""

    def change(values: Values) -> None:
        for name in values["files"]:
            path = folder / name
            values["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        values["weight_bytes"] = sum(values["files"][name]["bytes"] for name in values["weight_files"])
        values["bits_per_weight"] = 8 * values["weight_bytes"] / values["source"]["parameters"]

    edit_json(folder / MANIFEST, change)


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    rehash(folder)


def refused(folder: Path, *says: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        verify(folder)
    for part in says:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_made_is_believed_also_with_fresh_hashes(method: str, copied: Callable[[str], Path]) -> None:
    folder = copied(method)
    rehash(folder)
    verify(folder)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("gpt2", method) for method in ("rtn", "nf4", "float", "gguf")),
        *(("mixtral", method) for method in ("rtn", "float", "gguf")),
        ("gpt_neox, tied", "gguf"),  # llama.cpp wants a head of its own there
        ("gpt_neox, tied", "rtn"),
    ],
)
def test_models_whose_files_have_other_names_and_shapes_are_believed(name: str, method: str, tmp_path: Path) -> None:
    save_architecture(tmp_path / "model", name)
    verify(convert(str(tmp_path / "model"), method, out=tmp_path / "out").folder)


# The manifest


def put(*place: str, value: Any) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        for key in place[:-1]:
            values = values[key]
        assert repr(values.get(place[-1])) != repr(value)
        values[place[-1]] = value

    return change


def double_parameters(values: Values) -> None:
    values["source"]["parameters"] *= 2
    values["bits_per_weight"] /= 2


def halve_parameters(values: Values) -> None:
    values["source"]["parameters"] //= 2
    values["bits_per_weight"] *= 2


EDITS: list[tuple[str, Callable[[Values], object], str]] = [
    ("gptq", put("recipe", "method", value="nf4"), "the method nf4 makes normal float"),
    ("gptq", put("recipe", "method", value="rtn"), "the method rtn has no option"),
    ("rtn", put("recipe", "method", value="gptq"), "it tells of no calibration"),
    ("rtn", put("recipe", "method", value="magic"), "unknown method 'magic'"),
    ("rtn", put("format", value="awq"), "it says that the files are awq, and they are not"),
    ("awq", put("format", value="gptq"), "it says that the files are gptq, and they are not"),
    ("rtn", put("format", value="magic"), "unknown format 'magic'"),
    ("gptq", put("calibration_sha256", value=None), "it tells of no calibration"),
    ("rtn", put("calibration_sha256", value="0" * 64), "it tells of a calibration"),
    ("rtn", put("recipe", "bits", value="8"), "bits is '8' there, and the files say '4'"),
    ("rtn", put("recipe", "bits", value="5"), "has no bits '5'"),
    ("nf4", put("recipe", "bits", value="8"), "has no bits '8'"),
    ("gguf", put("recipe", "bits", value="Q8_0"), "bits is 'Q8_0' there, and the files say 'Q4_K_M'"),
    ("ctranslate2", put("recipe", "bits", value="float16"), "bits is 'float16' there"),
    ("float", put("recipe", "bits", value="bfloat16"), "bits is 'bfloat16' there, and the files say 'float16'"),
    ("rtn", put("options", "group_size", value=64), "group_size is 64 there, and the files say 128"),
    ("rtn", put("options", "sym", value=False), "sym is False there, and the files say True"),
    ("gptq", put("options", "desc_act", value=True), "desc_act is True there, and the files say False"),
    ("gptq", put("options", "damp_percent", value=7), "damp_percent"),
    ("awq", put("options", "group_size", value=32), "group_size is 32 there, and the files say 128"),
    ("nf4", put("options", "double_quant", value=False), "double_quant is False there"),
    ("nf4", put("options", "compute_dtype", value="float16"), "compute_dtype is 'float16' there"),
    ("gguf", put("options", "vocab_only", value=True), "vocab_only is True there"),
    ("rtn", put("recipe", "options", value={"sym": False}), "sym = False was asked for, and True made"),
    ("rtn", put("recipe", "options", value={"sim": False}), "sim"),
    *((method, put("tensor_types", value={"int2": 3}), "it counts 3 int2, and the files hold") for method in METHODS),
    *((method, put("source", "config", "num_hidden_layers", value=1), "") for method in METHODS),
    *((method, double_parameters, "parameters of the source") for method in METHODS),
    *((method, halve_parameters, "parameters of the source") for method in METHODS),
    ("rtn", put("source", "config", "rms_norm_eps", value=0.5), "rms_norm_eps is 0.5 in its source.config"),
    ("rtn", put("source", "config", "num_attention_heads", value=-1), "num_attention_heads is -1"),
    ("rtn", put("weight_bytes", value=5), "weight_bytes is 5"),
    ("rtn", put("bits_per_weight", value=0.1), "bits_per_weight is 0.1"),
    ("rtn", put("weight_files", value=["config.json"]), "its weight files are not those of the format gptq"),
    ("rtn", put("weight_files", value=["model.safetensors"] * 2), "its weight files are not those of the format gptq"),
    ("gguf", put("weight_files", value=[]), "its weight files have no hashes"),
    ("gguf", put("weight_files", value=["tokenizer.json"]), "its weight files are not those of the format gguf"),
]


@pytest.mark.parametrize(("method", "change", "says"), EDITS)
def test_a_manifest_that_does_not_tell_the_truth_is_refused(
    method: str, change: Callable[[Values], object], says: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(method)
    edit_json(folder / MANIFEST, change)
    refused(folder, says)


# Tensors, with fresh hashes


def cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def set_values(name: str, value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)})


def first_value(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    return change


def remove(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def add(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def shorten(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name][1:]})


def turn(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].T})


SAFETENSORS = ("rtn", "awq", "nf4", "float")
DAMAGE: list[tuple[str, Callable[[Tensors], object], str]] = [
    *((method, remove(EMBEDDING), "and the files hold") for method in SAFETENSORS),
    *((method, shorten(NORM), "has the shape (127,), not (128,)") for method in SAFETENSORS),
    *((method, add("model.extra.weight", torch.ones(3)), "and the files hold") for method in SAFETENSORS),
    *((method, cast(NORM, torch.float32), "and the files hold") for method in SAFETENSORS),
    *((method, cast(NORM, torch.int32), "and the files hold") for method in SAFETENSORS),
    *((method, first_value(NORM, float("nan")), "NaN or infinite") for method in SAFETENSORS),
    ("float", turn(f"{LAYER}.weight"), "has the shape (128, 256), not (256, 128)"),
    *(
        (method, change, says)
        for method in ("rtn", "awq")
        for change, says in (
            (remove(f"{LAYER}.qzeros"), f"lacks the tensor {LAYER}.qzeros"),
            (remove(f"{LAYER}.qweight"), "without its qweight"),
            (cast(f"{LAYER}.qweight", torch.int64), "qweight is int64, not int32"),
            (cast(f"{LAYER}.scales", torch.float32), "scales is float32, not float16"),
            (shorten(f"{LAYER}.scales"), "'scales': (0, 256)"),
            (shorten(f"{LAYER}.qzeros"), "'qzeros': (0, 32)"),
            (shorten(f"{LAYER}.qweight"), "do not fit"),
            (turn(f"{LAYER}.qweight"), "do not fit"),
            (set_values(f"{LAYER}.scales", 0.0), "scales that are 0 or not finite"),
            (first_value(f"{LAYER}.scales", float("nan")), "scales that are 0 or not finite"),
        )
    ),
    ("rtn", remove(f"{LAYER}.g_idx"), f"lacks the tensor {LAYER}.g_idx"),
    ("rtn", first_value(f"{LAYER}.g_idx", 1), "columns of other groups"),
    ("rtn", first_value(f"{LAYER}.g_idx", -1), "columns of other groups"),
    ("rtn", first_value("model.layers.1.mlp.down_proj.g_idx", 1), "do not lie side by side"),
    ("rtn", set_values(f"{LAYER}.qzeros", 0), "is not symmetric"),
    ("nf4", remove(f"{LAYER}.weight.absmax"), "its absmax is missing"),
    ("nf4", remove(f"{LAYER}.weight"), "without its codes"),
    ("nf4", cast(f"{LAYER}.weight.absmax", torch.float32), "its absmax has"),
    ("nf4", shorten(f"{LAYER}.weight.absmax"), "its absmax has 511 values"),
    ("nf4", shorten(f"{LAYER}.weight.nested_absmax"), "its nested_absmax has 1 values"),
    ("nf4", set_values(f"{LAYER}.weight.quant_map", 1.0), "is not the table of nf4"),
    ("nf4", shorten(f"{LAYER}.weight"), "are no codes for the shape"),
]


@pytest.mark.parametrize(("method", "change", "says"), DAMAGE)
def test_damaged_tensors_are_refused_though_their_hashes_are_right(
    method: str, change: Callable[[Tensors], object], says: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(method)
    edit_tensors(folder, change)
    refused(folder, says)


@pytest.mark.parametrize("method", SAFETENSORS)
@pytest.mark.parametrize(
    ("change", "count", "says"),
    [
        (remove(EMBEDDING), -1, f"lacks the tensor {EMBEDDING}"),
        (remove(NORM), -1, f"lacks the tensor {NORM}"),
        (add("model.extra.weight", torch.ones(3)), 1, "holds the tensor model.extra.weight, which the model does not"),
        (add("layers.1.input_layernorm.weight", torch.ones(128)), 1, "holds the tensor"),
        (cast(NORM, torch.float32), 0, "holds tensors in float32, and its config.json says"),
    ],
)
def test_nor_does_it_help_to_count_them_anew(
    method: str, change: Callable[[Tensors], object], count: int, says: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(method)
    dtype = json.loads((folder / "config.json").read_text())["dtype"]

    def in_its_dtype(tensors: Tensors) -> None:
        before = set(tensors)
        change(tensors)
        tensors.update({name: tensors[name].to(getattr(torch, dtype)) for name in tensors.keys() - before})

    def recount(values: Values) -> None:
        values["tensor_types"][dtype] += count
        if count == 0:
            values["tensor_types"][dtype] -= 1
            values["tensor_types"]["float32"] = 1

    edit_tensors(folder, in_its_dtype)
    edit_json(folder / MANIFEST, recount)
    refused(folder, says)


STATES: list[Any] = [
    b"\xff", b"[1]", b"{}", b"[" * 90_000, {"shape": [2**62, 2**62]}, {"shape": [256]}, {"shape": [-256, -128]},
    {"shape": "256"}, {"shape": [256, 127]}, {"blocksize": 0}, {"blocksize": 10**12}, {"blocksize": None},
    {"blocksize": 32}, {"nested_blocksize": -1}, {"nested_offset": float("nan")}, {"nested_offset": "1"},
    {"nested_offset": None}, {"quant_type": "fp4"},
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: str(state)[:30])
def test_a_damaged_state_of_nf4_is_refused(state: Any, copied: Callable[[str], Path]) -> None:
    folder, name = copied("nf4"), f"{LAYER}.weight.{STATE}"

    def change(tensors: Tensors) -> None:
        data = state
        if isinstance(state, dict):
            data = json.dumps(json.loads(bytes(tensors[name].tolist())) | state).encode()
        tensors[name] = torch.tensor(list(data), dtype=torch.uint8)

    edit_tensors(folder, change)
    refused(folder, f"{LAYER}.weight cannot be read")


# Other files, with fresh hashes


def put_at(tokens: Any, place: int, value: Any) -> None:
    tokens[place] = value


SETTINGS: list[tuple[str, str, Callable[[Values], object], str]] = [
    ("rtn", "quantize_config.json", put("sym", value=False), "sym is False, and True in config.json"),
    ("rtn", "quantize_config.json", put("bits", value=8), "bits is 8, and 4 in config.json"),
    ("rtn", "config.json", put("quantization_config", "bits", value=8), "and the files hold"),
    ("rtn", "config.json", put("quantization_config", "bits", value="x"), "bits is 'x', not a whole number"),
    ("rtn", "config.json", put("quantization_config", "bits", value=5), "does not say how many bits"),
    ("rtn", "config.json", put("quantization_config", "group_size", value=64), "group_size"),
    ("rtn", "config.json", put("quantization_config", "group_size", value=[]), "group_size is [], not a whole"),
    ("rtn", "config.json", put("quantization_config", "sym", value=False), "sym"),
    ("rtn", "config.json", put("quantization_config", "desc_act", value=True), "desc_act"),
    ("rtn", "config.json", put("quantization_config", value=5), "it says that the files are gptq, and they are not"),
    ("rtn", "config.json", put("dtype", value="float32"), "holds tensors in float16, and its config.json says"),
    ("awq", "config.json", put("quantization_config", "group_size", value=64), "group_size"),
    ("nf4", "config.json", put("quantization_config", "bnb_4bit_quant_type", value="fp4"), "4-bit NormalFloat"),
    ("nf4", "config.json", put("quantization_config", "bnb_4bit_compute_dtype", value="float16"), "float16"),
    ("nf4", "config.json", put("quantization_config", "load_in_4bit", value=False), "4-bit NormalFloat"),
    ("float", "config.json", put("dtype", value="bfloat16"), "holds tensors in float16"),
    ("ctranslate2", "config.json", lambda values: values.pop("unk_token"), "unk_token is None"),
    ("ctranslate2", "config.json", put("layer_norm_epsilon", value="1e-06"), "layer_norm_epsilon is '1e-06'"),
    ("ctranslate2", "config.json", put("layer_norm_epsilon", value=10**400), "beyond what the engine can read"),
    ("ctranslate2", "config.json", put("other", value=float("inf")), "beyond what the engine can read"),
    ("ctranslate2", "config.json", put("other", value=float("nan")), "beyond what the engine can read"),
    ("ctranslate2", "config.json", put("unk_token", value=None), "unk_token is None"),
    ("ctranslate2", "config.json", put("bos_token", value="\ud800"), "files are ctranslate2, and they are not"),
    ("ctranslate2", "vocabulary.json", lambda tokens: put_at(tokens, 5, [1]), "is no list of tokens"),
    ("ctranslate2", "vocabulary.json", lambda tokens: put_at(tokens, 5, "\ud800"), "half of a character"),
    ("ctranslate2", "vocabulary.json", lambda tokens: tokens.pop(5), "has 303 tokens, and the model 304 rows"),
    *((m, "config.json", put("hidden_act", value="relu"), "hidden_act is 'silu' in its") for m in SAFETENSORS),
    *((m, "config.json", put("pretraining_tp", value=1.0), "pretraining_tp is 1 in its") for m in SAFETENSORS),
    *(
        (m, "config.json", put("pad_token_id", value=float("-inf")), "pad_token_id is None in its source.config")
        for m in SAFETENSORS
        if m != "float"
    ),
    (
        "float",
        "config.json",
        put("pad_token_id", value=float("-inf")),
        "files are float, and they are not",
    ),
    ("rtn", "config.json", put("quantization_config", "sym", value=1), "sym is True there, and the files say 1"),
    *((m, "config.json", put("vocab_size", value=10), "vocab_size is") for m in SAFETENSORS),
    *(
        (m, "config.json", lambda values: values.pop("model_type"), "model_type is 'llama' in its")
        for m in SAFETENSORS
        if m != "float"
    ),
    ("float", "config.json", lambda values: values.pop("model_type"), "files are float, and they are not"),
]


@pytest.mark.parametrize(("method", "name", "change", "says"), SETTINGS)
def test_settings_that_contradict_each_other_are_refused(
    method: str, name: str, change: Callable[[Values], object], says: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(method)
    edit_json(folder / name, change)
    rehash(folder)
    refused(folder, says)
    with pytest.raises(ArtifactError, match=re.escape(says)):
        refuse_untrue(open_artifact(folder))


@pytest.mark.parametrize(
    ("method", "other", "says"),
    [
        ("gguf", "gguf Q8_0", "and the files hold"),
        ("gguf", "gguf shorter", "and the files hold"),
        ("ctranslate2", "ctranslate2 float16", "and the files hold"),
        ("ctranslate2", "ctranslate2 shorter", "and the files hold"),
    ],
)
def test_the_file_of_another_model_or_other_bits_is_refused(
    method: str, other: str, says: str, copied: Callable[[str], Path], made: dict[str, Path]
) -> None:
    folder = copied(method)
    names = [json.loads((path / MANIFEST).read_text())["weight_files"][0] for path in (folder, made[other])]
    shutil.copyfile(made[other] / names[1], folder / names[0])
    rehash(folder)
    refused(folder, says)
    if other.endswith("shorter"):
        types = json.loads((made[other] / MANIFEST).read_text())["tensor_types"]
        edit_json(folder / MANIFEST, put("tensor_types", value=types))
        refused(folder, "block_count" if method == "gguf" else "lack")


def test_an_artifact_without_tensors_is_one_only_where_that_was_asked(made: dict[str, Path], tmp_path: Path) -> None:
    folder = convert(str(made["tiny"]), "gguf", "Q4_K_M", tmp_path / "vocabulary", vocab_only=True).folder
    verify(folder)

    def change(values: Values) -> None:
        values["options"]["vocab_only"] = False
        values["recipe"]["options"] = {}

    edit_json(folder / MANIFEST, change)
    refused(folder, "vocab_only is False there, and the files say True")


# The keys of a GGUF file


def edit_keys(
    folder: Path, change: Callable[[bytes, int, bytes], bytes], chosen: Callable[[str], bool] = lambda _: True
) -> list[str]:
    """Copies of `folder`'s file, each with one of the `chosen` keys changed; return those that verify takes.

    `change(data, place, key)` gives the bytes of a file whose `key` ends at `place`, where its type stands.
    """
    (path,) = folder.glob("*.gguf")
    sound, taken = path.read_bytes(), []
    keys = [key for key in read_header(path).keys if chosen(key)]
    assert len(keys) > 10
    for key in keys:
        place = sound.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
        path.write_bytes(change(sound, place, key.encode()))
        rehash(folder)
        try:
            verify(folder)
        except ArtifactError:
            pass
        else:
            taken.append(key)
    path.write_bytes(sound)
    rehash(folder)
    verify(folder)
    return taken


def another_value(data: bytes, place: int, _: bytes) -> bytes:
    bit = 1 if data[place] == BOOL else 4
    return data[: place + 4] + bytes([data[place + 4] ^ bit]) + data[place + 5 :]


def another_type(data: bytes, place: int, _: bytes) -> bytes:
    """A uint32 as an int32, a float32 as a uint32."""
    return data[:place] + {4: b"\5", 6: b"\4"}[data[place]] + data[place + 1 :]


def another_name(data: bytes, place: int, key: bytes) -> bytes:
    return data.replace(key, key[:-1] + b"X", 1)


@pytest.mark.parametrize("change", [another_value, another_type, another_name])
def test_every_key_of_the_model_is_held_against_its_config(
    change: Callable[[bytes, int, bytes], bytes], copied: Callable[[str], Path]
) -> None:
    assert edit_keys(copied("gguf"), change, lambda key: key.startswith("llama.")) == []


def another_kind(data: bytes, place: int, _: bytes) -> bytes:
    """A value, or the items of a list, of another type of the same size; a text as a list of bytes."""
    if data[place] == 8:
        return data[:place] + struct.pack("<II", 9, 0) + data[place + 4 :]
    place += 4 * (data[place] == 9)
    return data[:place] + {4: b"\5", 5: b"\4", 6: b"\5", 7: b"\0", 8: b"\7"}[data[place]] + data[place + 1 :]


def test_every_key_has_the_type_that_programs_take(copied: Callable[[str], Path]) -> None:
    assert edit_keys(copied("gguf"), another_kind) == []


def test_every_key_of_the_tokenizer_is_that_of_the_tokenizer_beside(copied: Callable[[str], Path]) -> None:
    assert edit_keys(copied("gguf"), another_value, lambda key: key.startswith("tokenizer.")) == []


def swap_two_tokens(values: Values) -> None:
    tokens = values["model"]["vocab"]
    one, other = sorted(tokens, key=tokens.__getitem__)[-2:]
    tokens[one], tokens[other] = tokens[other], tokens[one]


@pytest.mark.parametrize(
    ("name", "change"),
    [("tokenizer.json", swap_two_tokens), ("tokenizer_config.json", put("eos_token", value="<s>"))],
)
def test_another_tokenizer_beside_a_file_is_refused(
    name: str, change: Callable[[Values], object], copied: Callable[[str], Path]
) -> None:
    folder = copied("gguf")
    edit_json(folder / name, change)
    rehash(folder)
    refused(folder, "is not what the tokenizer in")


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"])
def test_a_key_that_programs_need_is_missing(key: str, copied: Callable[[str], Path]) -> None:
    folder = copied("gguf")
    (path,) = folder.glob("*.gguf")
    path.write_bytes(another_name(path.read_bytes(), 0, key.encode()))
    rehash(folder)
    with pytest.raises(ArtifactError, match=key):
        verify(folder)
