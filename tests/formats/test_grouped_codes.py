"""Grouped codes: checkpoints of ours and of others as sources, one layout from another, and what config.json says."""

import json

import numpy as np
import pytest
import torch
from edits import edit_json, put
from quantized_folders import LAYERS, foreign, read_values, refuse_source, version_2
from safetensors.torch import load_file
from tiny_llama import converted
from tiny_models import EVALUATION, changed_copy
from transformers import AutoConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from trials import dense_values, read_back

from bench.fuzz.dequantize import values_of as plain_values
from quantkit import convert, evaluate, verify
from quantkit.contracts.registry import find_format
from quantkit.conversion.check import check, prepare
from quantkit.errors import QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.formats._bit_packing import unpack_awq
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_source
from quantkit.numerics.quantized_weight import GroupedWeight
from quantkit.records.recipe import ConvertRecipe

GROUP = 64
ZEROS = {"group_size": GROUP, "sym": False}
# By name: method, bits, and options.
SOURCES = {
    "gptq": ("rtn", "4", {"group_size": GROUP}),
    "gptq in activation order": ("gptq", "4", {"group_size": GROUP, "desc_act": True}),
    "awq": ("awq", "4", {"group_size": GROUP, "n_grid": 2}),
    "compressed-tensors": ("gptq", "8", {"group_size": -1, "format": "compressed-tensors"}),
    "bitsandbytes": ("nf4", "4", {}),
}
UP = "model.layers.0.mlp.up_proj."


@pytest.fixture(scope="module")
def sources(made):
    def get(name):
        method, bits, options = SOURCES[name]
        return made(method, bits, **options)

    return get


def without(*endings):
    """A change that takes tensors away."""
    return lambda _, tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(endings)]


def as_auto_round(settings, packing):
    for key in ("version", "checkpoint_format", "desc_act"):
        settings.pop(key, None)
    settings.update(quant_method="auto-round", packing_format=packing, data_type="int", autoround_version="0.5.1")


# Of settings, which former versions did not write.
LATER = ("checkpoint_format", "static_groups", "true_sequential", "lm_head")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", version_2),
        ("gptq", without("g_idx")),
        ("gptq", lambda c, _: [c.pop(key, None) for key in LATER]),
        ("awq", lambda c, _: c.update(version="GEMM", w_bit=c.pop("bits"), q_group_size=c.pop("group_size"))),
        ("awq", lambda c, _: c.update(checkpoint_format=c.pop("version"), format="GEMM")),
        ("gptq", lambda c, t: (without("g_idx")(c, t), as_auto_round(c, "auto_round:auto_gptq"))),
        ("gptq", lambda c, t: (version_2(c, t), as_auto_round(c, "auto_round"))),
        ("gptq", lambda c, t: (version_2(c, t), c.update(format=c.pop("checkpoint_format")))),
        ("awq", lambda c, _: as_auto_round(c, "auto_round:auto_awq")),
    ],
)
def test_other_tools_files_of_the_same_codes_give_the_same_values(name, change, sources, tmp_path):
    ours = read_values(sources(name).folder)
    theirs = read_values(foreign(sources(name), tmp_path / "foreign", change))
    assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_the_version_of_a_layout_that_only_quantize_config_names_counts(key, sources, tmp_path):
    ours = read_values(sources("gptq").folder)
    folder = foreign(sources("gptq"), tmp_path / "foreign", lambda c, t: (version_2(c, t), c.pop("checkpoint_format")))
    own = quantization_of(folder) | {key: "gptq_v2"}
    (folder / "quantize_config.json").write_text(json.dumps(own))
    assert "quantize_config.json" in open_source(str(folder)).hashed_files
    theirs = read_values(folder)
    assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)


@pytest.mark.parametrize(
    ("name", "place"),
    [("gptq", "quantize_config.json"), ("awq", "quant_config.json"), ("compressed-tensors", "compression_config")],
)
def test_settings_in_another_place_are_read_and_hashed_and_go_into_no_output(name, place, sources, tmp_path):
    folder = foreign(sources(name), tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "quantize_config.json").unlink(missing_ok=True)
    if place.endswith(".json"):
        (folder / "config.json").write_text(json.dumps(config))
        refuse_source(folder, "neither config.json nor quantize_config.json nor quant_config", tmp_path / "out")
        (folder / place).write_text(json.dumps({key: settings[key] for key in settings.keys() - {"quant_method"}}))
    (folder / "config.json").write_text(json.dumps(config if place.endswith(".json") else {**config, place: settings}))
    ours, theirs, source = read_values(sources(name).folder), read_values(folder), open_source(str(folder))
    assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)
    assert place not in source.config
    assert (place in source.hashes) == place.endswith(".json")


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "bits", "options", "says"),
    [
        ("gptq", "8", {}, {"dynamic": {"-:.*head": {}, r".*\.down_proj$": {"bits": 8, "group_size": 32}}}),
        ("gptq", "4", ZEROS | {"group_size": -1}, {"dynamic": {r"+:.*down": {"group_size": -1, "sym": False}}}),
        ("gptq", "4", {}, {"quant_method": "auto-round", "extra_config": {DOWN: {"group_size": 32}}}),
        ("awq", "4", {"sym": False}, {"dynamic": {".*down": {"group_size": 32}}}),
        ("compressed-tensors", "4", {}, {}),
    ],
)
def test_layers_with_groups_of_another_size_are_read_and_not_kept(kind, bits, options, says, made, tmp_path):
    one = made("rtn", "4", format=kind, group_size=GROUP, sym=kind != "awq")
    two = made("rtn", bits, format=kind, **{"group_size": 32, **options})

    def mix(settings, tensors):
        theirs = load_file(two.folder / "model.safetensors")
        tensors |= {name: theirs[name] for name in theirs if name.startswith(DOWN)}
        settings.update(says)
        if not says:
            own = quantization_of(two.folder)["config_groups"]["group_0"]
            settings["config_groups"]["group_1"] = own | {"targets": [DOWN]}

    folder = foreign(one, tmp_path / "foreign", mix)
    of_one, of_two = plain_values(one.folder), plain_values(two.folder)
    for name, value in read_values(folder).items():
        assert np.array_equal(value, (of_two if DOWN in name else of_one)[name]), name
    with pytest.raises(UnsupportedError, match=r"layers of several kinds .*, but keep writes only one kind"):
        convert(str(folder), "keep", None, tmp_path / "out")


def test_scales_in_bfloat16_are_read(sources, tmp_path):
    artifact, scale = sources("compressed-tensors"), LAYERS[0] + "_scale"
    folder = foreign(artifact, tmp_path / "foreign", lambda _, t: t.update({scale: t[scale].bfloat16()}))
    layer = read_back(artifact)[LAYERS[0]]
    expected = layer.steps() * layer.spread(layer.scales.bfloat16())
    assert np.array_equal(read_values(folder)[LAYERS[0]], expected.numpy())


def test_a_former_order_of_columns_is_read(sources, tmp_path):
    """compressed-tensors before 0.20: columns in the order of their activations."""

    def change(settings, tensors):
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


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gptq", lambda c, t: c.update(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        ("gptq", lambda c, t: c.update(bits=5), "no valid number of bits"),
        ("gptq", lambda c, t: c.update(group_size=0), "group_size is 0"),
        ("gptq", lambda c, t: t[f"{UP}qzeros"].fill_(-1), "zero points of 16"),
        ("gptq", without("qweight", "qzeros", "scales", "g_idx"), "but no tensor is. Remove quantization_config"),
        ("gptq", lambda c, t: t.pop(f"{UP}scales"), "lacks the tensor"),
        ("gptq", lambda c, t: t[f"{UP}scales"].fill_(float("inf")), "not finite"),
        ("gptq", lambda c, t: t[f"{UP}g_idx"].fill_(7), "columns outside its"),
        ("gptq", lambda c, t: c.update(group_size=32), "do not fit 4 bits and groups of 32 .*does not support"),
        ("gptq", lambda c, t: as_auto_round(c, "auto_round:fp8"), "'auto_round:fp8' .* not supported. These are"),
        ("awq", lambda c, t: c.update(version="gemv"), "'gemv', and only gemm is supported"),
        ("awq", lambda c, t: c.update(checkpoint_format="GEMV_fast", version=None), "'GEMV_fast', and only gemm"),
        ("awq", lambda c, t: c.update(quant_method="quip"), r"already quantized \('quip'\), in a format that"),
        ("bitsandbytes", lambda c, t: c.update(load_in_4bit=False, load_in_8bit=True), "LLM.int8.*but no tensor is"),
    ],
)
def test_a_source_whose_settings_lie_is_refused(name, change, says, sources, tmp_path):
    refuse_source(foreign(sources(name), tmp_path / "foreign", change), says, tmp_path / "out")


def test_a_source_that_is_cut_is_not_evaluated(artifact_of, tmp_path):
    whole = foreign(artifact_of("rtn", "4", group_size=GROUP), tmp_path / "foreign")
    model = changed_copy(whole, tmp_path / "cut", num_hidden_layers=2)
    with pytest.raises(QuantkitError, match="of another one"):
        evaluate(open_source(str(model)), probes=("perplexity",), limit=2, n_ctx=64, divergence=False)


def test_the_baseline_is_what_the_sources_values_give(sources, tmp_path):
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


def kept(model, kind, out, bits=4):
    artifact = convert(str(model), "keep", bits, out, format=kind)
    verify(artifact)
    return artifact


def same_codes(one, other):
    pairs = [(one[name], other[name]) for name in LAYERS]
    return all(
        isinstance(a, GroupedWeight)
        and isinstance(b, GroupedWeight)
        and all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("codes", "scales", "zeros", "g_idx"))
        for a, b in pairs
    )


def test_codes_come_back_bit_for_bit_by_way_of_every_layout(sources, tmp_path):
    first = sources("gptq")
    source = open_source(str(first.folder))
    assert (source.parameters, source.format) == (first.manifest.source.parameters, "gptq")
    assert np.array_equal(source.floats(LAYERS[0], 3, 5), source.floats(LAYERS[0])[3:5])
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


def test_an_order_of_columns_that_the_config_leaves_out_is_kept_or_refused(sources, tmp_path):
    artifact = sources("gptq in activation order")
    model = foreign(artifact, tmp_path / "foreign", lambda c, _: c.pop("desc_act"))
    with pytest.raises(RecipeError, match="cannot store an order of columns"):
        kept(model, "awq", tmp_path / "awq")
    again = kept(model, "gptq", tmp_path / "gptq")
    assert same_codes(read_back(artifact), read_back(again))
    assert json.loads((again.folder / "config.json").read_text())["quantization_config"]["desc_act"] is True


def test_scales_of_zero_are_read_and_not_kept(sources, tmp_path):
    model = foreign(sources("gptq"), tmp_path / "foreign", lambda _, t: t[f"{UP}scales"].zero_())
    assert not open_source(str(model)).floats(f"{UP}weight").any()
    with pytest.raises(SourceError, match="scales that are 0 or not finite in float16") as raised:
        kept(model, "awq", tmp_path / "out")
    assert "Convert again" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_head_in_codes_is_not_kept(sources, tmp_path):
    def head_of_codes(_, tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors[f"lm_head.{part}"] = tensors[f"model.layers.0.self_attn.q_proj.{part}"].clone()

    head = foreign(sources("gptq"), tmp_path / "head", head_of_codes)
    edit_json(head / "config.json", put("tie_word_embeddings", value=False))
    with pytest.raises(UnsupportedError, match=r"lm_head.weight of .* is quantized, and the format"):
        convert(str(head), "keep", None, tmp_path / "out", format="awq")


def test_engines_find_awqs_layout(made):
    artifact = made("gptq", "4", format="awq", **ZEROS)
    wanted = {"bits": 4, "group_size": GROUP, "zero_point": True, "modules_to_not_convert": None}
    assert quantization_of(artifact.folder) == {"quant_method": "awq", "version": "gemm", **wanted}
    assert artifact.label.endswith(f"gptq-4 group_size={GROUP} sym=False format=awq")
    assert verify(artifact) == artifact
    assert not (artifact.folder / "quantize_config.json").exists()
    assert not any("vLLM loads only symmetric" in note for note in artifact.manifest.notes)
    tensors, values = load_file(artifact.folder / "model.safetensors"), read_back(artifact)
    for name in LAYERS:
        value, stem = values[name], name.removesuffix("weight")
        assert stem + "g_idx" not in tensors
        scales = tensors[stem + "scales"].float().repeat_interleave(GROUP, 0)
        codes, zeros = (unpack_awq(tensors[stem + part]).float() for part in ("qweight", "qzeros"))
        assert torch.equal((codes - zeros.repeat_interleave(GROUP, 0)).mul(scales).T, value.dense())


def test_readers_and_engines_go_by_the_format_not_by_the_method(made):
    ours, theirs = (made("gptq", "4", format=kind, **ZEROS) for kind in ("awq", "gptq"))
    one, other = dense_values(ours), dense_values(theirs)
    assert all(torch.equal(one[name], other[name]) for name in LAYERS)
    cases = [("rtn", "gptq", True, False), ("rtn", "awq", False, False), ("awq", "gptq", False, True)]
    for method, kind, sym, refused in cases:
        artifact = made(method, "4", format=kind, group_size=GROUP, sym=sym)
        engines = find_format(kind).refusals(quantization_of(artifact.folder))
        assert ("vllm" in engines) == refused  # zero points, whatever method wrote them


def test_what_the_format_cannot_hold_is_refused_before_long_work(one_block, tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.conversion.check.draw_tokens", lambda *_: pytest.fail("the text was read"))
    monkeypatch.setattr("quantkit.conversion.convert.staged", lambda *_: pytest.fail("the work was begun"))
    with pytest.raises(RecipeError, match="the format awq cannot store an order of columns: leave desc_act out"):
        convert(str(one_block), "gptq", "4", tmp_path / "out", format="awq", desc_act=True)


@pytest.mark.parametrize(("kind", "least"), [("awq", 0), ("gptq", 1)])
def test_awq_fits_weights_above_zero_with_zero_points_that_the_layout_can_store(kind, least, one_block, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    model = changed_copy(one_block, tmp_path / "model", lambda tensors: tensors[name].abs_())
    options = {"group_size": GROUP, "n_grid": 2, "rounding": "nearest"}
    value = read_back(converted(model, tmp_path / "out", "awq", format=kind, **options))[name]
    assert int(value.zeros.min()) == least
    assert float(value.dense().min()) >= 0.0


# What config.json says, for all options

# method, bits, format, options
CASES = [
    ("gptq", "4", "gptq", {"sym": False, "desc_act": True, "group_size": 64}),
    ("gptq", "4", "gptq", {"sym": True, "desc_act": True, "group_size": -1}),
    ("gptq", "3", "gptq", {"sym": False, "group_size": 32}),
    ("rtn", "2", "gptq", {"sym": True, "group_size": 64}),
    ("awq", "4", "awq", {"group_size": -1, "n_grid": 2}),
    ("awq", "4", "awq", {"sym": True, "group_size": 64, "n_grid": 2}),
]


def of_the_codes(artifact):
    """Bits, group size, symmetry and order of columns as the stored tensors have them."""
    read, tensors = read_back(artifact), load_file(artifact.folder / "model.safetensors")
    bits, groups, symmetric, scattered, highest = set(), set(), True, False, 0
    for name in LAYERS:
        layer = read[name]
        (rows, columns), words = layer.shape, tensors[name.removesuffix("weight") + "qweight"]
        bits.add(words.numel() * 32 // (rows * columns))
        groups.add(-1 if layer.scales.shape[1] == 1 else columns // layer.scales.shape[1])
        symmetric = symmetric and bool((layer.zeros == 1 << (layer.bits - 1)).all())
        scattered = scattered or not torch.equal(layer.g_idx, layer.g_idx.sort().values)
        highest = max(highest, int(layer.codes.max()))
    (width,), (group,) = bits, groups
    assert highest == 2**width - 1
    return {"bits": width, "group_size": group, "sym": symmetric, "scattered": scattered}


@pytest.mark.parametrize(("method", "bits", "kind", "options"), CASES)
def test_the_config_says_what_the_codes_are(method, bits, kind, options, made):
    artifact = made(method, bits, format=kind, **options)
    says, codes = quantization_of(artifact.folder), of_the_codes(artifact)
    assert (says["quant_method"], says["bits"], says["group_size"]) == (kind, codes["bits"], codes["group_size"])
    read = AutoQuantizationConfig.from_dict(dict(says))
    assert (read.quant_method.value, read.bits, read.group_size) == (kind, codes["bits"], codes["group_size"])
    if kind == "awq":
        # Its readers always subtract zero points, and have no order of columns.
        assert (says["zero_point"], read.zero_point, says["version"], codes["scattered"]) == (True, True, "gemm", False)
        assert codes["sym"] == options.get("sym", False)
        return
    assert json.loads((artifact.folder / "quantize_config.json").read_text()) == says
    assert says["sym"] is read.sym is codes["sym"] is options.get("sym", False)
    assert says["desc_act"] is read.desc_act is options.get("desc_act", False)
    # One group has nothing to scatter.
    assert codes["scattered"] == (says["desc_act"] and codes["group_size"] != -1)
    assert read.format == says["checkpoint_format"] == "gptq"
    for name in ("static_groups", "true_sequential", "damp_percent"):
        assert says.get(name) == artifact.manifest.options.get(name)


@pytest.mark.parametrize(("method", "dtype"), [("rtn", "float16"), ("nf4", "bfloat16")])
def test_the_sources_old_key_for_its_dtype_does_not_stay(method, dtype, one_block, tmp_path):
    """A checkpoint as older tools wrote it, with `torch_dtype`."""
    old = changed_copy(one_block, tmp_path / "old", torch_dtype="float32")
    source = json.loads((old / "config.json").read_text())
    artifact = convert(str(old), method, "4", tmp_path / "out")
    config = json.loads((artifact.folder / "config.json").read_text())
    assert "torch_dtype" not in config
    assert config["dtype"] == dtype
    assert AutoConfig.from_pretrained(artifact.folder).dtype == getattr(torch, dtype)
    norm = load_file(artifact.folder / "model.safetensors")["model.norm.weight"]
    assert norm.dtype == getattr(torch, dtype)
    other = {"torch_dtype", "dtype", "quantization_config"}
    assert {k: v for k, v in config.items() if k not in other} == {k: v for k, v in source.items() if k not in other}
