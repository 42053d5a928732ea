"""Grouped codes as Q4_0 and Q8_0: literal bytes, the package gguf, llama.cpp, and the codes of other layouts."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from tiny_architectures import save_architecture
from tiny_models import CALIBRATION, save_tiny
from trials import dense_values

from quantkit import verify
from quantkit.artifact import Artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.contracts.run import Run
from quantkit.conversion.check import check, prepare
from quantkit.conversion.convert import convert
from quantkit.errors import QuantkitError, RecipeError, UnsupportedError
from quantkit.formats.gguf.grouped import TYPES, pack, unpack
from quantkit.formats.source import open_model
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups
from quantkit.recipe import ConvertRecipe

HALF = [0x00, 0x38]  # 0.5 in float16


def layer(bits: int, rows: int, columns: int, group: int) -> GroupedWeight:
    """Random codes, scales of both signs, zero points in the middle."""
    make = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=make, dtype=torch.uint8)
    scales = torch.randn(rows, columns // group, generator=make).to(torch.float16)
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    return GroupedWeight(codes, scales, zeros, contiguous_groups(columns, group), bits)


def test_a_block_of_four_bits_holds_the_scale_and_the_halves_side_by_side() -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    weight = GroupedWeight(codes[None], torch.tensor([[0.5]]), torch.tensor([[8]]), torch.zeros(32).long(), 4)
    assert pack(weight).tolist() == [HALF + [low | low << 4 for low in range(16)]]


def test_a_block_of_eight_bits_holds_the_scale_and_signed_bytes() -> None:
    codes = torch.tensor([0, 127, 128, 255] * 8, dtype=torch.uint8)
    weight = GroupedWeight(codes[None], torch.tensor([[0.5]]), torch.tensor([[128]]), torch.zeros(32).long(), 8)
    assert pack(weight).tolist() == [HALF + [0x80, 0xFF, 0x00, 0x7F] * 8]


@pytest.mark.parametrize("group", [32, 64, 192])
@pytest.mark.parametrize("bits", TYPES)
def test_the_package_gguf_reads_the_same_values(bits: int, group: int) -> None:
    weight = layer(bits, 5, 192, group)
    kind = gguf.GGMLQuantizationType[TYPES[bits]]
    assert np.array_equal(gguf.quants.dequantize(pack(weight).numpy(), kind), weight.dense().numpy())


@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("bits", TYPES)
def test_blocks_give_codes_and_scales_back(bits: int, group: int) -> None:
    weight = layer(bits, 3, 128, 128 if group == -1 else group)
    back = unpack(pack(weight), bits, group)
    for name in ("codes", "scales", "zeros", "g_idx"):
        assert getattr(back, name).equal(getattr(weight, name)), name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


KEPT = [
    ("gptq", "rtn", "4", {"group_size": 64}),
    ("compressed-tensors", "rtn", "8", {"group_size": -1}),
    ("awq", "awq", "4", {"group_size": 32, "sym": True, "n_grid": 2}),
]


def same_values(layers: Artifact, blocks: Artifact) -> None:
    """The second is a GGUF file, which gives the layers of GPT-2 back as the source has them: turned."""
    ours, theirs = dense_values(layers), dense_values(blocks)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        turned = ".c_" in name and value.ndim == 2
        assert ours[name].float().equal(value.float().T if turned else value.float()), name


@pytest.mark.parametrize(("kind", "method", "bits", "options"), KEPT, ids=[kind for kind, *_ in KEPT])
def test_codes_of_every_layout_are_kept_to_the_last_bit(
    kind: str, method: str, bits: str, options: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    made = convert(str(tiny), method, bits, tmp_path / "made", format=kind, calibration=CALIBRATION, **options)
    kept = convert(str(made.folder), "keep", bits, tmp_path / "kept", format="gguf")
    assert kept.manifest.tensor_types[TYPES[int(bits)]] == 21
    assert kept.manifest.weight_files == (f"made-{TYPES[int(bits)]}.gguf",)
    same_values(made, kept)
    verify(kept)


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "phi3"])
def test_experts_turned_and_fused_layers_find_their_rows(name: str, tmp_path: Path) -> None:
    model = save_architecture(tmp_path / "model", name)
    other = convert(str(model), "rtn", "4", tmp_path / "gptq", group_size=32)
    same_values(other, convert(str(model), "rtn", "4", tmp_path / "gguf", format="gguf"))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_methods_write_blocks_that_llama_cpp_computes_with(method: str, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    options = {"sym": True, "n_grid": 2} if method == "awq" else {}
    made = convert(str(tiny), method, "4", tmp_path / "out", format="gguf", calibration=CALIBRATION, **options)
    assert made.manifest.options["group_size"] == 32
    ids = np.arange(1, 49)[None] % 280 + 3
    ours, theirs = (
        engine_logits(find_engine(name).load(open_model(made), LoadSpec(1, 64, dtype)), ids)
        for name, dtype in (("reference", "float32"), ("llamacpp", None))
    )
    # llama.cpp rounds the activations to eight bits; blocks that are read wrongly are about 1 apart.
    assert float(np.abs(ours - theirs).mean()) < 0.1 * float(ours.std())


def test_norms_that_awq_has_scaled_are_written_as_llama_cpp_counts_them(tmp_path: Path) -> None:
    """gemma's norms are stored less one."""
    model = save_architecture(tmp_path / "model", "gemma2")
    options: dict[str, Any] = {"sym": True, "n_grid": 2, "group_size": 32, "calibration": CALIBRATION}
    plain = dense_values(convert(str(model), "awq", "4", tmp_path / "plain", **options))
    blocks = dense_values(convert(str(model), "awq", "4", tmp_path / "blocks", format="gguf", **options))
    for name, value in plain.items():
        assert torch.allclose(value.float(), blocks[name].float(), atol=2e-7), name


def test_a_finished_block_comes_back_as_it_was_added(tiny: Path, tmp_path: Path) -> None:
    job = prepare(ConvertRecipe(model=str(tiny), method="rtn", bits="4", format="gguf", options={"group_size": 64}))
    job = job.changed(checked=job.method.check(job))
    job.source.copy_side_files(tmp_path)
    weight, norm = layer(4, 128, 128, 64), torch.randn(128)
    names = [f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "input_layernorm")]
    with suppress(KeyboardInterrupt), job.open_writer(Run(tmp_path), job.checked.plan) as writer:
        for name, value in zip(names, (weight, norm), strict=True):
            writer.add(name, value)
        writer.finish_block(0)
        raise KeyboardInterrupt
    back = {}
    with suppress(KeyboardInterrupt), job.open_writer(Run(tmp_path), job.checked.plan) as writer:
        assert writer.finished == 1
        back = writer.block("model.layers.0.")
        raise KeyboardInterrupt
    assert sorted(back) == sorted(names)
    codes, values = (back[name] for name in names)
    assert isinstance(codes, GroupedWeight)
    assert isinstance(values, torch.Tensor)
    assert codes.dense().equal(weight.dense())
    assert values.equal(norm)


def test_tuned_scales_take_the_place_of_the_first_ones(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tune_steps": 2, "group_size": 32, "calibration": CALIBRATION}
    plain = convert(str(tiny), "gptq", "4", tmp_path / "plain", **options)
    same_values(plain, convert(str(tiny), "gptq", "4", tmp_path / "blocks", format="gguf", **options))


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"bits": "3"}, RecipeError, "4 bits .Q4_0. and 8 bits .Q8_0., not 3"),
        ({"sym": False}, RecipeError, "no zero points"),
        ({"group_size": 16}, UnsupportedError, "one for 16: give a group_size that is a multiple of 32"),
        ({"method": "gptq", "desc_act": True}, RecipeError, "leave desc_act out"),
    ],
)
def test_what_no_block_holds_is_refused_at_once(
    options: dict[str, Any], kind: type[QuantkitError], says: str, tiny: Path, tmp_path: Path
) -> None:
    values = {"method": "rtn", "bits": "4"} | options
    recipe = {name: values.pop(name) for name in ("method", "bits")}
    with pytest.raises(kind, match=says):
        check(prepare(ConvertRecipe(model=str(tiny), options=values, format="gguf", **recipe)), tmp_path / "out")


def test_zero_points_of_a_source_are_refused_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    made = convert(str(tiny), "rtn", "4", tmp_path / "made", sym=False)
    with pytest.raises(RecipeError, match="no zero points"):
        convert(str(made.folder), "keep", "4", tmp_path / "kept", format="gguf")
    assert not (tmp_path / "kept").exists()
