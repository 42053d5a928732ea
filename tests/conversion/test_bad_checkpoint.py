"""Checkpoints that somebody damaged: one line of ours, at once, whatever transformers would do with them."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from edits import edit_json, edit_tensors, put
from safetensors.torch import load_file, save_file
from tiny_models import CALIBRATION, changed_copy
from transformers import AutoModelForCausalLM

from quantkit.checkpoints.safetensors import read_header
from quantkit.conversion.convert import convert
from quantkit.errors import QuantkitError, SourceError, UnsupportedError
from quantkit.formats.float import open_checkpoint
from quantkit.formats.source import open_source
from quantkit.models.config import ROPE, load_tokenizer, open_config, refuse_config
from quantkit.models.skeleton import open_skeleton

pytestmark = pytest.mark.usefixtures("here")
DEEP = "[" * 100_000 + "]" * 100_000
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tiny, here):
    """A copy of the checkpoint, called `model`, to be damaged."""
    return changed_copy(tiny, Path("model"))


def refused(folder, *says, method="rtn"):
    """One line that says this, and nothing left behind."""
    with pytest.raises(QuantkitError) as caught:
        convert(str(folder), method, out="out", calibration=CALIBRATION)
    told = str(caught.value)
    assert told.isprintable(), told
    assert len(told) < 2000, told
    for part in says:
        assert part in told, told
    assert not Path("out").exists()
    assert not Path("out.partial").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 200),  # of 21 tensors
        ("num_attention_heads", True),
        ("vocab_size", 12.5),
        ("max_position_embeddings", -1),
        ("architectures", ["LlamaForCausalLM", 5]),
        ("rope_scaling", "yarn"),
        ("rope_theta", float("inf")),
        *(("rope_parameters", {"rope_theta": theta}) for theta in (-1, 0, -10000, True, "1")),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 0}}),
        *((name, {"rope_type": "linear", "factor": factor}) for name in ROPE for factor in (0, -2)),
        ("rope_scaling", {"rope_type": "yarn", "factor": -1}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2, "beta_fast": 0}),
        ("rope_scaling", {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 1}),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0] * 15 + [0]}),
        ("partial_rotary_factor", 1.5),
        *((name, wrong) for name in ("eos_token_id", "pad_token_id") for wrong in ("x", {}, [], [1, "2"], 10**9, True)),
    ],
)
def test_values_that_no_model_has(key, value, tiny):
    config = json.loads((tiny / "config.json").read_text()) | {key: value}
    with pytest.raises(UnsupportedError, match=key if "layers" not in key else "num_hidden_layers|decoder blocks"):
        refuse_config(config, 21)
    with pytest.raises(QuantkitError):
        open_checkpoint(changed_copy(tiny, Path("model"), **{key: value}), "model")


def test_settings_inside_others_and_products_are_bounded_too(tiny):
    config = json.loads((tiny / "config.json").read_text())
    many = {"num_hidden_layers": 10**9}
    experts = {"num_hidden_layers": 4000, "num_local_experts": 4000}
    shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64, "attention_types": [[["global"], 1]]}
    positions = {"max_position_embeddings": 1 << 18, **shape}
    cases = [
        (refuse_config, {"model_type": "gemma3", "text_config": config | many}, "num_hidden_layers"),
        (refuse_config, config | {"rope_parameters": {"rope_theta": float("inf")}}, r"rope_parameters\.rope_theta is"),
        (refuse_config, {"model_type": "mixtral", **experts}, "4000 layers of 4000 experts"),
        (open_config, {"model_type": "llama", **many}, "num_hidden_layers"),  # as a manifest holds them
        (open_skeleton, {"model_type": "gpt_neo", **positions}, r"262,144 tokens needs 6\d\.\d GB of position tables"),
    ]
    for function, given, says in cases:
        with pytest.raises(UnsupportedError, match=says):
            function(given)


def test_what_published_configs_leave_open_is_taken(tiny):
    left_open = {"architectures": None, "pad_token_id": -1, "rope_scaling": None, "quantization_config": None}
    folder = changed_copy(tiny, Path("model"), **left_open)
    open_skeleton(open_checkpoint(folder, "model").config)
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(text)  # with the tag of transformers
    assert load_tokenizer(folder).chat_template == text
    refuse_config({"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]})
    phi3 = {"type": "longrope", "factor": None, "short_factor": [1.0], "attention_factor": None, "mscale_all_dim": 0}
    refuse_config({"rope_scaling": phi3, "eos_token_id": [2, 9], "text_config": {"rope_theta": [1e4, 5e6]}})
    refuse_config({"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_json_that_no_parser_should_see(name, folder):
    for text in (DEEP, '{"a": ' + "1" * 5000 + "}", "\ufeff{}", "", '"\ud800"', "5"):
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        refused(folder, name)


def test_links_inside_the_source_and_into_the_hub_cache_are_followed(tiny, tmp_path):
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


def test_a_side_file_larger_than_any_is_refused_unread(folder):
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate((1 << 26) + 1)
    for open_it in (lambda: open_source(str(folder)), lambda: load_tokenizer(folder)):
        with pytest.raises(SourceError, match=r"tokenizer.json has 67,108,865 bytes; at most 67,108,864 are read"):
            open_it()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "FixedLength", "length": 0}}),  # a panic
        ("tokenizer_config.json", {"tokenizer_class": ["PreTrainedTokenizerFast"]}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": "{{ " + "(" * 100_000}),
        ("tokenizer_config.json", {"bos_token": 5}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tokenizer_that_cannot_work(name, change, folder):
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    with pytest.raises(SourceError, match=r"tokenizer|model"):
        load_tokenizer(folder)


def config(**values):
    return lambda folder: edit_json(folder / "config.json", lambda given: given.update(values))


def removed(name):
    return lambda folder: (folder / name).unlink()


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def linked(name, target):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def indexed(weight_map):
    return written("model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": weight_map}).encode())


def entry(shape, offsets, dtype="F32", name="a"):
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def header(entries):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return written("model.safetensors", struct.pack("<Q", len(text)) + text + bytes(12))


CODE = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
DAMAGE = [
    (config(intermediate_size=128), ("(256, 128)", "(128, 128)", "config.json that belongs")),
    (config(quantization_config={"quant_method": "mxfp4"}), ("quantized (mxfp4), but no tensor is", "Remove quant")),
    (config(quantization_config={"quant_method": "hqq"}), ("already quantized ('hqq'", "Give the unquantized model")),
    (config(model_type="zamboni", auto_map=CODE), ("needs its own code", "does not run")),
    (removed("config.json"), ("model has no config.json", "Give the folder that has it")),
    (removed("model.safetensors"), ("has no model.safetensors",)),
    (removed("tokenizer.json"), ("has no tokenizer (tokenizer.json, tokenizer.model, vocab.json)",)),
    (lambda folder: os.mkfifo(folder / "LICENSE"), ("LICENSE is not a file",)),
    (written("adapter_config.json", b"{}"), ("adapter_config.json", "--adapter")),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), ("can run code",)),
    (linked("LICENSE", "/etc/hostname"), ("LICENSE is a link out of its folder",)),
    (linked("generation_config.json", "../secret"), ("generation_config.json is a link out of its folder",)),
    *((written(name, DEEP.encode()), ("model",)) for name in ("tokenizer.json", "special_tokens_map.json")),
    (written("tokenizer_config.json", b"[1]"), ("model",)),
    (written("generation_config.json", b'{"eos_token_id": "x"}'), ("generation_config.json: eos_token_id is 'x'",)),
    (indexed({"a": "model-00002-of-00002.safetensors"}), ("lacks the shard model-00002-of-00002.safetensors",)),
    (indexed({"a": "../model.safetensors"}), ("outside its folder",)),
    (indexed({}), ("not a valid shard index",)),
    (written("model.safetensors.index.json", b'{"weight_map": {"a": "b"}}'), ("no metadata", 'Add "metadata": {}')),
    (
        lambda folder: os.truncate(folder / "model.safetensors", 90_000),
        ("is truncated", "(90000 bytes)", "Fetch"),
    ),
    (written("model.safetensors", b""), ("truncated, damaged, or not a safetensors file (0 bytes)",)),
    (written("model.safetensors", b"\xff" * 1000), ("not a safetensors file",)),
    (header(entry([2], [0, 8]) | entry([2], [4, 12], name="b")), ("invalid offset for tensor `b`",)),
    (header(entry([2], [4, 12])), ("invalid offset for tensor `a`",)),
    (header(entry([3], [0, float("inf")])), ("damaged", "invalid JSON in header")),
    (header(entry([2**62, 4], [0, 12])), ("overflow computing buffer size",)),
    (header(entry([2], [0, 12])), ("invalid shape, data type, or offset",)),
    (header(entry([12], [0, 12], "F4")), ("damaged",)),
    (header(entry([24], [0, 12], "F4")), ("has the type F4",)),
    (header(b'{"b": 1, "a": 2, "a": 3}'), ("damaged", "invalid JSON in header")),
    (header(DEEP.encode()), ("damaged", "invalid JSON in header")),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_what_no_checkpoint_has_is_refused(damage, says, folder):
    damage(folder)
    refused(folder, *says)


def test_tensor_in_two_shards(folder):
    shutil.copyfile(folder / "model.safetensors", folder / "more.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    names = read_header(folder / "more.safetensors")
    indexed(dict.fromkeys(names, "first.safetensors") | {"b": "more.safetensors"})(folder)
    refused(folder, "model.embed_tokens.weight twice", "in first.safetensors and in more.safetensors", "uses the last")


@pytest.mark.parametrize("unlisted", [{}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, {"b": None}])
@pytest.mark.parametrize("name", [UP, "model.embed_tokens.weight"])
def test_an_index_decides_where_transformers_takes_the_same_tensor(folder, name, unlisted):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "base.safetensors")
    stray = {key: weights[UP] if value is None else value for key, value in unlisted.items()}
    save_file({name: weights[name] * 2, **stray}, folder / "over.safetensors")
    indexed(dict.fromkeys(weights, "base.safetensors") | {name: "over.safetensors"})(folder)
    artifact = convert(str(folder), "float", "float32", "out")
    told = [note for note in artifact.manifest.notes if "index" in note]
    assert told[0] == f"{name} of base.safetensors is not read: the index names another file"
    assert [note.split(": ")[1] for note in told[1:]] == list(unlisted)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    ours = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert ours[name].equal(weights[name].float() * 2)
    assert all(ours[key].equal(value) for key, value in theirs.items())


def test_two_models_in_one_folder(folder):
    """transformers would read the single file, an index names others."""
    weights = load_file(folder / "model.safetensors")
    indexed(dict.fromkeys(weights, "model.safetensors"))(folder)
    open_checkpoint(folder, "model")  # an index of the single file is fine
    places = {name: "ab"[number % 2] + ".safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file)
    indexed(places)(folder)
    refused(folder, "has model.safetensors and an index of other files (a.safetensors, b.safetensors")
    (folder / "model.safetensors").unlink()
    open_checkpoint(folder, "model")
    moved = next(iter(weights))
    indexed(places | {moved: "b.safetensors"})(folder)
    refused(folder, f"a.safetensors holds the tensor {moved}, but the index says otherwise")


@pytest.mark.parametrize(("method", "value"), [("rtn", float("nan")), ("gguf", float("inf"))])
def test_weights_that_are_not_finite(method, value, tiny):
    folder = changed_copy(tiny, Path("model"), lambda tensors: tensors[UP].view(-1)[5:7].fill_(value))
    says = (f"the tensor {UP} in model.safetensors has 2 NaN or infinite values", "fetch it again")
    refused(folder, *says, method=method)


@pytest.mark.parametrize("method", ["rtn", "gguf", "ctranslate2"])
def test_weights_that_do_not_fit_the_config(method, tiny):
    refused(changed_copy(tiny, Path("missing"), lambda tensors: tensors.pop(UP)), UP, method=method)
    ints = changed_copy(tiny, Path("ints"), lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))
    refused(ints, UP, method=method)
    refused(changed_copy(tiny, Path("more"), num_hidden_layers=2), "layers.2.", method=method)


@pytest.mark.parametrize("method", ["rtn", "gguf"])
def test_a_tied_weight_that_is_stored_twice(folder, method):
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_tensors(folder, put("lm_head.weight", value=head.clone()))
    manifest = convert(str(folder), method, out="same").manifest
    assert not any("left out" in note for note in manifest.notes)
    changed = head.clone()
    changed[-1, 0] += 1
    for other in (head.half(), head[:-1], changed):
        edit_tensors(folder, put("lm_head.weight", value=other))
        refused(folder, "ties lm_head.weight to model.embed_tokens.weight", "tie_word_embeddings", method=method)
        with pytest.raises(SourceError, match=r"ties lm_head\.weight"):
            open_source(str(folder))  # as every command does
    # What the sentence advises.
    convert(str(changed_copy(folder, Path("untied"), tie_word_embeddings=False)), method, out="other")
    convert(
        str(changed_copy(folder, Path("tied"), lambda tensors: tensors.pop("lm_head.weight"))), method, out="without"
    )
    # The head alone is the embedding, as in transformers (checkpoints/test_wrapped_names.py); neither is refused.
    edit_tensors(folder, lambda tensors: (tensors.pop("model.embed_tokens.weight"), tensors.pop("lm_head.weight")))
    refused(folder, "model.embed_tokens.weight", method=method)


def test_another_head_is_refused_where_config_json_does_not_say_that_it_is_tied(folder):
    """transformers ties by default in some architectures, such as Gemma."""
    edit_json(folder / "config.json", lambda config: config.pop("tie_word_embeddings"))
    edit_tensors(folder, put("lm_head.weight", value=torch.ones(4, 4)))
    open_source(str(folder))
    kind = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    with pytest.raises(SourceError, match=r"ties lm_head\.weight"):
        open_source(str(changed_copy(folder, Path("gemma"), **kind)))


def test_a_checkpoint_without_its_head_or_with_other_names(folder):
    edit_json(folder / "config.json", put("tie_word_embeddings", value=False))
    refused(folder, "has no output head (lm_head.weight)", "Set tie_word_embeddings to true")
    edit_tensors(folder, lambda tensors: tensors.update({UP + "_packed": tensors.pop(UP)}))
    edit_json(folder / "config.json", put("tie_word_embeddings", value=True))
    refused(folder, f"has no tensor {UP}, but {UP}_packed")


def test_tensors_beside_the_model_that_look_like_codes_are_left_out(folder):
    edit_tensors(folder, put("model.extra.weight", value=torch.ones(4, 4).to(torch.float8_e4m3fn)))
    manifest = convert(str(folder), "rtn", out="out").manifest
    assert not manifest.source.kept
    assert [note for note in manifest.notes if "model.extra.weight" in note and "are left out" in note]
    assert "model.extra.weight" not in load_file("out/model.safetensors")
