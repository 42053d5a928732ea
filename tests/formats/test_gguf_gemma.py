"""GGUF files of Gemma 3n and Gemma 4, whose blocks differ: what llama.cpp computes of them, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_logits import engine_logits
from gguf_files import (
    job_for,
    keys,
    logits_of_llama_cpp,
    logits_of_transformers,
    take_any_tokenizer,
    tensors_of,
    written,
)
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES, Tiny, save_architecture
from tiny_llama import VOCABULARY, calibration
from tiny_more import settings_of
from tiny_multimodal import save_multimodal
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3nTextConfig, Gemma4TextConfig

from quantkit.contracts.engine import LoadSpec
from quantkit.contracts.model import Model
from quantkit.contracts.registry import find_engine
from quantkit.conversion.convert import convert
from quantkit.conversion.import_gguf import import_gguf
from quantkit.conversion.verify import verify
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.gguf.agreement import refuse_tensors
from quantkit.formats.gguf.architectures.rope import STILL, proportional_factors
from quantkit.formats.gguf.reader import read_file
from quantkit.formats.source import open_source
from quantkit.models.skeleton import open_skeleton

gguf = pytest.importorskip("gguf")
NAMES = ("gemma4", "gemma4, experts", "gemma3n")
S, F = "sliding_attention", "full_attention"
LIMIT = 1e-3  # of what is computed with ggml's GELU; some of its float16 values are rounded the other way
# Blocks with keys of their own and such as take them, as in Gemma 3n E2B.
DEEP = {
    "num_hidden_layers": 22,
    "layer_types": [S, S, S, S, F] * 4 + [S, F],
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
}


@pytest.fixture
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    take_any_tokenizer(monkeypatch)


def damped(model: Any) -> None:
    """Feed-forward layers of less weight: in so many sparse blocks a difference would grow too much."""
    for name, parameter in model.named_parameters():
        if "post_feedforward_layernorm" in name and model.config.num_hidden_layers > 4:
            parameter.mul_(0.2)


@pytest.fixture(autouse=True)
def unified(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("gemma4_unified_text") | {"global_head_dim": 32}
    monkeypatch.setitem(ARCHITECTURES, "gemma4, unified", Tiny("Gemma4UnifiedTextConfig", 7, settings))


def saved(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    return save_architecture(folder, name, dtype, damped, ARCHITECTURES[name].for_gguf | changes)


class Gelu(nn.Module):
    """ggml's, of float16 values in a table."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


def sparse_gates(module: Any, gates: torch.Tensor) -> torch.Tensor:
    """As Gemma 3n has them but for the deviation, which llama.cpp takes over one value less."""
    cut = torch.distributions.Normal(0, 1).icdf(torch.tensor(module.activation_sparsity))
    return nn.functional.relu(gates - gates.mean(-1, keepdim=True) - cut * gates.std(-1, keepdim=True))


def logits_as_in_ggml(folder: Path, ids: list[int]) -> torch.Tensor:
    """What transformers computes with ggml's activations."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = Gelu()
        if hasattr(module, "_gaussian_topk"):
            module._gaussian_topk = partial(sparse_gates, module)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def some_ids(seed: int = 0) -> list[int]:
    return torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(seed)).tolist()


def far_apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
SHARED = {"num_hidden_layers": 4, "layer_types": [S, F] * 2, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
# What else Gemma 4 may be: by what is changed.
VARIANTS = {
    "a cap": ("gemma4", {"final_logit_softcapping": 3.0}),
    "no inputs of blocks": ("gemma4", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "no shared keys": ("gemma4", {"num_kv_shared_layers": 0}),
    "values of keys": ("gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 4}),
    "equal widths": ("gemma4", {"use_double_wide_mlp": False}),
    "a head of its own": ("gemma4", {"tie_word_embeddings": False}),
    "all values turn": ("gemma4", {"rope_parameters": {**ROPE, F: {"rope_type": "default", "rope_theta": 1e6}}}),
    "half of them, slower": (
        "gemma4",
        {
            "rope_parameters": {
                **ROPE,
                F: {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0},
            }
        },
    ),
    "all blocks but the last with a window": ("gemma4", {"layer_types": [S, S, S, F], "num_kv_shared_layers": 0}),
    "unified": ("gemma4, unified", {}),
    "unified, values of keys, a cap": (
        "gemma4, unified",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    ),
    "unified, shared keys, double width": ("gemma4, unified", SHARED),
    "shared keys, some blocks sparse": ("gemma3n", DEEP),
    "20 blocks": (
        "gemma3n",
        {
            "num_hidden_layers": 20,
            "layer_types": [S, S, S, S, F] * 4,
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 10,
        },
    ),
}


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_in_llama_cpp_and_back(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    folder, ids = saved(tmp_path / "model", name, **changes), some_ids()
    file = written(job_for(folder, "F32", tmp_path / "out"))
    theirs, plain = logits_as_in_ggml(folder, ids), logits_of_transformers(folder, ids)
    assert far_apart(logits_of_llama_cpp(file, ids), theirs) < LIMIT
    assert far_apart(theirs, plain) < 5e-3
    assert theirs.std() > 0.3
    source, read = open_source(str(folder)), tensors_of(file)
    assert set(source.tensors) <= set(read)
    assert all(torch.equal(read[tensor], source.tensor(tensor).float()) for tensor in source.tensors)


def test_divisors_by_hand() -> None:
    assert proportional_factors(0.25, 1.0, 16).tolist() == pytest.approx([1.0, 1.0, *[STILL] * 6])
    assert proportional_factors(1.0, 2.0, 4).tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("bits", "options"),
    [
        ("Q4_K_M", {}),
        ("Q8_0", {}),
        ("Q4_K_M", {"imatrix": True}),
        ("Q4_K_M", {"rounding": "gptq"}),
        ("IQ2_M", {"imatrix": True}),
        ("auto", {"target_bpw": 7.0}),
    ],
)
def test_llama_cpp_and_our_reader_compute_what_was_written(
    name: str, bits: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the quantized file; transformers gets the values that are read back."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    wide = {"hidden_size": 256, "moe_intermediate_size": 256} if "experts" in name else {"hidden_size": 256}
    folder, ids = saved(tmp_path / "model", name, torch.bfloat16, **wide), some_ids()
    how = {"calibration": calibration()} if options else {}
    made = convert(str(folder), "gguf", bits, tmp_path / "out", **options, **how)
    verify(made)
    file = next(made.folder.glob("*.gguf"))
    back = import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder, config=folder / "config.json")
    theirs = logits_of_transformers(back, ids)
    engine = find_engine("reference").load(Model(made, None), LoadSpec(1, 128, "float32"))
    ours = torch.from_numpy(engine_logits(engine, torch.tensor([ids]).numpy()))[0]
    assert far_apart(ours, theirs) < 1e-5
    # llama.cpp rounds what quantized layers are given to 8 bits.
    far = float((logits_of_llama_cpp(file, ids) - theirs).square().mean().sqrt() / theirs.std())
    assert far < (0.3 if "experts" in name else 0.15)  # some tokens get other experts


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, ("Q6_K", "Q6_K")),
        ({"token_embedding_type": "Q8_0"}, ("Q8_0", "Q8_0")),
        ({"token_embedding_type": "Q8_0", "tensor_type": {"per_layer_token_embd": "Q4_0"}}, ("Q8_0", "Q4_0")),
        ({"tensor_type": {"per_layer_model_proj": "Q8_0"}}, ("Q6_K", "Q6_K")),
    ],
)
def test_inputs_of_blocks_have_the_type_of_the_embedding_unless_they_are_named(
    options: dict[str, Any], kinds: tuple[str, str], tmp_path: Path
) -> None:
    wide = {"hidden_size": 256, "hidden_size_per_layer_input": 64}
    folder = saved(tmp_path / "model", "gemma4", torch.bfloat16, **wide)
    file = written(job_for(folder, "Q4_K_M", tmp_path / "out", **options))
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert (types["token_embd.weight"], types["per_layer_token_embd.weight"]) == kinds
    named = "per_layer_model_proj" in options.get("tensor_type", {})
    assert types["per_layer_model_proj.weight"] == ("Q8_0" if named else "BF16")


# Checkpoints as they are published


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_keys_that_a_block_does_not_use_are_left_out(name: str, tmp_path: Path) -> None:
    folder, ids = saved(tmp_path / "model", name, **(DEEP if name == "gemma3n" else {})), some_ids()
    plain = written(job_for(folder, "F32", tmp_path / "plain")).read_bytes()
    tensors = load_file(folder / "model.safetensors")
    last = max(int(tensor.split(".")[2]) for tensor in tensors if tensor.startswith("model.layers."))
    own = f"model.layers.{last}.self_attn."
    rows = 2 * (32 if name == "gemma4" else 16)
    unused = {f"{own}{part}_proj.weight": torch.ones(rows, 64) for part in "kv"} | {
        f"{own}k_norm.weight": torch.ones(rows // 2)
    }
    assert not unused.keys() & tensors.keys()
    save_file(tensors | unused, folder / "model.safetensors")
    made = convert(str(folder), "gguf", "F32", tmp_path / "out")
    assert any(note.startswith("3 tensors of blocks that take the keys") for note in made.manifest.notes)
    file = next(made.folder.glob("*.gguf"))
    assert file.read_bytes() == plain
    assert not unused.keys() & tensors_of(file).keys()
    there = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    name_there = f"blk.{last}.attn_k.weight"
    assert (name_there in there) == (name == "gemma3n")
    assert name == "gemma4" or not there[name_there].data.any()
    assert far_apart(logits_of_llama_cpp(file, ids), logits_as_in_ggml(folder, ids)) < LIMIT


@pytest.mark.usefixtures("any_tokenizer")
def test_zeros_need_no_importance(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "gemma3n", torch.bfloat16, hidden_size=256, **DEEP)
    made = convert(str(folder), "gguf", "IQ1_S", tmp_path / "out", imatrix=True, calibration=calibration())
    types = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(next(made.folder.glob("*.gguf"))).tensors
    }
    assert (types["blk.0.attn_k.weight"], types["blk.21.attn_k.weight"]) == ("IQ1_S", "Q2_K")


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize("method", ["gguf", "rtn"])
def test_tokens_without_inputs_of_blocks_get_those_of_the_first(method: str, tmp_path: Path) -> None:
    """So does transformers, for the tokens of images and sounds."""
    rows = VOCABULARY - 40
    folder = saved(tmp_path / "model", "gemma3n", vocab_size_per_layer_input=rows)
    ids = [*range(rows, VOCABULARY), *some_ids()[:40]]
    bits, how = ("F32", {}) if method == "gguf" else ("8", {"format": "gguf"})
    made = convert(str(folder), method, bits, tmp_path / "out", **how)
    assert any("40 rows added to model.embed_tokens_per_layer.weight" in note for note in made.manifest.notes)
    file = next(made.folder.glob("*.gguf"))
    far = far_apart(logits_of_llama_cpp(file, ids), logits_as_in_ggml(folder, ids))
    assert far < (LIMIT if method == "gguf" else 0.15)
    config = folder / "config.json"
    back = import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder, config=config)
    table = load_file(back / "model.safetensors")["model.embed_tokens_per_layer.weight"]
    assert len(table) == VOCABULARY
    assert all(torch.equal(row, table[0]) for row in table[rows:])
    verify(made)


@pytest.mark.usefixtures("any_tokenizer")
def test_the_text_half_of_a_multimodal_folder(tmp_path: Path) -> None:
    folder, ids = save_multimodal(tmp_path / "model", "gemma4"), some_ids()
    made = convert(str(folder), "gguf", "F32", tmp_path / "out")
    assert any("are no part of its text half and are left out: model.embed_vision" in n for n in made.manifest.notes)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for module in whole.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = Gelu()
    with torch.no_grad():
        theirs = whole(input_ids=torch.tensor([ids])).logits[0]
    assert far_apart(logits_of_llama_cpp(next(made.folder.glob("*.gguf")), ids), theirs) < LIMIT


SIZES = {
    "Gemma 3n E4B": Gemma3nTextConfig(),
    "Gemma 3n E2B": Gemma3nTextConfig(num_hidden_layers=30, intermediate_size=8192, num_kv_shared_layers=10),
    "Gemma 4 without inputs of blocks": Gemma4TextConfig(
        hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=2
    ),
    "Gemma 4 with shared keys": Gemma4TextConfig(
        num_hidden_layers=35, layer_types=[S, S, S, S, F] * 7, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "Gemma 4 with experts": Gemma4TextConfig(
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_models_of_a_published_size_have_a_place_for_every_tensor(size: str) -> None:
    config = {**SIZES[size].to_dict(), "architectures": ["CausalLM"]}
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    model = open_skeleton(config, native=True).model
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    shapes |= {name: tuple(value.shape) for name, value in model.named_buffers() if name.endswith("layer_scalar")}
    refuse_tensors(config, shapes)
    shapes.pop("model.layers.1.self_attn.k_norm.weight")
    with pytest.raises(ArtifactError, match="lacks"):
        refuse_tensors(config, shapes)


# What llama.cpp has fixed

WIDTHS = {"intermediate_size": [1024] * 22}
OTHERWISE = [
    ("gemma4", {"layer_types": [F] * 4}, r"layer_types = .*, and llama\.cpp has some sliding_attention"),
    ("gemma4", {"layer_types": [F, S, S, F]}, r"take the keys of block 0, and llama\.cpp has those of block 1"),
    ("gemma4", {"layer_types": [S, "chunked_attention", S, F], "num_kv_shared_layers": 0}, "layer_types = "),
    ("gemma4", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
    ("gemma4", {"attention_bias": True}, "attention_bias = True"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
    ("gemma4", {"vocab_size_per_layer_input": VOCABULARY + 8}, f"vocab_size_per_layer_input = {VOCABULARY + 8}"),
    (
        "gemma4",
        {"layer_types": [S, F, F, F], "num_kv_shared_layers": 0,
         "per_layer_config": {1: {"head_dim": 32}, 2: {"head_dim": 8}, 3: {"head_dim": 32}}},
        r"heads of 8 in block 2, and llama\.cpp has 32 for all of full_attention",
    ),
    (
        "gemma4",
        {"rope_parameters": {S: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                             F: {"rope_type": "proportional", "rope_theta": 1e4}}},
        "rope parameters",
    ),
    ("gemma3n", {"laurel_rank": 32}, r"laurel_rank = 32; llama\.cpp computes 64"),
    ("gemma3n", {"hidden_size_per_layer_input": 128}, "hidden_size_per_layer_input = 128"),
    ("gemma3n", {"altup_num_inputs": 2}, "altup_num_inputs = 2"),
    ("gemma3n", {"altup_active_idx": 1}, "altup_active_idx = 1"),
    ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale = False"),
    ("gemma3n", {"final_logit_softcapping": 20.0}, r"final_logit_softcapping = 20\.0"),
    ("gemma3n", {"num_kv_shared_layers": 2}, r"num_kv_shared_layers = 2 of 4 blocks, and llama\.cpp has 0"),
    ("gemma3n", DEEP | {"num_kv_shared_layers": 0, **WIDTHS}, r"= 0 of 22 blocks, and llama\.cpp has 2: all"),
    ("gemma3n", {"activation_sparsity_pattern": [0.5] * 4}, r"activation_sparsity_pattern = .*, and llama\.cpp has"),
    ("gemma3n", {"intermediate_size": [128] * 3 + [256]}, r"intermediate_size = .* one for all blocks"),
    (
        "gemma3n",
        DEEP | {"layer_types": [S] * 18 + [F, S, S, F], **WIDTHS},
        r"full_attention that take the keys of block 18, and llama\.cpp has those of block 19",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "reason"), OTHERWISE)
def test_what_llama_cpp_has_otherwise_is_refused(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", name, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedError, match=reason):
        job_for(folder, "F16", tmp_path / "out").check()


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize("values", [[2, -1, 2, 2], [2.0, 4.0, 2.0, 2.0], [2, 4, 2], [0, 2, 4, 2]])
def test_a_list_that_is_none_of_each_block_is_refused(values: list[Any], tmp_path: Path) -> None:
    file = written(job_for(saved(tmp_path / "model", "gemma4"), "F16", tmp_path / "out"))
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma4")
    for key, value in keys(file).items():
        if key.startswith("gemma4.") and not isinstance(value, list):
            writer.add_key_value(key, value, reader.fields[key].types[0])
    writer.add_array("gemma4.attention.head_count_kv", values)
    writer.add_array("gemma4.attention.sliding_window_pattern", [True, False] * 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match=r"head_count_kv is .*; only blocks that are all alike"):
        list(read_file(tmp_path / "other.gguf"))
