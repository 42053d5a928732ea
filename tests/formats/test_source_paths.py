"""What a user may call a model: folders and files of every layout that people have, and one line for all others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_logits import logits_of
from safetensors.torch import load_file, save_file
from tiny_adapters import low_rank, save_adapter
from tiny_models import EVALUATION_FLAGS, fails, succeeds

from quantkit import convert
from quantkit.errors import QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.evaluation.engine_choice import choose
from quantkit.formats.source import open_model, open_source
from quantkit.models.skeleton import load_whole
from quantkit.records.recipe import EngineSpec, ModelRef
from quantkit.serving.servers import plan_server

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def renamed(model, folder, name):
    shutil.copytree(model, folder)
    (folder / SINGLE).rename(folder / name)
    return folder


def sharded(model, folder, count=3):
    """Its tensors in numbered files, without an index."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    for number in range(count):
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, folder / f"model-{number + 1:05}-of-{count:05}.safetensors", metadata={"format": "pt"})
    (folder / SINGLE).unlink()
    return folder


def test_files_of_other_names_are_converted_and_loaded_by_transformers(one_block, tmp_path):
    ids = torch.arange(3, 40)[None]
    expected = logits_of(load_whole(open_source(str(one_block)), dtype="float32")[0], ids)
    for folder in (
        sharded(one_block, tmp_path / "sharded"),
        renamed(one_block, tmp_path / "renamed", "other.safetensors"),
    ):
        model = open_model(folder)
        assert not model.source.own_files
        assert choose(model, EngineSpec()).name == "transformers"
        assert torch.equal(logits_of(load_whole(model.source, dtype="float32")[0], ids), expected)
        with pytest.raises(RecipeError, match="have unknown names"):
            choose(model, EngineSpec(engine="vllm"))
    source = open_source(str(folder / "other.safetensors"))
    assert (source.name, source.weight_files) == ("renamed", ["other.safetensors"])
    made, plain = (convert(str(place), "rtn", 4, tmp_path / f"{place.name}-out") for place in (folder, one_block))
    assert made.manifest.files[SINGLE] == plain.manifest.files[SINGLE]


def test_other_files_and_several_without_an_order_are_refused(one_block, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(SourceError, match=r"is a file that quantkit cannot read.*\.safetensors or \.gguf"):
        open_source(str(tmp_path / "model.bin"))
    folder = renamed(one_block, tmp_path / "folder", "a.safetensors")
    shutil.copyfile(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(SourceError, match=r"several weight files and no .*: a\.safetensors, b\.safetensors\. Give the"):
        open_source(str(folder))
    folder = sharded(one_block, tmp_path / "sharded")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SourceError, match=r"lacks the shard model-00002-of-00003\.safetensors"):
        open_source(str(folder))


def test_one_file_of_many_is_refused(one_block, tmp_path):
    folder = sharded(one_block, tmp_path / "sharded")
    with pytest.raises(SourceError, match=r"is one of several files of a model\. Give their folder"):
        open_source(str(folder / "model-00001-of-00003.safetensors"))
    names = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert open_source(str(folder)).own_files
    tensors = {name: value * 2 for name, value in load_file(one_block / SINGLE).items()}
    save_file(tensors, folder / "doubled.safetensors")
    source = open_source(str(folder / "doubled.safetensors"))
    assert torch.equal(source.tensor("model.norm.weight"), tensors["model.norm.weight"])
    assert source.hashes.keys() == {"config.json", "doubled.safetensors"}
    assert not source.own_files


def test_a_revision_is_one_of_the_hub(one_block, gguf, tmp_path):
    file = gguf.folder / gguf.manifest.weight_files[0]
    for place in (one_block, file, gguf.folder):
        with pytest.raises(QuantkitError, match="--revision is for models of the hub"):
            open_model(ModelRef(model=place, revision="main"))
    says = "Give the revision apart: some-org/some-model --revision v1.0"
    ended = fails("convert", "some-org/some-model@v1.0", "--method", "rtn", "--out", tmp_path / "out", says=says)
    assert ended.err.count("\n") == 1


def test_a_gguf_file_is_evaluated_by_llama_cpp_and_by_our_reader(gguf, tmp_path):
    file = Path(shutil.copyfile(gguf.folder / gguf.manifest.weight_files[0], tmp_path / "somebodys.gguf"))
    # What lies beside it is not its own.
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert not {7, 8} & open_model(file).end_tokens
    succeeds("eval-ppl", file, *EVALUATION_FLAGS, "--cross-check", "--no-divergence", "--json", tmp_path / "a")
    values = json.loads((tmp_path / "a").read_text())
    assert values["agrees"]
    assert [values[name]["engine"]["name"] for name in ("native", "reference")] == ["llamacpp", "reference"]
    assert {values[name]["model"]["name"] for name in ("native", "reference")} == {"somebodys"}


def test_a_server_is_not_given_a_model_that_no_file_holds(one_block, tmp_path):
    tensors = low_rank(one_block, ["model.layers.0.self_attn.q_proj"])
    adapter = save_adapter(tmp_path / "a", tensors, base_model_name_or_path=str(one_block))
    for model in (adapter, renamed(one_block, tmp_path / "renamed", "other.safetensors")):
        with pytest.raises(UnsupportedError, match=r"no server can load .*--method float"):
            plan_server(str(model), "vllm")
