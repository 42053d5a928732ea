"""A tiny random model of every architecture: llama.cpp computes from our file what transformers computes."""

import json
import os
import re
from collections import defaultdict
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_logits import IDS, far_apart, logits_of, logits_of_llama_cpp, logits_of_transformers
from gguf import GGUFReader
from gguf_files import identical_tensors, job_for, keys, saved, slow_but, written
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES, FULL, PLAIN, YARN, save_architecture
from tiny_architectures import SLIDING as SLIDE
from tiny_more import MORE, settings_of
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantkit.conversion.convert import convert, import_gguf
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats.gguf.architectures.known import KNOWN
from quantkit.formats.gguf.architectures.latent import LATENT_NORMS
from quantkit.formats.gguf.architectures.record import FIXED_EPSILON
from quantkit.formats.gguf.hyperparameters import ignored_window
from quantkit.formats.source import open_source
from quantkit.models.skeleton import open_skeleton

pytestmark = pytest.mark.usefixtures("any_tokenizer")
# Relative error of the logits. ggml computes GELU with tanh and from a table of float16 values, and the softplus of
# Mamba's steps as log(1 + exp(x)), of which little is left for steps below -5 (4e-4 here).
LIMIT, LIMIT_WITH_SILU = 1e-3, 1e-5
FILES = Path(__file__).with_name("gguf_architectures.json")
# The epsilon of all norms, as of those for which transformers has no other.
KIMI = {"rms_norm_eps": 1e-6, "linear_num_heads": 4, "q_lora_rank": None}
# Fewer tokens than a text has; with few heads many tokens score 0, of which anybody takes any.
INDEX = {"index_head_dim": 64, "index_n_heads": 32, "index_topk": 16}
DOTS = {**INDEX, "swa_head_dim": 24}
INDEXED = "indexed_attention"
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
WINDOWED = {"rope_parameters": {FULL: {**HALF, "rope_theta": 5e5}, SLIDE: HALF}}
SPARSE = {
    "layer_types": [FULL] + ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense"] + ["sparse"] * 2,
    "dense_intermediate_size": 96, "shared_intermediate_size": 64, "intermediate_size": 32,
}  # fmt: skip
COHERE = {
    "num_hidden_layers": 4, "logit_scale": 2.0, "sliding_window": 16, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "layer_types": [FULL, SLIDE, FULL, SLIDE], "prefix_dense_intermediate_size": 96,
}  # fmt: skip
# Gemma 3n with blocks that have keys of their own and such as take them, as E2B has.
DEEP = {
    "num_hidden_layers": 22, "layer_types": [SLIDE, SLIDE, SLIDE, SLIDE, FULL] * 4 + [SLIDE, FULL],
    "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
}  # fmt: skip
UNIFIED = {"global_head_dim": 32}
FOURTH = [SLIDE, SLIDE, SLIDE, FULL]
# Settings of further architectures that llama.cpp has, or without which all logits would be near zero.
FURTHER = {
    "minimax_m3_vl_text": SPARSE, "mimo_v2_flash": WINDOWED, "afmoe": {"mup_enabled": True},
    "hyperclovax": {
        "use_post_norm": False, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2
    },
    "cohere2_moe": {"logit_scale": 2.0},
    "gemma4_unified_text": {**UNIFIED, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "kimi_linear": KIMI, "deepseek_v32": INDEX, "dots3_note_text": DOTS,
}  # fmt: skip


def llama3(factor):
    rope = {"rope_theta": 1e4, "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    return {"rope_parameters": {**rope, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}


# What else they may be: the name of an architecture before a colon, and changed settings.
VARIANTS = {
    # blocks that llama.cpp computes otherwise than those of the tiny model
    "cohere2: a fourth block": {"num_hidden_layers": 4, "layer_types": FOURTH},
    # YaRN, whose scale a file tells where it is not the usual one, and other ropes
    "qwen3: a factor": {"rope_parameters": YARN | {"attention_factor": 1.3}},
    "llama: divisors": {**llama3(8.0), "attention_bias": True, "mlp_bias": True},
    "llama: linear": {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 4.0}, "head_dim": 32},
    "llama: two scales": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
    "deepseek_v3: equal scales": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "qwen2_moe: yarn": {"rope_parameters": YARN},
    "hunyuan_v1_moe: alpha": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        "moe_topk": [2] * 3, "num_experts": 4,
    },
    "internlm3: stretches beyond the context alone": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}
    },
    "glm4_moe_lite: another epsilon": {"rms_norm_eps": 1e-5},
    # states, beside experts and without
    "granitemoehybrid: a rope": {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 2},
    "falcon_h1: norms": {"mamba_rms_norm": True, "mamba_n_groups": 2},
    "falcon_h1: no size of states": {"mamba_d_ssm": None, "mamba_n_heads": 8},
    "bamba: two groups": {"mamba_n_groups": 2, "attn_layer_indices": [0, 2]},
    # windows, ropes and heads of some blocks
    "granite_swa: no rope in some": {"sliding_window": 16, "layer_rope_theta": [0, 1e4, 1e4]},
    "mellum: windows": {
        "sliding_window": 16, "layer_types": [SLIDE, FULL, SLIDE], "rope_parameters": {SLIDE: PLAIN, FULL: YARN}
    },
    "cohere2_moe: sigmoid": {**COHERE, "expert_selection_fn": "sigmoid", "num_shared_experts": 2},
    "mimo_v2_flash: more key heads in a window": {
        **WINDOWED, "sliding_window": 16, "layer_types": [FULL, SLIDE, SLIDE], "v_head_dim": 8, "n_group": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_value_scale": None,
    },
    "laguna: more heads in a window": {
        "layer_types": [FULL, SLIDE, SLIDE], "num_attention_heads_per_layer": [4, 8, 4], "sliding_window": 16,
        "moe_routed_scaling_factor": 1.5, "gating": "per-head",
        "rope_parameters": {FULL: {**YARN, "partial_rotary_factor": 0.5}, SLIDE: {**PLAIN, "rope_theta": 5e5}},
    },
    "laguna: a gate for each value, tied": {
        "layer_types": [SLIDE] * 3, "gating": "per-element", "tie_word_embeddings": True, "sliding_window": 16,
        "mlp_layer_types": ["sparse"] * 3, "rope_parameters": {FULL: PLAIN, SLIDE: HALF},
    },
    # latent attention and gated delta rules
    "minicpm3: factors of embedding, blocks and head": {
        "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 32, "v_head_dim": 24
    },
    "minicpm3: divisors of what turns of a head": {"rope_parameters": {
        **PLAIN, "rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 9.0],
    }},
    "kimi_linear: more attention": {
        **KIMI, "layer_types": [FULL, "linear_attention", FULL], "n_group": 1, "n_shared_experts": 2,
        "mlp_layer_types": ["dense", "dense", "sparse"], "linear_conv_kernel_dim": 3,
    },
    "bailing_hybrid: other gates": {
        "layer_group_size": 3, "kda_lower_bound": -3.5, "head_dim": 16, "first_k_dense_replace": 2, "n_group": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    "deepseek_v32: yarn, tied": {
        **INDEX, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "index_head_dim": 128,
        "first_k_dense_replace": 2, "tie_word_embeddings": True, "n_group": 1,
    },
    "dots3_note_text: other windows": {
        **DOTS, "layer_types": [SLIDE, INDEXED, SLIDE], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_kv_lora_rank": 24, "swa_qk_nope_head_dim": 24, "swa_head_dim": 32, "swa_v_head_dim": 24,
        "sliding_window": 20, "moe_intermediate_size": 24, "shared_experts_intermediate_size": 48, "n_group": 1,
        "rope_parameters": {INDEXED: PLAIN, SLIDE: {**PLAIN, "rope_theta": 5e5}},
    },
    # Gemma 4 and 3n
    "gemma4: no inputs of blocks": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gemma4: values of keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "gemma4: a head of its own": {"tie_word_embeddings": False},
    "gemma4: half of them, slower": {"rope_parameters": {
        SLIDE: PLAIN, FULL: {**HALF, "rope_type": "proportional", "factor": 4.0}
    }},
    "gemma4: all blocks but the last with a window": {"layer_types": FOURTH, "num_kv_shared_layers": 0},
    "gemma4_unified_text: plain": UNIFIED,
    "gemma4_unified_text: shared keys, double width": {
        **UNIFIED, "num_hidden_layers": 4, "layer_types": [SLIDE, FULL] * 2, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma3n: shared keys, some blocks sparse": DEEP,
}  # fmt: skip
CONVERTED = [name for name, tiny in ARCHITECTURES.items() if tiny.kind in KNOWN and not tiny.not_gguf]
CASES = {name: {} for name in CONVERTED} | {kind: FURTHER.get(kind, {}) for kind in MORE if kind in KNOWN} | VARIANTS
QUICK = {
    "llama, tied", "llama: divisors", "llama: linear", "phi3", "gpt2", "gpt_neox", "gemma2", "mixtral", "qwen2_moe",
    "deepseek_v3", "gpt_oss", "qwen3_next", "gemma4", "granitemoehybrid: a rope", "laguna: more heads in a window",
    "kimi_linear", "dots3_note_text: other windows", "minimax_m3_vl_text",
}  # fmt: skip
# Those whose keys transformers reads rightly, with what we add; the others need the source's config.json.
READ_FROM_KEYS = {
    "llama", "llama, tied", "mistral", "ministral", "minimax_m2", "qwen2", "qwen3", "gemma2", "phi3", "starcoder2",
    "gpt2", "mixtral", "internlm3", "iquestcoder", "qwen3_moe", "falcon, one key-value head", "stablelm, side by side",
    "nemotron", "bloom",
}  # fmt: skip


class Gelu(nn.Module):
    """ggml's, of float16 values in a table."""

    def forward(self, x):
        return nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


def sparse_gates(module, gates):
    """As Gemma 3n has them but for the deviation, which llama.cpp takes over one value less."""
    cut = torch.distributions.Normal(0, 1).icdf(torch.tensor(module.activation_sparsity))
    return nn.functional.relu(gates - gates.mean(-1, keepdim=True) - cut * gates.std(-1, keepdim=True))


def logits_as_in_ggml(folder, ids):
    """What transformers computes of Gemma 3n or 4 with ggml's activations."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = Gelu()
        if hasattr(module, "_gaussian_topk"):
            module._gaussian_topk = partial(sparse_gates, module)
    logits = logits_of(model, [ids])[0]
    assert far_apart(logits, logits_of_transformers(folder, ids)) < 5e-3
    return logits


def damped(model):
    """Feed-forward layers of less weight: in so many sparse blocks a difference would grow too much."""
    for name, parameter in model.named_parameters():
        if "post_feedforward_layernorm" in name and model.config.num_hidden_layers > 4:
            parameter.mul_(0.2)


def same_everywhere(model):
    """Weights that every processor draws alike."""
    for parameter in model.parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))


def digests(file):
    """Of each kind of tensor: names, shapes and float16 values (an exp's last digits differ between processors)."""
    kinds = defaultdict(sha256)
    for tensor in sorted(GGUFReader(file).tensors, key=lambda tensor: tensor.name):
        about = f"{tensor.name} {tensor.shape.tolist()}".encode()
        with np.errstate(over="ignore"):
            kinds[without_number(tensor.name)].update(about + tensor.data.astype(np.float16).tobytes())
    return {kind: digest.hexdigest()[:8] for kind, digest in kinds.items()}


def without_number(name):
    return re.sub(r"\.\d+\.", ".*.", name)


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_as_llama_cpp_was_tried_with_and_read_back(tmp_path, case):
    """After an intended change run the slow test below, and then this one with WRITE_FILES=1."""
    name = case.split(":")[0]
    folder = saved(tmp_path / "model", name, change=same_everywhere, **CASES[case])
    trial = job_for(folder, "Q8_0", tmp_path / "out")
    checked = trial.check().checked
    types = {without_number(tensor.name): tensor.type for tensor in checked.plan.plan.tensors}
    file = written(job_for(folder, "F32", tmp_path / "out"))
    about = {key: value for key, value in keys(file).items() if not key.startswith("tokenizer.")}
    found = {"keys": about, "tensors": digests(file), "Q8_0": types, "notes": len(checked.notes)}
    if "WRITE_FILES" in os.environ:
        files = json.loads(FILES.read_text()) | {case: found}
        FILES.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(files[name])}' for name in sorted(files)) + "\n}\n")
    assert found == json.loads(FILES.read_text())[case]

    config = None if case in READ_FROM_KEYS else folder / "config.json"
    back = open_source(str(import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder, config=config)))
    assert set(trial.source.tensors) <= set(back.tensors)
    for tensor in trial.source.tensors:
        near = 1e-6 if "norm" in tensor or tensor.endswith("A_log") else 0
        torch.testing.assert_close(back.tensor(tensor), trial.source.tensor(tensor), rtol=0, atol=near)


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_an_architecture_in_llama_cpp_and_back(tmp_path, case):
    name = case.split(":")[0]
    gemma = name.startswith(("gemma3n", "gemma4"))
    folder = saved(tmp_path / "model", name, change=damped if gemma else lambda _model: None, **CASES[case])
    trial = job_for(folder, "F32", tmp_path / "out")
    file = written(trial)
    ids = IDS if "beyond the context" in case else IDS[:100]
    ids = ids[: ignored_window(trial.source, trial.job.checked.plan.plan.shape)]
    computed = logits_as_in_ggml if gemma else logits_of_transformers
    ours, theirs = logits_of_llama_cpp(file, ids), computed(folder, ids)
    limit = LIMIT_WITH_SILU if trial.source.config.get("hidden_act") == "silu" else LIMIT
    assert far_apart(ours, theirs) < (1e-4 if case == "glm4_moe_lite: another epsilon" else limit)
    assert theirs.std() > 0.3

    config = None if case in READ_FROM_KEYS else folder / "config.json"
    if config is not None and case == name:
        with pytest.raises((ArtifactError, UnsupportedError), match=r"Give the source's config\.json with --conf"):
            import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder)
    out = import_gguf(file, tmp_path / "back", dtype="float32", tokenizer=folder, config=config)
    assert far_apart(computed(out, ids), ours) < LIMIT


@pytest.mark.parametrize("turning", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_tokens_attend_to_the_blocks_that_score_best(tmp_path, turning):
    """3 of 7 blocks of 16 tokens, the own one among them. llama.cpp has that with flash attention alone."""
    rope = {"rope_parameters": {**PLAIN, "partial_rotary_factor": turning}}
    blocks = {"index_block_size": 16, "index_topk_blocks": 3, "index_local_blocks": 1}
    folder = saved(tmp_path / "model", "minimax_m3_vl_text", **SPARSE, **blocks, **rope)
    trial = job_for(folder, "F32", tmp_path / "out")
    assert any("with flash attention (-fa on)" in note for note in trial.check().checked.notes)
    file, theirs = written(trial), logits_of_transformers(folder, IDS[:100])
    fast, slow = (far_apart(logits_of_llama_cpp(file, IDS[:100], flash_attn=on), theirs) for on in (True, False))
    assert fast < LIMIT
    assert slow > 0.05


DELTA_TOLD = "epsilon 1e-05 for the norms of latent values and the lengths of queries and keys of delta attention"


@pytest.mark.parametrize(
    ("name", "changes", "note", "told"),
    [
        ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}}, "rounds YaRN's range", True),
        ("glm4_moe_lite", {"rms_norm_eps": 1e-5}, "1e-05 for the norms of latent values, the source 1e-06", True),
        ("kimi_linear", {**KIMI, "rms_norm_eps": 1e-5}, DELTA_TOLD, True),
        ("kimi_linear", KIMI, "epsilon", False),
        ("qwen3_next", {"rms_norm_eps": 1e-5}, "1e-05 for the lengths of queries and keys of delta attention", True),
        ("dots3_note_text", {**DOTS, "rms_norm_eps": 1e-5}, "epsilon", False),  # which all its norms have
    ],
)
def test_what_llama_cpp_computes_a_little_otherwise_is_told(tmp_path, name, changes, note, told):
    trial = job_for(saved(tmp_path / "model", name, torch.bfloat16, **changes), "F16", tmp_path / "out")
    assert any(note in text for text in trial.check().checked.notes) == told


SOME = ("llama", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_linear", "qwen3_next")
OTHERS = sorted(KNOWN.keys() - {*SOME, "gemma3n_text", "lfm2_moe"})  # two need more settings to be built


@pytest.mark.parametrize("kinds", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_norms_that_have_another_epsilon_than_a_file_are_those_that_are_told(kinds):
    for kind in kinds:
        config = CONFIG_MAPPING[kind](**settings_of(kind))
        for name in {"rms_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon"} & vars(config).keys():
            setattr(config, name, 3e-5)
        model = open_skeleton(config.to_dict() | {"architectures": ["CausalLM"]}).model
        norms = (part for part in model.modules() if "RMSNorm" in type(part).__name__)
        epsilons = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
        assert epsilons <= {3e-5, FIXED_EPSILON, None}, kind
        assert (FIXED_EPSILON in epsilons) == (LATENT_NORMS in KNOWN[kind].fixed_epsilon), kind


# What the file's model has besides, what the config.json says instead, and what the refusal says.
CHANGES = {
    "theta": ({}, {"rope_parameters": {**PLAIN, "rope_theta": 5e5}}, "freq_base = 10000.0, .*500000"),
    "other divisors": (llama3(8.0), llama3(4.0), "rope factors differ"),
    "heads": ({}, {"num_attention_heads": 8, "head_dim": 8}, r"k_proj\.weight has .* \(32, 64\), but .* \(16, 64\)"),
    "bias": ({}, {"attention_bias": False}, r"do not belong in a GGUF file .*self_attn\.\w_proj\.bias"),
    "kind": ({}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "architecture qwen2|do not belong"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_means_something_else_is_refused(tmp_path, change):
    own, values, said = CHANGES[change]
    folder = saved(tmp_path / "model", "llama, tied", **own)
    file = written(job_for(folder, "F32", tmp_path / "out"))
    config = json.loads((folder / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=said):
        import_gguf(file, tmp_path / "back", tokenizer=folder, config=tmp_path / "config.json")
    assert not (tmp_path / "back").exists()


def test_names_without_the_model_s_prefix(tmp_path):
    folder = save_architecture(tmp_path / "model", "gpt2")
    whole = written(job_for(folder, "F16", tmp_path / "whole"))
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 128, 128)}, path)  # a mask, as the hub's file has it
    assert identical_tensors(written(job_for(folder, "F16", tmp_path / "out")), whole) > 10
    artifact = convert(str(folder), "gguf", "Q8_0", tmp_path / "artifact")
    assert artifact.manifest.weight_error.mean > 0  # every tensor was held against its original
