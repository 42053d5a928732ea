"""FP8 checkpoints as sources: values as transformers dequantizes them, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_folders import LAYERS, Change, change_folder, refuse_source
from safetensors.torch import load_file
from tiny_models import EVALUATION, changed_copy
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from bench.fuzz.quantized_bases import save_fp8
from quantkit import evaluate
from quantkit.errors import SourceError
from quantkit.formats._small_floats import E2M1, E4M3, E8M0
from quantkit.formats.quantized_checkpoint import QuantizedCheckpoint
from quantkit.formats.source import open_source

UP, K = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
SCALE = f"{UP}_scale_inv"
DEQUANTIZE: Any = Fp8Dequantize(None)
Tensors = dict[str, torch.Tensor]


def saved(source: Path, folder: Path, block: tuple[int, int] | None, change: Change) -> Path:
    save_fp8(source, folder, block)
    return change_folder(folder, change)


@pytest.fixture(scope="module")
def fp8(one_block: Path, once: Callable[..., Path]) -> Path:
    return once("fp8-source", lambda folder: save_fp8(one_block, folder, (128, 128)))


def test_the_tables_are_torchs_types() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for table, dtype in ((E4M3, torch.float8_e4m3fn), (E8M0, torch.float8_e8m0fnu)):
        assert np.array_equal(table, codes.view(dtype).float().numpy(), equal_nan=True)
    assert E2M1.tolist() == list(Fp8Dequantize._FP4_E2M1_LUT)
    assert np.signbit(E2M1[8])


@pytest.mark.parametrize("block", [(32, 64), None], ids=str)
def test_the_values_are_transformers(block: tuple[int, int] | None, one_block: Path, tmp_path: Path) -> None:
    """Blocks that are cut off at the end, too: test_source_target_matrix.py."""
    folder = tmp_path / "fp8"
    save_fp8(one_block, folder, block)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    source, stored = open_source(str(folder)), load_file(folder / "model.safetensors")
    assert isinstance(source, QuantizedCheckpoint)
    assert source.quantized == set(LAYERS)
    for name in source.tensors:
        ours = torch.from_numpy(source.floats(name))
        assert torch.equal(ours.to(theirs[name].dtype), theirs[name]), name
        if name in source.quantized:
            exact = DEQUANTIZE._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
            assert torch.equal(ours, exact), name
    assert np.array_equal(source.floats(UP, 5, 200), source.floats(UP)[5:200])


@pytest.mark.parametrize("block", [(48, 40), None], ids=str)
def test_a_stack_of_matrices_is_read(block: tuple[int, int] | None, one_block: Path, tmp_path: Path) -> None:
    gate = UP.replace("up_proj", "gate_proj")

    def stack(_: dict[str, Any], tensors: Tensors) -> None:
        tensors["experts"] = torch.stack([tensors[UP], tensors[gate]])
        scales = torch.stack([tensors[SCALE], tensors[f"{gate}_scale_inv"]])
        tensors["experts_scale_inv"] = scales if block else scales.reshape(2, 1, 1)

    source = open_source(str(saved(one_block, tmp_path / "fp8", block, stack)))
    assert np.array_equal(source.floats("experts")[0], source.floats(UP))
    assert np.array_equal(source.floats("experts", 1, 2)[0], source.floats(gate))


def powers(tensors: Tensors, dtype: torch.dtype) -> None:
    for name in LAYERS:
        scales = tensors[f"{name}_scale_inv"].log2().round().exp2()
        tensors[f"{name}_scale_inv"] = scales.to(torch.float8_e8m0fnu).view(dtype)


def old_names(_: dict[str, Any], tensors: Tensors) -> None:
    """AutoFP8's."""
    for name in LAYERS:
        tensors[f"{name}_scale"] = tensors.pop(f"{name}_scale_inv").reshape(1)
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        tensors[name.removesuffix("weight") + "k_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("block", "change", "reads"),
    [
        ((64, 64), lambda c, t: powers(t, torch.float8_e8m0fnu), SCALE),
        ((64, 64), lambda c, t: (c.update(scale_fmt="ue8m0"), powers(t, torch.uint8)), SCALE),
        ((64, 64), lambda c, t: t.update({k: v.bfloat16() for k, v in t.items() if k.endswith("_inv")}), SCALE),
        (None, old_names, f"{UP}_scale"),
    ],
    ids=["e8m0", "ue8m0 bytes", "bfloat16", "AutoFP8"],
)
def test_scales_of_other_kinds_are_read(block: Any, change: Any, reads: str, one_block: Path, tmp_path: Path) -> None:
    folder = saved(one_block, tmp_path / "fp8", block, change)
    source, stored = open_source(str(folder)), load_file(folder / "model.safetensors")
    expected = DEQUANTIZE._dequantize_one(stored[UP], stored[reads], torch.float32).reshape(stored[UP].shape)
    assert np.array_equal(source.floats(UP), expected.numpy())
    assert not any("scale" in name for name in source.tensors)


def test_transformers_and_our_reader_evaluate_it_alike(fp8: Path) -> None:
    settings = {**EVALUATION, "divergence": False}
    ours, theirs = (
        evaluate(fp8, ("perplexity",), engine=engine, **settings).measurements[0].value
        for engine in (None, "transformers")
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, t: c.update(weight_block_size=[64, 64]), r"64 x 64 the codes .* have scales of the shape \(2, 4\)"),
        (lambda c, t: c.update(weight_block_size=[0, 128]), r"weight_block_size is \[0, 128\], not two numbers"),
        (lambda c, t: c.pop("weight_block_size"), "with weight_block_size null"),
        (lambda c, t: c.update(expert_dtype="fp4"), "expert_dtype is 'fp4'"),
        (lambda c, t: t.pop(SCALE), f"lacks the tensor {SCALE}"),
        (lambda c, t: t.update({UP: t[UP].to(torch.float8_e5m2)}), "float8_e5m2, and codes are float8_e4m3fn"),
        (lambda c, t: t[SCALE].fill_(float("nan")), "are not finite"),
        (lambda c, t: t[UP].view(torch.uint8).fill_(127), "NaN"),
        (lambda c, t: t.update({UP: t[UP][:0], SCALE: t[SCALE][:0]}), "no matrix of codes"),
    ],
)
def test_what_lies_is_refused(change: Change, says: str, fp8: Path, tmp_path: Path) -> None:
    folder = change_folder(changed_copy(fp8, tmp_path / "fp8"), change)
    refuse_source(folder, says, tmp_path / "out")


def test_a_damaged_scale_is_found_before_the_work(fp8: Path, tmp_path: Path) -> None:
    last = f"{LAYERS[-1]}_scale_inv"
    folder = changed_copy(fp8, tmp_path / "fp8", lambda tensors: tensors[last].fill_(float("nan")))
    with pytest.raises(SourceError, match="are not finite"):
        open_source(str(folder)).refuse_non_finite()
