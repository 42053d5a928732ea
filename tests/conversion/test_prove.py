"""Reading back: values that are not finite, or lost, are found in the bytes of every format."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_models import CALIBRATION

from quantkit.artifact import Artifact, open_artifact
from quantkit.contracts.method import Job
from quantkit.conversion.check import prepare_job
from quantkit.conversion.prove import check_values, read_all
from quantkit.errors import ArtifactError
from quantkit.formats.ctranslate2.model_file import open_ct2_model
from quantkit.progress import Progress

gguf = pytest.importorskip("gguf")
LAYER = "model.layers.0.self_attn.o_proj"
Spoil = Callable[[Path, float], None]


def in_tensor(name: str) -> Spoil:
    """Puts a value into one tensor of the safetensors file."""

    def spoil(folder: Path, value: float) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors[name].view(-1)[0] = value
        save_file(tensors, path, metadata={"format": "pt"})

    return spoil


def in_gguf(name: str, dtype: type) -> Spoil:
    """Puts a value into the first bytes of a tensor."""

    def spoil(folder: Path, value: float) -> None:
        (path,) = folder.glob("*.gguf")
        (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name]
        data, start = np.array([value], dtype).tobytes(), int(tensor.data_offset)
        whole = path.read_bytes()
        path.write_bytes(whole[:start] + data + whole[start + len(data) :])

    return spoil


def in_ct2(name: str) -> Spoil:
    def spoil(folder: Path, value: float) -> None:
        path = folder / "model.bin"
        start, whole = open_ct2_model(path).variables[name].start, path.read_bytes()
        path.write_bytes(whole[:start] + np.float32(value).tobytes() + whole[start + 4 :])

    return spoil


# method, bits, options, and what is spoiled
CASES: dict[str, tuple[str, str, dict[str, Any], Spoil]] = {
    "gptq, a scale": ("rtn", "4", {}, in_tensor(f"{LAYER}.scales")),
    "awq, a scale": ("rtn", "4", {"format": "awq"}, in_tensor(f"{LAYER}.scales")),
    "nf4, a scale of scales": ("nf4", "4", {}, in_tensor(f"{LAYER}.weight.nested_absmax")),
    "float": ("float", "bfloat16", {}, in_tensor(f"{LAYER}.weight")),
    "gguf, a norm": ("gguf", "Q4_K_M", {}, in_gguf("output_norm.weight", np.float32)),
    "gguf, a factor": ("gguf", "Q8_0", {}, in_gguf("blk.0.attn_output.weight", np.float16)),
    "ctranslate2": ("ctranslate2", "int8", {}, in_ct2("decoder/layer_norm/gamma")),
}


@pytest.fixture
def made(
    tiny_with: Callable[..., Path], artifact_of: Callable[..., Artifact], tmp_path: Path
) -> Callable[..., tuple[Job, Artifact]]:
    """A job and a copy of its artifact."""

    def make(method: str, bits: str, options: dict[str, Any]) -> tuple[Job, Artifact]:
        model = tiny_with(num_hidden_layers=1)
        folder = shutil.copytree(artifact_of(method, bits, model=model, **options).folder, tmp_path / "out")
        return prepare_job(str(model), method, bits, calibration=CALIBRATION, **options), open_artifact(folder)

    return make


@pytest.mark.parametrize("case", CASES)
def test_values_that_are_not_finite_are_found(case: str, made: Callable[..., tuple[Job, Artifact]]) -> None:
    method, bits, options, spoil = CASES[case]
    job, artifact = made(method, bits, options)
    read_all(artifact, Progress())
    check_values(job, artifact, Progress())
    for value in (float("nan"), float("-inf")):
        spoil(artifact.folder, value)
        for check in (lambda: read_all(artifact, Progress()), lambda: check_values(job, artifact, Progress())):
            # Readers may know a wrong scale for themselves.
            with pytest.raises(ArtifactError, match=r"NaN or infinite|scales that are 0 or not finite"):
                check()


def test_a_layer_whose_values_are_lost_is_found(made: Callable[..., tuple[Job, Artifact]]) -> None:
    job, artifact = made("rtn", "4", {})
    error = check_values(job, artifact, Progress())
    assert error is not None
    assert 0.02 < error.mean <= error.worst < 0.3
    path = artifact.folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{LAYER}.qweight"].bitwise_not_()  # each code c becomes 15 - c: the sign turns
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"{LAYER}.weight reads back with a relative error of [12]"):
        check_values(job, artifact, Progress())
