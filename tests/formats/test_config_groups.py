"""compressed-tensors with several groups of layers as a source."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import LINEARS, converted
from trials import dense_values

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


def more(settings: dict[str, Any]) -> dict[str, Any]:
    group = settings["config_groups"]["group_0"]
    return {f"more_{n}": {**group, "weights": {**group["weights"], "group_size": n}} for n in range(80)}
