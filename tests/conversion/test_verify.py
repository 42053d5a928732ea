"""verify believes neither manifest nor files: what one says is held against the other, and against the model."""

import json
import re
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from edits import edit_json, edit_tensors, put, rehash
from tiny_models import CALIBRATION, changed_copy, prepare_job

from quantkit import convert, open_artifact, verify
from quantkit.contracts.check_manifest import refuse_untrue
from quantkit.conversion.verify import check_values, read_all
from quantkit.errors import ArtifactError
from quantkit.formats.ctranslate2.model_file import open_ct2_model
from quantkit.formats.gguf.header import BOOL, read_header
from quantkit.records.artifact import MANIFEST
from quantkit.system.progress import Progress

METHODS = {
    "rtn": "4", "gptq": "4", "awq": "4", "nf4": "4", "gguf": "Q4_K_M", "ctranslate2": "int8", "float": "float16"
}  # fmt: skip
LAYER = "model.layers.1.mlp.up_proj"
NORM, EMBEDDING = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"


@pytest.fixture
def copied(artifact_of, tmp_path):
    return lambda method: Path(shutil.copytree(artifact_of(method, METHODS[method]).folder, tmp_path / "out"))


def refused(folder, says):
    with pytest.raises(ArtifactError) as caught:
        verify(folder)
    assert says in str(caught.value)


# llama.cpp wants a head of its own for a tied gpt_neox
@pytest.mark.parametrize(
    ("name", "method"),
    [("gpt2", "nf4"), ("gpt2", "gguf"), ("mixtral", "float"), ("gpt_neox, tied", "gguf"), ("gpt_neox, tied", "rtn")],
)
def test_models_whose_files_have_other_names_and_shapes_are_believed(name, method, architecture, tmp_path):
    verify(convert(str(architecture(name)), method, out=tmp_path / "out").folder)


def double_parameters(values):
    values["source"]["parameters"] *= 2
    values["bits_per_weight"] /= 2


EDITS = [
    ("gptq", put("recipe", "method", value="rtn"), "the method rtn has no option"),
    ("rtn", put("recipe", "method", value="gptq"), "it has no calibration"),
    ("awq", put("format", value="gptq"), "it names the format gptq, but the files are not"),
    ("rtn", put("calibration_sha256", value="0" * 64), "it has a calibration"),
    ("gguf", put("recipe", "bits", value="Q8_0"), "bits is 'Q8_0' there, but 'Q4_K_M' or 'auto' in the files"),
    ("float", put("recipe", "bits", value="bfloat16"), "bits is 'bfloat16' there, but 'float16' in the files"),
    ("rtn", put("options", "group_size", value=64), "group_size is 64 there, but 128 in the files"),
    ("nf4", put("options", "double_quant", value=False), "double_quant is False there"),
    ("rtn", put("recipe", "options", value={"sym": False}), "sym = False in the recipe, True in"),
    *(
        (method, change, says)
        for method in ("rtn", "gguf", "ctranslate2")
        for change, says in (
            (put("tensor_types", value={"int2": 3}), "it counts 3 int2, but the files have"),
            (put("source", "config", "num_hidden_layers", value=1), ""),
            (double_parameters, "parameters of the source"),
        )
    ),
    ("rtn", put("source", "config", "rms_norm_eps", value=0.5), "rms_norm_eps is 0.5 in its source.config"),
    ("rtn", put("bits_per_weight", value=0.1), "bits_per_weight is 0.1"),
    ("rtn", lambda values: values["weight_files"].append(values["weight_files"][0]), "its weight files do not belong"),
    ("gguf", put("weight_files", value=["tokenizer.json"]), "its weight files do not belong to the format gguf"),
]


@pytest.mark.parametrize(("method", "change", "says"), EDITS)
def test_a_manifest_that_does_not_tell_the_truth_is_refused(method, change, says, copied):
    folder = copied(method)
    edit_json(folder / MANIFEST, change)
    refused(folder, says)


def changed(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def first(value):
    return lambda tensor: torch.cat([torch.full_like(tensor[:1], value), tensor[1:]])


def added(name):
    return lambda tensors: tensors.update({name: torch.ones(128, dtype=torch.bfloat16)})


DAMAGE = [
    ("rtn", lambda tensors: tensors.pop(EMBEDDING), "but the files have"),
    ("nf4", changed(NORM, lambda t: t[1:]), "has the shape (127,), not (128,)"),
    ("awq", added("model.extra.weight"), "but the files have"),
    ("float", changed(NORM, torch.Tensor.float), "but the files have"),
    ("rtn", changed(NORM, first(float("nan"))), "NaN or infinite"),
    ("float", changed(f"{LAYER}.weight", lambda t: t.T), "has the shape (128, 256), not (256, 128)"),
    *(
        (method, change, says)
        for method in ("rtn", "awq")
        for change, says in (
            (lambda tensors: tensors.pop(f"{LAYER}.qweight"), "without its qweight"),
            (changed(f"{LAYER}.qweight", torch.Tensor.long), "qweight is int64, not int32"),
            (changed(f"{LAYER}.scales", lambda t: t[1:]), "'scales': (0, 256)"),
            (changed(f"{LAYER}.scales", torch.zeros_like), "scales that are 0 or not finite"),
        )
    ),
    ("awq", changed(f"{LAYER}.qzeros", lambda t: t[1:]), "'qzeros': (0, 32)"),
    ("rtn", lambda tensors: tensors.pop(f"{LAYER}.g_idx"), f"lacks the tensor {LAYER}.g_idx"),
    ("rtn", changed(f"{LAYER}.g_idx", first(-1)), "columns outside its"),
    ("rtn", changed(f"{LAYER}.qzeros", torch.zeros_like), "is not symmetric"),
    ("nf4", lambda tensors: tensors.pop(f"{LAYER}.weight.absmax"), "its absmax is missing"),
    ("nf4", changed(f"{LAYER}.weight.absmax", lambda t: t[1:]), "its absmax has 511 values"),
    ("nf4", changed(f"{LAYER}.weight.quant_map", torch.ones_like), "is not the table of nf4"),
    ("nf4", changed(f"{LAYER}.weight", lambda t: t[1:]), "are not codes for the shape"),
]


@pytest.mark.parametrize(("method", "change", "says"), DAMAGE)
def test_damaged_tensors_are_refused_though_their_hashes_are_right(method, change, says, copied):
    folder = copied(method)
    edit_tensors(folder, change)
    rehash(folder)
    refused(folder, says)


@pytest.mark.parametrize(
    ("method", "change", "counts", "says"),
    [
        ("awq", lambda tensors: tensors.pop(EMBEDDING), {"float16": -1}, f"lacks the tensor {EMBEDDING}"),
        (
            "nf4",
            added("model.extra.weight"),
            {"bfloat16": 1},
            "has the tensor model.extra.weight, which its config.json",
        ),
        ("rtn", changed(NORM, torch.Tensor.float), {"float16": -1, "float32": 1}, "and its config.json says"),
    ],
)
def test_nor_does_it_help_to_count_them_anew(method, change, counts, says, copied):
    folder = copied(method)
    edit_tensors(folder, change)
    rehash(folder)

    def recount(values):
        types = values["tensor_types"]
        types.update({name: types.get(name, 0) + more for name, more in counts.items()})

    edit_json(folder / MANIFEST, recount)
    refused(folder, says)


STATES = [
    b"\xff", b"[" * 90_000, {"shape": [2**62, 2**62]}, {"shape": [256, 127]}, {"blocksize": 10**12},
    {"nested_offset": float("nan")}, {"quant_type": "fp4"},
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: str(state)[:30])
def test_a_damaged_state_of_nf4_is_refused(state, copied):
    folder, name = copied("nf4"), f"{LAYER}.weight.quant_state.bitsandbytes__nf4"

    def change(tensors):
        data = state
        if isinstance(state, dict):
            data = json.dumps(json.loads(bytes(tensors[name].tolist())) | state).encode()
        tensors[name] = torch.tensor(list(data), dtype=torch.uint8)

    edit_tensors(folder, change)
    rehash(folder)
    refused(folder, f"{LAYER}.weight cannot be read")


SETTINGS = [
    ("rtn", "quantize_config.json", put("sym", value=False), "sym is False, and True in config.json"),
    ("rtn", "config.json", put("quantization_config", "bits", value=5), "has no valid number of bits"),
    ("rtn", "config.json", put("quantization_config", "group_size", value=[]), "group_size is [], not a whole"),
    ("rtn", "config.json", put("quantization_config", "sym", value=1), "sym is True there, but 1 in the files"),
    ("rtn", "config.json", put("quantization_config", value=5), "it names the format gptq, but the files are not"),
    ("rtn", "config.json", put("dtype", value="float32"), "holds tensors in float16, and its config.json says"),
    ("nf4", "config.json", put("quantization_config", "bnb_4bit_quant_type", value="fp4"), "4-bit NormalFloat"),
    ("ctranslate2", "config.json", lambda values: values.pop("unk_token"), "unk_token is None"),
    ("ctranslate2", "config.json", put("layer_norm_epsilon", value=10**400), "too large for the engine"),
    ("ctranslate2", "config.json", put("bos_token", value="\ud800"), "names the format ctranslate2, but the files"),
    ("ctranslate2", "vocabulary.json", lambda tokens: tokens.append("\ud800"), "half of a surrogate pair"),
    ("ctranslate2", "vocabulary.json", lambda tokens: tokens.pop(5), "has 303 tokens, but the model has 304 rows"),
    ("awq", "config.json", put("pretraining_tp", value=1.0), "pretraining_tp is 1 in its"),
    ("rtn", "config.json", lambda values: values.pop("model_type"), "model_type is 'llama' in its"),
]


@pytest.mark.parametrize(("method", "name", "change", "says"), SETTINGS)
def test_settings_that_contradict_each_other_are_refused(method, name, change, says, copied):
    folder = copied(method)
    edit_json(folder / name, change)
    rehash(folder)
    refused(folder, says)
    with pytest.raises(ArtifactError, match=re.escape(says)):
        refuse_untrue(open_artifact(folder))


@pytest.mark.parametrize(("method", "says"), [("gguf", "block_count"), ("ctranslate2", "lack")])
def test_the_file_of_another_model_is_refused(method, says, copied, artifact_of, tiny_with):
    folder, another = copied(method), artifact_of(method, METHODS[method], model=tiny_with(num_hidden_layers=2))
    [own], [theirs] = open_artifact(folder).manifest.weight_files, another.manifest.weight_files
    shutil.copyfile(another.folder / theirs, folder / own)
    rehash(folder)
    refused(folder, "but the files have")
    edit_json(folder / MANIFEST, put("tensor_types", value=another.manifest.tensor_types))
    refused(folder, says)


def edit_keys(folder, change, prefix):
    """Copies of `folder`'s file, each with one of the keys of `prefix` changed; return those that verify takes.

    `change(data, place, key)` gives the bytes of a file whose `key` ends at `place`, where its type stands.
    """
    (path,) = folder.glob("*.gguf")
    sound, taken = path.read_bytes(), []
    keys = [key for key in read_header(path).keys if key.startswith(prefix)]
    assert len(keys) > 10
    for key in keys:
        place = sound.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
        path.write_bytes(change(sound, place, key.encode()))
        rehash(folder)
        try:
            verify(folder)
        except ArtifactError:
            continue
        taken.append(key)
    return taken


def another_value(data, place, _):
    bit = 1 if data[place] == BOOL else 4
    return data[: place + 4] + bytes([data[place + 4] ^ bit]) + data[place + 5 :]


def another_name(data, place, key):
    return data.replace(key, key[:-1] + b"X", 1)


def another_kind(data, place, _):
    """A value, or the items of a list, of another type of the same size; a text as a list of bytes."""
    if data[place] == 8:
        return data[:place] + struct.pack("<II", 9, 0) + data[place + 4 :]
    place += 4 * (data[place] == 9)
    return data[:place] + {4: b"\5", 5: b"\4", 6: b"\5", 7: b"\0", 8: b"\7"}[data[place]] + data[place + 1 :]


@pytest.mark.parametrize(
    ("change", "prefix"),
    [(another_value, "llama."), (another_name, "llama."), (another_kind, ""), (another_value, "tokenizer.")],
)
def test_every_key_is_held_against_the_config_and_the_tokenizer(change, prefix, copied):
    assert edit_keys(copied("gguf"), change, prefix) == []


# Reading back: values that are not finite, or lost, are found in the bytes of every format

OUTPUT = "model.layers.0.self_attn.o_proj"


def in_tensor(name):
    return lambda folder, value: edit_tensors(folder, changed(name, first(value)))


def in_gguf(name, dtype):
    """Puts a value into the first bytes of a tensor."""

    def spoil(folder, value):
        (path,) = folder.glob("*.gguf")
        (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name]
        data, start = np.array([value], dtype).tobytes(), int(tensor.data_offset)
        whole = path.read_bytes()
        path.write_bytes(whole[:start] + data + whole[start + len(data) :])

    return spoil


def in_ct2(name):
    def spoil(folder, value):
        path = folder / "model.bin"
        start, whole = open_ct2_model(path).variables[name].start, path.read_bytes()
        path.write_bytes(whole[:start] + np.float32(value).tobytes() + whole[start + 4 :])

    return spoil


# method, bits, options, and what is spoiled
CASES = {
    "gptq, a scale": ("rtn", "4", {}, in_tensor(f"{OUTPUT}.scales")),
    "awq, a scale": ("rtn", "4", {"format": "awq"}, in_tensor(f"{OUTPUT}.scales")),
    "nf4, a scale of scales": ("nf4", "4", {}, in_tensor(f"{OUTPUT}.weight.nested_absmax")),
    "float": ("float", "bfloat16", {}, in_tensor(f"{OUTPUT}.weight")),
    "gguf, a norm": ("gguf", "Q4_K_M", {}, in_gguf("output_norm.weight", np.float32)),
    "gguf, a factor": ("gguf", "Q8_0", {}, in_gguf("blk.0.attn_output.weight", np.float16)),
    "ctranslate2": ("ctranslate2", "int8", {}, in_ct2("decoder/layer_norm/gamma")),
}


@pytest.fixture
def made(tiny_with, artifact_of, tmp_path):
    """A job and a copy of its artifact."""

    def make(method, bits, options):
        model = tiny_with(num_hidden_layers=1)
        folder = shutil.copytree(artifact_of(method, bits, model=model, **options).folder, tmp_path / "out")
        return prepare_job(str(model), method, bits, calibration=CALIBRATION, **options), open_artifact(folder)

    return make


@pytest.mark.parametrize("case", CASES)
def test_values_that_are_not_finite_are_found(case, made):
    method, bits, options, spoil = CASES[case]
    job, artifact = made(method, bits, options)
    read_all(artifact, Progress())
    check_values(job, artifact, Progress())
    for value in (float("nan"), float("-inf")):
        spoil(artifact.folder, value)
        for check in (lambda: read_all(artifact, Progress()), lambda: check_values(job, artifact, Progress())):
            # Readers may know a wrong scale for themselves.
            with pytest.raises(ArtifactError, match=r"NaN or infinite|scales that are 0 or not finite"):
                check()


def test_a_layer_whose_values_are_lost_is_found(made):
    job, artifact = made("rtn", "4", {})
    error = check_values(job, artifact, Progress())
    assert 0.02 < error.mean <= error.worst < 0.3
    # Each code c becomes 15 - c: the sign turns.
    edit_tensors(artifact.folder, changed(f"{OUTPUT}.qweight", torch.bitwise_not))
    with pytest.raises(ArtifactError, match=rf"{OUTPUT}.weight reads back with a relative error of [12]"):
        check_values(job, artifact, Progress())


@pytest.mark.parametrize(("bits", "noted"), [("Q8_0", True), ("Q4_K_M", False), ("BF16", False)])
def test_values_that_eight_bits_lose_are_noted(bits, noted, tiny, tmp_path):
    """Scales of Q8_0 are float16, where these values have next to no digits; of fewer bits much is lost anyway."""
    name = f"{LAYER}.weight"
    folder = changed_copy(
        tiny, tmp_path / "model", lambda tensors: tensors.update({name: tensors[name].float() * 2e-5})
    )
    notes = convert(str(folder), "gguf", bits, tmp_path / "out").manifest.notes
    assert any(f"{name} has values that {bits} cannot represent" in note for note in notes) == noted
