"""Adapters in a source: equal to PEFT's own merge to the last bit, and to formulas written out where it is missing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_adapters import ALPHA, RANK, low_rank, save_adapter
from tiny_architectures import save_architecture
from tiny_llama import VOCABULARY, converted, save_llama
from tiny_models import save_tiny
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit import convert
from quantkit.checkpoints.adapter_config import CONFIG
from quantkit.errors import SourceError
from quantkit.formats.source import open_source
from quantkit.models.skeleton import load, load_whole, open_skeleton
from quantkit.models.source import Source

IDS = torch.arange(1, 40)[None]
ATTENTION = [f"model.layers.{i}.self_attn.{name}" for i in (0, 2) for name in ("q_proj", "k_proj")]
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
TABLE, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {
        "llama": save_llama(place / "llama", tie_word_embeddings=False, attention_bias=True),
        "tied": save_llama(place / "tied", attention_bias=True, num_hidden_layers=3),
        "qwen2": save_architecture(place / "qwen2", "qwen2", changes={"tie_word_embeddings": True}),
        "qwen3": save_architecture(place / "qwen3", "qwen3"),
        "gpt2": save_architecture(place / "gpt2", "gpt2"),
    }


def base_value(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name].float()


def merged(source: Source, name: str) -> torch.Tensor:
    return source.tensor(name)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(IDS).logits
    return result


# What PEFT trains, by the model: settings of its LoraConfig, and how many tokens the model is given first.
TRAINED: list[tuple[str, dict[str, Any]]] = [
    *((name, {"target_modules": "all-linear"}) for name in ("llama", "tied", "qwen2", "qwen3", "stories260k")),
    *(
        (name, {"target_modules": ["v_proj", "up_proj"], "use_dora": True})
        for name in ("llama", "qwen3", "stories260k")
    ),
    ("qwen2", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 5, "lora_alpha": 16}),
    (
        "llama",
        {
            "target_modules": r".*layers\.[01]\.self_attn\.(q|k)_proj",
            "rank_pattern": {"k_proj": 2, r"layers\.1\..*q_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 5},
        },
    ),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "exclude_modules": ["layers.2.q_proj"]}),
    ("tied", {"target_modules": ["q_proj"], "lora_bias": True, "bias": "lora_only"}),
    ("tied", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm", "embed_tokens"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "tokens": 310}),
    ("tied", {"target_modules": ["q_proj"], "tokens": 310}),
    ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    ("tied", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
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
def test_values_equal_pefts_own_merge_to_the_last_bit(
    name: str, settings: dict[str, Any], models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    peft = pytest.importorskip("peft")
    folder = models.get(name) or request.getfixturevalue("shared_data") / name
    settings = dict(settings)
    tokens = settings.pop("tokens", None)

    def base() -> Any:
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
    expected = logits(beside)
    source = open_source(str(folder), None, [tmp_path / "adapter"])
    torch.testing.assert_close(logits(load_whole(source, dtype="float32")[0]), expected, rtol=1e-4, atol=1e-3)

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


def test_a_linear_layer_is_w_plus_s_b_a(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = low_rank(models["tied"], ATTENTION)
    source = open_source(str(models["tied"]), None, [save_adapter(tmp_path / "a", tensors)])
    base = open_source(str(models["tied"]))
    for name, info in source.tensors.items():
        path = name.removesuffix(".weight")
        if path in ATTENTION:
            a, b = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
            expected = base_value(models["tied"], name) + (b @ a) * (ALPHA / RANK)
            assert info.dtype == "F32"
            assert torch.equal(merged(source, name), expected)
        else:
            assert info == base.tensors[name]
            assert torch.equal(merged(source, name), base.tensor(name))
    assert source.architecture == "llama"
    assert source.parameters == base.parameters


def test_rows_are_those_of_the_whole(models: dict[str, Path], tmp_path: Path) -> None:
    source = open_source(str(models["llama"]), None, [save_adapter(tmp_path / "a", low_rank(models["llama"], [DOWN]))])
    whole = source.floats(f"{DOWN}.weight")
    parts = [source.floats(f"{DOWN}.weight", start, start + 7) for start in range(0, len(whole), 7)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("settings", "scale"), [({}, 6 / 4), ({"use_rslora": True}, 6 / 2), ({"lora_alpha": 0.5}, 1 / 8)]
)
def test_the_scale(settings: dict[str, Any], scale: float, models: dict[str, Path], tmp_path: Path) -> None:
    tensors = low_rank(models["llama"], [Q])
    source = open_source(str(models["llama"]), None, [save_adapter(tmp_path / "a", tensors, **settings)])
    delta = tensors[f"{Q}.lora_B.weight"] @ tensors[f"{Q}.lora_A.weight"] * scale
    assert torch.equal(merged(source, f"{Q}.weight"), base_value(models["llama"], f"{Q}.weight") + delta)


def test_patterns_of_ranks_and_alphas_are_told_in_their_order(models: dict[str, Path], tmp_path: Path) -> None:
    one, two = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
    tensors = {**low_rank(models["llama"], [one], rank=2), **low_rank(models["llama"], [two], rank=3)}
    patterns = {"rank_pattern": {r"layers\.0\..*": 2, "q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 12}}
    source = open_source(str(models["llama"]), None, [save_adapter(tmp_path / "a", tensors, **patterns)])
    for path, scale in ((one, ALPHA / 2), (two, 12 / 3)):
        delta = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"] * scale
        assert torch.equal(merged(source, f"{path}.weight"), base_value(models["llama"], f"{path}.weight") + delta)


def test_dora_keeps_lengths_and_turns_directions(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = low_rank(models["llama"], [Q])
    magnitude = torch.rand(128) + 0.5
    adapter = save_adapter(tmp_path / "a", tensors | {f"{Q}.lora_magnitude_vector": magnitude}, use_dora=True)
    source = open_source(str(models["llama"]), None, [adapter])
    delta = tensors[f"{Q}.lora_B.weight"] @ tensors[f"{Q}.lora_A.weight"] * (ALPHA / RANK)
    summed = base_value(models["llama"], f"{Q}.weight") + delta
    value = merged(source, f"{Q}.weight")
    for row in (0, 77):
        length = math.sqrt(sum(float(x) ** 2 for x in summed[row]))
        torch.testing.assert_close(value[row], magnitude[row] * summed[row] / length, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(value.norm(dim=1), magnitude)
    assert source.adapters[0].kind == "DoRA"


def test_transposed_layers_of_equal_and_other_sides_are_changed_the_right_way_round(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for path, out in (("transformer.h.0.attn.c_proj", 64), ("transformer.h.0.attn.c_attn", 192)):
        a, b = torch.randn(RANK, 64), torch.randn(out, RANK)
        tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        source = open_source(str(models["gpt2"]), None, [save_adapter(tmp_path / path, tensors)])
        base = base_value(models["gpt2"], f"{path}.weight")
        assert torch.equal(merged(source, f"{path}.weight"), base + (b @ a).T * (ALPHA / RANK))


def test_biases(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = low_rank(models["tied"], [Q])
    extra, other = torch.randn(128), torch.randn(128)
    tensors |= {f"{Q}.lora_B.bias": extra, "model.layers.0.self_attn.q_proj.bias": other}
    source = open_source(str(models["tied"]), None, [save_adapter(tmp_path / "a", tensors, lora_bias=True)])
    expected = base_value(models["tied"], f"{Q}.bias") + extra * (ALPHA / RANK)
    assert torch.equal(merged(source, f"{Q}.bias"), expected)
    assert torch.equal(merged(source, "model.layers.0.self_attn.q_proj.bias"), other)


def test_names_without_the_models_first_part_find_their_place(models: dict[str, Path], tmp_path: Path) -> None:
    """An adapter of the model without its head; and one for a checkpoint whose names leave the first part out."""
    tensors = low_rank(models["llama"], [Q])
    short = {name.removeprefix("model."): value for name, value in tensors.items()}
    one = open_source(str(models["llama"]), None, [save_adapter(tmp_path / "long", tensors)])
    two = open_source(str(models["llama"]), None, [save_adapter(tmp_path / "short", short)])
    assert torch.equal(merged(one, f"{Q}.weight"), merged(two, f"{Q}.weight"))


def test_one_expert_of_a_mixture_as_published_checkpoints_name_it(tmp_path: Path) -> None:
    model = save_architecture(tmp_path / "mixtral", "mixtral")
    path = "model.layers.1.block_sparse_moe.experts.2.w1"
    tensors = low_rank(model, [path])
    source = open_source(str(model), None, [save_adapter(tmp_path / "a", tensors, target_modules=["w1"])])
    delta = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"] * (ALPHA / RANK)
    expected = base_value(model, f"{path}.weight") + delta
    skeleton = open_skeleton(source.config)
    assert torch.equal(load(source, skeleton, f"{path}.weight"), expected)
    whole, _ = load_whole(source, dtype="float32")
    assert torch.equal(whole.model.layers[1].mlp.experts.gate_up_proj[2][: len(expected)], expected)


def embedding(tokens: int = VOCABULARY) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(5)
    return {
        f"{TABLE}.lora_embedding_A": torch.randn(RANK, tokens, generator=noise) * 0.1,
        f"{TABLE}.lora_embedding_B": torch.randn(128, RANK, generator=noise) * 0.1,
    }


def of_head(value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The change of a head that is the one of the embedding."""
    a, b = (value[f"{TABLE}.lora_embedding_{part}"] for part in "AB")
    return {f"{HEAD}.lora_A.weight": b.T, f"{HEAD}.lora_B.weight": a.T}


def test_a_tied_head_stays_as_it_was_where_the_embedding_changes(models: dict[str, Path], tmp_path: Path) -> None:
    source = open_source(str(models["tied"]), None, [save_adapter(tmp_path / "a", embedding())])
    base, changes = base_value(models["tied"], f"{TABLE}.weight"), embedding()
    delta = (changes[f"{TABLE}.lora_embedding_B"] @ changes[f"{TABLE}.lora_embedding_A"]).T * (ALPHA / RANK)
    assert torch.equal(merged(source, f"{TABLE}.weight"), base + delta)
    assert torch.equal(merged(source, f"{HEAD}.weight"), base)
    assert source.config["tie_word_embeddings"] is False
    assert any("head has weights of its own" in note for note in source.notes)


def test_a_tied_embedding_stays_as_it_was_where_the_head_changes(models: dict[str, Path], tmp_path: Path) -> None:
    other = torch.randn(VOCABULARY, 128)
    source = open_source(str(models["tied"]), None, [save_adapter(tmp_path / "a", {f"{HEAD}.weight": other})])
    assert torch.equal(merged(source, f"{HEAD}.weight"), other)
    assert torch.equal(merged(source, f"{TABLE}.weight").float(), base_value(models["tied"], f"{TABLE}.weight"))
    assert source.config["tie_word_embeddings"] is False


def test_both_ends_stay_tied_where_they_change_alike(models: dict[str, Path], tmp_path: Path) -> None:
    table = torch.randn(VOCABULARY, 128)
    both = embedding() | of_head(embedding()) | {f"{end}.base_layer.weight": table for end in (TABLE, HEAD)}
    source = open_source(str(models["tied"]), None, [save_adapter(tmp_path / "a", both)])
    assert source.config["tie_word_embeddings"] is True
    assert f"{HEAD}.weight" not in source.tensors
    delta = (both[f"{TABLE}.lora_embedding_B"] @ both[f"{TABLE}.lora_embedding_A"]).T * (ALPHA / RANK)
    assert torch.equal(merged(source, f"{TABLE}.weight"), table + delta)
    # In one number otherwise, and they are two.
    alpha = save_adapter(tmp_path / "alpha", both, alpha_pattern={HEAD: 5})
    assert open_source(str(models["tied"]), None, [alpha]).config["tie_word_embeddings"] is False
    for name in (f"{HEAD}.lora_B.weight", f"{HEAD}.lora_A.weight", f"{HEAD}.base_layer.weight"):
        other = both[name].clone()
        other[3, 2] += 1
        parted = open_source(str(models["tied"]), None, [save_adapter(tmp_path / name, both | {name: other})])
        assert parted.config["tie_word_embeddings"] is False
        assert not torch.equal(merged(parted, f"{HEAD}.weight"), merged(parted, f"{TABLE}.weight"))


def test_what_came_before_the_ends_parted_is_in_both(models: dict[str, Path], tmp_path: Path) -> None:
    first = save_adapter(tmp_path / "first", embedding() | of_head(embedding()))
    second = save_adapter(tmp_path / "second", embedding())
    source = open_source(str(models["tied"]), None, [first, second])
    assert torch.equal(
        merged(source, f"{HEAD}.weight"), open_source(str(models["tied"]), None, [first]).tensor(f"{TABLE}.weight")
    )
    assert not torch.equal(merged(source, f"{TABLE}.weight"), merged(source, f"{HEAD}.weight"))


def test_new_tokens_come_with_their_rows_and_their_tokenizer(models: dict[str, Path], tmp_path: Path) -> None:
    table = torch.randn(VOCABULARY + 2, 128)
    adapter = save_adapter(tmp_path / "a", {f"{end}.weight": table for end in (TABLE, HEAD)})
    tokenizer = AutoTokenizer.from_pretrained(models["tied"])
    tokenizer.add_tokens(["<|user|>", "<|model|>"])
    tokenizer.save_pretrained(adapter)
    source = open_source(str(models["tied"]), None, [adapter])
    assert source.config["vocab_size"] == VOCABULARY + 2
    assert source.tensors[f"{TABLE}.weight"].shape == (VOCABULARY + 2, 128)
    assert source.tokenizer().convert_tokens_to_ids("<|model|>") == VOCABULARY + 1
    assert any("tokenizer is the one that lies beside the adapter a" in note for note in source.notes)
    source.copy_side_files(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
    assert (tmp_path / "generation_config.json").read_bytes() == (
        models["tied"] / "generation_config.json"
    ).read_bytes()
    with pytest.raises(SourceError, match="other numbers of tokens at its ends"):
        open_source(str(models["llama"]), None, [save_adapter(tmp_path / "one", {f"{TABLE}.weight": table})])


def test_the_base_models_tokenizer_is_taken_where_the_adapters_is_the_same(
    models: dict[str, Path], tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "a", low_rank(models["llama"], [Q]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models["llama"] / name, adapter / name)
    source = open_source(str(models["llama"]), None, [adapter])
    assert source.side_files() == open_source(str(models["llama"])).side_files()
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    source = open_source(str(models["llama"]), None, [adapter])
    assert source.tokenizer().chat_template == "{{ messages }}"
    assert source.side_files()["tokenizer.json"] == adapter / "tokenizer.json"
    last = Path(shutil.copytree(adapter, tmp_path / "last"))
    (last / "chat_template.jinja").write_text("{{ messages[0] }}")
    bare = save_adapter(tmp_path / "bare", low_rank(models["llama"], [Q]))
    source = open_source(str(models["llama"]), None, [adapter, last, bare])
    assert source.tokenizer().chat_template == "{{ messages[0] }}"


def test_adapters_are_merged_one_into_the_other_in_their_order(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = low_rank(models["llama"], [Q]) | {f"{Q}.lora_magnitude_vector": torch.rand(128) + 1}
    one = save_adapter(tmp_path / "one", tensors, use_dora=True)
    two = save_adapter(tmp_path / "two", low_rank(models["llama"], [Q], seed=2))
    both = open_source(str(models["llama"]), None, [one, two])
    other = open_source(str(models["llama"]), None, [two, one])
    a, b = (load_file(two / "adapter_model.safetensors")[f"base_model.model.{Q}.lora_{part}.weight"] for part in "AB")
    after_one = open_source(str(models["llama"]), None, [one]).tensor(f"{Q}.weight")
    assert torch.equal(merged(both, f"{Q}.weight"), after_one + b @ a * (ALPHA / RANK))
    assert not torch.allclose(merged(both, f"{Q}.weight"), merged(other, f"{Q}.weight"), rtol=1e-3)
    assert both.hashes != other.hashes
    assert len(both.hashes) == len(open_source(str(models["llama"])).hashes) + 4
    assert [entry.name for entry in both.adapters] == ["one", "two"]


def test_an_adapter_on_what_was_quantized_before(models: dict[str, Path], tmp_path: Path) -> None:
    artifact = converted(models["llama"], tmp_path / "rtn", "rtn")
    tensors = low_rank(models["llama"], [Q])
    source = open_source(str(artifact.folder), None, [save_adapter(tmp_path / "a", tensors)])
    base = open_source(str(artifact.folder))
    delta = tensors[f"{Q}.lora_B.weight"] @ tensors[f"{Q}.lora_A.weight"] * (ALPHA / RANK)
    assert torch.equal(merged(source, f"{Q}.weight"), base.tensor(f"{Q}.weight").float() + delta)
    assert source.quantization == base.quantization
    assert source.quantization is not None
    assert source.format == "float"


class Trained(nn.Module):
    """W + s B A in place of W, as torch trains it."""

    def __init__(self, out: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(RANK, columns) * 0.05), nn.Parameter(torch.zeros(out, RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a * (ALPHA / RANK)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, an adapter that plain torch has trained for it, and the whole model as it was trained, in float32."""
    place = tmp_path_factory.mktemp("trained")
    folder = save_tiny(place / "model", num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False)
    torch.manual_seed(3)
    paths = [
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    ]
    changes = {path: Trained(*model.get_submodule(path).weight.shape) for path in paths}
    for path, change in changes.items():
        torch.nn.utils.parametrize.register_parametrization(model.get_submodule(path), "weight", change)
    step = torch.optim.Adam([value for change in changes.values() for value in change.parameters()], lr=0.02)
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(SAMPLE_TEXT)["input_ids"][:128]])
    for _ in range(15):
        step.zero_grad()
        model(ids, labels=ids).loss.backward()
        step.step()
    tensors = {}
    for path, change in changes.items():
        tensors |= {f"{path}.lora_A.weight": change.a.data, f"{path}.lora_B.weight": change.b.data}
        torch.nn.utils.parametrize.remove_parametrizations(model.get_submodule(path), "weight")
    model.save_pretrained(place / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, place / "merged" / name)
    return (
        folder,
        save_adapter(place / "adapter", tensors, target_modules=["q_proj", "v_proj", "down_proj"]),
        place / "merged",
    )


SAMPLE_TEXT = "The keeper of the old lighthouse wrote the weather down each evening, and counted the boats. " * 20


def loss(model: Any, folder: Path) -> float:
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(SAMPLE_TEXT)["input_ids"][:128]])
    with torch.no_grad():
        return float(model.eval()(ids, labels=ids).loss)


def test_a_trained_adapter_is_the_model_that_was_trained(trained: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder, adapter, whole = trained
    before = loss(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder)
    after = loss(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32), folder)
    assert after < before - 0.5
    source = open_source(str(folder), None, [adapter])
    assert loss(load_whole(source, dtype="float32")[0], folder) == pytest.approx(after, rel=1e-6)
    assert str(source.settings.dtype).endswith("bfloat16")  # as config.json has it, whatever was loaded
    # What is written is what was trained.
    artifact = convert(str(folder), "float", "float32", tmp_path / "out", adapters=[adapter])
    written, expected = load_file(artifact.folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert [entry.name for entry in artifact.manifest.source.adapters] == ["adapter"]
    assert artifact.manifest.recipe.adapters == ("adapter",)
    assert "adapter (LoRA)" in (artifact.folder / "README.md").read_text()


@pytest.mark.parametrize(("method", "bits"), [("gguf", "F32"), ("ctranslate2", "float32")])
def test_formats_that_others_write_hold_the_merged_values(
    method: str, bits: str, trained: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    folder, adapter, whole = trained
    artifact = convert(str(folder), method, bits, tmp_path / "adapted", adapters=[adapter])
    other = convert(str(whole), method, bits, tmp_path / "whole")
    (name,) = artifact.manifest.weight_files
    if method == "gguf":
        from quantkit.formats.gguf.reader import read_file

        one, two = (dict(read_file(made.folder / made.manifest.weight_files[0])) for made in (artifact, other))
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[key].whole(), two[key].whole()) for key in one)
    else:
        assert (artifact.folder / name).read_bytes() == (other.folder / name).read_bytes()


def as_model(adapter: Path, base: Path | str | None) -> Path:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": base and str(base)}))
    return adapter


def test_an_adapter_as_the_model_is_merged_into_its_base_where_that_is_a_folder(
    models: dict[str, Path], tmp_path: Path
) -> None:
    adapter = as_model(save_adapter(tmp_path / "a", low_rank(models["llama"], [Q])), models["llama"])
    source, other = open_source(str(adapter)), open_source(str(models["llama"]), None, [adapter])
    assert source.model == str(models["llama"])
    assert source.hashes == other.hashes
    assert torch.equal(merged(source, f"{Q}.weight"), merged(other, f"{Q}.weight"))
    second = save_adapter(tmp_path / "b", low_rank(models["llama"], [Q], seed=2))
    assert [entry.name for entry in open_source(str(adapter), None, [second]).adapters] == ["a", "b"]


@pytest.mark.parametrize(
    ("base", "says"),
    [("meta-llama/Llama-9", "its base model, meta-llama/Llama-9, is no folder here"), (None, "does not name its base")],
)
def test_an_adapter_as_the_model_says_what_to_do(
    base: str | None, says: str, models: dict[str, Path], tmp_path: Path
) -> None:
    adapter = as_model(save_adapter(tmp_path / "a", low_rank(models["llama"], [Q])), base)
    with pytest.raises(SourceError, match=f"{says}.*--adapter {adapter}"):
        open_source(str(adapter))


Break = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {n.replace("layers.1", "layers.9"): v for n, v in t.items()}, r"layers\.9.*no such tensor"),
        (lambda t: {n.replace("q_proj", "z_proj"): v for n, v in t.items()}, "z_proj.*no such tensor"),
        (lambda t: {n: v[:, :64] if "_A" in n else v for n, v in t.items()}, r"\(128, 64\), and it is \(128, 128\)"),
        (lambda t: {n: v[:64] if "_B" in n else v for n, v in t.items()}, r"\(64, 128\), and it is \(128, 128\)"),
        (lambda _: {"model.norm.weight": torch.ones(64)}, r"\(64,\), and \(128,\)"),
        (lambda _: {"model.layers.1.mlp.up_proj.weight": torch.ones(300, 128)}, r"\(300, 128\), and \(256, 128\)"),
        (lambda _: {f"{TABLE}.weight": torch.ones(VOCABULARY, 64)}, r"\(304, 64\), and \(304, 128\)"),
        (lambda _: {"nothing": torch.ones(4)}, "nothing.*no such tensor"),
        (lambda t: t | {n.removeprefix("model."): v for n, v in t.items()}, "two names"),
        (
            lambda _: {f"{TABLE}.lora_A.weight": torch.ones(4, 128), f"{TABLE}.lora_B.weight": torch.ones(304, 4)},
            "embed_tokens' is changed like a linear layer",
        ),
        (
            lambda _: {f"{Q}.lora_embedding_A": torch.ones(4, 128), f"{Q}.lora_embedding_B": torch.ones(128, 4)},
            "q_proj' is changed like an embedding",
        ),
    ],
    ids=range(11),
)
def test_what_finds_no_place_is_named(change: Break, says: str, models: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "a", change(low_rank(models["llama"], [Q])))
    with pytest.raises(SourceError, match=says) as raised:
        open_source(str(models["llama"]), None, [adapter])
    assert "Give the base model that the adapter was made for." in str(raised.value)


def test_a_bias_for_a_layer_that_has_none(models: dict[str, Path], tmp_path: Path) -> None:
    tensors = low_rank(models["llama"], [DOWN]) | {f"{DOWN}.lora_B.bias": torch.ones(128)}
    with pytest.raises(SourceError, match=r"down_proj\.bias.*no such tensor"):
        open_source(str(models["llama"]), None, [save_adapter(tmp_path / "a", tensors, lora_bias=True)])
