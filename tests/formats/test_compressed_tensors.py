"""compressed-tensors, held against the package of that name, and transformers with it: packed codes, scaled values."""

import numpy as np
import pytest
import torch
from engine_logits import logits_by
from quantized_folders import LAYERS, foreign, parts_of, read_values
from safetensors.torch import load_file
from tiny_models import save_tiny
from trials import dense, dense_values, read_all, read_back

from quantkit import convert, verify
from quantkit.contracts.format import ON_CPU
from quantkit.contracts.registry import find_engine, find_format
from quantkit.contracts.run import Run
from quantkit.conversion.check import prepare
from quantkit.errors import ArtifactError, EngineError, QuantkitError, RecipeError, UnsupportedError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_model, open_source
from quantkit.numerics.quantized_weight import GroupedWeight, InputRounding, ScaledWeight
from quantkit.records.artifact import open_artifact
from quantkit.records.recipe import ConvertRecipe, EngineSpec

pytest.importorskip("compressed_tensors")
KIND = "compressed-tensors"
GROUP = 64
# Of packed codes: method, bits, options
PACKED = {
    "2 zeros": ("rtn", "2", {"sym": False}),
    "3": ("rtn", "3", {}),
    "4": ("rtn", "4", {}),
    "4 rows": ("rtn", "4", {"group_size": -1}),
    "8": ("rtn", "8", {}),
    "8 zeros": ("rtn", "8", {"sym": False}),
    "gptq 3 zeros": ("gptq", "3", {"sym": False}),
    "awq 4": ("awq", "4", {"n_grid": 2}),
}
# Of scaled values: the same, the package's name of the scheme, and of the layout
SCALED = {
    "int8": ("int8", "8", {}, "W8A8", "int-quantized"),
    "fp8": ("fp8", "8", {}, "FP8_DYNAMIC", "float-quantized"),
    "fp8 blocks": ("fp8", "8", {"granularity": "block"}, "FP8_BLOCK", "float-quantized"),
    "nvfp4": ("gptq", "nvfp4", {}, "NVFP4A16", "nvfp4-pack-quantized"),
    "mxfp4": ("gptq", "mxfp4", {}, "MXFP4A16", "mxfp4-pack-quantized"),
    "plain nvfp4": ("rtn", "nvfp4", {}, "NVFP4A16", "nvfp4-pack-quantized"),
    "plain mxfp4": ("rtn", "mxfp4", {}, "MXFP4A16", "mxfp4-pack-quantized"),
}
STEM = LAYERS[0].removesuffix("weight")
slow = pytest.mark.slow


@pytest.fixture(scope="session")
def artifacts(artifact_of, one_block):
    """artifacts(name): of the llama of one block, or of `model`."""

    def get(name, model=one_block, **more):
        if name in PACKED:
            method, bits, options = PACKED[name]
            return artifact_of(method, bits, model=model, **{"group_size": GROUP, "format": KIND, **options, **more})
        method, bits, options, _, _ = SCALED[name]
        return artifact_of(method, bits, model=model, **options, **more)

    return get


def of_the_package(artifact):
    """What the package makes of an artifact: its settings, its one scheme, and its compressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = QuantizationConfig.model_validate(quantization_of(artifact.folder))
    (scheme,) = stored.config_groups.values()
    return stored, scheme, BaseCompressor.get_value_from_registry(stored.format)


@pytest.mark.parametrize("name", [*PACKED, *SCALED])
def test_the_package_reads_what_we_read_and_understands_the_config(name, artifacts):
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    artifact = artifacts(name)
    stored, scheme, compressor = of_the_package(artifact)
    tensors, ours = load_file(artifact.folder / "model.safetensors"), read_back(artifact)
    for layer in LAYERS:
        theirs, value = compressor.decompress(parts_of(tensors, layer), scheme)["weight"], ours[layer]
        if isinstance(value, GroupedWeight):  # it multiplies in float16, the type of the scales
            assert torch.equal(value.steps().half() * value.spread(value.scales).half(), theirs), layer
        else:
            assert theirs.dtype == torch.bfloat16
            assert torch.equal(value.dense().bfloat16(), theirs), layer
    assert tensors["model.norm.weight"].dtype == theirs.dtype
    assert verify(artifact) == open_artifact(artifact.folder)
    layout = SCALED[name][4] if name in SCALED else "pack-quantized"
    assert artifact.manifest.format == quantization_of(artifact.folder)["quant_method"] == KIND
    assert stored.format == layout
    assert (stored.quantization_status.value, stored.ignore) == ("compressed", ["lm_head"])
    if name in SCALED:
        want = preset_name_to_scheme(SCALED[name][3], ["Linear"])
        want.format = layout
        assert scheme.model_dump() == want.model_dump()
        return
    _, bits, options = PACKED[name]
    weights, rows = scheme.weights, options.get("group_size") == -1
    symmetric = "zeros" not in name and "awq" not in name
    assert (weights.num_bits, weights.type, weights.symmetric) == (int(bits), "int", symmetric)
    assert (weights.strategy, weights.group_size) == (("channel", None) if rows else ("group", GROUP))
    assert (weights.actorder, scheme.input_activations, scheme.targets) == (None, None, ["Linear"])


@pytest.mark.parametrize("name", ["plain nvfp4", "plain mxfp4"])
def test_plain_4_bit_floats_are_the_packages_own(name, artifacts, one_block):
    """Its scales and codes of the same weight; but for zeros, which have a sign there."""
    from compressed_tensors.quantization.utils import calculate_qparams

    _, scheme, compressor = of_the_package(artifacts(name))
    source, read = open_source(str(one_block)), read_back(artifacts(name))
    ours = load_file(artifacts(name).folder / "model.safetensors")
    for layer in LAYERS:
        stem, weight = layer.removesuffix("weight"), source.tensor(layer).float()
        groups = weight.unflatten(-1, (-1, scheme.weights.group_size))
        divisor = ours.get(stem + "weight_global_scale")
        scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=divisor)
        given = {"weight": weight, "weight_scale": scales}
        given |= {} if divisor is None else {"weight_global_scale": divisor}
        theirs = compressor.compress(given, scheme)
        assert torch.equal(theirs["weight_scale"].view(torch.uint8), ours[stem + "weight_scale"].view(torch.uint8))
        packed, value = theirs["weight_packed"], read[layer]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        assert torch.equal(torch.where(codes == 8, 0, codes), value.values)


def test_layers_that_engines_fuse_have_one_divisor(artifacts, tiny):
    source, tensors = open_source(str(tiny)), load_file(artifacts("plain nvfp4", tiny).folder / "model.safetensors")
    for block in range(3):
        found = {float(v) for key, v in tensors.items() if f".{block}." in key and key.endswith("global_scale")}
        layers = [name.replace(".0.", f".{block}.") for name in LAYERS]
        largest = max(float(source.tensor(name).abs().max()) for name in layers)
        assert list(found) == [pytest.approx(448 * 6 / largest, rel=1e-6)]


def as_the_package(rounding, x):
    """Its own rounding to int8 has scales of the largest value / 127.5."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127.5
    return torch.round(wide / scale).clamp(-128, 127) * scale


# The package rounds the inputs of opt's second layers by one scale for all tokens, as these come in two dimensions.
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, None) for case in ("3", "4 rows", "8", "int8", "fp8", "fp8 blocks", "nvfp4")),
        ("4 rows", "opt"),
        ("4 rows", "qwen2_moe"),
        ("fp8", "gpt_neox"),
        *(pytest.param("4 rows", name, marks=slow) for name in ("gpt_neox", "gemma2", "mixtral")),
        *(pytest.param("plain mxfp4", name, marks=slow) for name in ("gpt_neox", "opt")),
    ],
)
def test_transformers_computes_what_we_compute(case, name, artifacts, architecture, monkeypatch):
    """Biases, heads, gates and projections are not quantized, and experts are found one by one."""
    if case == "int8":
        monkeypatch.setattr(InputRounding, "rounded", as_the_package)
    artifact = artifacts(case) if name is None else artifacts(case, architecture(name))
    ids, dtype = np.arange(2, 40)[None], "bfloat16" if case.endswith("fp4") else "float32"
    theirs, ours = (logits_by(engine, artifact, ids, dtype=dtype) for engine in ("transformers", "reference"))
    # Packed codes multiply in float16.
    assert (theirs - ours).abs().max() < (0.01 if case in PACKED else 1e-4) * ours.abs().max()


def test_engines_that_cannot_take_an_artifact_are_told(artifacts, architecture):
    vllm = f"vllm{ON_CPU}"
    refused = {"3": {vllm}, "4": set(), "8 zeros": {"transformers", vllm}, "fp8": set(), "nvfp4": {vllm}}
    for name, engines in refused.items():
        assert set(find_format(KIND).refusals(quantization_of(artifacts(name).folder))) == engines, name
    with pytest.raises(RecipeError, match="transformers does not load packed zero points"):
        choose(open_model(artifacts("awq 4")), EngineSpec(engine="transformers"))
    for name, since in {"3": "0.25", "8": "0.23", "8 zeros": "0.25", "2 zeros": "0.31", "nvfp4": "0.23"}.items():
        model, refuse = open_model(artifacts(name)), find_engine("vllm").refuse_model
        with pytest.raises(EngineError, match=rf"on a CPU: .*For NVIDIA GPUs, vLLM {since} and newer .*source: vllm/"):
            refuse(model, None, "cpu")
        refuse(model, None, "cuda")
    ids = np.arange(2, 9)[None]
    # Once it does load zero points, the refusal has to go.
    with pytest.raises(EngineError, match="ignore_mismatched_sizes"):
        logits_by("transformers", artifacts("awq 4"), ids)
    with pytest.raises(EngineError, match="transformers stacks experts, and reads those of"):
        logits_by("transformers", artifacts("plain nvfp4", architecture("mixtral")), ids)
    with pytest.raises(EngineError, match=r"cannot compute it in float32. Leave --dtype out"):
        logits_by("transformers", artifacts("nvfp4"), ids, dtype="float32")


@pytest.mark.parametrize(
    ("method", "bits", "options", "says"),
    [
        (
            "fp8",
            "8",
            {"granularity": "block"},
            "112 input columns, not a multiple of 128, .* Use --granularity channel",
        ),
        ("rtn", "mxfp4", {}, "has 112 input columns, not a multiple of 32"),
        ("rtn", "nvfp4", {"group_size": 32}, "nvfp4 has groups of 16 columns, not 32: leave group_size out"),
        ("rtn", "nvfp4", {"sym": False}, "sym = False does not apply to nvfp4"),
    ],
)
def test_what_does_not_fit_is_refused(method, bits, options, says, tiny_with, tmp_path):
    model = tiny_with(num_hidden_layers=1, hidden_size=112)
    with pytest.raises((RecipeError, UnsupportedError), match=says):
        convert(str(model), method, bits, tmp_path / "out", **options)


def test_layers_that_readers_do_not_find_are_refused(architecture, tmp_path):
    with pytest.raises(UnsupportedError, match=r"query_key_value.weight .* is a FalconLinear, .* Use --format gptq"):
        convert(str(architecture("falcon, one norm")), "rtn", None, tmp_path / "out", format=KIND)
    with pytest.raises(UnsupportedError, match="readers of compressed-tensors"):
        convert(str(architecture("gpt2")), "fp8", None, tmp_path / "out")


def test_columns_that_fill_no_words_and_rows_that_fill_no_blocks_are_stored(tmp_path):
    """GPTQ's layout refuses 172 columns at 3 bits."""
    model = save_tiny(tmp_path / "model", num_hidden_layers=1, intermediate_size=172)
    artifact = convert(str(model), "rtn", 3, tmp_path / "out", format=KIND, group_size=-1)
    layer = read_back(artifact)["model.layers.0.mlp.down_proj.weight"]
    assert layer.shape[1] == 172
    _, scheme, compressor = of_the_package(artifact)
    parts = parts_of(load_file(artifact.folder / "model.safetensors"), "model.layers.0.mlp.down_proj.weight")
    assert parts["weight_packed"].shape[1] == 17  # 516 bits
    assert torch.equal(compressor.decompress(parts, scheme)["weight"], layer.dense().half())
    artifact = convert(str(model), "fp8", "8", tmp_path / "fp8")
    assert any("mlp.gate_proj.weight is 172 x" in note for note in artifact.manifest.all_notes)


def test_a_block_is_found_as_it_was_taken(artifacts, one_block, tmp_path):
    """What an interrupted conversion goes on with."""
    job = prepare(ConvertRecipe(model=str(one_block), method="fp8", bits="8", options={"granularity": "block"}))
    layers = {key: value for key, value in read_back(artifacts("fp8 blocks")).items() if ".layers.0." in key}
    with job.open_writer(Run(tmp_path), job.method.check(job).plan) as writer:
        for key, value in layers.items():
            writer.add(key, value)
        found = writer.block("model.layers.0.")
    assert found.keys() == layers.keys()
    for key, want in layers.items():
        assert getattr(found[key], "inputs", None) == getattr(want, "inputs", None)
        assert torch.equal(dense(found[key]), dense(want))


def weights_of(config):
    return config["config_groups"]["group_0"]["weights"]


def each(tensors, part, change):
    for key in [key for key in tensors if key.endswith(f".{part}")]:
        tensors[key] = change(tensors[key])


def beside(tensors, part, other, value):
    tensors |= {key.replace(part, other): value(tensor) for key, tensor in tensors.items() if key.endswith(part)}


def one_scale(config, tensors):
    """As of the package's preset FP8: a scale for a whole tensor and for its inputs."""
    weights_of(config).update(strategy="tensor")
    config["config_groups"]["group_0"]["input_activations"].update(strategy="tensor", dynamic=False)
    each(tensors, "weight_scale", lambda scale: scale[0].float())
    beside(tensors, "weight_scale", "input_scale", lambda _: torch.ones(1))


def other_scales(config, tensors):
    """As of former versions: scales in float32, without a second dimension, and zero points of 0."""
    config["format"] = "naive-quantized"
    each(tensors, "weight_scale", lambda scale: scale.float()[:, 0])
    beside(tensors, "weight_scale", "weight_zero_point", lambda scale: torch.zeros(len(scale), 1, dtype=torch.int8))


def inputs_too(config, tensors):
    """As of the preset NVFP4, whose inputs are rounded, too."""
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    beside(tensors, "weight_global_scale", "input_global_scale", lambda _: torch.ones(1))


@pytest.mark.parametrize(("name", "change"), [("fp8", one_scale), ("int8", other_scales), ("nvfp4", inputs_too)])
def test_what_other_tools_write_is_read(name, change, artifacts, tmp_path):
    values = read_values(foreign(artifacts(name), tmp_path / "foreign", change))
    read = read_back(artifacts(name))
    for key, want in dense_values(artifacts(name)).items():
        layer = read[key]
        if change is one_scale and isinstance(layer, ScaledWeight):
            want = layer.steps() * layer.scales[0].float()
        assert np.array_equal(want.float().numpy(), values[key]), key


def spoiled(tensor, at):
    tensor = tensor.clone()
    tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype)[0, 0] = at
    return tensor


def part(name, change):
    """Another value of one part of a layer."""
    return lambda _, tensors: tensors.update({STEM + name: change(tensors[STEM + name])})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fp8", lambda c, _: c.update(format="int-quantized")),
        ("fp8", lambda c, _: c["config_groups"]["group_0"].pop("weights")),
        ("fp8 blocks", lambda c, _: weights_of(c).update(block_structure=[64, 64])),
        ("nvfp4", lambda c, _: weights_of(c).update(group_size=32)),
        ("4", part("weight_shape", lambda _: torch.tensor([1 << 40, 64]))),
        ("4", part("weight_scale", lambda scale: scale * float("nan"))),
        ("4", part("weight_packed", lambda words: words[:, :-1])),
        ("fp8", part("weight", lambda codes: spoiled(codes, 0x7F))),
        ("fp8", part("weight_scale", lambda scale: spoiled(scale, float("inf")))),
        ("fp8 blocks", part("weight_scale", lambda scale: torch.cat([scale, scale]))),
        ("nvfp4", part("weight_global_scale", lambda divisor: divisor * 0)),
        ("mxfp4", part("weight_scale", lambda scale: spoiled(scale, 255))),
    ],
)
def test_what_does_not_belong_together_is_found_in_artifacts_and_sources(name, change, artifacts, tmp_path):
    folder = foreign(artifacts(name), tmp_path / "out", change)
    with pytest.raises(ArtifactError):
        read_all(KIND, folder)
    with pytest.raises(QuantkitError):
        convert(str(folder), "rtn", "8", tmp_path / "made")


def stored_in_float32(_, tensors):
    each(tensors, "weight_scale", lambda scale: scale.float())


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("fp8", lambda _, tensors: each(tensors, "weight_scale", lambda scale: spoiled(scale, -1.0)), "not above 0"),
        ("fp8", stored_in_float32, "is float32, not bfloat16"),
        ("4", stored_in_float32, "float32"),
        ("int8", lambda c, _: c["config_groups"]["group_0"].update(input_activations=None), "does not describe"),
        ("4", lambda c, _: c["config_groups"].update(group_1=c["config_groups"]["group_0"]), "has 2 groups"),
        ("4", lambda c, _: weights_of(c).update(num_bits=8), "do not fit 8 bits"),
        ("4", lambda c, _: weights_of(c).update(symmetric=False), "lacks the tensor .*_zero_point"),
    ],
)
def test_artifacts_are_held_against_what_we_write(name, change, says, artifacts, tmp_path):
    with pytest.raises(ArtifactError, match=says):
        read_all(KIND, foreign(artifacts(name), tmp_path / "out", change))
