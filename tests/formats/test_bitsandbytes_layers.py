"""What transformers gives to bitsandbytes: NF4 artifacts that it loads, told where layers stay as they are."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_logits import engine_logits
from safetensors.torch import load_file
from tiny_architectures import LAYERS, save_architecture
from tiny_llama import converted, save_llama
from transformers import AutoModelForCausalLM

from quantkit.artifact import Artifact
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.conversion.verify import verify
from quantkit.errors import EngineError, UnsupportedError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats.bitsandbytes.layers import has_bfloat16_units
from quantkit.recipe import EngineSpec

Linear4bit: Any = pytest.importorskip(
    "bitsandbytes.nn", reason="bitsandbytes is the reference of these tests"
).Linear4bit

IDS = torch.arange(40).reshape(2, 20) * 7 % 300
# By architecture the layers of 4 bits, for one of each kind: dense, transposed, experts by their published names,
# stacked ones with biases, renamed stacks, a shared expert beside a plain gate, experts that transformers unstacks.
KINDS = {
    "llama": LAYERS * 7,
    "gpt2": LAYERS * 4,
    "mixtral": LAYERS * 4,
    "gpt_oss": LAYERS * 4,
    "granitemoe": LAYERS * 4,
    "qwen2_moe": LAYERS * 7,
    "llama4": LAYERS * 11,
}
WIDE = {"qwen2_moe": {"shared_expert_intermediate_size": 128}, "llama4": {"intermediate_size": 64}}


def in_transformers(folder: Path) -> tuple[Any, torch.Tensor]:
    """transformers' own model of a folder, with every tensor in it used, and its logits.

    Layers are dequantized, as on processors without bfloat16 units, so that nothing but their values is rounded.
    """
    model, about = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        return model, model.eval()(input_ids=IDS).logits


def in_reference(artifact: Artifact) -> torch.Tensor:
    spec = LoadSpec(threads=1, n_ctx=64, dtype="float32")
    return torch.from_numpy(engine_logits(find_engine("reference").load(Model(artifact, None), spec), IDS.numpy()))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("llama", "gpt_oss", "mixtral"))) for n in KINDS]
)
def test_transformers_loads_it_and_computes_what_our_reader_does(name: str, tmp_path: Path) -> None:
    source = save_architecture(tmp_path / "model", name, changes=WIDE.get(name))
    artifact = converted(source, tmp_path / "out", "nf4", compute_dtype="float32", min_quantized=0)
    verify(artifact)
    model, logits = in_transformers(artifact.folder)
    held = [path for path, module in model.named_modules() if isinstance(module, Linear4bit)]
    assert len(held) == artifact.manifest.tensor_types["nf4"] == KINDS[name]
    want = in_reference(artifact)
    assert (logits - want).abs().max() < 1e-4 * want.abs().max()


def test_a_mixture_of_which_little_is_quantized_is_refused_with_its_bits(
    architecture: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = architecture("mixtral")
    with pytest.raises(
        UnsupportedError, match=r"12 of 48 linear layers of 'mixtral' \(not .*experts.*stacked"
    ) as refusal:
        converted(folder, tmp_path / "out", "nf4")
    says = str(refusal.value)
    share = float(re.search(r"([\d.]+)% of their weights", says)[1])  # type: ignore[index]
    least = re.search(r"Take --min-quantized ([\d.]+) to have it so", says)[1]  # type: ignore[index]
    artifact = converted(folder, tmp_path / "out", "nf4", min_quantized=float(least))
    types, weights = artifact.manifest.tensor_types, load_file(folder / "model.safetensors")
    assert types["nf4"] == LAYERS * 4
    attention = LAYERS * (64 * 64 * 2 + 64 * 32 * 2)
    experts = sum(tensor.numel() for name, tensor in weights.items() if "experts" in name)
    assert share == round(100 * attention / (attention + experts), 1)
    [told] = [note for note in artifact.manifest.notes if "transformers gives bitsandbytes" in note]
    bits = float(re.search(r"has ([\d.]+) bits per weight", told)[1])  # type: ignore[index]
    stored = sum(tensor.nbytes for tensor in load_file(artifact.folder / "model.safetensors").values())
    tables = types["nf4"] * (16 * 4 + 256 * 4 + 200)  # of values, of scales, and the state of each layer
    assert abs(8 * (stored - tables) / artifact.manifest.source.parameters - bits) < 0.05


def test_falcon_is_refused_of_which_transformers_replaces_no_layer(
    architecture: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = architecture("falcon, grouped")
    with pytest.raises(UnsupportedError, match=r"no layer of 'falcon' .*keeps in a FalconLinear"):
        converted(folder, tmp_path / "out", "nf4", min_quantized=0)


@pytest.mark.parametrize(
    ("inner", "layers", "first"),
    [(172, 3, r"gate_proj.weight (172 x 128 weights)"), (192, 0, "")],
)
def test_shapes_that_processors_do_not_compute_are_told_and_refused_there(
    inner: int, layers: int, first: str, tmp_path: Path
) -> None:
    folder = save_llama(tmp_path / "model", intermediate_size=inner, num_hidden_layers=1)
    artifact = converted(folder, tmp_path / "out", "nf4")
    told = [note for note in artifact.manifest.notes if "on cards only" in note]
    if not layers:
        assert not told
        assert choose(Model(artifact, None), EngineSpec()).name == "transformers"
        return
    assert told[0].startswith(f"{layers} of 7 quantized layers, such as ")
    assert first in told[0]
    assert in_reference(artifact).isfinite().all()
    if inner % 32 and not has_bfloat16_units():
        return
    with pytest.raises(EngineError, match=r"down_proj|gate_proj.*on cards only.*--engine reference"):
        find_engine("transformers").load(Model(artifact, None), LoadSpec(threads=1, n_ctx=64))
