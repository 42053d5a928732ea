"""The layouts of GPTQ and AWQ: the same codes in both, and what config.json says of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import LAYERS
from safetensors.torch import load_file
from tiny_llama import converted
from tiny_models import CALIBRATION, changed_copy
from transformers import AutoConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from trials import dense_values, read_back

from quantkit import verify
from quantkit.artifact import Artifact
from quantkit.contracts.registry import find_format
from quantkit.conversion.convert import convert
from quantkit.errors import RecipeError
from quantkit.formats._quantization_config import quantization_of

GROUP = 64
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Artifacts = Callable[..., Artifact]


@pytest.fixture(scope="session")
def artifacts(made: Callable[..., Artifact]) -> Artifacts:
    """artifacts(method, format): of 4 bits in groups of 64."""
    return lambda method, kind, sym=False: made(method, "4", group_size=GROUP, sym=sym, format=kind)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """(R, C) int32 words -> (R, 8 C) codes in AWQ's order; written from the layout's description."""
    out = torch.zeros(words.shape[0], words.shape[1] * 8, dtype=torch.int64)
    for place, column in enumerate(ORDER):
        out[:, column::8] = (words.long() >> (4 * place)) & 15
    return out


def test_engines_find_awqs_layout(artifacts: Artifacts) -> None:
    artifact = artifacts("gptq", "awq")
    assert quantization_of(artifact.folder) == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    assert (artifact.manifest.format, artifact.manifest.recipe.format) == ("awq", "awq")
    assert artifact.label.endswith(f"gptq-4 group_size={GROUP} sym=False format=awq")
    assert verify(artifact) == artifact
    assert not (artifact.folder / "quantize_config.json").exists()
    assert not any("vLLM loads only symmetric" in note for note in artifact.manifest.notes)
    tensors, values = load_file(artifact.folder / "model.safetensors"), read_back(artifact)
    for name in LAYERS:
        value, stem = values[name], name.removesuffix("weight")
        assert stem + "g_idx" not in tensors
        scales = tensors[stem + "scales"].float().repeat_interleave(GROUP, 0)
        zeros = unpacked(tensors[stem + "qzeros"]).repeat_interleave(GROUP, 0)
        assert torch.equal((unpacked(tensors[stem + "qweight"]) - zeros).float().mul(scales).T, value.dense())


def test_readers_and_engines_go_by_the_format_not_by_the_method(artifacts: Artifacts) -> None:
    ours, theirs = artifacts("gptq", "awq"), artifacts("gptq", "gptq")
    wrong = find_format("gptq").open(ours.folder, ours.manifest.weight_files, dict(ours.manifest.source.config))
    with pytest.raises(Exception, match="g_idx"):
        wrong.read(LAYERS[0])
    one, other = dense_values(ours), dense_values(theirs)
    assert all(torch.equal(one[name], other[name]) for name in LAYERS)
    for case, refused in ((("rtn", "gptq", True), False), (("rtn", "awq"), False), (("awq", "gptq"), True)):
        engines = find_format(case[1]).refusals(quantization_of(artifacts(*case).folder))
        assert ("vllm" in engines) == refused  # zero points, whatever method wrote them


@pytest.mark.parametrize(
    ("method", "bits", "options", "says"),
    [
        ("rtn", "8", {}, "the format awq holds codes of 4 bits, not of 8"),
        ("nf4", "4", {}, r"nf4 cannot be written as 'awq'.*Its formats: bitsandbytes\."),
        ("gptq", "4", {"format": "awk"}, r"gptq cannot be written as 'awk'\. Did you mean 'awq'\? Its formats: gptq"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_long_work(
    method: str,
    bits: str,
    options: dict[str, Any],
    says: str,
    one_block: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantkit.conversion.check.draw_tokens", lambda *_: pytest.fail("the text was read"))
    monkeypatch.setattr("quantkit.conversion.convert.staged", lambda *_: pytest.fail("the work was begun"))
    with pytest.raises(RecipeError, match=says):
        convert(str(one_block), method, bits, tmp_path / "out", **{"format": "awq", **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "least"), [("awq", 0), ("gptq", 1)])
def test_awq_fits_weights_above_zero_with_zero_points_that_the_layout_can_store(
    kind: str, least: int, one_block: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    model = changed_copy(one_block, tmp_path / "model", lambda tensors: tensors[name].abs_())
    value = read_back(converted(model, tmp_path / "out", "awq", group_size=GROUP, format=kind, n_grid=2))[name]
    assert int(value.zeros.min()) == least
    assert float(value.dense().min()) >= 0.0


# What config.json says, for all options

# method, bits, format, options
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("gptq", "4", "gptq", {"sym": False, "desc_act": True, "group_size": 64}),
    ("gptq", "4", "gptq", {"sym": True, "desc_act": True, "group_size": -1}),
    ("gptq", "3", "gptq", {"sym": False, "group_size": 32}),
    ("rtn", "2", "gptq", {"sym": True, "group_size": 64}),
    ("awq", "4", "awq", {"group_size": -1, "n_grid": 2}),
    ("awq", "4", "awq", {"sym": True, "group_size": 64, "n_grid": 2}),
]


def of_the_codes(artifact: Artifact) -> dict[str, Any]:
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
def test_the_config_says_what_the_codes_are(
    method: str, bits: str, kind: str, options: dict[str, Any], made: Callable[..., Artifact]
) -> None:
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


@pytest.mark.parametrize(
    ("method", "bits", "kind", "dtype"),
    [("gptq", "4", "gptq", "float16"), ("nf4", "4", "bitsandbytes", "bfloat16")],
)
def test_the_sources_old_key_for_its_dtype_does_not_stay(
    method: str, bits: str, kind: str, dtype: str, one_block: Path, tmp_path: Path
) -> None:
    """A checkpoint as older tools wrote it, with `torch_dtype`."""
    old = changed_copy(one_block, tmp_path / "old", torch_dtype="float32")
    source = json.loads((old / "config.json").read_text())
    assert source["torch_dtype"] == "float32"
    artifact = convert(str(old), method, bits, tmp_path / "out", format=kind, calibration=CALIBRATION)
    config = json.loads((artifact.folder / "config.json").read_text())
    assert "torch_dtype" not in config
    assert config["dtype"] == dtype
    assert AutoConfig.from_pretrained(artifact.folder).dtype == getattr(torch, dtype)
    norm = load_file(artifact.folder / "model.safetensors")["model.norm.weight"]
    assert norm.dtype == getattr(torch, dtype)
    other = {"torch_dtype", "dtype", "quantization_config"}
    assert {k: v for k, v in config.items() if k not in other} == {k: v for k, v in source.items() if k not in other}
