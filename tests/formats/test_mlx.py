"""MLX's layout against literal words, a slow reference, and mlx-lm itself."""

import json
import shutil

import numpy as np
import pytest
import torch
from edits import edit_json, edit_tensors, put
from engine_logits import IDS, far_apart, logits_by
from gguf_files import slow_but
from tiny_models import CALIBRATION, fails

from quantkit import convert, verify
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Layout
from quantkit.contracts.stored import open_stored
from quantkit.errors import RecipeError, SourceError, UnsupportedError
from quantkit.formats.mlx import ARCHITECTURES, FORMAT, PACKING, SMALL_FLOATS, FloatPacking, biases_of
from quantkit.formats.source import open_source
from quantkit.models.config import older_keys
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups

BITS = (2, 3, 4, 6, 8)
SEEN = ("llama, tied", *(name.replace("gemma3_text", "gemma3") for name in ARCHITECTURES))
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def mx():
    return pytest.importorskip("mlx.core", reason="MLX is the reference of this test")


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """Artifacts by method, with groups of 64."""
    folder = tmp_path_factory.mktemp("mlx")
    how = {"group_size": 64, "format": "mlx", "calibration": CALIBRATION}
    made = {name: convert(str(tiny), name, 4, folder / name, **how) for name in ("gptq", "awq")}
    return made | {"symmetric": convert(str(tiny), "rtn", 4, folder / "rtn", group_size=64, sym=True, format="mlx")}


def weight_of(bits):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, 64), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (3, 2), generator=generator)
    scales = torch.rand(3, 2, generator=generator).add_(0.01).to(torch.float16)
    return GroupedWeight(codes, scales, zeros.to(torch.uint8), contiguous_groups(64, 32), bits)


def test_words_hold_the_first_code_in_their_low_bits():
    codes = torch.arange(1, 9, dtype=torch.uint8).repeat(1, 4)
    scales = torch.tensor([[0.5]], dtype=torch.float16)
    weight = GroupedWeight(codes, scales, torch.tensor([[9]], dtype=torch.uint8), contiguous_groups(32, 32), 4)
    parts = PACKING.pack(weight, Layout(4, 32), "w")
    assert [f"{word:08x}" for word in parts["weight"].view(torch.int32).numpy().view(np.uint32)[0]] == ["87654321"] * 4
    assert (parts["weight"].dtype, parts["biases"].item(), parts["scales"].item()) == (torch.uint32, -4.5, 0.5)


@pytest.mark.parametrize("bits", BITS)
def test_mlx_reads_the_values_that_we_mean_and_packs_as_we_do(bits, mx):
    weight = weight_of(bits)
    parts = PACKING.pack(weight, Layout(bits, 32), "w")
    words = mx.array(parts["weight"].view(torch.int32).numpy().view(np.uint32))
    scales, biases = (mx.array(parts[part].float().numpy()) for part in ("scales", "biases"))
    theirs = np.array(mx.dequantize(words, scales, biases, group_size=32, bits=bits))
    exact = weight.codes.float() * weight.spread(parts["scales"]) + weight.spread(parts["biases"])
    assert np.array_equal(theirs, exact.numpy())
    back = PACKING.unpack(parts, bits)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.zeros, weight.zeros)


@pytest.mark.parametrize("bits", BITS)
def test_zero_points_come_back_from_rounded_biases(bits):
    scales = torch.logspace(-6, 2, 500, dtype=torch.float64).to(torch.float16)[:, None]
    for zero in range(1 << bits):
        zeros = torch.full_like(scales, zero, dtype=torch.uint8)
        parts = {"scales": scales, "biases": biases_of(scales, zeros)}
        assert torch.equal(PACKING.unpack_zeros(parts, bits, 0, 0), zeros)


def test_codes_have_zero_points_by_default_as_a_bias_is_stored_in_any_case(made):
    assert [made[name].manifest.options["sym"] for name in ("gptq", "awq", "symmetric")] == [False, False, True]


@pytest.mark.parametrize("name", ["gptq", "awq", "symmetric"])
def test_mlx_lm_loads_an_artifact_and_gives_our_readers_logits(name, made, mx):
    verify(made[name])
    folder = str(made[name].folder)
    ours, theirs = (logits_by(engine, folder, [IDS], 128, dtype="float32") for engine in ("reference", "mlx"))
    assert far_apart(theirs, ours) < 2e-5
    stored = json.loads((made[name].folder / "config.json").read_text())["quantization"]
    assert stored == {"bits": 4, "group_size": 64, "mode": "affine"}


def test_keep_gives_the_same_bytes_there_and_back(made, tmp_path):
    first = made["symmetric"].folder
    there = convert(str(first), "keep", None, tmp_path / "gptq", format="gptq")
    back = convert(str(there.folder), "keep", None, tmp_path / "mlx", format="mlx")
    assert (back.folder / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    with pytest.raises(UnsupportedError, match=r"biases of .* are no whole multiples of their scales"):
        convert(str(made["awq"].folder), "keep", None, tmp_path / "awq", format="compressed-tensors")


def test_rounded_biases_are_noted_and_read_as_mlx_reads_them(made):
    assert "values change by up to 0.8 % of a step" in " ".join(made["awq"].manifest.all_notes)
    assert not any("biases" in note for note in made["symmetric"].manifest.all_notes)
    reader = open_stored(made["awq"], FORMAT)
    kinds = {type(reader.read(name)) for name in reader.names() if "proj" in name}
    assert torch.Tensor in kinds  # codes and zero points would give other values


def test_what_mlx_lm_writes_is_a_source_with_the_same_values(tiny, mx, tmp_path):
    from mlx_lm.convert import convert as theirs

    theirs(str(tiny), mlx_path=str(tmp_path / "made"), quantize=True, q_group_size=32, q_bits=6, q_mode="affine")
    source = open_source(str(tmp_path / "made"))
    assert source.quantization == "mlx, 6 bits, groups of 32"
    assert "model.embed_tokens.weight" in source.quantized
    ours, mine = (
        logits_by(engine, str(tmp_path / "made"), [IDS], 128, dtype="float32") for engine in ("reference", "mlx")
    )
    assert far_apart(mine, ours) < 2e-5
    again = convert(str(tmp_path / "made"), "rtn", 8, tmp_path / "again", group_size=32)
    assert "quantization" not in json.loads((again.folder / "config.json").read_text())


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_modes_of_small_floats_have_mlxs_values(mode, mx):
    packing = FloatPacking(mode)
    bits, columns = SMALL_FLOATS[mode]
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 1 << 32, (3, 64 * bits // 32), dtype=np.uint32)
    scales = generator.integers(0, 254 if mode.startswith("mx") else 126, (3, 64 // columns), dtype=np.uint8)
    if bits == 8:
        codes &= 0x7E7E7E7E  # no NaN
    theirs = np.array(mx.dequantize(mx.array(codes), mx.array(scales), mode=mode, dtype=mx.float32))
    parts = {"weight": torch.from_numpy(codes.view(np.int32)).view(torch.uint32), "scales": torch.from_numpy(scales)}
    assert np.array_equal(packing.unpack(parts, bits).dense().numpy(), theirs)


def test_mxfp4_is_written_loaded_and_kept(tiny, mx, tmp_path):
    made = convert(str(tiny), "rtn", "mxfp4", tmp_path / "made", format="mlx")
    verify(made)
    ours, theirs = (logits_by(engine, str(made.folder), [IDS], 128, dtype="float32") for engine in ("reference", "mlx"))
    assert far_apart(theirs, ours) < 2e-5
    settings = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    assert json.loads((made.folder / "config.json").read_text())["quantization"] == settings
    there = convert(str(made.folder), "keep", None, tmp_path / "there", format="compressed-tensors")
    back = convert(str(there.folder), "keep", None, tmp_path / "back", format="mlx")
    assert (back.folder / "model.safetensors").read_bytes() == (made.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8", "mixed"])
def test_what_mlx_lm_writes_in_other_modes_is_a_source(mode, tiny, mx, tmp_path):
    from mlx_lm.convert import convert as theirs

    def with_some_affine(path, _module):
        return {"group_size": 64, "bits": 8, "mode": "affine"} if "down_proj" in path else {"mode": "mxfp4"}

    how = {"quant_predicate": with_some_affine, "q_mode": "mxfp4"} if mode == "mixed" else {"q_mode": mode}
    theirs(str(tiny), mlx_path=str(tmp_path / "made"), quantize=True, **how)
    ours, mine = (
        logits_by(engine, str(tmp_path / "made"), [IDS], 128, dtype="float32") for engine in ("reference", "mlx")
    )
    assert far_apart(mine, ours) < 2e-5
    assert open_source(str(tmp_path / "made")).quantization.startswith("mlx, " + mode.replace("mixed", "mxfp4; 8 bits"))


@pytest.mark.parametrize(("options", "says"), [
    ({"group_size": 16}, "holds groups of 32, 64, 128 columns, not of 16"),
    ({"group_size": -1}, "holds groups of 32, 64, 128 columns, not of -1"),
])  # fmt: skip
def test_groups_that_mlx_lacks_are_refused(options, says, tiny, tmp_path):
    with pytest.raises(RecipeError, match=says):
        convert(str(tiny), "rtn", 4, tmp_path / "out", format="mlx", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", slow_but(("gemma3", "mixtral"), SEEN))
def test_mlx_lm_computes_every_architecture_as_we_do(name, architecture, mx, tmp_path):
    """mlx-lm reads RoPE's settings by transformers 4's names, and has its own default where one is missing."""
    made = convert(str(architecture(name)), "rtn", 4, tmp_path / "out", format="mlx", group_size=32)
    assert not older_keys(json.loads((made.folder / "config.json").read_text()))
    ids = IDS[:8]  # within every sliding window
    ours, theirs = (logits_by(engine, str(made.folder), [ids], 128, dtype="float32") for engine in ("reference", "mlx"))
    assert far_apart(theirs, ours) < 3e-4  # starcoder2 and gemma: another approximation of GELU


def test_architectures_that_mlx_lm_computes_otherwise_are_refused(architecture, tmp_path):
    with pytest.raises(UnsupportedError, match="does not load quantized models of the architecture 'qwen3_moe'"):
        convert(str(architecture("qwen3_moe")), "rtn", 4, tmp_path / "out", format="mlx")
    made = convert(str(architecture("mistral")), "rtn", 4, tmp_path / "window", format="mlx", group_size=32)
    assert "mlx-lm ignores the sliding window" in " ".join(made.manifest.all_notes)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bits": 5, "group_size": 64}, "no valid number of bits: 5"),
        ({"bits": 4, "group_size": 32}, "do not fit 4 bits"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "scales of float16 .* do not fit the mode mxfp4"),
        ({"bits": 4, "group_size": 64, "mode": ["affine"]}, r"has the mode \['affine'\]; quantkit reads affine, mxfp4"),
        ({"bits": 4, "group_size": 64, UP: {"bits": "four"}}, f"gives {UP} the bits 'four'"),
    ],
)
def test_settings_that_lie_are_refused_in_one_line(settings, says, made, tmp_path):
    folder = shutil.copytree(made["gptq"].folder, tmp_path / "copy")
    edit_json(folder / "config.json", put("quantization", value=settings))
    fails("verify", folder)
    (folder / "quantkit.json").unlink()
    with pytest.raises(SourceError, match=says):
        convert(str(folder), "rtn", 4, tmp_path / "out")


def test_codes_without_biases_are_refused(made, tmp_path):
    folder = shutil.copytree(made["gptq"].folder, tmp_path / "copy")
    (folder / "quantkit.json").unlink()
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.biases"))
    with pytest.raises(SourceError, match="up_proj"):
        convert(str(folder), "rtn", 4, tmp_path / "out")


def test_the_words_on_disk_are_unsigned(made):
    stored = StoredTensors(made["gptq"].folder, ("model.safetensors",))
    assert stored.dtype("model.layers.0.mlp.up_proj.weight") == "uint32"
