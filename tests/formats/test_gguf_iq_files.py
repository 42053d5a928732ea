"""A file of IQ types is verified, inspected, imported and taken as a source as any other is."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import gguf, save_model, tensors_of
from tiny_models import CALIBRATION, quantkit

from quantkit import verify
from quantkit.artifact import MANIFEST
from quantkit.conversion.convert import convert
from quantkit.errors import ArtifactError
from quantkit.formats.source import open_source
from quantkit.system.files import sha256_of

TYPES = {"attn_q": "IQ3_XXS", "attn_k": "IQ4_XS", "ffn_up": "IQ2_XXS", "ffn_down": "IQ4_NL"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the types of the file type IQ3_S beside those given."""
    folder = tmp_path_factory.mktemp("iq")
    model = save_model(folder / "tiny", num_hidden_layers=1)
    convert(str(model), "gguf", "IQ3_S", folder / "out", calibration=CALIBRATION, rounding="gptq", tensor_type=TYPES)
    return folder / "out"


def file_in(folder: Path) -> Path:
    return next(folder.glob("*.gguf"))


def test_it_is_verified_and_one_with_other_bytes_is_not(artifact: Path, tmp_path: Path) -> None:
    assert verify(artifact)
    damaged = Path(shutil.copytree(artifact, tmp_path / "damaged"))
    [tensor] = [t for t in gguf.GGUFReader(file_in(artifact)).tensors if t.name == "blk.0.attn_q.weight"]
    content = bytearray(file_in(damaged).read_bytes())
    content[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.inf).tobytes()  # the first block's scale
    file_in(damaged).write_bytes(content)
    manifest = json.loads((damaged / MANIFEST).read_text())
    text = json.dumps(manifest).replace(sha256_of(file_in(artifact)), sha256_of(file_in(damaged)))
    (damaged / MANIFEST).write_text(text)
    with pytest.raises(ArtifactError, match=r"not finite|q_proj|attn_q"):
        verify(damaged)


def test_what_is_inspected_names_its_types(artifact: Path) -> None:
    ended = quantkit("inspect", file_in(artifact), "--tensors")
    assert ended.code == 0, ended.out
    for kind in {*TYPES.values(), "IQ3_S"}:
        assert kind in ended.out


def test_values_are_read_as_gguf_reads_them(artifact: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file_in(artifact)).tensors}
    names = {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate"}
    names |= {"self_attn.o_proj": "attn_output"}
    read = tensors_of(file_in(artifact))
    for ours, theirs in names.items():
        tensor = tensors[f"blk.0.{theirs}.weight"]
        assert tensor.tensor_type.name == TYPES.get(theirs, "IQ3_S")
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.allclose(read[f"model.layers.0.{ours}.weight"].numpy(), expected, rtol=1e-6, atol=0)


def test_it_is_imported_and_a_source_with_the_same_values(artifact: Path, tmp_path: Path) -> None:
    values = tensors_of(file_in(artifact))
    checkpoint = convert(str(file_in(artifact)), "float", "float32", tmp_path / "float")
    source = open_source(str(checkpoint.folder))
    for name, value in values.items():
        assert torch.equal(source.tensor(name), value), name
    ours, theirs = (
        convert(str(m), "rtn", "4", tmp_path / f"{i}") for i, m in enumerate((file_in(artifact), checkpoint.folder))
    )
    for name in ours.manifest.weight_files:
        assert (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes()
