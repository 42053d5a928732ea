"""Quantized checkpoints as sources, ours and those of other tools, and their codes kept in another layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_folders import LAYERS, Change, foreign, read_values, refuse_source, version_2
from safetensors.torch import load_file
from tiny_models import EVALUATION
from trials import dense_values, read_back

from quantkit import evaluate, verify
from quantkit.artifact import Artifact
from quantkit.contracts.format import Stored
from quantkit.conversion.check import check, prepare
from quantkit.conversion.convert import convert
from quantkit.errors import QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.formats.source import open_source
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.recipe import ConvertRecipe

GROUP = 64
# By name: method, bits, and options.
SOURCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("rtn", "4", {"group_size": GROUP}),
    "gptq asymmetric": ("rtn", "3", {"group_size": GROUP, "sym": False}),
    "gptq in activation order": ("gptq", "4", {"group_size": GROUP, "desc_act": True}),
    "awq": ("awq", "4", {"group_size": GROUP, "n_grid": 2}),
    "compressed-tensors": ("gptq", "8", {"group_size": -1, "format": "compressed-tensors"}),
    "bitsandbytes": ("nf4", "4", {}),
}
UP = "model.layers.0.mlp.up_proj."
Sources = Callable[[str], Artifact]


@pytest.fixture(scope="module")
def sources(made: Callable[..., Artifact]) -> Sources:
    def get(name: str) -> Artifact:
        method, bits, options = SOURCES[name]
        return made(method, bits, **options)

    return get


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_what_the_artifact_holds(name: str, sources: Sources) -> None:
    artifact = sources(name)
    source, values = open_source(str(artifact.folder)), read_values(artifact.folder)
    for tensor, expected in dense_values(artifact).items():
        assert np.array_equal(values[tensor], expected.float().numpy()), tensor
    assert source.parameters == artifact.manifest.source.parameters
    assert source.quantization.startswith(artifact.manifest.format)
    assert np.array_equal(source.floats(LAYERS[0], 3, 5), values[LAYERS[0]][3:5])


# What other tools write


def no_order(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors.pop(name)


def old_settings(settings: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    for key in ("checkpoint_format", "static_groups", "true_sequential", "lm_head"):
        settings.pop(key, None)


def old_awq(settings: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    settings["w_bit"], settings["q_group_size"] = settings.pop("bits"), settings.pop("group_size")


@pytest.mark.parametrize(
    ("name", "change"), [("gptq", version_2), ("gptq", no_order), ("gptq", old_settings), ("awq", old_awq)]
)
def test_other_tools_files_of_the_same_codes_give_the_same_values(
    name: str, change: Change, sources: Sources, tmp_path: Path
) -> None:
    ours = read_values(sources(name).folder)
    theirs = read_values(foreign(sources(name), tmp_path / "foreign", change))
    assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)


def test_scales_in_bfloat16_are_read(sources: Sources, tmp_path: Path) -> None:
    artifact, scale = sources("compressed-tensors"), LAYERS[0] + "_scale"
    folder = foreign(artifact, tmp_path / "foreign", lambda _, t: t.update({scale: t[scale].bfloat16()}))
    layer = read_back(artifact)[LAYERS[0]]
    expected = layer.steps() * layer.spread(layer.scales.bfloat16())
    assert np.array_equal(read_values(folder)[LAYERS[0]], expected.numpy())


def test_a_former_order_of_columns_is_read(sources: Sources, tmp_path: Path) -> None:
    """compressed-tensors before 0.20: columns in the order of their activations."""

    def change(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        settings["config_groups"]["group_0"]["weights"].update(actorder="group", strategy="group", group_size=GROUP)
        for name in LAYERS:
            groups = int(tensors[name + "_shape"][1]) // GROUP
            tensors[name + "_scale"] = tensors[name + "_scale"].repeat(1, groups) * torch.arange(1, groups + 1)
            tensors[name + "_g_idx"] = (torch.arange(groups * GROUP) % groups).to(torch.int32)

    artifact = sources("compressed-tensors")
    values = read_values(foreign(artifact, tmp_path / "foreign", change))
    layer = read_back(artifact)[LAYERS[0]]
    factor = (torch.arange(layer.shape[1]) % (layer.shape[1] // GROUP) + 1)[None]
    expected = layer.steps() * (layer.scales.float() * factor).half().float()
    assert np.allclose(values[LAYERS[0]], expected.numpy(), rtol=1e-3)


def all_dense(tensors: dict[str, torch.Tensor]) -> None:
    """config.json says that it is quantized, and only floats are left."""
    for name in [name for name in tensors if name.endswith(("qweight", "qzeros", "scales", "g_idx"))]:
        tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gptq", lambda c, t: c.update(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        ("gptq", lambda c, t: c.update(bits=5), "how many bits"),
        ("gptq", lambda c, t: c.update(group_size=0), "group_size is 0"),
        ("gptq", lambda c, t: t[f"{UP}qzeros"].fill_(-1), "zero points of 16"),
        ("gptq", lambda c, t: all_dense(t), "and no tensor is. Take quantization_config out"),
        ("gptq", lambda c, t: t.pop(f"{UP}scales"), "lacks the tensor"),
        ("gptq", lambda c, t: t[f"{UP}scales"].fill_(float("inf")), "not finite"),
        ("gptq", lambda c, t: t[f"{UP}g_idx"].fill_(7), "other groups"),
        ("awq", lambda c, t: c.update(quant_method="quip"), r"already quantized \('quip'\), in none of the formats"),
        ("bitsandbytes", lambda c, t: c.update(load_in_4bit=False, load_in_8bit=True), "LLM.int8.*and no tensor is"),
    ],
)
def test_a_source_whose_settings_lie_is_refused(
    name: str, change: Change, says: str, sources: Sources, tmp_path: Path
) -> None:
    refuse_source(foreign(sources(name), tmp_path / "foreign", change), says, tmp_path / "out")


def test_a_source_that_is_cut_is_not_evaluated(artifact_of: Callable[..., Artifact], tmp_path: Path) -> None:
    model = foreign(artifact_of("rtn", "4", group_size=GROUP), tmp_path / "foreign")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(QuantkitError, match="of a further one"):
        evaluate(open_source(str(model)), probes=("perplexity",), limit=2, n_ctx=64, divergence=False)


def test_the_baseline_is_what_the_sources_values_give(sources: Sources, tmp_path: Path) -> None:
    folder = sources("gptq").folder
    same = convert(str(folder), "float", "float32", tmp_path / "same")
    assert any("the source was quantized before" in note for note in same.manifest.notes)
    forecast = check(prepare(ConvertRecipe(model=str(folder), method="rtn")), tmp_path / "out").forecast
    assert forecast.phases["making a tensor of the source"] == 17 * 256 * 128
    of_copy = evaluate(same, ("perplexity",), source=str(folder), **EVALUATION).find("kld")
    assert of_copy.value < 1e-5
    report = evaluate(open_source(str(folder)), ("perplexity",), **EVALUATION)
    assert report.engine.name == "reference"
    assert report.model.label.endswith(" source")
    own = report.find("kld")
    assert own.value < 0.02  # bfloat16 against float32


# The same codes in another layout


def kept(model: Path, kind: str, out: Path, bits: int = 4) -> Artifact:
    artifact = convert(str(model), "keep", bits, out, format=kind)
    verify(artifact)
    return artifact


def same_codes(one: dict[str, Stored], other: dict[str, Stored]) -> bool:
    pairs = [(one[name], other[name]) for name in LAYERS]
    return all(
        isinstance(a, GroupedWeight)
        and isinstance(b, GroupedWeight)
        and all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("codes", "scales", "zeros", "g_idx"))
        for a, b in pairs
    )


def test_codes_come_back_bit_for_bit_by_way_of_every_layout(sources: Sources, tmp_path: Path) -> None:
    first = sources("gptq")
    awq = kept(first.folder, "awq", tmp_path / "awq")
    compressed = kept(awq.folder, "compressed-tensors", tmp_path / "compressed")
    last = kept(compressed.folder, "gptq", tmp_path / "gptq")
    for artifact in (awq, compressed, last):
        assert same_codes(read_back(first), read_back(artifact))
        assert artifact.manifest.weight_error is None  # every tensor is equal
    one, other = (load_file(artifact.folder / "model.safetensors") for artifact in (first, last))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    norm = "model.norm.weight"
    model = foreign(first, tmp_path / "foreign", lambda _, t: t.update({norm: t[norm].bfloat16()}))
    notes = kept(model, "awq", tmp_path / "out").manifest.notes
    assert "tensors that are not quantized become float16: 1, such as model.norm.weight" in notes


def test_an_order_of_columns_that_the_config_leaves_out_is_kept_or_refused(sources: Sources, tmp_path: Path) -> None:
    artifact = sources("gptq in activation order")
    model = foreign(artifact, tmp_path / "foreign", lambda c, _: c.pop("desc_act"))
    with pytest.raises(RecipeError, match="cannot say which columns form a group"):
        kept(model, "awq", tmp_path / "awq")
    again = kept(model, "gptq", tmp_path / "gptq")
    assert same_codes(read_back(artifact), read_back(again))
    assert json.loads((again.folder / "config.json").read_text())["quantization_config"]["desc_act"] is True


def test_scales_of_zero_are_read_and_not_kept(sources: Sources, tmp_path: Path) -> None:
    model = foreign(sources("gptq"), tmp_path / "foreign", lambda _, t: t[f"{UP}scales"].zero_())
    assert not open_source(str(model)).floats(f"{UP}weight").any()
    with pytest.raises(SourceError, match="scales that are 0 or no float16 numbers") as raised:
        kept(model, "awq", tmp_path / "out")
    assert "Convert again" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def head_of_codes(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """As some tools write it."""
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"lm_head.{part}"] = tensors[f"model.layers.0.self_attn.q_proj.{part}"].clone()


def test_a_head_in_codes_is_not_kept(sources: Sources, tmp_path: Path) -> None:
    """What else is refused, test_source_target_matrix.py tells."""
    head = foreign(sources("gptq"), tmp_path / "head", head_of_codes)
    with pytest.raises(UnsupportedError, match=r"lm_head.weight of .* is quantized, and the format"):
        convert(str(head), "keep", None, tmp_path / "out", format="awq")
