"""A tiny random model of every architecture: llama.cpp computes from our file what transformers computes."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import (
    identical_tensors,
    job_for,
    logits_of_llama_cpp,
    logits_of_transformers,
    quantized_by_llama_cpp,
    take_any_tokenizer,
    tensors_of,
    written,
)
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES, save_architecture
from tiny_llama import VOCABULARY, calibration

from quantkit.conversion.convert import convert
from quantkit.conversion.import_gguf import import_gguf
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.gguf import FORMAT as GGUF
from quantkit.formats.gguf.architectures.hyperparameters import ignored_window
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.row_orders import (
    INDEX_ORDERS,
    LINEAR_ORDERS,
    ORDERS,
    Heads,
    gather,
    joined,
    restored,
)
from quantkit.formats.gguf.contents import contents_of
from quantkit.formats.source import open_source

gguf = pytest.importorskip("gguf")

CONVERTED = [name for name, tiny in ARCHITECTURES.items() if tiny.kind in KNOWN and not tiny.not_gguf]
REFUSED = {name: tiny.not_gguf for name, tiny in ARCHITECTURES.items() if tiny.not_gguf}
# Relative error of the logits. ggml computes GELU with tanh and from a table of float16 values, and the softplus of
# Mamba's steps as log(1 + exp(x)), of which little is left for steps below -5 (4e-4 here).
LIMIT, LIMIT_WITH_SILU = 1e-3, 1e-5


@pytest.fixture(autouse=True)
def no_kept_scores(monkeypatch, tmp_path):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def known_tokenizer(monkeypatch):
    take_any_tokenizer(monkeypatch)


@dataclass
class Made:
    """A tiny model of float32, its F32 file, and what llama.cpp computes of it."""

    folder: Path
    file: Path
    silu: bool
    ids: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes each of them once."""
    found = {}

    def make(name):
        if name not in found:
            place = tmp_path_factory.mktemp("made")
            folder = save_architecture(place / "model", name, dtype=torch.float32, changes=ARCHITECTURES[name].for_gguf)
            ids = torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()
            trial = job_for(folder, "F32", place / "out")
            file = written(trial)
            ids = ids[: ignored_window(trial.source, trial.check().checked.plan.plan.shape)]
            silu = trial.source.config.get("hidden_act") == "silu"
            found[name] = Made(folder, file, silu, ids, logits_of_llama_cpp(file, ids))
        return found[name]

    return make


@pytest.mark.parametrize("name", CONVERTED)
def test_llama_cpp_computes_what_transformers_computes(name, made):
    mine = made(name)
    theirs = logits_of_transformers(mine.folder, mine.ids)
    error = float((mine.logits - theirs).abs().max() / theirs.abs().max())
    assert error < (LIMIT_WITH_SILU if mine.silu else max(LIMIT, ARCHITECTURES[name].limit)), error
    assert theirs.std() > 0.3


# Settings that llama.cpp follows in other blocks than the tiny model has.
FOURTH = {
    "exaone_moe": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "cohere2": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
}


@pytest.mark.parametrize("name", FOURTH)
def test_every_fourth_block_is_computed_otherwise(tmp_path, name):
    folder = save_architecture(
        tmp_path / "model", name, dtype=torch.float32, changes={"num_hidden_layers": 4} | FOURTH[name]
    )
    ids = torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs = (
        logits_of_llama_cpp(written(job_for(folder, "F32", tmp_path / "out")), ids),
        logits_of_transformers(folder, ids),
    )
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < LIMIT_WITH_SILU


@pytest.mark.parametrize("rope", [None, "rope"])
def test_a_granite_hybrid_without_experts_and_with_a_rope(tmp_path, rope):
    changes = {"num_local_experts": 0, "position_embedding_type": rope, "mamba_n_groups": 2}
    folder = save_architecture(tmp_path / "model", "granitemoehybrid", dtype=torch.float32, changes=changes)
    ids = torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    file = written(job_for(folder, "F32", tmp_path / "out"))
    theirs = logits_of_transformers(folder, ids)
    assert float((logits_of_llama_cpp(file, ids) - theirs).abs().max() / theirs.abs().max()) < LIMIT_WITH_SILU
    source, read = open_source(str(folder)), tensors_of(file)
    assert source.tensors.keys() == read.keys()
    for name in source.tensors:
        assert torch.allclose(read[name], source.tensor(name).float(), rtol=0, atol=1e-6), name


@pytest.mark.parametrize(("name", "called"), [("nemotron_h", "nemotron_h"), ("nemotron_h, experts", "nemotron_h_moe")])
def test_models_with_experts_have_llama_cpp_s_own_name(name, called, made):
    assert gguf.GGUFReader(made(name).file).fields["general.architecture"].contents() == called


# Settings that llama.cpp has none for, or fixed otherwise, and what the refusal says.
OTHERWISE = [
    ("cohere", {"use_qk_norm": True}, "use_qk_norm = True"),
    ("cohere2", {"layer_types": ["full_attention"] * 3}, "layer_types = .*, and llama.cpp has"),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}, r"no_rope_layers = \[1, 0, 1\], and llama.cpp has \[1, 1, 1\]"),
    ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads = 2, and llama.cpp has one"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True"),
    ("exaone4", {"sliding_window": 16}, "sliding_window = 16"),
    ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "mlp"]}, "experts beside blocks"),
    *(
        (name, {setting: [kind] * 3}, r"blocks of \w+ alone, and llama\.cpp ends")  # it would end our process, too
        for name, setting, kind in (
            ("nemotron_h", "layers_block_type", "full_attention"),
            ("granitemoehybrid", "layer_types", "mamba"),
            ("lfm2", "layer_types", "conv"),
            ("lfm2", "layer_types", "full_attention"),
            ("qwen3_next", "layer_types", "linear_attention"),
        )
    ),
    ("exaone_moe", {}, "layer_types = .*, and llama.cpp has"),
    ("jais2", {"mlp_bias": False}, "mlp_bias = False"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias = True"),
    ("ernie4_5", {"use_bias": True}, "use_bias = True"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm = True"),
    ("nemotron", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), OTHERWISE)
def test_settings_that_llama_cpp_has_none_for_are_refused(tmp_path, name, changes, reason):
    folder = save_architecture(tmp_path / "model", name, changes=changes)
    with pytest.raises(UnsupportedError, match=reason):
        job_for(folder, "F16", tmp_path / "out").check()


@pytest.mark.parametrize("name", CONVERTED)
def test_file_reads_back_as_the_source(name, made):
    source, read = GGUF.prepared(open_source(str(made(name).folder))), tensors_of(made(name).file)
    assert set(source.tensors) <= set(read)
    for tensor in source.tensors:
        expected = source.tensor(tensor).float()
        assert read[tensor].shape == expected.shape
        near = 1e-6 if "norm" in tensor or tensor.endswith("A_log") else 0
        assert torch.allclose(read[tensor], expected, rtol=0, atol=near), tensor


# Those whose keys transformers reads rightly, with what we add; the others need the source's config.json.
READ_FROM_KEYS = {
    *(
        "llama",
        "llama, tied",
        "mistral",
        "ministral",
        "minimax_m2",
        "qwen2",
        "qwen3",
        "gemma2",
        "phi3",
        "starcoder2",
        "gpt2",
        "mixtral",
    ),
    *(
        "internlm3",
        "iquestcoder",
        "minimax_m2",
        "qwen3_moe",
        "falcon, one key-value head",
        "stablelm, side by side",
        "nemotron",
        "bloom",
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_file_imports_as_a_checkpoint_that_computes_the_same(tmp_path, name, made):
    mine, config = made(name), None
    if name not in READ_FROM_KEYS:
        with pytest.raises((ArtifactError, UnsupportedError), match=r"Give the source's config\.json with --config"):
            import_gguf(mine.file, tmp_path / "back", dtype="float32", tokenizer=mine.folder)
        assert not (tmp_path / "back").exists()
        config = mine.folder / "config.json"
    out = import_gguf(mine.file, tmp_path / "back", dtype="float32", tokenizer=mine.folder, config=config)
    ours = logits_of_transformers(out, mine.ids)
    assert float((ours - mine.logits).abs().max() / mine.logits.abs().max()) < max(LIMIT, ARCHITECTURES[name].limit)


def scaled(factor):
    rope = {"rope_theta": 1e4, "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    return {"rope_parameters": {**rope, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}


# What the file's model has besides, what the config.json says instead, and what the refusal says.
CHANGES = {
    "theta": ({}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "freq_base = 10000.0, .*500000"),
    "no divisors": ({}, scaled(8.0), "other divisors"),
    "other divisors": (scaled(8.0), scaled(4.0), "other divisors"),
    "heads": (
        {},
        {"num_attention_heads": 8, "head_dim": 8},
        r"k_proj\.weight has the shape \(32, 64\), but .* \(16, 64\)",
    ),
    "norm": ({}, {"rms_norm_eps": 1e-3}, "layer_norm_rms_epsilon = "),
    "blocks": ({}, {"num_hidden_layers": 2}, "no place in a GGUF file"),
    "bias": ({}, {"attention_bias": False}, r"no place in a GGUF file .*self_attn\.\w_proj\.bias"),
    "kind": ({}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "architecture qwen2|no place"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_means_something_else_is_refused(tmp_path, change):
    own, values, said = CHANGES[change]
    folder = save_architecture(tmp_path / "model", "llama, tied", dtype=torch.float32, changes=own)
    file = written(job_for(folder, "F32", tmp_path / "out"))
    config = json.loads((folder / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=said):
        import_gguf(file, tmp_path / "back", tokenizer=folder, config=tmp_path / "config.json")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_names_without_the_model_s_prefix(tmp_path, name):
    folder = save_architecture(tmp_path / "model", name)
    whole = written(job_for(folder, "F16", tmp_path / "whole"))
    path = folder / "model.safetensors"
    prefixes = ("model.", "transformer.", "gpt_neox.")
    tensors = {key.removeprefix(next((p for p in prefixes if key.startswith(p)), "")): value
               for key, value in load_file(path).items()}  # fmt: skip
    save_file(tensors, path)
    assert not any(key.startswith(prefixes) for key in open_source(str(folder)).tensors)
    assert identical_tensors(written(job_for(folder, "F16", tmp_path / "out")), whole) > 10
    artifact = convert(str(folder), "gguf", "Q8_0", tmp_path / "artifact")
    assert artifact.manifest.weight_error.mean > 0  # every tensor was held against its original


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, name, reason):
    folder = save_architecture(tmp_path / "model", name)
    with pytest.raises(UnsupportedError, match=reason):
        job_for(folder, "F16", tmp_path / "out").check()


WHOLE = ORDERS | INDEX_ORDERS | {name: order for name, order in LINEAR_ORDERS.items() if name.startswith("tiled")}


@pytest.mark.parametrize(("name", "heads"), [(name, Heads(6, 2, 4)) for name in WHOLE])
def test_orders_are_undone(name, heads):
    order = WHOLE[name](heads)
    assert sorted(order) == list(range(len(order)))
    rows = np.random.default_rng(0).normal(size=(len(order), 3))
    assert np.array_equal(restored(rows[order], order), rows)
    assert np.array_equal(gather(lambda start, stop: rows[start:stop], order[3:17]), rows[order[3:17]])


def test_rows_in_several_tensors_are_joined():
    orders = [LINEAR_ORDERS[name](Heads(6, 2, 4)) for name in ("channels of groups", "gates of groups")]
    assert sorted(np.concatenate(orders)) == list(range(2 * (2 + 6) * 4))
    rows = np.random.default_rng(0).normal(size=(64, 3))
    parts = [(lambda start, stop, own=rows[order]: own[start:stop], order) for order in orders]
    assert np.array_equal(joined(parts)(0, 64), rows)
    assert np.array_equal(joined(parts)(5, 31), rows[5:31])


def test_orders_by_hand():
    linear = Heads(query=4, key=2, size=1)  # four values, two of each key: q0 k0 v0 v1 z0 z1, q1 k1 v2 v3 z2 z3
    assert LINEAR_ORDERS["channels of groups"](linear).tolist() == [0, 6, 1, 7, 2, 3, 8, 9]
    assert LINEAR_ORDERS["gates of groups"](linear).tolist() == [4, 5, 10, 11]
    assert LINEAR_ORDERS["tiled values"](Heads(4, 2, 2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert LINEAR_ORDERS["tiled heads"](Heads(4, 2, 2)).tolist() == [0, 2, 1, 3]
    assert LINEAR_ORDERS["tiled channels"](linear).tolist() == [0, 1, 2, 3, 4, 6, 5, 7]
    heads = Heads(query=2, key=1, size=2)
    assert ORDERS["thirds"](heads).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert ORDERS["groups"](heads).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ORDERS["groups"](Heads(2, 2, 1)).tolist() == [0, 3, 1, 4, 2, 5]
    assert ORDERS["query halves"](Heads(1, 1, 4)).tolist() == [0, 2, 1, 3]
    assert INDEX_ORDERS["index key pairs"](Heads(2, 1, 8, 6)).tolist() == [0, 2, 4, 1, 3, 5, 6, 7]
    assert INDEX_ORDERS["index query pairs"](Heads(2, 1, 4)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
WIDE_OLD = {"n_embd": 256, "n_layer": 2}
EXPERTS = {**WIDE, "num_local_experts": 8, "num_key_value_heads": 1}
BESIDE = {key: value for key, value in WIDE.items() if key != "num_hidden_layers"}
STATES = {
    **BESIDE,
    "num_kv_shared_layers": 0,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 512,
    "activation_sparsity_pattern": [0.95] * 4,
}
IDENTICAL = [
    ("mixtral", "Q4_K_M", EXPERTS),
    ("mixtral", "Q3_K_M", EXPERTS),
    ("qwen3_moe", "Q2_K", {**WIDE, "moe_intermediate_size": 256}),
    ("falcon, grouped", "Q4_K_M", WIDE),
    ("gpt2", "Q4_K_M", WIDE_OLD),
    ("gpt_neox", "Q3_K_M", WIDE),
    ("phi3", "Q4_K_M", WIDE),
    ("gemma2", "Q5_K_M", WIDE),
    ("gemma4", "Q4_K_M", BESIDE),
    ("gemma4", "Q8_0", BESIDE),
    ("gemma4, experts", "Q3_K_M", {**BESIDE, "num_hidden_layers": 3, "moe_intermediate_size": 256}),
    ("gemma3n", "Q4_K_M", STATES),
    ("gemma3n", "Q2_K", STATES),
]


@pytest.mark.parametrize(("name", "bits", "changes"), IDENTICAL)
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_equal_llama_cpp(tmp_path, name, bits, changes, weighted):
    folder = save_architecture(tmp_path / "model", name, changes=changes)
    base = written(job_for(folder, "BF16", tmp_path / "base"))
    trial = job_for(folder, bits, tmp_path / "out")
    generator = torch.Generator().manual_seed(0)
    importance, values = {}, {}
    for tensor in trial.check().checked.plan.plan.tensors if weighted else ():
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            rows = (torch.rand(len(tensor.parts), tensor.shape[-1], generator=generator) + 0.1).numpy()
            importance |= dict(zip(tensor.parts, rows, strict=True))
            values[tensor.name] = rows
    theirs = quantized_by_llama_cpp(base, tmp_path / "theirs.gguf", bits, values)
    assert identical_tensors(written(trial, importance), theirs) > 10


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt2", "gpt_neox", "falcon, one key-value head"])
@pytest.mark.parametrize("options", [{"imatrix": True}, {"rounding": "gptq"}], ids=["imatrix", "feedback"])
def test_weighted_files_hold_nearly_the_source(tmp_path, name, options):
    """Rows of experts, fused and transposed weights get the importance and the codes that belong to them."""
    folder = save_architecture(tmp_path / "model", name, changes=WIDE_OLD if name == "gpt2" else WIDE)
    out = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), **options)
    read, source = tensors_of(next(out.folder.glob("*.gguf"))), open_source(str(folder))
    for tensor, info in source.tensors.items():
        if len(info.shape) == 2:
            expected = source.tensor(tensor).float()
            assert float((read[tensor] - expected).norm()) < 0.15 * float(expected.norm()), tensor


def two_pairs(model):
    """Routers whose first four rows are two pairs v, -v: one of each pair is above zero, where all others are."""
    for layer in model.model.layers:
        gate = dict(layer.mlp.named_parameters())["gate.weight"]
        gate[4:], gate[2:4] = 0, -gate[:2]


@pytest.mark.parametrize(
    ("bits", "options"),
    [("Q4_K_M", {"imatrix": True}), ("Q4_K_M", {"rounding": "gptq"}), ("auto", {"target_bpw": 5.5})],
    ids=["imatrix", "feedback", "chosen"],
)
def test_experts_that_saw_nothing_keep_their_weights(tmp_path, bits, options):
    folder = save_architecture(
        tmp_path / "model", "mixtral", change=two_pairs, changes={**WIDE, "num_local_experts": 8}
    )
    out = convert(str(folder), "gguf", bits, tmp_path / "out", calibration=calibration(), **options)
    assert any("8 of 16 experts saw fewer than" in note for note in out.manifest.notes)
    read, source = tensors_of(next(out.folder.glob("*.gguf"))), open_source(str(folder))
    for tensor in (name for name in source.tensors if ".experts." in name):
        expected = source.tensor(tensor).float()
        assert float((read[tensor] - expected).norm()) < 0.15 * float(expected.norm()), tensor


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "falcon, grouped", "mpt", "starcoder2", "gpt_neox", "phi3"])
def test_types_are_chosen_for_every_architecture(tmp_path, name):
    sizes = {"d_model": 256, "n_layers": 2} if name == "mpt" else WIDE_OLD if name == "gpt2" else WIDE
    folder = save_architecture(tmp_path / "model", name, changes=sizes)
    out = convert(str(folder), "gguf", "auto", tmp_path / "out", calibration=calibration(), target_bpw=5.0)
    assert 4.8 < 8 * sum(t.nbytes for t in contents_of(out.folder).tensors) / out.manifest.source.parameters <= 5.0
    assert len(out.manifest.tensor_types) > 2
