"""Checkpoints that somebody damaged: one line of ours, at once, whatever transformers would do with them."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CALIBRATION_FLAGS, changed_copy, quantkit, save_tiny
from transformers import AutoModelForCausalLM

from quantkit.conversion.convert import convert
from quantkit.conversion.verify import verify
from quantkit.errors import QuantkitError, SourceError, UnsupportedError
from quantkit.formats.float.checkpoint import open_checkpoint
from quantkit.formats.source import open_source
from quantkit.models.bounds import refuse_config
from quantkit.models.config import load_tokenizer, open_config
from quantkit.models.skeleton import open_skeleton

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(folder: Path, *says: str, method: str = "rtn") -> None:
    """One line that says this, and nothing left behind."""
    ended = quantkit("convert", folder, "--method", method, "--out", "out")
    assert ended.code == 1, ended.err
    assert ended.err.startswith("error: "), ended.err
    assert ended.err.strip().count("\n") == 0, ended.err
    assert len(ended.err) < 2000, ended.err
    for part in says:
        assert part in ended.err, ended.err
    assert not Path("out").exists()
    assert not Path("out.partial").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 200),  # of 21 tensors
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "2"),
        ("num_attention_heads", 0),
        ("num_attention_heads", 10**8),
        ("num_attention_heads", True),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("head_dim", 1 << 40),
        ("hidden_size", 2**62),
        ("hidden_size", 0),
        ("intermediate_size", 2**62),
        ("vocab_size", 2**62),
        ("vocab_size", 12.5),
        ("max_position_embeddings", -1),
        ("max_position_embeddings", 10**18),
        ("num_local_experts", 10**7),
        ("architectures", 5),
        ("architectures", ["LlamaForCausalLM", 5]),
        ("architectures", {"a": 1}),
        ("model_type", 5),
        ("model_type", ["llama"]),
        ("rope_parameters", 5),
        ("rope_parameters", []),
        ("rope_scaling", "yarn"),
        ("rope_theta", float("inf")),
        ("rope_theta", 0),
        ("rope_theta", "ten"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", "1e-5"),
        ("initializer_range", float("-inf")),
    ],
)
def test_values_that_no_model_has(key: str, value: Any, tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {key: value}
    with pytest.raises(UnsupportedError, match=key if "layers" not in key else "num_hidden_layers|decoder blocks"):
        refuse_config(config, 21)
    with pytest.raises(QuantkitError):
        open_checkpoint(changed_copy(tiny, Path("model"), **{key: value}), "model")


def test_a_setting_inside_text_config_is_held_within_its_limits_too(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        refuse_config({"model_type": "gemma3", "text_config": config | {"num_hidden_layers": 10**9}})
    with pytest.raises(UnsupportedError, match=r"rope_parameters\.rope_theta is inf"):
        refuse_config(config | {"rope_parameters": {"rope_theta": float("inf")}})


def test_layers_times_experts_are_bounded() -> None:
    with pytest.raises(UnsupportedError, match="4000 layers of 4000 experts"):
        refuse_config({"model_type": "mixtral", "num_hidden_layers": 4000, "num_local_experts": 4000})


def test_infinity_where_a_published_config_has_it_is_taken() -> None:
    refuse_config({"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]})


@pytest.mark.parametrize("classes", [[], None, ["MptForCausalLM"]])
def test_what_published_configs_leave_open_is_taken(classes: Any, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"), architectures=classes, pad_token_id=-1, rope_scaling=None)
    open_skeleton(open_checkpoint(folder, "model").config)


def test_a_table_of_positions_squared_is_not_made() -> None:
    shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64, "attention_types": [[["global"], 1]]}
    config = {"model_type": "gpt_neo", "max_position_embeddings": 1 << 18, **shape}
    with pytest.raises(UnsupportedError, match=r"262,144 tokens takes 6\d\.\d GB of tables of positions"):
        open_skeleton(config)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text", [DEEP, '{"a": ' + "1" * 5000 + "}", "\ufeff{}", "", "nul", '"\ud800"', "5"], ids=range(7)
)
def test_json_that_no_parser_should_see(name: str, text: str, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(folder, name)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", [DEEP, "null", "[1]", "{", "\x00"], ids=range(5))
@pytest.mark.parametrize("method", ["rtn", "nf4"])
def test_tokenizer_files_that_are_none(name: str, text: str, method: str, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / name).write_text(text)
    refused(folder, "model", method=method)


def broken_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(model=None),
        lambda t: t.update(normalizer={"type": "Nothing"}),
        lambda t: t.update(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
        lambda t: t.update(decoder={"type": 5}),
        lambda t: t.update(pre_tokenizer={"type": "FixedLength", "length": 0}),  # a panic
        lambda t: t["model"].update(vocab=[]),
        lambda t: t["model"]["vocab"].update({"zz": -5}),
        lambda t: t.update(added_tokens=[{"id": -1, "content": "x", "special": True}]),
        lambda t: t.update(added_tokens=5),
    ],
    ids=range(9),
)
def test_a_tokenizer_that_cannot_work(change: Callable[[dict[str, Any]], object], tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    broken_tokenizer(folder, change)
    with pytest.raises(SourceError, match="tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer_class", 5),
        ("tokenizer_class", ["PreTrainedTokenizerFast"]),
        ("chat_template", 5),
        ("chat_template", "{% if %}"),
        ("chat_template", "{{ " + "(" * 100_000),
        ("extra_special_tokens", 5),
        ("added_tokens_decoder", [1]),
        ("bos_token", 5),
    ],
)
def test_settings_of_a_tokenizer_that_it_cannot_have(key: str, value: Any, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(SourceError, match="model"):
        load_tokenizer(folder)


def test_the_tag_of_transformers_in_a_template_is_taken(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(text)
    assert load_tokenizer(folder).chat_template == text


def write_safetensors(path: Path, entries: Any, nbytes: int) -> Path:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    return path


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, "b overlaps a"),
        ({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, "b overlaps a"),
        ({"a": entry([2], [4, 12])}, "a leaves a hole after its header"),
        ({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, "b leaves a hole after a"),
        ({"a": entry([float("inf")], [0, 12])}, "broken safetensors header: it holds the number"),
        ({"a": entry([3], [0, float("inf")])}, "broken safetensors header: it holds the number"),
        ({"a": entry([3.0], [0, 12])}, "broken safetensors header: it holds the number"),
        ({"a": entry([-3], [0, -12])}, "broken header entry for a"),
        ({"a": entry([1] * 1000 + [3], [0, 12])}, "broken header entry for a"),
        ({"a": entry([2**62, 4], [0, 12])}, "broken header entry for a"),
        ({"a": entry(3, [0, 12])}, "broken header entry for a"),
        ({"a": entry([3], [0, 12, 12])}, "broken header entry for a"),
        ({"a": entry([3], None)}, "broken header entry for a"),
        ({"a": entry([3], [0, 12], 5)}, "broken header entry for a"),
        ({"a": entry([True, 3], [0, 12])}, "broken header entry for a"),
        ({"a": entry([12], [0, 12], "F4")}, "has the type F4"),
        ({"a": entry([3], [0, 12]) | {"more": 1.5}}, "broken safetensors header"),
        ({"a": entry([3], [0, 12]), "__metadata__": {"format": 5}}, "broken safetensors header"),
        ({"a": entry([3], [0, 12]), "__metadata__": "pt"}, "broken safetensors header"),
        (DEEP, "broken safetensors header"),
        ('{"a": ' + "1" * 5000 + "}", "broken safetensors header"),
    ],
)
def test_headers_that_lie(entries: Any, says: str, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    write_safetensors(folder / "model.safetensors", entries, 12)
    refused(folder, says)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("method", ["rtn", "gguf", "float", "nf4", "ctranslate2"])
def test_weights_that_are_no_floats(dtype: torch.dtype, method: str, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, folder / "model.safetensors")
    refused(folder, name, method=method)


def test_tensors_beside_the_model_are_kept_with_a_word(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    weights = load_file(folder / "model.safetensors")
    steps = torch.arange(3, dtype=torch.int32)
    save_file(weights | {"model.steps": steps}, folder / "model.safetensors")
    for method in ("rtn", "float", "nf4"):
        artifact = convert(str(folder), method, out=f"out-{method}")
        (note,) = [note for note in artifact.manifest.notes if "model.steps" in note]
        assert note.startswith("1 tensor of the source (3 values) are no part of its architecture")
        assert "are kept as they are" in note
        assert artifact.manifest.source.kept == ("model.steps",)
        assert artifact.manifest.source.parameters == sum(w.numel() for w in weights.values()) + 3
        assert load_file(f"out-{method}/model.safetensors")["model.steps"].equal(steps)
        assert "int32" not in artifact.manifest.tensor_types
        verify(artifact.folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_tensors_beside_the_model_that_look_like_codes_are_left_out(dtype: torch.dtype, tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.extra.weight": torch.ones(4, 4).to(dtype)}, folder / "model.safetensors")
    manifest = convert(str(folder), "rtn", out="out").manifest
    assert not manifest.source.kept
    assert [note for note in manifest.notes if "model.extra.weight" in note and "are left out" in note]
    assert "model.extra.weight" not in load_file("out/model.safetensors")


@pytest.mark.parametrize("method", ["rtn", "nf4", "float", "gguf", "ctranslate2"])
def test_decoder_blocks_beyond_the_config(method: str, tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    folder = changed_copy(tiny, Path("model"), num_hidden_layers=config["num_hidden_layers"] - 1)
    refused(folder, f"layers.{config['num_hidden_layers'] - 1}.", method=method)


def test_a_tied_weight_that_is_stored_twice(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"), tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors")
    manifest = convert(str(folder), "rtn", out="same").manifest
    assert not any("left out" in note for note in manifest.notes)
    head[0, 0] += 1
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors")
    refused(folder, "ties lm_head.weight to model.embed_tokens.weight", "tie_word_embeddings")


def test_two_models_in_one_folder(tiny: Path) -> None:
    """transformers would read the single file, an index names others."""
    folder = changed_copy(tiny, Path("model"))
    weights = load_file(folder / "model.safetensors")
    half = len(weights) // 2
    names = {"a.safetensors": list(weights)[:half], "b.safetensors": list(weights)[half:]}
    for file, own in names.items():
        save_file({name: weights[name] * 2 for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in names.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "holds model.safetensors and an index of other files (a.safetensors, b.safetensors")
    (folder / "model.safetensors").unlink()
    convert(str(folder), "rtn", out="taken")
    moved = next(iter(weights))
    index["weight_map"][moved] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, f"a.safetensors holds the tensor {moved}, and the index says otherwise")


def test_an_index_of_the_single_file_is_taken(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    names = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    open_checkpoint(folder, "model")


def test_an_adapter_beside_the_weights(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "adapter_config.json", "--adapter")


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.model", "generation_config.json", "chat_template.jinja"])
def test_a_link_out_of_the_source_is_not_followed(name: str, tiny: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = changed_copy(tiny, Path("model"))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    refused(folder, f"{name} is a link out of its folder")
    (folder / name).unlink()
    (folder / name).symlink_to(Path("..") / "secret")
    refused(folder, f"{name} is a link out of its folder")


def test_links_inside_the_source_and_into_the_hub_cache_are_followed(tiny: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(tiny, snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / ".." / "blobs" / str(number))
    (snapshot / "COPY").write_text("free")
    (snapshot / "LICENSE").symlink_to("COPY")
    artifact = convert(str(snapshot), "rtn", out="out")
    assert (artifact.folder / "LICENSE").read_text() == "free"
    assert not any(path.is_symlink() for path in artifact.folder.iterdir())


def test_side_files_that_are_folders_or_pipes(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"))
    os.mkfifo(folder / "LICENSE")
    refused(folder, "LICENSE is no file")


def test_what_is_kept_is_what_transformers_leaves_out(tiny: Path) -> None:
    """The judge reads the same model: a further tensor changes nothing there."""
    folder = changed_copy(tiny, Path("model"))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.extra.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    _, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    artifact = convert(str(folder), "rtn", out="out", format="compressed-tensors")
    assert told["unexpected_keys"] == set(artifact.manifest.source.kept) == {"model.extra.weight"}
    settings = json.loads((artifact.folder / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", r"re:(model\.)?extra(\..*)?$"]


def test_the_settings_of_a_manifest_are_bounded_too() -> None:
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        open_config({"model_type": "llama", "num_hidden_layers": 10**9})


def test_calibrated_methods_refuse_the_same(tiny: Path) -> None:
    folder = changed_copy(tiny, Path("model"), num_hidden_layers=10**9)
    ended = quantkit("convert", folder, "--method", "gptq", "--out", "out", *CALIBRATION_FLAGS)
    assert (ended.code, ended.err.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("special_tokens_map.json", 1 << 24), ("added_tokens.json", 1 << 24), ("tokenizer_config.json", 1 << 24),
        ("tokenizer.json", 1 << 26), ("vocab.json", 1 << 26), ("chat_template.jinja", 1 << 20),
    ],
)  # fmt: skip
def test_a_side_file_larger_than_any_is_refused_unread(name: str, most: int, tiny: Path, tmp_path: Path) -> None:
    folder = changed_copy(tiny, tmp_path / "changed")
    with (folder / name).open("wb") as file:
        file.truncate(most + 1)
    with pytest.raises(SourceError, match=rf"{name} has {most + 1:,} bytes; at most {most:,} are read"):
        open_source(str(folder))
    with pytest.raises(SourceError, match=rf"{name} has {most + 1:,} bytes; at most {most:,} are read"):
        load_tokenizer(folder)
