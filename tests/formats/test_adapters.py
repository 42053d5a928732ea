"""Adapters in a source: equal to PEFT's own merge to the last bit, and to formulas written out where it is missing."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from engine_logits import logits_of
from safetensors.torch import load_file
from tiny_adapters import ALPHA, RANK, low_rank, save_adapter
from tiny_architectures import save_architecture
from tiny_llama import VOCABULARY, save_llama
from tiny_models import changed_copy, save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import convert
from quantkit.errors import SourceError
from quantkit.formats.source import open_source
from quantkit.models.adapter import CONFIG
from quantkit.models.skeleton import load, load_whole, open_skeleton

IDS = torch.arange(1, 40)[None]
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
TABLE, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture(scope="module")
def models(architecture, tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {
        "llama": save_llama(place / "llama", tie_word_embeddings=False, attention_bias=True, num_hidden_layers=2),
        "tied": save_llama(place / "tied", attention_bias=True, num_hidden_layers=2),
        "qwen2": save_architecture(place / "qwen2", "qwen2", changes={"tie_word_embeddings": True}),
        "gpt2": architecture("gpt2"),
    }


def stored(folder, name):
    return load_file(folder / "model.safetensors")[name].float()


def change_of(tensors, path, scale=ALPHA / RANK):
    return tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"] * scale


def adapted(model, folder, tensors, **config):
    return open_source(str(model), None, [save_adapter(folder, tensors, **config)])


PATTERNS = {"rank_pattern": {"k_proj": 2, r"layers\.1\..*q_proj": 3}, "alpha_pattern": {"layers.0.self_attn.q_proj": 5}}
# What PEFT trains, by the model: settings of its LoraConfig, and how many tokens the model is given first.
TRAINED = [
    ("llama", {"target_modules": "all-linear"}),
    pytest.param("stories260k", {"target_modules": "all-linear"}, marks=pytest.mark.slow),
    ("llama", {"target_modules": ["v_proj", "up_proj"], "use_dora": True}),
    ("qwen2", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 5, "lora_alpha": 16}),
    ("llama", {"target_modules": r".*layers\.[01]\.self_attn\.(q|k)_proj", **PATTERNS}),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "exclude_modules": ["layers.1.q_proj"]}),
    ("tied", {"target_modules": ["q_proj"], "lora_bias": True, "bias": "lora_only"}),
    ("tied", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "tokens": 310}),
    ("tied", {"target_modules": ["q_proj"], "tokens": 310}),
    ("tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    ("tied", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("tied", {"target_modules": ["lm_head"]}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    ("gpt2", {"target_modules": ["wte", "wpe"]}),
]
# Where PEFT changes the other end of a tied model along, or both twice: what it computes beside the model is another
# thing, and what is held against ours.
NOT_ITS_MERGE = (["q_proj", "embed_tokens"], ["lm_head"], ["wte", "wpe"])


@pytest.mark.parametrize(("name", "settings"), TRAINED, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_values_equal_pefts_own_merge_to_the_last_bit(name, settings, models, tmp_path, request):
    peft = pytest.importorskip("peft")
    folder = models.get(name) or request.getfixturevalue("shared_data") / name
    settings = dict(settings)
    tokens = settings.pop("tokens", None)

    def base():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if tokens is not None:
            model.resize_token_embeddings(tokens, mean_resizing=False)
        return model

    torch.manual_seed(1)
    trained = peft.get_peft_model(base(), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings))
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    trained.save_pretrained(tmp_path / "adapter")

    beside = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    expected = logits_of(beside, IDS)
    source = open_source(str(folder), None, [tmp_path / "adapter"])
    whole, _ = load_whole(source, dtype="float32")
    torch.testing.assert_close(logits_of(whole, IDS), expected, rtol=1e-4, atol=1e-3)

    theirs = beside.merge_and_unload().state_dict()
    skeleton = open_skeleton(source.config)
    changed = 0
    other_ends = name != "llama" and settings["target_modules"] in NOT_ITS_MERGE
    for parameter in skeleton.parameter_names():
        origin = skeleton.origins.get(parameter)
        value = load(source, skeleton, parameter).float()
        value = value.T if origin is not None and origin.transposed else value
        if other_ends and parameter.endswith(("lm_head.weight", "embed_tokens.weight", "wte.weight")):
            continue
        assert torch.equal(value, theirs[parameter]), parameter
        changed += 1
    assert changed


def test_alpha_and_rank_that_the_config_leaves_out_are_pefts_8(models, tmp_path):
    tensors, name = low_rank(models["llama"], [Q], 8), f"{Q}.weight"
    adapter = save_adapter(tmp_path / "a", tensors)
    (adapter / CONFIG).write_text(json.dumps({"peft_type": "LORA", "target_modules": None}))
    value = open_source(str(models["llama"]), None, [adapter]).tensor(name)
    assert torch.equal(value, stored(models["llama"], name) + change_of(tensors, Q, 1.0))


def test_rows_of_dora_are_those_of_the_whole(models, tmp_path):
    tensors = low_rank(models["llama"], [Q]) | {f"{Q}.lora_magnitude_vector": torch.rand(128) + 0.5}
    source, name = adapted(models["llama"], tmp_path / "a", tensors, use_dora=True), f"{Q}.weight"
    assert (source.adapters[0].kind, source.tensors[name].dtype) == ("DoRA", "F32")
    parts = [source.floats(name, start, start + 7) for start in range(0, 128, 7)]
    assert np.array_equal(np.concatenate(parts), source.tensor(name).numpy())


def test_one_expert_of_a_mixture_as_published_checkpoints_name_it(architecture, tmp_path):
    model, path = architecture("mixtral"), "model.layers.1.block_sparse_moe.experts.2.w1"
    tensors = low_rank(model, [path])
    source = adapted(model, tmp_path / "a", tensors, target_modules=["w1"])
    expected = stored(model, f"{path}.weight") + change_of(tensors, path)
    assert torch.equal(load(source, open_skeleton(source.config), f"{path}.weight"), expected)
    whole, _ = load_whole(source, dtype="float32")
    assert torch.equal(whole.model.layers[1].mlp.experts.gate_up_proj[2][: len(expected)], expected)


def test_both_ends_stay_tied_where_they_change_alike(models, tmp_path):
    a, b, table = torch.randn(RANK, VOCABULARY), torch.randn(128, RANK), torch.randn(VOCABULARY, 128)
    both = {f"{TABLE}.lora_embedding_A": a, f"{TABLE}.lora_embedding_B": b}
    both |= {f"{HEAD}.lora_A.weight": b.T, f"{HEAD}.lora_B.weight": a.T}
    both |= {f"{end}.base_layer.weight": table for end in (TABLE, HEAD)}
    source = adapted(models["tied"], tmp_path / "a", both)
    assert source.config["tie_word_embeddings"] is True
    assert f"{HEAD}.weight" not in source.tensors
    assert torch.equal(source.tensor(f"{TABLE}.weight"), table + (b @ a).T * (ALPHA / RANK))
    # In one number otherwise, and they are two.
    name = f"{HEAD}.lora_B.weight"
    parted = adapted(models["tied"], tmp_path / "parted", both | {name: both[name] + torch.eye(*both[name].shape)})
    assert parted.config["tie_word_embeddings"] is False
    assert any("head now has its own weights" in note for note in parted.notes)
    assert not torch.equal(parted.tensor(f"{HEAD}.weight"), parted.tensor(f"{TABLE}.weight"))


def test_new_tokens_come_with_their_rows_and_their_tokenizer(models, tmp_path):
    table = torch.randn(VOCABULARY + 2, 128)
    adapter = save_adapter(tmp_path / "a", {f"{end}.weight": table for end in (TABLE, HEAD)})
    tokenizer = AutoTokenizer.from_pretrained(models["tied"])
    tokenizer.add_tokens(["<|user|>", "<|model|>"])
    tokenizer.save_pretrained(adapter)
    source = open_source(str(models["tied"]), None, [adapter])
    assert source.config["vocab_size"] == VOCABULARY + 2
    assert source.tensors[f"{TABLE}.weight"].shape == (VOCABULARY + 2, 128)
    assert source.tokenizer().convert_tokens_to_ids("<|model|>") == VOCABULARY + 1
    assert any("tokenizer is from the folder of the adapter a" in note for note in source.notes)
    source.copy_side_files(tmp_path)
    for name, place in (("tokenizer.json", adapter), ("generation_config.json", models["tied"])):
        assert (tmp_path / name).read_bytes() == (place / name).read_bytes()
    with pytest.raises(SourceError, match="unequal numbers of tokens"):
        adapted(models["llama"], tmp_path / "one", {f"{TABLE}.weight": table})


def test_the_base_models_tokenizer_is_taken_where_the_adapters_is_the_same(models, tmp_path):
    adapter = save_adapter(tmp_path / "a", low_rank(models["llama"], [Q]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models["llama"] / name, adapter / name)
    source = open_source(str(models["llama"]), None, [adapter])
    assert source.side_files() == open_source(str(models["llama"])).side_files()
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    source = open_source(str(models["llama"]), None, [adapter])
    assert source.tokenizer().chat_template == "{{ messages }}"
    assert source.side_files()["tokenizer.json"] == adapter / "tokenizer.json"


def test_adapters_are_merged_one_into_the_other_in_their_order(models, tmp_path):
    tensors, name = low_rank(models["llama"], [Q]) | {f"{Q}.lora_magnitude_vector": torch.rand(128) + 1}, f"{Q}.weight"
    later = low_rank(models["llama"], [Q], seed=2)
    short = {name.removeprefix("model."): value for name, value in later.items()}  # of the model without its head
    one, two = save_adapter(tmp_path / "one", tensors, use_dora=True), save_adapter(tmp_path / "two", short)
    first, both, other = (open_source(str(models["llama"]), None, list(of)) for of in ([one], [one, two], [two, one]))
    assert torch.equal(both.tensor(name), first.tensor(name) + change_of(later, Q))
    assert not torch.allclose(both.tensor(name), other.tensor(name), rtol=1e-3)
    assert both.hashes != other.hashes
    assert [adapter.name for adapter in both.adapters] == ["one", "two"]


def test_what_is_written_is_the_merged_model(tmp_path):
    def merge(values):
        values |= {name: value.float() for name, value in values.items()}
        for path in (Q, DOWN):
            values[f"{path}.weight"] += change_of(tensors, path)

    model = save_tiny(tmp_path / "model", num_hidden_layers=2)
    tensors = low_rank(model, [Q, DOWN])
    adapter = save_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj", "down_proj"])
    whole = changed_copy(model, tmp_path / "whole", merge, dtype="float32")
    made = convert(str(model), "float", "float32", tmp_path / "adapted", adapters=[adapter])
    other = convert(str(whole), "float", "float32", tmp_path / "out")
    one, two = (artifact.folder / "model.safetensors" for artifact in (made, other))
    assert one.read_bytes() == two.read_bytes()
    assert made.manifest.recipe.adapters == ("adapter",)


def test_an_adapter_as_the_model_is_merged_into_its_base_where_that_is_a_folder(models, tmp_path):
    base, tensors = str(models["llama"]), low_rank(models["llama"], [Q])
    adapter = save_adapter(tmp_path / "a", tensors, base_model_name_or_path=base)
    source, other = open_source(str(adapter)), open_source(base, None, [adapter])
    assert source.model == base
    assert source.hashes == other.hashes
    assert torch.equal(source.tensor(f"{Q}.weight"), other.tensor(f"{Q}.weight"))
    for name, says in (
        ("meta-llama/Llama-9", "its base model, meta-llama/Llama-9, is not a local folder"),
        (None, "does not name its base"),
    ):
        save_adapter(adapter, tensors, base_model_name_or_path=name)
        with pytest.raises(SourceError, match=f"{says}.*--adapter {adapter}"):
            open_source(str(adapter))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {n.replace("layers.1", "layers.9"): v for n, v in t.items()}, r"layers\.9.*no such tensor"),
        (lambda t: {n: v[:, :64] if "_A" in n else v for n, v in t.items()}, r"\(128, 64\), but it is \(128, 128\)"),
        (lambda _: {"model.layers.1.mlp.up_proj.weight": torch.ones(300, 128)}, r"\(300, 128\), but \(256, 128\)"),
        (lambda t: t | {n.removeprefix("model."): v for n, v in t.items()}, "two names"),
        (
            lambda _: {f"{TABLE}.lora_A.weight": torch.ones(4, 128), f"{TABLE}.lora_B.weight": torch.ones(304, 4)},
            "embed_tokens' is changed like a linear layer",
        ),
        (lambda _: {f"{DOWN}.bias": torch.ones(128)}, r"down_proj\.bias.*no such tensor"),  # it has none
    ],
    ids=range(6),
)
def test_what_finds_no_place_is_named(change, says, models, tmp_path):
    with pytest.raises(SourceError, match=says) as raised:
        adapted(models["llama"], tmp_path / "a", change(low_rank(models["llama"], [Q])))
    assert "Give the base model that the adapter was made for." in str(raised.value)
