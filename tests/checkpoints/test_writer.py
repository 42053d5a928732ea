"""Checkpoint files: literal bytes, shards, and safetensors and transformers as foreign readers."""

import json
import os
import struct

import pytest
import torch
from edits import flip
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_llama import plain_model

from quantkit.checkpoints.safetensors import read_header
from quantkit.checkpoints.spool import JOURNAL, SPOOL, CheckpointWriter, read_journal, restore
from quantkit.contracts.run import Findings
from quantkit.formats.source import open_source


def written(folder, tensors, shard_bytes=1 << 30):
    folder.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(folder, shard_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    return folder


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8)
    return {f"t{i}": (torch.rand(3, i + 1, generator=generator) * 100).to(kind) for i, kind in enumerate(kinds)}


@pytest.mark.parametrize("name", ["b", "b23456789"])  # headers that end in one and the other half of 16 bytes
def test_the_bytes_of_a_small_file(name, tmp_path):
    tensors = {name: torch.tensor([1, 2, 255], dtype=torch.uint8), "a": torch.tensor([[1.0, -2.0]]).half()}
    folder = written(tmp_path, tensors)
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"a":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},'
        b'"%s":{"dtype":"U8","shape":[3],"data_offsets":[4,7]}}' % name.encode()
    )
    padded = header + b" " * (-len(header) % 8)
    data = bytes([0x00, 0x3C, 0x00, 0xC0, 1, 2, 255])
    assert (folder / "model.safetensors").read_bytes() == struct.pack("<Q", len(padded)) + padded + data
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_every_dtype_and_shape_comes_back_through_safetensors(tmp_path):
    tensors = {
        "bytes": torch.zeros(3, dtype=torch.uint8),
        **some_tensors(),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "strided": torch.arange(8)[::2],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    file = written(tmp_path, tensors) / "model.safetensors"
    loaded = load_file(file)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name], tensor)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    for name, info in read_header(file).items():
        assert info.start % tensors[name].element_size() == 0
    other = written(tmp_path / "other", dict(reversed(tensors.items())))
    assert file.read_bytes() == (other / "model.safetensors").read_bytes()


def test_shards_have_an_index_that_names_every_tensor(tmp_path):
    tensors = {f"t{i}": torch.full((25,), float(i)) for i in range(7)}  # 100 bytes each
    folder = written(tmp_path, tensors, shard_bytes=250)
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 700}
    assert index["weight_map"] == {f"t{i}": names[i // 2] for i in range(7)}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], tensors[name])


def test_transformers_loads_shards_and_gives_the_same_logits(tiny, tmp_path):
    source = open_source(str(tiny))
    tensors = {name: source.tensor(name) for name in source.tensors}
    folder = written(tmp_path / "sharded", tensors, shard_bytes=200_000)
    (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
    source.copy_side_files(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert torch.equal(plain_model(folder)(ids).logits, plain_model(tiny)(ids).logits)
    again = open_source(str(folder))
    assert all(torch.equal(again.tensor(name), tensor) for name, tensor in tensors.items())


def two_blocks(folder):
    """Two finished blocks and a tensor beyond them; the writer is closed as a killed process leaves it."""
    tensors, findings = some_tensors(), Findings()
    writer = CheckpointWriter(folder)
    for block, names in enumerate((("t0", "t1", "t2"), ("t3", "t4"))):
        for name in names:
            writer.add(name, tensors[name])
            findings.count("stored")
        findings.note(f"note of block {block}")
        writer.finish_block(block, findings.to_values())
    writer.add("t5", tensors["t5"])
    findings.count("lost")
    writer.close()
    return tensors


def test_finished_blocks_survive_and_what_came_after_them_does_not(tmp_path):
    tensors = two_blocks(tmp_path)
    size = (tmp_path / "tensors.spool").stat().st_size
    again = Findings(**restore(tmp_path))
    assert (again.tensor_types, len(again.notes)) == ({"stored": 5}, 2)
    writer = CheckpointWriter(tmp_path)
    assert (writer.finished, writer.names()) == (2, {"t0", "t1", "t2", "t3", "t4"})
    for name in writer.names():
        assert writer.get(name).dtype == tensors[name].dtype
        assert torch.equal(writer.get(name), tensors[name])
    assert (tmp_path / "tensors.spool").stat().st_size == size - tensors["t5"].numel()
    # Reading does not disturb where the next tensor goes; what is there is not taken twice; a finish can be done again.
    whole = written(tmp_path / "whole", tensors)
    for _ in range(2):
        for name, tensor in reversed(tensors.items()):
            writer.add(name, tensor)
            assert torch.equal(writer.get(name), tensor)
        writer.finish()
        assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        writer = CheckpointWriter(tmp_path)
    writer.close()


def cut_journal(folder):
    os.truncate(folder / JOURNAL, (folder / JOURNAL).stat().st_size - 1)


def flip_spool(folder):
    flip(folder / SPOOL, read_journal(folder)[0][1]["end"] - 1)


@pytest.mark.parametrize("damage", [cut_journal, flip_spool])
def test_a_damaged_last_block_is_dropped_and_the_one_before_it_kept(damage, tmp_path):
    two_blocks(tmp_path)
    damage(tmp_path)
    again = Findings(**restore(tmp_path))
    assert (again.tensor_types, list(again.notes.values())) == ({"stored": 3}, ["note of block 0"])
    writer = CheckpointWriter(tmp_path)
    assert (writer.finished, writer.names()) == (1, {"t0", "t1", "t2"})
    with pytest.raises(ValueError, match="block 1 is next"):
        writer.finish_block(2, {})
    writer.finish_block(1, {})
    writer.close()
    assert [line["block"] for line in read_journal(tmp_path)[0]] == [0, 1]


def test_a_replaced_tensor_is_the_last_one_until_a_kill(tmp_path):
    old, new = torch.arange(4.0), torch.arange(4.0) + 10
    assert restore(tmp_path) is None
    writer = CheckpointWriter(tmp_path)
    writer.add("a", old)
    writer.add("b", old)
    with pytest.raises(ValueError, match="tensor a was added twice"):
        writer.add("a", new)
    writer.finish_block(0, {})
    writer.replace("a", new)
    assert torch.equal(writer.get("a"), new)
    writer.close()
    again = CheckpointWriter(tmp_path)
    assert torch.equal(again.get("a"), old)
    again.replace("a", new)
    for wrong in (new.half(), new[:2]):
        with pytest.raises(ValueError, match="the tensor a is"):
            again.replace("a", wrong)
    again.finish()
    values = load_file(tmp_path / "model.safetensors")
    assert torch.equal(values["a"], new)
    assert torch.equal(values["b"], old)
