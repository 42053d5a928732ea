"""Checkpoints of every kind that is a source, made of one float checkpoint, and their values by plain arithmetic."""

import json
import re
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import SHAPES
from trials import prepared

from bench.fuzz import quantized_bases
from bench.fuzz.dequantize import values_of as plain_values
from quantkit.conversion.convert import convert
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_source
from quantkit.records.artifact import MANIFEST

LAYERS = [f"model.layers.0.{name}.weight" for name in SHAPES]  # linear ones of a llama of one block
Q8 = gguf.GGMLQuantizationType.Q8_0


def _rounded(method, bits, kind=None, **options):
    """What a method writes, without its manifest."""

    def make(model, folder):
        trial = prepared(model, method, bits, folder, kind, **options)
        trial.check()
        trial.write()

    return make


def change_folder(folder, change):
    """Give a checkpoint other settings of its quantization and other tensors."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    return folder


def foreign(artifact, folder, change=lambda _settings, _tensors: None):
    """The artifact as another tool would have written it: without a manifest, its settings and tensors changed."""
    shutil.copytree(artifact.folder, folder, ignore=shutil.ignore_patterns(MANIFEST))
    return change_folder(folder, change)


def read_values(folder):
    """All tensors as quantkit reads them, float32."""
    source = open_source(str(folder))
    return {name: source.floats(name) for name in source.tensors}


def decompressed(folder, layers=LAYERS):
    """By layer the first scheme of the package compressed-tensors that names it, and the values by that."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored, found = QuantizationConfig.model_validate(quantization_of(folder)), {}
    tensors = load_file(folder / "model.safetensors")
    for name in layers:
        module = name.removesuffix(".weight")
        scheme = next(
            group
            for group in stored.config_groups.values()
            if any(target == "Linear" or re.match(target.removeprefix("re:"), module) for target in group.targets)
        )
        compressor = BaseCompressor.get_value_from_registry(scheme.format or stored.format)
        found[name] = scheme, compressor.decompress(parts_of(tensors, name), scheme)["weight"]
    return found


def parts_of(tensors, layer):
    """What is stored of a layer, by the names of its parts."""
    stem = layer.removesuffix("weight")
    return {part.removeprefix(stem): tensor for part, tensor in tensors.items() if part.startswith(stem)}


def refuse_source(folder, says, out):
    """Hold that a source is refused in one line, which is not the one for artifacts."""
    with pytest.raises((SourceError, UnsupportedError), match=says) as raised:
        convert(str(folder), "float", "float32", out)
    assert "Convert again" not in str(raised.value)
    assert str(raised.value).isprintable()
    assert not out.exists()


def _changed(make, change):
    """The same with other settings and tensors."""

    def again(model, folder):
        make(model, folder)
        change_folder(folder, change)

    return again


def version_2(settings, tensors):
    """GPTQModel's `gptq_v2` stores zero points as they are; symmetric ones of 4 bits are 8."""
    settings["checkpoint_format"] = "gptq_v2"
    for name in tensors:
        if name.endswith("qzeros"):
            tensors[name] = torch.full_like(tensors[name], 0x88888888 - (1 << 32))


def _in_order(settings, tensors):
    """Columns of a group lie anywhere."""
    settings["desc_act"] = True
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name][torch.randperm(len(tensors[name]), generator=draw)]


def _by_transformers(**settings):
    return lambda model, folder: quantized_bases.save_with_transformers(model, folder, settings)


def _scaled(name):
    return lambda model, folder: quantized_bases.save_scaled(model, folder, quantized_bases.SCALED[name])


def _fp8(block):
    return lambda model, folder: quantized_bases.save_fp8(model, folder, block)


SYMMETRIC = _rounded("rtn", "4", "gptq", group_size=32)
ZEROS = {"sym": False, "group_size": 32}
SOURCES = {
    "float": shutil.copytree,
    "gptq": SYMMETRIC,
    "gptq version 2": _changed(SYMMETRIC, version_2),
    "gptq zeros": _rounded("rtn", "4", "gptq", **ZEROS),
    "gptq order": _changed(SYMMETRIC, _in_order),
    "awq": _rounded("rtn", "4", "awq", **ZEROS),
    "compressed": _rounded("rtn", "8", "compressed-tensors", group_size=32),
    "compressed zeros": _rounded("rtn", "3", "compressed-tensors", **ZEROS),
    **{name: _scaled(name) for name in quantized_bases.SCALED},
    "fp8": _fp8((32, 48)),
    "fp8 tensor": _fp8(None),
    "nf4": _by_transformers(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": _by_transformers(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "int8": _by_transformers(load_in_8bit=True),
    "gguf": _rounded("gguf", "Q8_0"),
    "mlx": _rounded("rtn", "4", "mlx", group_size=32, sym=True),
    "mlx zeros": _rounded("rtn", "3", "mlx", **ZEROS),
}
OF_GPT_OSS = {"mxfp4": quantized_bases.save_mxfp4}


def place(folder):
    """What a user gives as the model: a folder, or the one GGUF file in it."""
    return next(folder.glob("*.gguf"), folder)


def values_of(model, folder):
    """All tensors of a source by plain arithmetic, by the model's names, float32; `model` is what it was made of."""
    if not list(folder.glob("*.gguf")):
        return plain_values(folder)
    values = plain_values(model)
    for name, value in values.items():
        if value.ndim == 2 and "gate.weight" not in name:  # routers stay as they are
            fits = value.shape[1] % 32 == 0  # else ggml has float16
            rounded = gguf.quants.dequantize(gguf.quants.quantize(value, Q8), Q8) if fits else value.astype(np.float16)
            values[name] = rounded.astype(np.float32)
    return values


def save_floats(source, folder, values):
    """The same values as a checkpoint of floats."""
    folder.mkdir()
    opened = open_source(str(place(source)))
    opened.copy_side_files(folder)
    (folder / "config.json").write_text(json.dumps({**opened.config, "dtype": "float32"}))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
