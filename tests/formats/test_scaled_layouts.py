"""compressed-tensors' layouts of scaled values, held against the package of that name and transformers with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from safetensors.torch import load_file
from test_quantized_sources import foreign, values_of
from tiny_architectures import save_architecture
from tiny_llama import LINEARS, converted
from tiny_models import save_tiny
from trials import dense_values, read_back

from quantkit import verify
from quantkit.artifact import Artifact, open_artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine, find_format
from quantkit.contracts.run import Run
from quantkit.conversion.check import check, prepare
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError, EngineError, QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats.source import open_model, open_source
from quantkit.numerics.scaled.weight import InputRounding, ScaledWeight
from quantkit.recipe import ConvertRecipe, EngineSpec

pytest.importorskip("compressed_tensors")
KIND = "compressed-tensors"
# method, bits, options, the package's name of the scheme, and of the layout
CASES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "int8": ("int8", "8", {}, "W8A8", "int-quantized"),
    "fp8": ("fp8", "8", {}, "FP8_DYNAMIC", "float-quantized"),
    "fp8 blocks": ("fp8", "8", {"granularity": "block"}, "FP8_BLOCK", "float-quantized"),
    "nvfp4": ("gptq", "nvfp4", {}, "NVFP4A16", "nvfp4-pack-quantized"),
    "mxfp4": ("gptq", "mxfp4", {}, "MXFP4A16", "mxfp4-pack-quantized"),
    "plain nvfp4": ("rtn", "nvfp4", {}, "NVFP4A16", "nvfp4-pack-quantized"),
    "plain mxfp4": ("rtn", "mxfp4", {}, "MXFP4A16", "mxfp4-pack-quantized"),
}
FLOAT4 = [name for name in CASES if name.endswith("fp4")]
every_case = pytest.mark.parametrize("name", CASES)
Artifacts = Callable[[str], Artifact]


@pytest.fixture(scope="module")
def artifacts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Artifacts of the tiny llama, each made once."""
    made: dict[str, Artifact] = {}

    def get(name: str) -> Artifact:
        if name not in made:
            method, bits, options, _, _ = CASES[name]
            made[name] = converted(tiny_llama, tmp_path_factory.mktemp("out") / "out", method, bits, **options)
        return made[name]

    return get


def config_of(artifact: Artifact) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((artifact.folder / "config.json").read_text())["quantization_config"]
    return values


@every_case
def test_the_package_reads_what_we_read(name: str, artifacts: Artifacts) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    artifact = artifacts(name)
    stored = QuantizationConfig.model_validate(config_of(artifact))
    (scheme,) = stored.config_groups.values()
    compressor, tensors = BaseCompressor.get_value_from_registry(stored.format), dict(load_all(artifact))
    ours = read_back(artifact)
    for layer in LINEARS:
        stem, value = layer.removesuffix("weight"), ours[layer]
        parts = {part.removeprefix(stem): tensor for part, tensor in tensors.items() if part.startswith(stem)}
        theirs = compressor.decompress(parts, scheme)["weight"]
        assert isinstance(value, ScaledWeight)
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(value.dense().bfloat16(), theirs), layer
    assert verify(artifact) == open_artifact(artifact.folder)
    assert artifact.manifest.format == KIND


def load_all(artifact: Artifact) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(artifact.folder / "model.safetensors")
    return tensors


@every_case
def test_the_config_is_the_packages_own_scheme(name: str, artifacts: Artifacts) -> None:
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    _, _, _, preset, layout = CASES[name]
    values = config_of(artifacts(name))
    stored = QuantizationConfig.model_validate(values)
    (scheme,) = stored.config_groups.values()
    want = preset_name_to_scheme(preset, ["Linear"])
    want.format = layout
    assert scheme.model_dump() == want.model_dump()
    assert (values["quant_method"], stored.format, stored.quantization_status.value, stored.ignore) == (
        KIND, layout, "compressed", ["lm_head"],
    )  # fmt: skip


@pytest.mark.parametrize("name", FLOAT4[2:])
def test_plain_4_bit_floats_are_the_packages_own(name: str, artifacts: Artifacts, tiny_llama: Path) -> None:
    """Its scales and codes of the same weight; but for zeros, which have a sign there."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    stored = QuantizationConfig.model_validate(config_of(artifacts(name)))
    (scheme,) = stored.config_groups.values()
    source, ours = open_source(str(tiny_llama)), load_all(artifacts(name))
    for layer in LINEARS[:7]:
        stem, weight = layer.removesuffix("weight"), source.tensor(layer).float()
        groups = weight.unflatten(-1, (-1, scheme.weights.group_size))
        divisor = ours.get(stem + "weight_global_scale")
        scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=divisor)
        given = {"weight": weight, "weight_scale": scales}
        given |= {} if divisor is None else {"weight_global_scale": divisor}
        theirs = BaseCompressor.get_value_from_registry(stored.format).compress(given, scheme)
        assert torch.equal(theirs["weight_scale"].view(torch.uint8), ours[stem + "weight_scale"].view(torch.uint8))
        packed = theirs["weight_packed"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        layer_read = read_back(artifacts(name))[layer]
        assert isinstance(layer_read, ScaledWeight)
        assert torch.equal(torch.where(codes == 8, 0, codes), layer_read.values)


def test_what_is_stored_by_the_byte(artifacts: Artifacts) -> None:
    tensors = load_all(artifacts("plain nvfp4"))
    stem = LINEARS[0].removesuffix("weight")
    layer = read_back(artifacts("plain nvfp4"))[LINEARS[0]]
    assert isinstance(layer, ScaledWeight)
    kinds = {part: (tensors[stem + part].dtype, tuple(tensors[stem + part].shape)) for part in PARTS}
    assert kinds == {
        "weight_packed": (torch.uint8, (128, 64)),
        "weight_scale": (torch.float8_e4m3fn, (128, 8)),
        "weight_global_scale": (torch.float32, (1,)),
    }
    # The first column's code is the low half of the first byte.
    assert torch.equal(tensors[stem + "weight_packed"] & 15, layer.values[:, ::2])
    assert tensors["model.norm.weight"].dtype == torch.bfloat16


PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


def test_layers_that_engines_fuse_have_one_divisor(artifacts: Artifacts, tiny_llama: Path) -> None:
    source = open_source(str(tiny_llama))
    for name in ("plain nvfp4", "nvfp4"):
        tensors = load_all(artifacts(name))
        for block in range(3):
            found = {float(v) for key, v in tensors.items() if f".{block}." in key and key.endswith("global_scale")}
            largest = max(float(source.tensor(key).abs().max()) for key in LINEARS if f".{block}." in key)
            assert list(found) == [pytest.approx(448 * 6 / largest, rel=1e-6)]


def test_scales_of_gptq_are_searched_where_that_is_asked_for(
    artifacts: Artifacts, tiny_llama: Path, tmp_path: Path
) -> None:
    layer = LINEARS[0]
    made = {
        "plain": read_back(artifacts("plain mxfp4"))[layer],
        "searched": read_back(artifacts("mxfp4"))[layer],
        "largest": read_back(converted(tiny_llama, tmp_path / "out", "gptq", "mxfp4", scale_search=False))[layer],
    }
    scales = {name: value.scales for name, value in made.items() if isinstance(value, ScaledWeight)}
    assert torch.equal(scales["largest"], scales["plain"])
    assert not torch.equal(scales["searched"], scales["plain"])


def as_the_package(rounding: InputRounding, x: torch.Tensor) -> torch.Tensor:
    """Its own rounding to int8 has scales of the largest value / 127.5."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127.5
    return torch.round(wide / scale).clamp(-128, 127) * scale


@every_case
def test_transformers_computes_what_we_compute(
    name: str, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "int8":
        monkeypatch.setattr(InputRounding, "rounded", as_the_package)
    dtype = "bfloat16" if name in FLOAT4 else "float32"
    ids = np.arange(2, 40)[None]
    theirs, ours = (
        engine_logits(find_engine(engine).load(open_model(artifacts(name)), LoadSpec(1, 64, dtype=dtype)), ids)
        for engine in ("transformers", "reference")
    )
    assert np.abs(theirs - ours).max() < 1e-4 * np.abs(ours).max()


@pytest.mark.parametrize("name", FLOAT4[:2])
def test_transformers_still_computes_4_bit_floats_in_bfloat16_only(
    name: str, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it does more, the refusal has to go."""
    engine, model = find_engine("transformers"), open_model(artifacts(name))
    with pytest.raises(EngineError, match=r"cannot compute it in float32. Leave --dtype out"):
        engine.load(model, LoadSpec(1, 64, dtype="float32"))
    monkeypatch.setattr("quantkit.engines.transformers.ONLY_BFLOAT16", ())
    with pytest.raises(RuntimeError, match="same dtype"):
        engine_logits(engine.load(model, LoadSpec(1, 64, dtype="float32")), np.arange(2, 9)[None])


def test_engines_that_cannot_take_an_artifact_are_told(artifacts: Artifacts) -> None:
    refusals = find_format(KIND).refusals
    for name in CASES:
        assert set(refusals(config_of(artifacts(name)))) == ({"vllm"} if name in FLOAT4 else set())
    with pytest.raises(RecipeError, match="computes 4-bit floats on cards only"):
        choose(open_model(artifacts("nvfp4")), EngineSpec(engine="vllm"))


# The package rounds the inputs of opt's second layers by one scale for all tokens, as these come in two dimensions.
@pytest.mark.parametrize(("case", "name"), [("fp8", "gpt_neox"), ("plain mxfp4", "gpt_neox"), ("plain mxfp4", "opt")])
def test_transformers_reads_other_architectures(case: str, name: str, tmp_path: Path) -> None:
    """With biases, and projections that are not quantized."""
    model = save_architecture(tmp_path / "model", name)
    method, bits, options, _, _ = CASES[case]
    artifact = convert(str(model), method, bits, tmp_path / "out", **options)
    ids = np.arange(2, 30)[None]
    dtype = "bfloat16" if case in FLOAT4 else "float32"
    theirs, ours = (
        engine_logits(find_engine(engine).load(open_model(artifact), LoadSpec(1, 64, dtype=dtype)), ids)
        for engine in ("transformers", "reference")
    )
    assert np.abs(theirs - ours).max() < 1e-4 * np.abs(ours).max()


@pytest.mark.parametrize("case", ["int8", "fp8", "plain nvfp4", "plain mxfp4"])
def test_experts_are_read_one_by_one_or_refused(case: str, tmp_path: Path) -> None:
    """They have the names of published checkpoints. Once transformers reads all rightly, the refusal has to go."""
    from transformers import AutoModelForCausalLM

    model = save_architecture(tmp_path / "model", "mixtral")
    method, bits, options, _, _ = CASES[case]
    artifact = converted(model, tmp_path / "out", method, bits, **options)
    ours = dense_values(artifact)["model.layers.0.block_sparse_moe.experts.0.w1.weight"].bfloat16()
    try:
        find_engine("transformers").load(open_model(artifact), LoadSpec(1, 64))
        refused = False
    except EngineError as error:
        refused = "transformers stacks experts, and reads those of" in str(error)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(artifact.folder, dtype=torch.bfloat16)
        theirs = loaded.get_parameter("model.layers.0.mlp.experts.gate_up_proj")[0, : len(ours)]
        reads = torch.equal(theirs, ours)
    except RuntimeError:
        reads = False
    assert refused is not reads
    assert reads is (case in ("fp8", "plain mxfp4"))


@every_case
def test_a_folder_is_a_source_with_the_same_values(name: str, artifacts: Artifacts, tmp_path: Path) -> None:
    folder = foreign(artifacts(name), tmp_path / "foreign", lambda _config, _tensors: None)
    ours, theirs = dense_values(artifacts(name)), values_of(folder)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert np.array_equal(value.float().numpy(), theirs[key]), key
    source = open_source(str(folder))
    assert source.quantization is not None
    assert source.quantization.startswith(f"{KIND}, {CASES[name][4]}, scales of ")
    mxfp4 = name.endswith("mxfp4")
    says = "has no grouped codes, but is compressed-tensors"
    if mxfp4:
        says = "are mxfp4: leave --bits out, or give --bits mxfp4"
    with pytest.raises(RecipeError if mxfp4 else UnsupportedError, match=says):
        check(prepare(ConvertRecipe(model=str(folder), method="keep", bits="4")), tmp_path / "out")


def test_a_source_of_scaled_values_is_converted(artifacts: Artifacts, tmp_path: Path) -> None:
    for name in ("int8", "nvfp4"):
        folder = foreign(artifacts(name), tmp_path / name, lambda _config, _tensors: None)
        artifact = convert(str(folder), "rtn", "8", tmp_path / f"{name}-8", group_size=32)
        made, want = dense_values(artifact), dense_values(artifacts(name))
        for key in LINEARS:
            assert float((made[key] - want[key]).norm() / want[key].norm()) < 0.01


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return values


def _each(tensors: dict[str, torch.Tensor], part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for key in [key for key in tensors if key.endswith(f".{part}")]:
        tensors[key] = change(tensors[key])


def one_scale(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """As of the package's preset FP8: a scale for a whole tensor and for its inputs."""
    _weights(config).update(strategy="tensor")
    config["config_groups"]["group_0"]["input_activations"].update(strategy="tensor", dynamic=False)
    _each(tensors, "weight_scale", lambda scale: scale[0].float())
    tensors |= {
        key.replace("weight_scale", "input_scale"): torch.ones(1) for key in tensors if key.endswith("weight_scale")
    }


def other_scales(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """As of former versions: scales in float32, without a second dimension, and zero points of 0."""
    config["format"] = "naive-quantized"
    _each(tensors, "weight_scale", lambda scale: scale.float()[:, 0])
    tensors |= {
        key.replace("scale", "zero_point"): torch.zeros(len(scale), 1, dtype=torch.int8)
        for key, scale in tensors.items()
        if key.endswith("weight_scale")
    }


def inputs_too(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """As of the preset NVFP4, whose inputs are rounded, too."""
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    tensors |= {
        key.replace("weight_global", "input_global"): torch.ones(1) for key in tensors if key.endswith("global_scale")
    }


@pytest.mark.parametrize(
    ("name", "change"), [("fp8", one_scale), ("int8", other_scales), ("fp8", other_scales), ("nvfp4", inputs_too)]
)
def test_what_other_tools_write_is_read(name: str, change: Any, artifacts: Artifacts, tmp_path: Path) -> None:
    values = values_of(foreign(artifacts(name), tmp_path / "foreign", change))
    for key, want in dense_values(artifacts(name)).items():
        if change is one_scale and key in LINEARS:
            layer = read_back(artifacts(name))[key]
            assert isinstance(layer, ScaledWeight)
            want = layer.steps() * layer.scales[0].float()
        assert np.array_equal(want.float().numpy(), values[key]), key


LIES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("fp8", lambda c: c.update(format="int-quantized")),
    ("fp8", lambda c: c.update(format="mxfp8-quantized")),
    ("fp8", lambda c: c.update(config_groups={"a": 1})),
    ("fp8", lambda c: c["config_groups"]["group_0"].pop("weights")),
    ("fp8", lambda c: _weights(c).update(type="int")),
    ("fp8", lambda c: _weights(c).update(symmetric=False)),
    ("fp8", lambda c: _weights(c).update(strategy="group", group_size=0)),
    ("fp8", lambda c: _weights(c).update(strategy="group", group_size=64)),
    ("fp8", lambda c: _weights(c).update(strategy="tensor")),
    ("fp8 blocks", lambda c: _weights(c).update(block_structure=[64, 64])),
    ("fp8 blocks", lambda c: _weights(c).update(block_structure="128x128")),
    ("fp8 blocks", lambda c: _weights(c).update(block_structure=[128, True])),
    ("int8", lambda c: _weights(c).update(num_bits=4)),
    ("nvfp4", lambda c: c.update(format="mxfp4-pack-quantized")),
    ("nvfp4", lambda c: _weights(c).update(group_size=32)),
    ("mxfp4", lambda c: _weights(c).update(group_size=16)),
]


@pytest.mark.parametrize(("name", "change"), LIES)
def test_a_config_that_lies_is_found(
    name: str, change: Callable[[dict[str, Any]], object], artifacts: Artifacts, tmp_path: Path
) -> None:
    folder = foreign(artifacts(name), tmp_path / "out", lambda config, _: change(config))
    with pytest.raises(ArtifactError):
        _read_all(folder)
    with pytest.raises(SourceError):
        values_of(folder)


@pytest.mark.parametrize("key", ["input_activations", "format"])
def test_how_inputs_are_rounded_is_held_against_what_we_write(key: str, artifacts: Artifacts, tmp_path: Path) -> None:
    def change(config: dict[str, Any], _tensors: object) -> None:
        config["config_groups"]["group_0"][key] = None

    with pytest.raises(ArtifactError, match="its group of layers is not the one of"):
        _read_all(foreign(artifacts("int8"), tmp_path / "out", change))


def _put(part: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor], str], None]:
    def change(tensors: dict[str, torch.Tensor], stem: str) -> None:
        tensors[stem + part] = value(tensors[stem + part])

    return change


def _spoiled(at: float | int) -> Callable[[torch.Tensor], torch.Tensor]:
    def value(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype)[0, 0] = at
        return tensor

    return value


DAMAGE: list[tuple[str, Callable[[dict[str, torch.Tensor], str], object]]] = [
    ("fp8", lambda t, s: t.pop(s + "weight_scale")),
    ("fp8", lambda t, s: t.pop(s + "weight")),
    ("fp8", _put("weight", lambda w: w[:-1])),
    ("fp8", _put("weight", lambda w: w.float())),
    ("fp8", _put("weight", _spoiled(0x7F))),
    ("fp8", _put("weight_scale", _spoiled(float("inf")))),
    ("fp8", _put("weight_scale", lambda s: s[:-1])),
    ("fp8", _put("weight_scale", lambda s: s.T)),
    ("fp8 blocks", _put("weight_scale", lambda s: torch.cat([s, s]))),
    ("int8", _put("weight", lambda w: w.to(torch.uint8))),
    ("int8", _put("weight_scale", lambda s: s.to(torch.int32))),
    ("nvfp4", lambda t, s: t.pop(s + "weight_packed")),
    ("nvfp4", lambda t, s: t.pop(s + "weight_scale")),
    ("nvfp4", lambda t, s: t.pop(s + "weight_global_scale")),
    ("nvfp4", _put("weight_global_scale", lambda d: d * 0)),
    ("nvfp4", _put("weight_global_scale", lambda d: d.repeat(2))),
    ("nvfp4", _put("weight_packed", lambda w: w[:, :-1])),
    ("mxfp4", _put("weight_scale", _spoiled(255))),
    ("mxfp4", _put("weight_scale", lambda s: s.to(torch.int8))),
]


@pytest.mark.parametrize(("name", "change"), DAMAGE)
def test_parts_that_do_not_belong_together_are_found(
    name: str, change: Callable[[dict[str, torch.Tensor], str], object], artifacts: Artifacts, tmp_path: Path
) -> None:
    stem = LINEARS[0].removesuffix("weight")
    folder = foreign(artifacts(name), tmp_path / "out", lambda _, tensors: change(tensors, stem))
    with pytest.raises(ArtifactError):
        _read_all(folder)
    with pytest.raises(QuantkitError):
        convert(str(folder), "rtn", "8", tmp_path / "made")


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_our_own_scales_are_above_zero_and_bfloat16(value: float, artifacts: Artifacts, tmp_path: Path) -> None:
    stem = LINEARS[0].removesuffix("weight")
    for number, change in enumerate((_put("weight_scale", _spoiled(value)), _put("weight_scale", lambda s: s.float()))):
        folder = foreign(artifacts("fp8"), tmp_path / str(number), lambda _, tensors, c=change: c(tensors, stem))  # type: ignore[misc]
        with pytest.raises(ArtifactError, match=r"not above 0|is float32, not bfloat16"):
            _read_all(folder)


def test_zero_points_of_a_symmetric_folder_are_refused(artifacts: Artifacts, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        other_scales(config, tensors)
        _each(tensors, "weight_zero_point", lambda zeros: zeros + 1)

    with pytest.raises(SourceError, match=r"has zero points, and config.json says that it is symmetric"):
        values_of(foreign(artifacts("int8"), tmp_path / "out", change))


def _read_all(folder: Path) -> None:
    reader = find_format(KIND).open(folder, ("model.safetensors",), {})
    for name in reader.names():
        reader.read(name)


@pytest.mark.parametrize(
    ("method", "bits", "options", "says"),
    [
        (
            "fp8",
            "8",
            {"granularity": "block"},
            "has 112 input columns, no multiple of 128, .* Take granularity channel",
        ),
        ("rtn", "mxfp4", {}, "has 112 input columns, no multiple of 32"),
        ("gptq", "mxfp4", {}, "has 112 input columns, no multiple of 32"),
        ("rtn", "nvfp4", {"group_size": 32}, "nvfp4 has groups of 16 columns, not of 32: leave group_size out"),
        ("rtn", "nvfp4", {"sym": False}, "sym = False is not for nvfp4"),
        ("gptq", "nvfp4", {"desc_act": True}, "desc_act = True is not for nvfp4"),
        ("gptq", "mxfp4", {"refine": True}, "refine = True is not for mxfp4"),
        ("gptq", "nvfp4", {"static_groups": False}, "static_groups = False is not for nvfp4"),
        ("gptq", "nvfp4", {"format": "gptq"}, "gptq with bits nvfp4 cannot be written as 'gptq'. .*compressed-tensors"),
        ("fp8", "8", {"format": "gptq"}, "fp8 cannot be written as 'gptq'"),
    ],
)
def test_what_does_not_fit_is_refused(
    method: str, bits: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path / "model", hidden_size=112, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises((RecipeError, UnsupportedError), match=says):
        convert(str(model), method, bits, tmp_path / "out", **options)


@pytest.mark.parametrize("case", ["fp8", "int8", "plain nvfp4"])
@pytest.mark.parametrize("name", ["gpt2", "falcon, one norm"])
def test_layers_that_readers_do_not_find_are_refused(case: str, name: str, tmp_path: Path) -> None:
    model = save_architecture(tmp_path / "model", name)
    with pytest.raises(UnsupportedError, match="readers of compressed-tensors"):
        convert(str(model), *CASES[case][:2], tmp_path / "out")


def test_odd_shapes_are_told(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", intermediate_size=136)
    artifact = convert(str(model), "fp8", "8", tmp_path / "out")
    assert any("mlp.gate_proj.weight is 136 x" in note for note in artifact.manifest.all_notes)


@every_case
def test_a_block_is_found_as_it_was_taken(name: str, artifacts: Artifacts, tiny_llama: Path, tmp_path: Path) -> None:
    """What an interrupted conversion goes on with."""
    method, bits, options, _, _ = CASES[name]
    job = prepare(ConvertRecipe(model=str(tiny_llama), method=method, bits=bits, options=options))
    layout = job.method.check(job).plan
    layers = {key: value for key, value in read_back(artifacts(name)).items() if ".layers.1." in key}
    with job.open_writer(Run(tmp_path), layout) as writer:
        for key, value in layers.items():
            writer.add(key, value)
        found = writer.block("model.layers.1.")
    assert found.keys() == layers.keys()
    for key, value in found.items():
        want = layers[key]
        if isinstance(want, ScaledWeight):
            assert isinstance(value, ScaledWeight)
            assert (value.block, value.inputs) == (want.block, want.inputs)
            assert torch.equal(value.dense(), want.dense())
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(want))
