"""MXFP4 checkpoints as sources: values as transformers dequantizes them, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import logits_of_llama_cpp, logits_of_transformers, take_any_tokenizer
from quantized_folders import change_folder, refuse_source
from safetensors.torch import load_file, save_file
from tiny_architectures import save_architecture
from tiny_models import changed_copy
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trials import dense_values

from bench.fuzz.quantized_bases import save_mxfp4
from quantkit.conversion.convert import convert
from quantkit.formats.mxfp4 import FORMAT
from quantkit.formats.quantized_checkpoint import QuantizedCheckpoint
from quantkit.formats.source import open_source

STACKS = [f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")]
UP = STACKS[0]
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, with random codes."""
    folder = tmp_path_factory.mktemp("models") / "gpt-oss"
    changes = {"num_hidden_layers": 2, "intermediate_size": 96, "layer_types": None, "max_position_embeddings": 4096}
    plain = save_architecture(folder.with_name("plain"), "gpt_oss", changes=changes)
    save_mxfp4(plain, folder)
    return folder


def test_values_by_hand(tmp_path: Path) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = torch.stack([codes, codes << 4]).reshape(1, 2, 1, 16)
    scales = torch.tensor([127, 130], dtype=torch.uint8).reshape(1, 2, 1)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    reader = FORMAT.open(tmp_path, ("model.safetensors",), {})
    values = reader.read("x")
    assert not isinstance(values, torch.Tensor)
    first, second = np.array([[v, 0] for v in VALUES]).reshape(-1), np.array([[0, 8 * v] for v in VALUES]).reshape(-1)
    assert np.array_equal(values.whole(), np.stack([first, second], -1)[None])


def test_the_values_are_transformers(gpt_oss: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(gpt_oss).state_dict()
    source, stored = open_source(str(gpt_oss)), load_file(gpt_oss / "model.safetensors")
    assert isinstance(source, QuantizedCheckpoint)
    assert source.quantized == set(STACKS)
    assert source.tensors.keys() == theirs.keys()
    for name in source.tensors:
        ours = torch.from_numpy(source.floats(name))
        assert torch.equal(ours.to(theirs[name].dtype), theirs[name]), name
    for name in STACKS:
        exact = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert np.array_equal(source.floats(name), exact.numpy()), name
        assert np.array_equal(source.floats(name, 1, 2), exact[1:2].numpy()), name


def test_every_power_is_transformers(gpt_oss: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors[f"{UP}_scales"]
        scales.reshape(-1)[:191] = torch.arange(191, dtype=torch.uint8)  # up to 2^63

    folder = changed_copy(gpt_oss, tmp_path / "changed", change)
    stored = load_file(folder / "model.safetensors")
    exact = convert_moe_packed_tensors(stored[f"{UP}_blocks"], stored[f"{UP}_scales"], dtype=torch.float32)
    assert np.array_equal(open_source(str(folder)).floats(UP), exact.numpy())


def test_experts_are_rounded_anew_one_by_one(gpt_oss: Path, tmp_path: Path) -> None:
    made = dense_values(convert(str(gpt_oss), "rtn", "8", tmp_path / "out", group_size=32))
    source = open_source(str(gpt_oss)).floats("model.layers.0.mlp.experts.down_proj")
    for expert, values in enumerate(source):
        ours = made[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"].numpy()
        assert float(np.abs(ours - values.T).max()) < 0.02 * float(np.abs(values).max())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{UP}_scales"), f"lacks the tensor {UP}_scales"),
        (lambda t: t[f"{UP}_scales"].fill_(255), "are not finite"),
        (lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"][:, 1:]}), r"shapes .*, not \(experts, N, K/32, 16\)"),
        (lambda t: t.update({f"{UP}{p}": t[f"{UP}{p}"][:1] for p in ("_blocks", "_scales")}), "asks for"),
        (lambda t: t.update({UP: torch.ones(1)}), "twice"),
        (lambda t: [t.pop(f"{name}{p}") for name in STACKS for p in ("_blocks", "_scales")], "and no tensor is"),
    ],
)
def test_what_lies_is_refused(
    change: Callable[[dict[str, torch.Tensor]], object], says: str, gpt_oss: Path, tmp_path: Path
) -> None:
    folder = change_folder(changed_copy(gpt_oss, tmp_path / "changed"), lambda _, tensors: change(tensors))
    refuse_source(folder, says, tmp_path / "out")


def test_llama_cpp_computes_what_transformers_computes_of_codes(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    take_any_tokenizer(monkeypatch)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = changed_copy(gpt_oss, tmp_path / "copy", rope_parameters=rope)
    out = convert(str(folder), "gguf", "F32", tmp_path / "out")
    ids = list(range(3, 90))
    ours = logits_of_llama_cpp(next(out.folder.glob("*.gguf")), ids)
    theirs = logits_of_transformers(folder, ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
