import pytest
import torch
from safetensors.torch import load_file
from tiny_models import CALIBRATION, changed_copy

from quantkit.conversion.convert import convert
from quantkit.errors import UnsupportedError

OUTSIDE, INSIDE = "model.embed_tokens.weight", "model.layers.0.post_attention_layernorm.weight"
LINEAR = "model.layers.0.mlp.down_proj.weight"
BEYOND = 65520.0  # the least that a float16 rounds to infinity
# method, bits, options: what stores floats as float16
HALVES = [
    ("rtn", "4", {"format": "awq"}), ("gptq", "4", {"format": "gptq"}), ("awq", "4", {"format": "awq", "n_grid": 2}),
    ("nf4", "4", {"compute_dtype": "float16"}), ("float", "float16", {}), ("ctranslate2", "int8_float16", {}),
]  # fmt: skip


@pytest.fixture
def plain(tiny_with):
    return tiny_with(dtype=torch.float32, num_hidden_layers=1)


def holding(value, name, plain, folder):
    return changed_copy(plain, folder / "model", lambda tensors: tensors[name].view(-1)[5].fill_(value))


def made(model, out, method, bits, options):
    return convert(str(model), method, bits, out, calibration=CALIBRATION, **options)


def refused(model, name, folder, case):
    with pytest.raises(UnsupportedError, match=rf"{name} of .*model has values beyond") as caught:
        made(model, folder / "out", *case)
    assert "Methods that take" not in str(caught.value)  # their checks read no values
    assert [path.name for path in folder.iterdir()] == ["model"]


@pytest.mark.parametrize("name", [OUTSIDE, INSIDE])
@pytest.mark.parametrize("case", HALVES, ids=str)
def test_what_float16_cannot_hold_is_refused(case, name, plain, tmp_path):
    # AWQ divides a norm by its scales: what it makes of a value just beyond may be within.
    value = 1e9 if (case[0], name) == ("awq", INSIDE) else BEYOND
    refused(holding(value, name, plain, tmp_path), name, tmp_path, case)


@pytest.mark.parametrize("case", HALVES[:4], ids=str)
def test_a_layer_that_no_float16_scale_reaches_is_refused(case, plain, tmp_path):
    value = BEYOND if case[0] == "nf4" else 1e9  # NF4 computes the layer in float16
    refused(holding(value, LINEAR, plain, tmp_path), LINEAR, tmp_path, case)


@pytest.mark.parametrize(("case", "value", "dtype"), [
    *((case, 65504.0, torch.float16) for case in HALVES[:2]),
    (("nf4", "4", {"compute_dtype": "bfloat16"}), 2.0**30, torch.bfloat16),
    (("float", "float32", {}), 2.0**30, torch.float32),
], ids=str)  # fmt: skip
def test_the_largest_float16_is_kept_and_more_in_wider_types(case, value, dtype, plain, tmp_path):
    artifact = made(holding(value, INSIDE, plain, tmp_path), tmp_path / "out", *case)
    stored = load_file(artifact.folder / "model.safetensors")[INSIDE]
    assert (stored.dtype, float(stored[5])) == (dtype, value)


@pytest.mark.parametrize("bits", ["F16", "Q4_K_M"])
def test_gguf_keeps_a_norm(bits, plain, tmp_path):
    assert made(holding(1e9, INSIDE, plain, tmp_path), tmp_path / "out", "gguf", bits, {}).folder.is_dir()
