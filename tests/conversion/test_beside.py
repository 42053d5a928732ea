"""Tensors beside the model, such as layers for several tokens at once, go into the artifact as they are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_logits import engine_logits
from safetensors.torch import load_file, save_file
from tiny_architectures import whole_model

from quantkit import convert, verify
from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.registry import find_engine
from quantkit.formats.source import open_model

# Where published checkpoints have such layers, and transformers knows them to be.
LAYERS = {"deepseek_v3": "model.layers.61.", "qwen3_next": "mtp.layers.0."}


@pytest.fixture(scope="module")
def sources(architecture: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, prefix in LAYERS.items():
        folders[name] = folder = shutil.copytree(architecture(name), tmp_path_factory.mktemp(name) / "model")
        tensors = load_file(folder / "model.safetensors")
        torch.manual_seed(0)
        more = {
            f"{prefix}self_attn.o_proj.weight": torch.randn(64, 64).to(torch.bfloat16),
            f"{prefix}mlp.gate.bias": torch.randn(5),
            f"{prefix}scalar": torch.tensor(2.5),
        }
        save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.mark.parametrize(
    ("name", "method", "kind"),
    [("deepseek_v3", "rtn", "compressed-tensors"), ("qwen3_next", "fp8", None), ("qwen3_next", "float", None)],
)
def test_layers_beyond_the_model_are_kept(
    name: str, method: str, kind: str | None, sources: dict[str, Path], tmp_path: Path
) -> None:
    artifact = convert(str(sources[name]), method, out=tmp_path / "out", format=kind)
    source, stored = (load_file(folder / "model.safetensors") for folder in (sources[name], artifact.folder))
    kept = {tensor for tensor in source if tensor.startswith(LAYERS[name])}
    assert len(kept) == 3
    assert set(artifact.manifest.source.kept) == kept
    for tensor in kept:
        assert stored[tensor].dtype == source[tensor].dtype
        assert stored[tensor].equal(source[tensor])
    (note,) = [note for note in artifact.manifest.notes if "are kept as they are" in note]
    assert note.startswith(f"3 tensors of the source ({64 * 64 + 5 + 1:,} values) are no part of its architecture")
    verify(artifact.folder)
    if kind == "compressed-tensors":  # they are named where a reader would quantize them
        settings = json.loads((artifact.folder / "config.json").read_text())["quantization_config"]
        assert r"re:(model\.)?layers\.61(\..*)?$" in settings["ignore"]
        assert not any(name.endswith(r"layers\.0(\..*)?$") for name in settings["ignore"])


def test_an_artifact_that_keeps_them_computes_the_same_and_is_a_source_again(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source, ids = sources["qwen3_next"], np.random.default_rng(0).integers(3, 300, (2, 24))
    artifact = convert(str(source), "float", "float32", out=tmp_path / "out")
    loaded = find_engine("reference").load(open_model(artifact), LoadSpec(threads=1, n_ctx=32, dtype="float32"))
    with torch.inference_mode():
        want = whole_model(artifact.folder)(input_ids=torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(engine_logits(loaded, ids), want, atol=1e-4)
    first = convert(str(source), "rtn", out=tmp_path / "first").folder
    again = convert(str(first), "keep", 4, format="compressed-tensors", out=tmp_path / "again")
    one, other = (load_file(folder / "model.safetensors") for folder in (source, again.folder))
    assert len(again.manifest.source.kept) == 3
    assert all(other[name].equal(one[name]) for name in again.manifest.source.kept)
