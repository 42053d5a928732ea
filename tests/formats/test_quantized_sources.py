"""Quantized checkpoints as sources, ours and those of other tools, and their codes kept in another layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import LINEARS, converted
from trials import dense_values, read_back

from quantkit import evaluate, verify
from quantkit.artifact import MANIFEST, Artifact
from quantkit.contracts.format import Stored
from quantkit.contracts.model import Model
from quantkit.conversion.check import check, prepare
from quantkit.conversion.convert import convert
from quantkit.errors import QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats.source import open_source
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.recipe import ConvertRecipe, EngineSpec

GROUP = 64
TARGETS = [
    ("rtn", "4", {"format": "gptq", "group_size": GROUP}),
    ("rtn", "4", {"format": "awq", "group_size": GROUP}),
    ("rtn", "4", {"format": "compressed-tensors", "group_size": GROUP}),
    ("nf4", "4", {}),
    ("ctranslate2", "float32", {}),
    ("gguf", "Q8_0", {}),
    ("float", "float32", {}),
]
SOURCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("rtn", "4", {"group_size": GROUP}),
    "gptq asymmetric": ("rtn", "3", {"group_size": GROUP, "sym": False}),
    "gptq in activation order": ("gptq", "4", {"group_size": GROUP, "desc_act": True}),
    "awq": ("awq", "4", {"group_size": GROUP, "n_grid": 2}),
    "compressed-tensors": ("gptq", "8", {"group_size": -1, "format": "compressed-tensors"}),
    "compressed-tensors asymmetric": ("rtn", "2", {"group_size": 32, "sym": False, "format": "compressed-tensors"}),
    "bitsandbytes": ("nf4", "4", {}),
}
Sources = Callable[[str], Artifact]


@pytest.fixture(scope="module")
def sources(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Quantized checkpoints, each made once."""
    made: dict[str, Artifact] = {}

    def get(name: str) -> Artifact:
        if name not in made:
            method, bits, options = SOURCES[name]
            made[name] = converted(tiny_llama, tmp_path_factory.mktemp("sources") / "out", method, bits, **options)
        return made[name]

    return get


def foreign(
    artifact: Artifact, folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
) -> Path:
    """The artifact as another tool would have written it: without a manifest, its settings and tensors changed."""
    folder.mkdir()
    for path in artifact.folder.iterdir():
        if path.name not in (MANIFEST, "model.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(artifact.folder / "model.safetensors")
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def values_of(model: Path) -> dict[str, np.ndarray]:
    source = open_source(str(model))
    return {name: source.floats(name) for name in source.tensors}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_what_the_artifact_holds(name: str, sources: Sources) -> None:
    artifact = sources(name)
    values = values_of(artifact.folder)
    for tensor, expected in dense_values(artifact).items():
        assert np.array_equal(values[tensor], expected.float().numpy()), tensor
    source = open_source(str(artifact.folder))
    assert source.parameters == artifact.manifest.source.parameters
    assert source.quantization is not None
    assert source.quantization.startswith(artifact.manifest.format)
    row = source.floats(LINEARS[0], 3, 5)
    assert np.array_equal(row, values[LINEARS[0]][3:5])


@pytest.mark.parametrize(
    ("method", "bits", "options"), TARGETS, ids=[f"{m}-{o.get('format', b)}" for m, b, o in TARGETS]
)
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_becomes_every_target(
    name: str, method: str, bits: str, options: dict[str, Any], sources: Sources, tmp_path: Path
) -> None:
    folder = sources(name).folder
    if method == "ctranslate2":
        with pytest.raises(QuantkitError, match="CTranslate2's converter reads checkpoint folders of floats"):
            convert(str(folder), method, bits, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        return
    artifact = convert(str(folder), method, bits, tmp_path / "out", **options)
    verify(artifact)
    assert any("the source was quantized before" in note for note in artifact.manifest.notes)
    if method == "float":
        ours, theirs = dense_values(artifact), values_of(folder)
        assert all(np.array_equal(ours[tensor].numpy(), theirs[tensor]) for tensor in ours)


# What other tools write


def version_2(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """GPTQModel's `gptq_v2` stores zero points as they are; symmetric ones of 4 bits are 8."""
    settings["checkpoint_format"] = "gptq_v2"
    for name in tensors:
        if name.endswith("qzeros"):
            tensors[name] = torch.full_like(tensors[name], 0x88888888 - (1 << 32))


def no_order(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors.pop(name)


def old_settings(settings: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    for key in ("checkpoint_format", "static_groups", "true_sequential", "lm_head"):
        settings.pop(key, None)


def old_awq(settings: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    settings["w_bit"], settings["q_group_size"] = settings.pop("bits"), settings.pop("group_size")


def bfloat16_scales(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("scale"):
            tensors[name] = tensors[name].bfloat16()


def with_order(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """compressed-tensors before 0.20: columns in the order of their activations."""
    settings["config_groups"]["group_0"]["weights"].update(actorder="group", strategy="group", group_size=GROUP)
    for name in LINEARS:
        stem, scales = name.removesuffix("weight"), tensors[name + "_scale"]
        columns = int(tensors[name + "_shape"][1])
        tensors[name + "_scale"] = scales.repeat(1, columns // GROUP) * torch.arange(1, columns // GROUP + 1)
        tensors[stem + "weight_g_idx"] = (torch.arange(columns) % (columns // GROUP)).to(torch.int32)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", version_2),
        ("gptq", no_order),
        ("gptq", old_settings),
        ("awq", old_awq),
        ("bitsandbytes", lambda *_: None),
    ],
)
def test_other_tools_files_of_the_same_codes_give_the_same_values(
    name: str, change: Any, sources: Sources, tmp_path: Path
) -> None:
    model = foreign(sources(name), tmp_path / "foreign", change)
    ours, theirs = values_of(sources(name).folder), values_of(model)
    assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)


def test_scales_in_bfloat16_are_read(sources: Sources, tmp_path: Path) -> None:
    artifact = sources("compressed-tensors")
    values = values_of(foreign(artifact, tmp_path / "foreign", bfloat16_scales))
    layer = read_back(artifact)[LINEARS[0]]
    assert isinstance(layer, GroupedWeight)
    expected = layer.steps() * layer.spread(layer.scales.bfloat16())
    assert np.array_equal(values[LINEARS[0]], expected.numpy())
    bad = foreign(artifact, tmp_path / "finer", lambda _, t: _finer(t))
    with pytest.raises(SourceError, match="scales that are 0 or no float16 numbers"):
        convert(str(bad), "keep", 8, tmp_path / "out", format="gptq")


def _finer(tensors: dict[str, torch.Tensor]) -> None:
    name = LINEARS[0] + "_scale"
    tensors[name] = tensors[name].float() * 1.0001


def test_a_former_order_of_columns_is_read(sources: Sources, tmp_path: Path) -> None:
    artifact = sources("compressed-tensors")
    values = values_of(foreign(artifact, tmp_path / "foreign", with_order))
    layer = read_back(artifact)[LINEARS[0]]
    assert isinstance(layer, GroupedWeight)
    columns = torch.arange(layer.shape[1])
    group = columns % (layer.shape[1] // GROUP)
    factor = (group + 1)[None]
    expected = layer.steps() * (layer.scales.float() * factor).half().float()
    assert np.allclose(values[LINEARS[0]], expected.numpy(), rtol=1e-3)


def all_dense(tensors: dict[str, torch.Tensor]) -> None:
    """config.json says that it is quantized, and only floats are left."""
    for name in [name for name in tensors if name.endswith(("qweight", "qzeros", "scales", "g_idx"))]:
        tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gptq", lambda c, t: c.update(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        ("gptq", lambda c, t: c.update(bits=5), "how many bits"),
        ("gptq", lambda c, t: c.update(bits=8), "has the shape"),
        ("gptq", lambda c, t: c.update(group_size=32), "groups of 32"),
        ("gptq", lambda c, t: c.update(group_size=0), "group_size is 0"),
        ("gptq", lambda c, t: c.update(checkpoint_format=["gptq"]), "checkpoint_format"),
        ("gptq", lambda c, t: t["model.layers.0.mlp.up_proj.qzeros"].fill_(-1), "zero points of 16"),
        ("gptq", lambda c, t: (c.update(desc_act=True), no_order(c, t)), "g_idx"),
        ("bitsandbytes", lambda c, t: c.update(load_in_8bit=True), "this is True, True and 'nf4'"),
        ("bitsandbytes", lambda c, t: c.update(load_in_4bit=False, load_in_8bit=True), "LLM.int8.*and no tensor is"),
        ("bitsandbytes", lambda c, t: c.update(bnb_4bit_quant_type="fp4"), "config.json says that codes are fp4"),
        ("bitsandbytes", lambda c, t: c.update(bnb_4bit_quant_type=["nf4"]), "and \\['nf4'\\]"),
        ("gptq", lambda c, t: all_dense(t), "and no tensor is. Take quantization_config out"),
        ("gptq", lambda c, t: t.pop("model.layers.0.mlp.up_proj.scales"), "lacks the tensor"),
        ("gptq", lambda c, t: t["model.layers.0.mlp.up_proj.scales"].fill_(float("inf")), "not finite"),
        ("gptq", lambda c, t: t["model.layers.0.mlp.up_proj.g_idx"].fill_(7), "other groups"),
        ("awq", lambda c, t: c.update(version="gemv"), "version 'gemv'"),
        ("awq", lambda c, t: c.update(quant_method="quip"), r"already quantized \('quip'\), in none of the formats"),
        ("bitsandbytes", lambda c, t: t.pop("model.layers.0.mlp.up_proj.weight.absmax"), "absmax is missing"),
        ("compressed-tensors", lambda c, t: c.update(format="marlin-24"), "pack-quantized, but 'marlin-24'"),
    ],
)
def test_a_source_whose_settings_lie_is_refused_in_one_line(
    name: str, change: Any, says: str, sources: Sources, tmp_path: Path
) -> None:
    model = foreign(sources(name), tmp_path / "foreign", change)
    with pytest.raises((SourceError, UnsupportedError), match=says) as raised:
        convert(str(model), "float", "float32", tmp_path / "out")
    assert "Convert again" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_rows_that_fill_no_words_are_refused(sources: Sources, tmp_path: Path) -> None:
    """A word too many, and a config.json that agrees."""

    def longer(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        stem = "model.layers.0.mlp.up_proj."
        for part in ("qweight", "scales"):
            tensors[stem + part] = torch.cat([tensors[stem + part], tensors[stem + part][:, :4]], 1)

    model = foreign(sources("gptq"), tmp_path / "foreign", longer)
    with pytest.raises(SourceError, match=r"260 x 128 weights; 4-bit words need multiples of 8"):
        open_source(str(model)).floats("model.layers.0.mlp.up_proj.weight")


def test_a_source_that_is_cut_is_not_judged(sources: Sources, tmp_path: Path) -> None:
    model = foreign(sources("gptq"), tmp_path / "foreign", lambda *_: None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(QuantkitError, match="of a further one"):
        evaluate(open_source(str(model)), probes=("perplexity",), limit=2, n_ctx=64, divergence=False)


def test_engines_that_cannot_take_a_source_are_told_before_they_start(sources: Sources) -> None:
    model = Model(None, open_source(str(sources("compressed-tensors asymmetric").folder)))
    for engine, says in (("transformers", "packed zero points"), ("vllm", "4 and 8 bits")):
        with pytest.raises(RecipeError, match=says):
            choose(model, EngineSpec(engine=engine))


def test_the_memory_of_a_dequantized_layer_is_forecast(sources: Sources, tmp_path: Path) -> None:
    for model, phases in ((sources("gptq").folder, {"making a tensor of the source": 17 * 256 * 128}), (None, {})):
        folder = model or convert(str(sources("gptq").folder), "float", "float32", tmp_path / "float").folder
        forecast = check(prepare(ConvertRecipe(model=str(folder), method="rtn")), tmp_path / "out").forecast
        assert forecast is not None
        assert {name: size for name, size in forecast.phases.items() if "making" in name} == phases


# Judging


def test_the_baseline_is_what_the_sources_values_give(sources: Sources, tmp_path: Path) -> None:
    folder = sources("gptq").folder
    same = convert(str(folder), "float", "float32", tmp_path / "same")
    settings: dict[str, Any] = {"probes": ("perplexity",), "limit": 2, "n_ctx": 64, "threads": (1,)}
    of_copy = evaluate(same, source=str(folder), **settings).find("kld")
    assert of_copy is not None
    assert of_copy.value < 1e-5
    report = evaluate(open_source(str(folder)), **settings)
    assert (report.model.label, report.engine.name) == ("gptq source", "reference")
    own = report.find("kld")
    assert own is not None
    assert own.value < 0.02  # bfloat16 against float32


# The same codes in another layout


def kept(model: Path, kind: str, out: Path, bits: int = 4) -> Artifact:
    artifact = convert(str(model), "keep", bits, out, format=kind)
    verify(artifact)
    return artifact


def same_codes(one: dict[str, Stored], other: dict[str, Stored]) -> bool:
    pairs = [(one[name], other[name]) for name in LINEARS]
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


@pytest.mark.parametrize("name", ["gptq asymmetric", "awq", "compressed-tensors", "compressed-tensors asymmetric"])
@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
def test_codes_are_kept_or_refused(name: str, kind: str, sources: Sources, tmp_path: Path) -> None:
    artifact = sources(name)
    bits = int(SOURCES[name][1])
    zeros = min(int(v.zeros.min()) for v in read_back(artifact).values() if isinstance(v, GroupedWeight))
    if kind == "awq" and bits != 4:
        with pytest.raises(RecipeError, match="holds codes of 4 bits"):
            kept(artifact.folder, kind, tmp_path / "out", bits)
    elif kind == "gptq" and zeros < 1:
        with pytest.raises(UnsupportedError, match="zero points of 0, and the format gptq holds none below 1"):
            kept(artifact.folder, kind, tmp_path / "out", bits)
    else:
        assert same_codes(read_back(artifact), read_back(kept(artifact.folder, kind, tmp_path / "out", bits)))


def test_an_order_of_columns_that_the_config_leaves_out_is_kept_or_refused(sources: Sources, tmp_path: Path) -> None:
    artifact = sources("gptq in activation order")
    model = foreign(artifact, tmp_path / "foreign", lambda c, _: c.pop("desc_act"))
    with pytest.raises(RecipeError, match="cannot say which columns form a group"):
        kept(model, "awq", tmp_path / "awq")
    again = kept(model, "gptq", tmp_path / "gptq")
    assert same_codes(read_back(artifact), read_back(again))
    assert json.loads((again.folder / "config.json").read_text())["quantization_config"]["desc_act"] is True


def test_scales_of_zero_are_read_and_not_kept(sources: Sources, tmp_path: Path) -> None:
    model = foreign(sources("gptq"), tmp_path / "foreign", lambda _, t: t["model.layers.0.mlp.up_proj.scales"].zero_())
    assert not open_source(str(model)).floats("model.layers.0.mlp.up_proj.weight").any()
    with pytest.raises(SourceError, match="scales that are 0 or no float16 numbers") as raised:
        kept(model, "awq", tmp_path / "out")
    assert "Convert again" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_what_is_not_quantized_becomes_float16_and_it_is_told(sources: Sources, tmp_path: Path) -> None:
    def bfloat16_norm(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()

    notes = kept(foreign(sources("gptq"), tmp_path / "foreign", bfloat16_norm), "awq", tmp_path / "out").manifest.notes
    assert "tensors that are not quantized become float16: 1, such as model.norm.weight" in notes


def test_what_cannot_be_kept_is_refused(tiny_llama: Path, sources: Sources, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UnsupportedError, match="is not quantized"):
        convert(str(tiny_llama), "keep", out=out)
    with pytest.raises(UnsupportedError, match="4-bit NormalFloat"):
        convert(str(sources("bitsandbytes").folder), "keep", out=out)
    with pytest.raises(RecipeError, match="have 3 bits: leave --bits out, or give --bits 3"):
        convert(str(sources("gptq asymmetric").folder), "keep", 4, out=out)
    with pytest.raises(RecipeError, match="cannot say which columns form a group"):
        convert(str(sources("gptq in activation order").folder), "keep", out=out)
    head = foreign(sources("gptq"), tmp_path / "head", lambda _, t: _quantized_norm(t))
    with pytest.raises(UnsupportedError, match=r"lm_head.weight of .* is quantized, and the format"):
        convert(str(head), "keep", out=out, format="awq")
    assert not out.exists()


def _quantized_norm(tensors: dict[str, torch.Tensor]) -> None:
    """A head of codes, as some tools write it."""
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"lm_head.{part}"] = tensors[f"model.layers.0.self_attn.q_proj.{part}"].clone()
