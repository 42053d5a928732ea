"""compressed-tensors with several groups of layers as a source."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import LINEARS, converted
from trials import dense_values

from bench.fuzz.quantized_bases import save_scaled
from quantkit.artifact import Artifact
from quantkit.contracts.registry import find_format
from quantkit.conversion.convert import convert
from quantkit.engines.transformers import ENGINE
from quantkit.errors import ArtifactError, SourceError, UnsupportedError
from quantkit.formats.source import open_source

DOWN = [name for name in LINEARS if "down_proj" in name]
UP = [name for name in LINEARS if "up_proj" in name]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def parts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """The same model in several ways, each with one group."""
    folder = tmp_path_factory.mktemp("parts")
    made = {
        "4": ("4", {"group_size": 64}),
        "8": ("8", {"group_size": -1}),
        "4 zeros": ("4", {"group_size": 32, "sym": False}),
    }
    return {
        name: converted(tiny_llama, folder / name, "rtn", bits, format="compressed-tensors", **options)
        for name, (bits, options) in made.items()
    }


def mixed(
    parts: dict[str, Artifact],
    folder: Path,
    change: Callable[[dict[str, Any], Tensors], object] = lambda _settings, _tensors: None,
) -> Path:
    """4 bits, but 8 for down_proj, and 4 with zero points for up_proj, as llm-compressor would write it."""
    folder.mkdir()
    for path in parts["4"].folder.iterdir():
        if path.name not in ("config.json", "model.safetensors", "quantkit.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    configs = {name: json.loads((part.folder / "config.json").read_text()) for name, part in parts.items()}
    stored = {name: load_file(part.folder / "model.safetensors") for name, part in parts.items()}
    tensors = stored["4"]
    groups = {}
    for number, (name, targets) in enumerate(
        (("8", ["re:.*down_proj$"]), ("4 zeros", [n.removesuffix(".weight") for n in UP]), ("4", ["Linear"]))
    ):
        (group,) = configs[name]["quantization_config"]["config_groups"].values()
        groups[f"group_{number}"] = {**group, "targets": targets}
    for name, layers in (("8", DOWN), ("4 zeros", UP)):
        for layer in layers:
            stem = layer.removesuffix("weight")
            tensors = {n: v for n, v in tensors.items() if not n.startswith(stem)}
            tensors |= {n: v for n, v in stored[name].items() if n.startswith(stem)}
    config = configs["4"]
    config["quantization_config"]["config_groups"] = groups
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def by_groups(settings: dict[str, Any], _: Tensors) -> None:
    settings["format"] = "mixed-precision"


def in_other_words(settings: dict[str, Any], _: Tensors) -> None:
    """Groups that are stored like others: of whole rows, which a group size of as many columns says, too."""
    group = settings["config_groups"]["group_0"]
    settings["config_groups"]["group_3"] = {**group, "weights": {**group["weights"], "observer": "minmax"}}
    rows = {**group["weights"], "strategy": "group", "group_size": 256}
    settings["config_groups"]["group_4"] = {**group, "weights": rows}


@pytest.mark.parametrize("change", [lambda _c, _t: None, by_groups, in_other_words], ids=["", "mixed", "twice"])
def test_each_layer_is_read_by_its_group(change: Any, parts: dict[str, Artifact], tmp_path: Path) -> None:
    source = open_source(str(mixed(parts, tmp_path / "mixed", change)))
    exact = {name: dense_values(part) for name, part in parts.items()}
    for name in source.tensors:
        kind = "8" if name in DOWN else "4 zeros" if name in UP else "4"
        assert np.array_equal(source.floats(name), exact[kind][name].float().numpy()), name
    assert source.quantization is not None
    assert source.quantization.startswith(
        "compressed-tensors, 8 bits, whole rows; 4 bits, groups of 32; 4 bits, groups of 64"
    )


def test_shapes_that_do_not_tell_the_bits_are_refused(tmp_path: Path) -> None:
    """8 columns of 3 bits take a word, and those of 4 bits, too."""
    stem = "model.layers.0.mlp.up_proj.weight"
    tensors = {
        f"{stem}_packed": torch.zeros(2, 1, dtype=torch.int32),
        f"{stem}_scale": torch.ones(2, 1).half(),
        f"{stem}_shape": torch.tensor([2, 8]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {"type": "int", "symmetric": True, "strategy": "channel"}
    groups = {str(bits): {"weights": {**weights, "num_bits": bits}} for bits in (3, 4)}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    kind = find_format("compressed-tensors")
    assert kind.open_quantized is not None
    with pytest.raises(ArtifactError, match=r"up_proj.weight fit several of the groups"):
        kind.open_quantized(tmp_path, ("model.safetensors",), {})


def test_its_types_are_counted_and_engines_refuse_what_they_refuse_of_a_group(
    parts: dict[str, Artifact], tmp_path: Path
) -> None:
    folder = mixed(parts, tmp_path / "mixed")
    kind = find_format("compressed-tensors")
    assert kind.open_quantized is not None
    config = json.loads((folder / "config.json").read_text())
    types = kind.open_quantized(folder, ("model.safetensors",), config).types()
    assert (types["int8"], types["int4"]) == (len(DOWN), len(LINEARS) - len(DOWN))
    assert set(kind.refusals(config["quantization_config"])) == {ENGINE.name}


def test_it_is_converted_and_its_codes_are_not_kept(parts: dict[str, Artifact], tmp_path: Path) -> None:
    folder = mixed(parts, tmp_path / "mixed")
    convert(str(folder), "gguf", "Q8_0", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="has layers of several kinds"):
        convert(str(folder), "keep", 4, tmp_path / "kept")


def weights(settings: dict[str, Any], group: int) -> dict[str, Any]:
    values: dict[str, Any] = settings["config_groups"][f"group_{group}"]["weights"]
    return values


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, t: weights(c, 0).update(num_bits=3), "fit none of the groups"),
        (lambda c, t: weights(c, 0).update(num_bits=5), "how many bits codes have"),
        (lambda c, t: weights(c, 1).update(symmetric=True), "fit none of the groups"),
        (lambda c, t: weights(c, 2).update(group_size=0), "group_size is 0"),
        (lambda c, t: c["config_groups"].pop("group_0"), "fit none of the groups"),
        (lambda c, t: c["config_groups"].update(group_0=[1]), "no compressed-tensors of one group"),
        (lambda c, t: weights(c, 0).update(type="float"), "no compressed-tensors of one group"),
        (lambda c, t: (by_groups(c, t), c["config_groups"]["group_0"].update(format="int-quantized")), "int-quantized"),
        (lambda c, t: c["config_groups"].update(more(c)), "has 83 groups"),
        (lambda c, t: weights(c, 0).update(num_bits=4, group_size=64, strategy="group", actorder="weight"), "none of"),
        (lambda c, t: t.pop(DOWN[0] + "_scale"), "lacks the tensor .*_scale"),
        (lambda c, t: t.update({DOWN[0] + "_scale": t[DOWN[0] + "_scale"][:0]}), "fit none of the groups"),
        (lambda c, t: t.pop(DOWN[0] + "_packed"), "without its weight_packed"),
        (lambda c, t: t[DOWN[0] + "_scale"].fill_(float("nan")), "not finite"),
    ],
)
def test_what_lies_is_refused_in_one_line(change: Any, says: str, parts: dict[str, Artifact], tmp_path: Path) -> None:
    folder = mixed(parts, tmp_path / "mixed", change)
    with pytest.raises(SourceError, match=says) as raised:
        convert(str(folder), "float", "float32", tmp_path / "out")
    assert "Convert again" not in str(raised.value)
    assert not (tmp_path / "out").exists()


# Scaled values, beside codes


KINDS = {
    "down_proj": "int8",
    "up_proj": "nvfp4",
    "gate_proj": "mxfp4",
    "q_proj": "float8 blocks",
    "k_proj": "float8",
}
Q = "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[dict[str, Any], Tensors], object]


def of_every_kind(
    model: Path, codes: Artifact, folder: Path, change: Change = lambda _settings, _tensors: None
) -> Path:
    """A group for each kind of `KINDS`, and one of 4-bit codes for what is left."""
    save_scaled(model, folder, {**KINDS, "": "int8"})
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    stored = json.loads((codes.folder / "config.json").read_text())["quantization_config"]
    settings = config["quantization_config"]
    settings["config_groups"][f"group_{len(KINDS)}"] = stored["config_groups"]["group_0"]
    rest = ("v_proj.", "o_proj.")
    tensors = {name: value for name, value in tensors.items() if not any(words in name for words in rest)}
    packed = load_file(codes.folder / "model.safetensors")
    tensors |= {name: value for name, value in packed.items() if any(words in name for words in rest)}
    change(settings, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def as_the_package_reads(folder: Path) -> Tensors:
    """Every layer decompressed by the package, in the first group that names it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(settings).config_groups.values()
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in LINEARS:
        stem = name.removesuffix("weight")
        scheme = next(
            group
            for group in groups
            if any(t == "Linear" or re.match(t.removeprefix("re:"), stem.removesuffix(".")) for t in group.targets)
        )
        parts = {part.removeprefix(stem): tensor for part, tensor in tensors.items() if part.startswith(stem)}
        values[name] = BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]
    return values


def test_layers_of_every_kind_are_read_as_the_package_reads_them(
    tiny_llama: Path, parts: dict[str, Artifact], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    folder = of_every_kind(tiny_llama, parts["4"], tmp_path / "mixed")
    source, theirs = open_source(str(folder)), as_the_package_reads(folder)
    for name, value in theirs.items():
        ours = torch.from_numpy(source.floats(name))
        assert torch.equal(ours.to(value.dtype), value), name
    plain = open_source(str(tiny_llama))
    assert source.tensors.keys() == plain.tensors.keys()
    for name in source.tensors.keys() - set(LINEARS):
        assert np.array_equal(source.floats(name), plain.floats(name)), name
    assert source.quantization is not None
    assert source.quantization.count("; ") == len(KINDS)
    kind = find_format("compressed-tensors")
    assert kind.open_quantized is not None
    types = kind.open_quantized(folder, ("model.safetensors",), {}).types()
    assert {name: types[name] for name in ("int8", "nvfp4", "mxfp4", "float8", "int4")} == {
        "int8": 3, "nvfp4": 3, "mxfp4": 3, "float8": 6, "int4": 6
    }  # fmt: skip
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert set(kind.refusals(settings)) == {"vllm"}


def in_blocks(size: tuple[int, int]) -> Change:
    def change(settings: dict[str, Any], _: Tensors) -> None:
        group = settings["config_groups"]["group_3"]
        other = {**group, "weights": {**group["weights"], "block_structure": list(size)}}
        settings["config_groups"] = {"more": other, **settings["config_groups"]}

    return change


def test_a_layer_that_fits_two_groups_is_read_where_they_give_the_same_values(
    tiny_llama: Path, parts: dict[str, Artifact], tmp_path: Path
) -> None:
    """128 rows are four blocks of 32, and of 40; 128 columns are three blocks of 48, and of 64 they are two."""
    exact = open_source(str(of_every_kind(tiny_llama, parts["4"], tmp_path / "mixed"))).floats(Q)
    one = open_source(str(of_every_kind(tiny_llama, parts["4"], tmp_path / "one", in_blocks((32, 64)))))
    assert np.array_equal(one.floats(Q), exact)
    two = of_every_kind(tiny_llama, parts["4"], tmp_path / "two", in_blocks((40, 48)))
    with pytest.raises(SourceError, match=rf"the parts of {Q} fit several of the groups"):
        open_source(str(two))


def only(*names: str) -> Change:
    def change(settings: dict[str, Any], _: Tensors) -> None:
        settings["config_groups"] = {name: settings["config_groups"][name] for name in names}

    return change


def put(part: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        tensors[part] = value(tensors[part])

    return change


DOWN_8, UP_4, GATE_4, V_4 = (
    f"model.layers.0.{name}." for name in ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj", "self_attn.v_proj")
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (only("group_0", "group_1", "group_2", "group_3", "group_5"), "fit none of the groups"),  # rows of k_proj
        (only("group_1", "group_2", "group_5"), "is of a layer of 8 bits, and config.json has no such group"),
        (only("group_0", "group_3", "group_4", "group_5"), "is of a layer of 4-bit floats, and config.json has no"),
        (only("group_0", "group_1", "group_2", "group_3", "group_4"), "is of a layer of packed codes, and config.json"),
        (only("group_0", "group_1", "group_3", "group_4", "group_5"), "fit none of the groups"),
        (lambda c, t: c.update(format="float-quantized"), "is not read"),
        (lambda c, t: weights(c, 0).update(type="float"), "is not read"),
        (lambda c, t: weights(c, 3).update(block_structure=[0, 48]), "no rows and columns"),
        (lambda c, t: t.pop(f"{DOWN_8}weight"), "without its weight"),
        (lambda c, t: t.pop(f"{DOWN_8}weight_scale"), "lacks the tensor"),
        (lambda c, t: t.pop(f"{V_4}weight_packed"), "without its weight"),
        (lambda c, t: t.pop(f"{UP_4}weight_global_scale"), "fit none of the groups"),
        (put(f"{DOWN_8}weight", lambda v: v.float()), "without its weight_packed"),
        (put(f"{DOWN_8}weight_scale", lambda v: v[:-1]), "fit none of the groups"),
        (put(f"{UP_4}weight_packed", lambda v: v.to(torch.int32)), "lacks the tensor|fit none|without its|no pair"),
        (put(f"{GATE_4}weight_scale", lambda v: v.to(torch.int16)), "fit none of the groups"),
        (lambda c, t: t.update({f"{V_4}weight": t[f"{DOWN_8}weight"].clone()}), "twice, as"),
        (put(f"{GATE_4}weight_scale", lambda v: torch.full_like(v, 255)), "scales that are no numbers"),
    ],
)
def test_scaled_layers_that_lie_are_refused_in_one_line(
    change: Change, says: str, tiny_llama: Path, parts: dict[str, Artifact], tmp_path: Path
) -> None:
    folder = of_every_kind(tiny_llama, parts["4"], tmp_path / "mixed", change)
    with pytest.raises(SourceError, match=says) as raised:
        convert(str(folder), "float", "float32", tmp_path / "out")
    assert "Convert again" not in str(raised.value)
    assert str(raised.value).isprintable()
    assert not (tmp_path / "out").exists()


def more(settings: dict[str, Any]) -> dict[str, Any]:
    group = settings["config_groups"]["group_0"]
    return {f"more_{n}": {**group, "weights": {**group["weights"], "group_size": n}} for n in range(80)}
