"""FP4 and LLM.int8 checkpoints as transformers saves them: values as bitsandbytes has them, and what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_folders import LAYERS, refuse_source
from safetensors.torch import load_file
from tiny_models import changed_copy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from quantkit.formats.source import open_source

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the reference of these tests")

UP = "model.layers.0.mlp.up_proj."
KINDS: dict[str, dict[str, Any]] = {
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "fp4 double": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(one_block: Path, once: Callable[..., Path]) -> Saved:
    """What transformers saves, each kind once."""
    return lambda kind: once(f"by-transformers-{kind}", lambda folder: save(one_block, folder, kind))


def save(source: Path, folder: Path, kind: str) -> Path:
    settings = BitsAndBytesConfig(**KINDS[kind])
    AutoModelForCausalLM.from_pretrained(source, quantization_config=settings).save_pretrained(folder)
    for path in source.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def their_values(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if f"{name.removesuffix('weight')}SCB" in tensors:
        return functional.int8_vectorwise_dequant(tensors[name], tensors[f"{name.removesuffix('weight')}SCB"])
    parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    state = functional.QuantState.from_dict(parts, torch.device("cpu"))
    state.dtype = torch.float32
    return functional.dequantize_4bit(tensors[name], state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_are_those_of_bitsandbytes(kind: str, saved: Saved) -> None:
    folder = saved(kind)
    source, tensors = open_source(str(folder)), load_file(folder / "model.safetensors")
    assert source.quantization == ("bitsandbytes, " + ("LLM.int8" if kind == "int8" else "4-bit floats (FP4)"))
    for name in LAYERS:
        assert np.array_equal(source.floats(name), their_values(tensors, name).numpy()), name
    assert np.array_equal(source.floats(LAYERS[0], 3, 9), source.floats(LAYERS[0])[3:9])
    assert not any(name.endswith(("SCB", "weight_format", "absmax")) for name in source.tensors)


@pytest.mark.parametrize("kind", ["fp4", "int8"])
def test_layers_that_transformers_has_the_other_way_round_come_as_it_has_them(
    kind: str, architecture: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_source(str(save(architecture("gpt2"), tmp_path / "saved", kind)))
    exact = open_source(str(architecture("gpt2")))
    name = "transformer.h.0.mlp.c_fc.weight"
    assert source.tensors[name].shape == (64, 256)
    ours, theirs = source.floats(name), exact.floats(name)
    assert np.linalg.norm(ours - theirs) < 0.2 * np.linalg.norm(theirs)
    assert np.array_equal(source.floats(name, 5, 7), ours[5:7])


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("int8", lambda t: t.pop(f"{UP}SCB"), f"lacks the tensor {UP}SCB"),
        ("int8", lambda t: t.update({f"{UP}SCB": t[f"{UP}SCB"][1:]}), r"SCB is float32 of the shape \(255,\)"),
        ("int8", lambda t: t[f"{UP}SCB"].fill_(float("inf")), "SCB are not finite"),
        ("int8", lambda t: t[f"{UP}weight_format"].fill_(2), "weight_format is not 0"),
        ("fp4", lambda t: t.pop(f"{UP}weight.absmax"), "absmax is missing"),
        ("fp4", lambda t: t.update({f"{UP}weight": t[f"{UP}weight"].T.contiguous()}), "and not one column"),
        ("fp4", lambda t: t[f"{UP}weight.quant_map"].mul_(2), "not the table of fp4"),
        ("fp4", lambda t: other_words(t[f"{UP}weight.quant_state.bitsandbytes__fp4"]), "tells of no fp4"),
        ("fp4", lambda t: as_nf4(t), "config.json says that codes are fp4"),
    ],
)
def test_what_lies_is_refused(
    kind: str, change: Callable[[dict[str, torch.Tensor]], object], says: str, saved: Saved, tmp_path: Path
) -> None:
    refuse_source(changed_copy(saved(kind), tmp_path / "changed", change), says, tmp_path / "out")


def other_words(state: torch.Tensor) -> None:
    state.copy_(torch.tensor(list(bytes(state.tolist()).replace(b"fp4", b"nf4")), dtype=torch.uint8))


def as_nf4(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("__fp4")]:
        tensors[name.replace("fp4", "nf4")] = tensors.pop(name)
