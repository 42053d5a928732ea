"""compressed-tensors with several groups of layers as a source."""

import json

import numpy as np
import pytest
import torch
from quantized_folders import LAYERS, change_folder, decompressed, foreign, refuse_source
from safetensors.torch import load_file
from trials import dense_values

from bench.fuzz.quantized_bases import save_scaled
from quantkit.contracts.format import ON_CPU
from quantkit.contracts.registry import find_format
from quantkit.engines.transformers import ENGINE
from quantkit.errors import SourceError
from quantkit.formats.source import open_source

KIND = find_format("compressed-tensors")
Q, DOWN, UP, V = (
    f"model.layers.0.{name}." for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj", "self_attn.v_proj")
)


def nothing(_settings, _tensors):
    pass


@pytest.fixture(scope="session")
def parts(made):
    """The same model in several ways, each with one group."""
    return {
        "4": made("rtn", "4", group_size=64, format=KIND.name),
        "8": made("rtn", "8", group_size=-1, format=KIND.name),
        "4 zeros": made("rtn", "4", group_size=32, sym=False, format=KIND.name),
    }


def mixed(parts, folder, change=nothing):
    """4 bits, but 8 for down_proj, and 4 with zero points for up_proj, as llm-compressor would write it."""
    configs = {name: json.loads((part.folder / "config.json").read_text()) for name, part in parts.items()}
    stored = {name: load_file(part.folder / "model.safetensors") for name, part in parts.items()}

    def mix(settings, tensors):
        groups = {}
        targets = {"8": ["re:.*down_proj$"], "4 zeros": [UP.removesuffix(".")], "4": ["Linear"]}
        for number, (name, layers) in enumerate(targets.items()):
            (group,) = configs[name]["quantization_config"]["config_groups"].values()
            groups[f"group_{number}"] = {**group, "targets": layers}
        for name, stem in (("8", DOWN), ("4 zeros", UP)):
            for part in [part for part in tensors if part.startswith(stem)]:
                tensors.pop(part)
            tensors |= {part: value for part, value in stored[name].items() if part.startswith(stem)}
        settings["config_groups"] = groups
        change(settings, tensors)

    return foreign(parts["4"], folder, mix)


def by_groups(settings, _):
    settings["format"] = "mixed-precision"


@pytest.mark.parametrize("change", [nothing, by_groups])
def test_each_layer_is_read_by_its_group(change, parts, tmp_path):
    folder = mixed(parts, tmp_path / "mixed", change)
    source = open_source(str(folder))
    exact = {name: dense_values(part) for name, part in parts.items()}
    for name in source.tensors:
        kind = "8" if DOWN in name else "4 zeros" if UP in name else "4"
        assert np.array_equal(source.floats(name), exact[kind][name].float().numpy()), name
    assert source.quantization.startswith(
        "compressed-tensors, 8 bits, whole rows; 4 bits, groups of 32; 4 bits, groups of 64"
    )
    config = json.loads((folder / "config.json").read_text())
    types = KIND.open_quantized(folder, ("model.safetensors",), config).types()
    assert (types["int8"], types["int4"]) == (1, len(LAYERS) - 1)
    assert set(KIND.refusals(config["quantization_config"])) == {ENGINE.name, f"vllm{ON_CPU}"}


def group(settings, number):
    return settings["config_groups"][f"group_{number}"]


# Scaled values, beside codes

KINDS = {"down_proj": "int8", "up_proj": "nvfp4", "gate_proj": "mxfp4", "q_proj": "float8 blocks", "k_proj": "float8"}


def of_every_kind(model, codes, folder, change=nothing):
    """A group for each kind of `KINDS`, and one of 4-bit codes for what is left."""
    save_scaled(model, folder, {**KINDS, "": "int8"})
    stored = json.loads((codes.folder / "config.json").read_text())["quantization_config"]
    packed = load_file(codes.folder / "model.safetensors")
    rest = ("v_proj.", "o_proj.")

    def mix(settings, tensors):
        settings["config_groups"][f"group_{len(KINDS)}"] = stored["config_groups"]["group_0"]
        for name in [name for name in tensors if any(words in name for words in rest)]:
            tensors.pop(name)
        tensors |= {name: value for name, value in packed.items() if any(words in name for words in rest)}
        change(settings, tensors)

    return change_folder(folder, mix)


def test_layers_of_every_kind_are_read_as_the_package_reads_them(one_block, parts, tmp_path):
    pytest.importorskip("compressed_tensors")
    folder = of_every_kind(one_block, parts["4"], tmp_path / "mixed")
    source, plain = open_source(str(folder)), open_source(str(one_block))
    for name, (_, value) in decompressed(folder).items():
        assert torch.equal(torch.from_numpy(source.floats(name)).to(value.dtype), value), name
    assert source.tensors.keys() == plain.tensors.keys()
    for name in source.tensors.keys() - set(LAYERS):
        assert np.array_equal(source.floats(name), plain.floats(name)), name
    assert source.quantization.count("; ") == len(KINDS)
    types = KIND.open_quantized(folder, ("model.safetensors",), {}).types()
    counts = {"int8": 1, "nvfp4": 1, "mxfp4": 1, "float8": 2, "int4": 2}
    assert {name: types[name] for name in counts} == counts
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert set(KIND.refusals(settings)) == {f"vllm{ON_CPU}"}


def in_blocks(size):
    def change(settings, _):
        one = group(settings, 3)
        other = {**one, "weights": {**one["weights"], "block_structure": list(size)}}
        settings["config_groups"] = {"more": other, **settings["config_groups"]}

    return change


def test_a_layer_that_fits_two_groups_is_read_where_they_give_the_same_values(one_block, parts, tmp_path):
    """128 rows are four blocks of 32, and of 40; 128 columns are three blocks of 48, and of 64 they are two."""
    exact = open_source(str(of_every_kind(one_block, parts["4"], tmp_path / "mixed"))).floats(f"{Q}weight")
    one = open_source(str(of_every_kind(one_block, parts["4"], tmp_path / "one", in_blocks((32, 64)))))
    assert np.array_equal(one.floats(f"{Q}weight"), exact)
    two = of_every_kind(one_block, parts["4"], tmp_path / "two", in_blocks((40, 48)))
    with pytest.raises(SourceError, match=rf"the parts of {Q}weight fit several of the groups"):
        open_source(str(two))


def only(*numbers):
    def change(settings, _):
        settings["config_groups"] = {f"group_{n}": settings["config_groups"][f"group_{n}"] for n in numbers}

    return change


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("codes", lambda c, t: group(c, 0)["weights"].update(num_bits=5), "no valid number of bits"),
        ("codes", lambda c, t: group(c, 1)["weights"].update(symmetric=True), "fit none of the groups"),
        ("codes", lambda c, t: (by_groups(c, t), group(c, 0).update(format="int-quantized")), "int-quantized"),
        ("codes", lambda c, t: t.update({f"{DOWN}weight_scale": torch.ones(0, 1)}), "fit none of the groups"),
        ("codes", lambda c, t: t.pop(f"{DOWN}weight_packed"), "without its weight_packed"),
        ("scaled", only(0, 1, 2, 3, 5), "fit none of the groups"),  # rows of k_proj
        ("scaled", only(0, 3, 4, 5), "weight_packed of uint8 have no scales, or config.json has no"),
        ("scaled", lambda c, t: t.update({f"{V}weight": t[f"{DOWN}weight"].clone()}), "twice, in two kinds"),
    ],
)
def test_what_lies_is_refused(kind, change, says, one_block, parts, tmp_path):
    out = tmp_path / "mixed"
    folder = mixed(parts, out, change) if kind == "codes" else of_every_kind(one_block, parts["4"], out, change)
    refuse_source(folder, says, tmp_path / "out")
