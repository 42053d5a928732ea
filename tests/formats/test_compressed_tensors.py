"""compressed-tensors, held against the package of that name: its words, its values, and transformers with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from safetensors.torch import load_file, save_file
from tiny_architectures import save_architecture
from tiny_llama import LINEARS, converted
from tiny_models import save_tiny
from trials import read_back

from quantkit import verify
from quantkit.artifact import Artifact, open_artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine, find_format
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError, EngineError, RecipeError, UnsupportedError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats._packing import pack_string, unpack_string
from quantkit.formats._quantization_config import quantization_of
from quantkit.formats.source import open_model
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.recipe import EngineSpec

compressed_tensors = pytest.importorskip("compressed_tensors")
KIND = "compressed-tensors"
GROUP = 64
# method, bits, options
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("rtn", bits, {"sym": sym}) for bits in ("2", "3", "4", "8") for sym in (True, False)),
    ("rtn", "4", {"group_size": -1}),
    ("gptq", "4", {}),
    ("gptq", "3", {"sym": False}),
    ("awq", "4", {"n_grid": 2}),
]
NAMES = ["-".join([method, bits, *(f"{k}={v}" for k, v in options.items())]) for method, bits, options in CASES]
Artifacts = Callable[..., Artifact]


@pytest.fixture(scope="module")
def artifacts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Artifacts of the tiny llama, each made once."""
    made: dict[str, Artifact] = {}

    def get(method: str, bits: str = "4", kind: str = KIND, **options: Any) -> Artifact:
        options = {"group_size": GROUP, **options}
        key = repr((method, bits, kind, sorted(options.items())))
        if key not in made:
            out = tmp_path_factory.mktemp("artifacts") / "out"
            made[key] = converted(tiny_llama, out, method, bits, format=kind, **options)
        return made[key]

    return get


def config_of(artifact: Artifact) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((artifact.folder / "config.json").read_text())["quantization_config"]
    return values


def decompressed(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The layers as the package reads them, by weight name."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stored = QuantizationConfig.model_validate(config_of(artifact))
    (scheme,) = stored.config_groups.values()
    tensors = load_file(artifact.folder / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(stored.format)
    values = {}
    for name in LINEARS:
        stem = name.removesuffix("weight")
        parts = {part.removeprefix(stem): value for part, value in tensors.items() if part.startswith(stem)}
        values[name] = compressor.decompress(parts, scheme)["weight"]
    return values


@pytest.mark.parametrize(("method", "bits", "options"), CASES, ids=NAMES)
def test_the_package_reads_what_we_read(method: str, bits: str, options: dict[str, Any], artifacts: Artifacts) -> None:
    artifact = artifacts(method, bits, **options)
    ours = read_back(artifact)
    for name, value in decompressed(artifact).items():
        layer = ours[name]
        assert isinstance(layer, GroupedWeight)
        # It multiplies in float16, the type of the scales.
        assert torch.equal(layer.steps().half() * layer.spread(layer.scales).half(), value), name
    assert verify(artifact) == open_artifact(artifact.folder)


@pytest.mark.parametrize(("method", "bits", "options"), CASES, ids=NAMES)
def test_the_codes_are_those_of_gptqs_layout(
    method: str, bits: str, options: dict[str, Any], artifacts: Artifacts
) -> None:
    kind = "awq" if method == "awq" else "gptq"
    one = read_back(artifacts(method, bits, **options))
    other = read_back(artifacts(method, bits, kind, **options))
    for name in LINEARS:
        ours, theirs = one[name], other[name]
        assert isinstance(ours, GroupedWeight)
        assert isinstance(theirs, GroupedWeight)
        for part in ("codes", "zeros", "scales", "g_idx"):
            assert torch.equal(getattr(ours, part), getattr(theirs, part)), (name, part)


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (4, 32), (7, 33), (2, 64), (5, 172)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_are_those_of_the_package(bits: int, rows: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(
        0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8
    )
    signed = (codes.int() - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(pack_string(codes, bits), pack_to_int32(signed, bits))
    assert torch.equal(pack_string(codes.T, bits).T, pack_to_int32(signed, bits, packed_dim=0))
    assert torch.equal(unpack_string(pack_string(codes, bits), bits, columns), codes)


def test_the_config_is_what_the_package_understands(artifacts: Artifacts) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    values = config_of(artifacts("gptq"))
    stored = QuantizationConfig.model_validate(values)
    assert (values["quant_method"], stored.format, stored.quantization_status.value) == (
        KIND, "pack-quantized", "compressed",
    )  # fmt: skip
    (scheme,) = stored.config_groups.values()
    weights = scheme.weights
    assert (weights.num_bits, weights.type, weights.symmetric, weights.strategy, weights.group_size) == (
        4, "int", True, "group", GROUP,
    )  # fmt: skip
    assert weights.actorder is None
    assert scheme.input_activations is None
    assert (scheme.targets, stored.ignore) == (["Linear"], ["lm_head"])
    (scheme,) = QuantizationConfig.model_validate(config_of(artifacts("rtn", group_size=-1))).config_groups.values()
    assert (scheme.weights.strategy, scheme.weights.group_size) == ("channel", None)


@pytest.mark.parametrize(
    ("method", "bits", "options"),
    [("rtn", "4", {}), ("gptq", "4", {}), ("rtn", "8", {}), ("rtn", "3", {}), ("rtn", "4", {"group_size": -1})],
)
def test_transformers_computes_what_we_compute(
    method: str, bits: str, options: dict[str, Any], artifacts: Artifacts
) -> None:
    artifact = artifacts(method, bits, **options)
    ids = np.arange(2, 40)[None]
    theirs, ours = (
        engine_logits(find_engine(name).load(open_model(artifact), LoadSpec(1, 64, dtype="float32")), ids)
        for name in ("transformers", "reference")
    )
    assert np.abs(theirs - ours).max() < 2e-3  # float16 products of codes and scales


def test_columns_that_fill_no_words_are_stored(tmp_path: Path) -> None:
    """GPTQ's layout refuses 172 columns at 3 bits."""
    model = save_tiny(tmp_path / "model", intermediate_size=172)
    artifact = convert(str(model), "rtn", 3, tmp_path / "out", format=KIND, group_size=-1)
    layer = read_back(artifact)["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(layer, GroupedWeight)
    assert layer.shape[1] == 172
    packed = load_file(artifact.folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight_packed"]
    assert packed.shape[1] == 17  # 516 bits


def test_an_order_of_columns_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """The package has removed it: "actorder='group' has been removed"."""
    with pytest.raises(RecipeError, match="cannot say which columns form a group"):
        convert(str(tiny_llama), "gptq", 4, tmp_path / "out", format=KIND, desc_act=True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt2", r"no linear layer where .* is, .* Take the format gptq"),
        ("falcon, one norm", r"query_key_value.weight .* is a FalconLinear, .* Take the format gptq"),
    ],
)
def test_layers_that_readers_do_not_find_are_refused(name: str, says: str, tmp_path: Path) -> None:
    model = save_architecture(tmp_path / "model", name)
    with pytest.raises(UnsupportedError, match=says):
        convert(str(model), "rtn", 4, tmp_path / "out", format=KIND)


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "gemma2", "mixtral", "qwen2_moe"])
def test_transformers_reads_other_architectures(name: str, tmp_path: Path) -> None:
    """Their heads, gates and projections that are not quantized are left out, and experts are found one by one."""
    model = save_architecture(tmp_path / "model", name)
    artifact = convert(str(model), "rtn", 4, tmp_path / "out", format=KIND, group_size=-1)
    ids = np.arange(2, 30)[None]
    theirs, ours = (
        engine_logits(find_engine(engine).load(open_model(artifact), LoadSpec(1, 64, dtype="float32")), ids)
        for engine in ("transformers", "reference")
    )
    assert np.abs(theirs - ours).max() < 0.01 * np.abs(ours).max()  # experts multiply in float16


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def _weights(config: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return values


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(format="nvfp4-pack-quantized"),
        lambda c: c.update(config_groups={}),
        lambda c: c.update(config_groups=[1]),
        lambda c: c["config_groups"].update(group_1=c["config_groups"]["group_0"]),
        lambda c: _weights(c).update(num_bits=8),
        lambda c: _weights(c).update(num_bits=5),
        lambda c: _weights(c).update(type="float"),
        lambda c: _weights(c).update(symmetric=False),
        lambda c: _weights(c).update(group_size=32),
        lambda c: _weights(c).update(group_size=None),
        lambda c: _weights(c).update(strategy="channel", group_size=None),
        lambda c: _weights(c).update(actorder="group"),
    ],
)
def test_a_config_that_lies_is_found(
    change: Callable[[dict[str, Any]], object], artifacts: Artifacts, tmp_path: Path
) -> None:
    folder = _copied(artifacts("rtn"), tmp_path)
    _edit(folder, change)
    with pytest.raises(ArtifactError):
        _read_all(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, s: t.pop(s + "weight_shape"),
        lambda t, s: t.pop(s + "weight_scale"),
        lambda t, s: t.pop(s + "weight_packed"),
        lambda t, s: t.update({s + "weight_shape": torch.tensor([1 << 40, 64])}),
        lambda t, s: t.update({s + "weight_shape": torch.tensor([64, -64])}),
        lambda t, s: t.update({s + "weight_shape": torch.tensor([64.0, 64.0])}),
        lambda t, s: t.update({s + "weight_zero_point": torch.zeros(8, 1, dtype=torch.int32)}),
        lambda t, s: t.update({s + "weight_scale": t[s + "weight_scale"] * float("nan")}),
        lambda t, s: t.update({s + "weight_scale": t[s + "weight_scale"].float()}),
        lambda t, s: t.update({s + "weight_packed": t[s + "weight_packed"][:, :-1].contiguous()}),
    ],
)
def test_parts_that_do_not_belong_together_are_found(
    change: Callable[[dict[str, torch.Tensor], str], object], artifacts: Artifacts, tmp_path: Path
) -> None:
    folder = _copied(artifacts("rtn"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, LINEARS[0].removesuffix("weight"))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError):
        _read_all(folder)


def _copied(artifact: Artifact, tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((artifact.folder / name).read_bytes())
    return tmp_path


def _read_all(folder: Path) -> None:
    reader = find_format(KIND).open(folder, ("model.safetensors",), {})
    for name in reader.names():
        reader.read(name)


def test_engines_that_cannot_take_an_artifact_are_told(artifacts: Artifacts) -> None:
    refused = [
        set(find_format(KIND).refusals(quantization_of(artifact.folder)))
        for artifact in (artifacts("rtn", "4"), artifacts("rtn", "8", sym=False), artifacts("rtn", "3"))
    ]
    assert refused == [set(), {"transformers"}, {"vllm"}]
    with pytest.raises(RecipeError, match="transformers does not load packed zero points"):
        choose(open_model(artifacts("awq", n_grid=2)), EngineSpec(engine="transformers"))


def test_transformers_still_does_not_load_zero_points(artifacts: Artifacts) -> None:
    """Once it does, the refusal has to go."""
    with pytest.raises(EngineError, match="ignore_mismatched_sizes"):
        find_engine("transformers").load(open_model(artifacts("awq", n_grid=2)), LoadSpec(1, 64))
