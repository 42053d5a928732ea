"""A tiny random model of every architecture: llama.cpp computes from our file what transformers computes."""

import contextlib
import json

import numpy as np
import pytest
import torch
from gguf_files import identical_tensors, job_for, quantized_by_llama_cpp, tensors_of, written
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES, POSITIONS, save_architecture
from tiny_llama import VOCABULARY, calibration

from quantkit.conversion.convert import convert
from quantkit.conversion.import_gguf import import_gguf
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.float.checkpoint import Checkpoint
from quantkit.formats.gguf.architectures.hyperparameters import ignored_window
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.row_orders import ORDERS, Heads, gather, restored
from quantkit.formats.gguf.contents import contents_of
from quantkit.formats.source import open_source

gguf = pytest.importorskip("gguf")

CONVERTED = [name for name, tiny in ARCHITECTURES.items() if tiny.kind in KNOWN and not tiny.not_gguf]
REFUSED = {name: tiny.not_gguf for name, tiny in ARCHITECTURES.items() if tiny.not_gguf}
# Relative error of the logits. ggml computes GELU with tanh and from a table of float16 values.
LIMIT, LIMIT_WITH_SILU = 1e-3, 1e-5


@pytest.fixture(autouse=True)
def no_kept_scores(monkeypatch, tmp_path):
    monkeypatch.setattr("quantkit.methods.gguf.mixed_precision.cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(autouse=True)
def known_tokenizer(monkeypatch):
    """The tokenizers of these models were trained here; what pre-tokenizer llama.cpp takes does not matter.

    transformers gives every qwen2 checkpoint the steps of Qwen's tokenizer, whatever its file says.
    """
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr("quantkit.formats.gguf.tokenizer.vocabulary._pre_tokenizer", lambda *_: "gpt-2")
    monkeypatch.setattr(Checkpoint, "tokenizer", lambda source: PreTrainedTokenizerFast.from_pretrained(source.folder))


def logits_of_llama_cpp(path, ids):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the reference of this test")
    engine = llama_cpp.Llama(
        str(path), n_ctx=POSITIONS, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    with contextlib.closing(engine):
        engine.eval(ids)
        return torch.tensor(np.array(engine.scores[: len(ids)]))


def logits_of_transformers(folder, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", CONVERTED)
def test_llama_cpp_computes_what_transformers_computes(tmp_path, name):
    folder = save_architecture(tmp_path / "model", name, dtype=torch.float32)
    ids = torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    trial = job_for(folder, "F32", tmp_path / "out")
    ids = ids[: ignored_window(trial.source, trial.check().checked.plan.plan.shape)]
    ours = logits_of_llama_cpp(written(trial), ids)
    theirs = logits_of_transformers(folder, ids)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < (LIMIT_WITH_SILU if trial.source.config.get("hidden_act") == "silu" else LIMIT), error
    assert theirs.std() > 0.3


# Settings that llama.cpp follows in other blocks than the tiny model has.
FOURTH = {
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


# Settings that llama.cpp has none for, or fixed otherwise, and what the refusal says.
OTHERWISE = [
    ("cohere", {"use_qk_norm": True}, "use_qk_norm = True"),
    ("cohere2", {"layer_types": ["full_attention"] * 3}, "layer_types = .*, and llama.cpp has"),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}, r"no_rope_layers = \[1, 0, 1\], and llama.cpp has \[1, 1, 1\]"),
    ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads = 2, and llama.cpp has one"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True"),
    ("exaone4", {"sliding_window": 16}, "sliding_window = 16"),
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
def test_file_reads_back_as_the_source(tmp_path, name):
    folder = save_architecture(tmp_path / "model", name)
    source = open_source(str(folder))
    read = tensors_of(written(job_for(folder, "F32", tmp_path / "out")))
    assert set(source.tensors) <= set(read)
    for tensor in source.tensors:
        expected = source.tensor(tensor).float()
        assert read[tensor].shape == expected.shape
        assert torch.allclose(read[tensor], expected, rtol=0, atol=1e-6 if "norm" in tensor else 0), tensor


# Those whose keys transformers reads rightly, with what we add; the others need the source's config.json.
READ_FROM_KEYS = {
    *("llama", "llama, tied", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "starcoder2", "gpt2", "mixtral"),
    *("qwen3_moe", "falcon, one key-value head", "stablelm, side by side", "nemotron", "bloom"),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_file_imports_as_a_checkpoint_that_computes_the_same(tmp_path, name):
    folder = save_architecture(tmp_path / "model", name, dtype=torch.float32)
    ids = torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    file = written(job_for(folder, "F32", tmp_path / "out"))
    config = None
    if name not in READ_FROM_KEYS:
        with pytest.raises((ArtifactError, UnsupportedError), match=r"Give the source's config\.json with --config"):
            import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder)
        assert not (tmp_path / "back").exists()
        config = folder / "config.json"
    out = import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder, config=config)
    ours, theirs = logits_of_transformers(out, ids), logits_of_llama_cpp(file, ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < LIMIT


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


@pytest.mark.parametrize(("name", "heads"), [(name, Heads(6, 2, 4)) for name in ORDERS])
def test_orders_are_undone(name, heads):
    order = ORDERS[name](heads)
    assert sorted(order) == list(range(len(order)))
    rows = np.random.default_rng(0).normal(size=(len(order), 3))
    assert np.array_equal(restored(rows[order], order), rows)
    assert np.array_equal(gather(lambda start, stop: rows[start:stop], order[3:17]), rows[order[3:17]])


def test_orders_by_hand():
    heads = Heads(query=2, key=1, size=2)
    assert ORDERS["thirds"](heads).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert ORDERS["groups"](heads).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ORDERS["groups"](Heads(2, 2, 1)).tolist() == [0, 3, 1, 4, 2, 5]
    assert ORDERS["query halves"](Heads(1, 1, 4)).tolist() == [0, 2, 1, 3]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
WIDE_OLD = {"n_embd": 256, "n_layer": 2}
EXPERTS = {**WIDE, "num_local_experts": 8, "num_key_value_heads": 1}
IDENTICAL = [
    ("mixtral", "Q4_K_M", EXPERTS),
    ("mixtral", "Q3_K_M", EXPERTS),
    ("qwen3_moe", "Q2_K", {**WIDE, "moe_intermediate_size": 256}),
    ("falcon, grouped", "Q4_K_M", WIDE),
    ("gpt2", "Q4_K_M", WIDE_OLD),
    ("gpt_neox", "Q3_K_M", WIDE),
    ("phi3", "Q4_K_M", WIDE),
    ("gemma2", "Q5_K_M", WIDE),
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
