"""What config.json says of grouped codes, against the codes themselves and what transformers reads, for all options."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import LAYERS
from safetensors.torch import load_file
from tiny_models import CALIBRATION, changed_copy
from transformers import AutoConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from trials import read_back

from quantkit.artifact import Artifact
from quantkit.conversion.convert import convert
from quantkit.formats._quantization_config import quantization_of
from quantkit.numerics.grouped_weight import GroupedWeight

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
        assert isinstance(layer, GroupedWeight)
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
    assert says is not None
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
