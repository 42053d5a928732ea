"""FP8 checkpoints as sources: values as transformers dequantizes them, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import LINEARS
from tiny_models import EVALUATION
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from trials import dense_values

from quantkit import evaluate, verify
from quantkit.conversion.convert import convert
from quantkit.errors import SourceError
from quantkit.formats._small_floats import E2M1, E4M3, E8M0
from quantkit.formats.quantized_checkpoint import QuantizedCheckpoint
from quantkit.formats.source import open_source

UP = "model.layers.0.mlp.up_proj.weight"
LARGEST = 448.0
DEQUANTIZE: Any = Fp8Dequantize(None)
Tensors = dict[str, torch.Tensor]


def fp8_of(value: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, block by block."""
    rows, columns = block
    codes = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(value.shape[0] / rows), math.ceil(value.shape[1] / columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = value[place].abs().max() / LARGEST
            codes[place] = (value[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def slow_values(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    values = torch.empty(codes.shape)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            values[i, j] = codes[i, j].float() * scales[i // block[0], j // block[1]].float()
    return values


def save_fp8(
    source: Path,
    folder: Path,
    block: tuple[int, int] | None = (128, 128),
    change: Callable[[dict[str, Any], Tensors], object] = lambda _settings, _tensors: None,
) -> Path:
    """A float checkpoint as DeepSeek's tools would write it."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    for name in LINEARS:
        value = tensors[name].float()
        tensors[name], scales = fp8_of(value, block or tuple(value.shape))
        tensors[f"{name}_scale_inv"] = scales if block else scales.reshape(())
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block),
    }
    config["quantization_config"] = settings
    change(settings, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_tables_are_torchs_types() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for table, dtype in ((E4M3, torch.float8_e4m3fn), (E8M0, torch.float8_e8m0fnu)):
        assert np.array_equal(table, codes.view(dtype).float().numpy(), equal_nan=True)
    assert E2M1.tolist() == list(Fp8Dequantize._FP4_E2M1_LUT)
    assert np.signbit(E2M1[8])


@pytest.mark.parametrize("block", [(128, 128), (32, 64), None], ids=str)
def test_the_values_are_transformers(block: tuple[int, int] | None, tiny_llama: Path, tmp_path: Path) -> None:
    folder = save_fp8(tiny_llama, tmp_path / "fp8", block)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    source, stored = open_source(str(folder)), load_file(folder / "model.safetensors")
    assert isinstance(source, QuantizedCheckpoint)
    assert source.quantized == set(LINEARS)
    for name in source.tensors:
        ours = torch.from_numpy(source.floats(name))
        assert torch.equal(ours.to(theirs[name].dtype), theirs[name]), name
        if name in source.quantized:
            exact = DEQUANTIZE._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
            assert torch.equal(ours, exact), name
    assert np.array_equal(source.floats(UP, 5, 200), source.floats(UP)[5:200])


@pytest.mark.parametrize("block", [(128, 128), (48, 40)], ids=str)
def test_blocks_that_are_cut_off_equal_a_slow_reference(
    block: tuple[int, int], tiny_llama: Path, tmp_path: Path
) -> None:
    source = open_source(str(save_fp8(tiny_llama, tmp_path / "fp8", block)))
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    for name in ("model.layers.0.self_attn.k_proj.weight", UP):
        expected = slow_values(stored[name], stored[f"{name}_scale_inv"], block)
        assert np.array_equal(source.floats(name), expected.numpy())
        assert np.array_equal(source.floats(name, 47, 50), expected[47:50].numpy())


def stacked(_: dict[str, Any], tensors: Tensors) -> None:
    tensors["experts"] = torch.stack([tensors[UP], tensors["model.layers.1.mlp.up_proj.weight"]])
    names = (f"{UP}_scale_inv", "model.layers.1.mlp.up_proj.weight_scale_inv")
    tensors["experts_scale_inv"] = torch.stack([tensors[name] for name in names])


def test_a_stack_of_matrices_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    for block in ((48, 40), None):
        source = open_source(str(save_fp8(tiny_llama, tmp_path / str(block), block, lambda c, t: _stack(c, t))))
        values = source.floats("experts")
        assert np.array_equal(values[0], source.floats(UP))
        assert np.array_equal(source.floats("experts", 1, 2)[0], source.floats("model.layers.1.mlp.up_proj.weight"))


def _stack(settings: dict[str, Any], tensors: Tensors) -> None:
    stacked(settings, tensors)
    if settings["weight_block_size"] is None:
        tensors["experts_scale_inv"] = tensors["experts_scale_inv"].reshape(2, 1, 1)


def powers(tensors: Tensors, dtype: torch.dtype) -> None:
    for name in LINEARS:
        scales = tensors[f"{name}_scale_inv"].log2().round().exp2()
        tensors[f"{name}_scale_inv"] = scales.to(torch.float8_e8m0fnu).view(dtype)


def old_names(_: dict[str, Any], tensors: Tensors) -> None:
    """AutoFP8's."""
    for name in LINEARS:
        tensors[f"{name}_scale"] = tensors.pop(f"{name}_scale_inv").reshape(1)
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        tensors[name.removesuffix("weight") + "k_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("block", "change", "reads"),
    [
        ((64, 64), lambda c, t: powers(t, torch.float8_e8m0fnu), None),
        ((64, 64), lambda c, t: (c.update(scale_fmt="ue8m0"), powers(t, torch.uint8)), None),
        ((64, 64), lambda c, t: t.update({k: v.bfloat16() for k, v in t.items() if k.endswith("_inv")}), None),
        (None, old_names, "model.layers.0.mlp.up_proj.weight_scale"),
    ],
    ids=["e8m0", "ue8m0 bytes", "bfloat16", "AutoFP8"],
)
def test_scales_of_other_kinds_are_read(
    block: Any, change: Any, reads: str | None, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = save_fp8(tiny_llama, tmp_path / "fp8", block, change)
    source, stored = open_source(str(folder)), load_file(folder / "model.safetensors")
    scales = stored[reads or f"{UP}_scale_inv"]
    expected = DEQUANTIZE._dequantize_one(stored[UP], scales, torch.float32).reshape(stored[UP].shape)
    assert np.array_equal(source.floats(UP), expected.numpy())
    assert not any("scale" in name for name in source.tensors)


@pytest.mark.parametrize(
    ("method", "bits"), [("float", "bfloat16"), ("gguf", "Q4_K_M"), ("rtn", "4"), ("nf4", "4")], ids=str
)
def test_it_becomes_every_target(method: str, bits: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = save_fp8(tiny_llama, tmp_path / "fp8")
    artifact = convert(str(folder), method, bits, tmp_path / "out")
    verify(artifact)
    assert any("was quantized before (fp8, blocks of 128 x 128)" in note for note in artifact.manifest.notes)
    if method == "float":
        source = open_source(str(folder))
        for name, value in dense_values(artifact).items():
            assert torch.equal(value.bfloat16(), torch.from_numpy(source.floats(name)).bfloat16()), name


def test_transformers_and_our_reader_judge_it_alike(tiny_llama: Path, tmp_path: Path) -> None:
    folder = save_fp8(tiny_llama, tmp_path / "fp8")
    settings = {**EVALUATION, "divergence": False}
    ours, theirs = (
        evaluate(folder, ("perplexity",), engine=engine, **settings).measurements[0].value
        for engine in (None, "transformers")
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c, t: c.update(weight_block_size=[64, 64]), r"64 x 64 the codes .* have scales of the shape \(2, 4\)"),
        (lambda c, t: c.update(weight_block_size=[0, 128]), r"weight_block_size is \[0, 128\], not two numbers"),
        (lambda c, t: c.update(weight_block_size=[128]), "not two numbers"),
        (lambda c, t: c.update(weight_block_size=128), "not two numbers"),
        (lambda c, t: c.update(weight_block_size=[True, 1.5]), "not two numbers"),
        (lambda c, t: c.pop("weight_block_size"), "with weight_block_size null"),
        (lambda c, t: c.update(expert_dtype="fp4"), "expert_dtype is 'fp4'"),
        (lambda c, t: t.pop(f"{UP}_scale_inv"), f"lacks the tensor {UP}_scale_inv"),
        (lambda c, t: t.update({UP: t[UP].bfloat16()}), "without codes"),
        (lambda c, t: t.pop(UP), "without codes"),
        (lambda c, t: t.update({UP: t[UP].to(torch.float8_e5m2)}), "float8_e5m2, and codes are float8_e4m3fn"),
        (lambda c, t: t.update({UP: t[UP].view(torch.uint8)}), "without codes"),
        (lambda c, t: t.update({f"{UP}_scale_inv": t[f"{UP}_scale_inv"].long()}), "are int64, not float32"),
        (lambda c, t: powers(t, torch.uint8), "are uint8, not float32"),
        (lambda c, t: t[f"{UP}_scale_inv"].fill_(float("nan")), "are not finite"),
        (lambda c, t: t[f"{UP}_scale_inv"].fill_(-float("inf")), "are not finite"),
        (lambda c, t: t[f"{UP}_scale_inv"].fill_(1e38), "beyond 2"),
        (lambda c, t: t[UP].view(torch.uint8).fill_(127), "NaN"),
        (lambda c, t: t.update({UP: t[UP].reshape(-1)}), "no matrix of codes"),
        (lambda c, t: t.update({UP: t[UP][:0], f"{UP}_scale_inv": t[f"{UP}_scale_inv"][:0]}), "no matrix of codes"),
        (lambda c, t: t.update({UP: t[UP][:, :64], f"{UP}_scale_inv": t[f"{UP}_scale_inv"][:, :1]}), "asks for"),
    ],
)
def test_what_lies_is_refused_in_one_line(change: Any, says: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = save_fp8(tiny_llama, tmp_path / "fp8", change=change)
    with pytest.raises(Exception, match=says) as raised:
        convert(str(folder), "float", "float32", tmp_path / "out")
    assert type(raised.value).__name__ in ("SourceError", "UnsupportedError")
    assert "Convert again" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_damaged_scale_is_found_before_the_work(tiny_llama: Path, tmp_path: Path) -> None:
    last = f"{LINEARS[-1]}_scale_inv"
    folder = save_fp8(tiny_llama, tmp_path / "fp8", change=lambda _, t: t[last].fill_(float("nan")))
    with pytest.raises(SourceError, match="are not finite"):
        open_source(str(folder)).refuse_non_finite()
