"""Quantized files of architectures: the bytes of llama.cpp, weights that belong to their layers, types, and stacks."""

import itertools

import numpy as np
import pytest
import torch
from engine_logits import far_apart, logits_of_llama_cpp
from gguf_files import file_in, identical_tensors, job_for, quantized_by_llama_cpp, saved, slow_but, tensors_of, written
from safetensors.torch import load_file, save_file
from test_gguf_architectures import DOTS, INDEX, KIMI, SPARSE, WINDOWED
from tiny_architectures import FULL
from tiny_architectures import SLIDING as SLIDE
from tiny_llama import any_scale, calibration
from tiny_models import CALIBRATION, changed_copy

from quantkit.calibration import channel_scales
from quantkit.conversion.convert import convert
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.source import open_source
from quantkit.methods.gguf.imatrix import make_imatrix
from quantkit.records.recipe import CalibrationSpec

pytestmark = pytest.mark.usefixtures("any_tokenizer")
BF16 = torch.bfloat16
SHORT = {"hidden_size": 256, "intermediate_size": 512}
TWO = {**SHORT, "num_hidden_layers": 2}
OLD = {"n_embd": 256, "n_layer": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
LATENT = {**WIDE, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32, "v_head_dim": 64}
DELTA = {
    **WIDE, "linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
SHARED = {"shared_experts_intermediate_size": 256}
RANK = {**WIDE, "kv_lora_rank": 256}
# Types of a file of wide models; what a block has of its own decides some of them.
IDENTICAL = {
    ("mixtral", "Q4_K_M"): {**TWO, "num_local_experts": 8, "num_key_value_heads": 1},
    ("mixtral", "Q3_K_M"): {**TWO, "num_local_experts": 8, "num_key_value_heads": 1},
    ("qwen3_moe", "Q2_K"): {**TWO, "moe_intermediate_size": 256},
    ("gpt2", "Q4_K_M"): OLD,
    ("gpt_neox", "Q3_K_M"): TWO,
    ("phi3", "Q4_K_M"): TWO,
    ("gemma4", "Q4_K_M"): SHORT,
    ("gemma4, experts", "Q3_K_M"): {**SHORT, "moe_intermediate_size": 256},
    ("gemma3n", "Q4_K_M"): SHORT,
    ("gpt_oss", "Q4_K_M"): {"hidden_size": 256, "intermediate_size": 256},
    ("deepseek_v3", "Q3_K_M"): LATENT,
    ("qwen3_next", "Q4_K_M"): {**DELTA, "shared_expert_intermediate_size": 512},
    ("qwen3_5", "Q5_K_M"): DELTA,
    ("bamba", "Q2_K"): {"hidden_size": 256, "mamba_d_head": 64, "num_key_value_heads": 1},
    ("mimo_v2_flash", "Q2_K"): {**WINDOWED, **WIDE, "num_attention_heads": 8, "layer_types": [SLIDE, FULL, SLIDE]},
    ("laguna", "Q4_K_M"): {**WIDE, "layer_types": [FULL, SLIDE, SLIDE], "num_attention_heads_per_layer": [4, 8, 4]},
    ("gemma4_unified_text", "Q4_K_M"): {"hidden_size": 256, "global_head_dim": 32},
    ("minimax_m3_vl_text", "Q4_K_M"): {
        **SPARSE, **WIDE, "dense_intermediate_size": 256, "shared_intermediate_size": 256
    },
    ("minicpm3", "Q4_K_M"): {"hidden_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "v_head_dim": 64},
    ("kimi_linear", "Q4_K_M"): {**KIMI, **RANK, "linear_head_dim": 64},
    ("bailing_hybrid", "Q4_K_M"): {**RANK, "head_dim": 32},
    ("deepseek_v32", "Q4_K_M"): {**INDEX, **RANK, "q_lora_rank": 256},
    ("deepseek_v32", "Q3_K_M"): {**INDEX, **RANK, "q_lora_rank": 256, "n_routed_experts": 8},
    ("dots3_note_text", "Q4_K_M"): {**DOTS, **RANK, **SHARED, "q_lora_rank": 256, "swa_q_lora_rank": 256},
}  # fmt: skip
QUICK_BYTES = {
    ("mixtral", "Q4_K_M"), ("gpt2", "Q4_K_M"), ("gemma3n", "Q4_K_M"), ("qwen3_next", "Q4_K_M"), ("bamba", "Q2_K"),
    ("minimax_m3_vl_text", "Q4_K_M"), ("kimi_linear", "Q4_K_M"), ("deepseek_v32", "Q4_K_M"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "bits"), slow_but(QUICK_BYTES, IDENTICAL))
def test_bytes_equal_llama_cpp(tmp_path, name, bits):
    folder = saved(tmp_path / "model", name, BF16, **IDENTICAL[name, bits])
    base = written(job_for(folder, "BF16", tmp_path / "base"))
    plain = written(job_for(folder, bits, tmp_path / "plain"))
    assert identical_tensors(plain, quantized_by_llama_cpp(base, tmp_path / "plain.gguf", bits)) > 10
    trial = job_for(folder, bits, tmp_path / "weighted")
    generator = torch.Generator().manual_seed(0)
    importance, values = {}, {}
    for tensor in trial.check().checked.plan.plan.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            for part in tensor.parts:
                if part not in importance:
                    importance[part] = (torch.rand(tensor.shape[-1], generator=generator) + 0.1).numpy()
            columns = slice(None) if tensor.columns is None else tensor.columns
            values[tensor.name] = np.stack([importance[part][columns] for part in tensor.parts])
    theirs = quantized_by_llama_cpp(base, tmp_path / "weighted.gguf", bits, values)
    assert identical_tensors(written(trial, importance), theirs) > 10


def held_against(folder, out, limit=0.15, which=lambda _name: True):
    """Every matrix of a file is nearly the source's."""
    read, source = tensors_of(file_in(out)), open_source(str(folder))
    names = [name for name, info in source.tensors.items() if len(info.shape) > 1 and which(name)]
    assert names
    for name in names:
        expected = source.tensor(name).float()
        if expected.ndim == 2 or limit < 0.4:
            assert float((read[name] - expected).norm()) < limit * float(expected.norm()), name


WEIGHTED = {
    "mixtral": TWO, "qwen3_moe": TWO, "gpt2": OLD, "gpt_neox": TWO, "falcon, one key-value head": TWO,
    "gpt_oss": {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "layer_types": None},
    "deepseek_v3": {**LATENT, "num_hidden_layers": 2},
    "qwen3_5": {**DELTA, "num_hidden_layers": 2, "layer_types": ["linear_attention", FULL]},
    "kimi_linear": {**KIMI, **RANK}, "bailing_hybrid": RANK, "deepseek_v32": {**INDEX, **RANK},
    "dots3_note_text": {**DOTS, **SHARED, **RANK},
}  # fmt: skip
HOW = {"imatrix": {"imatrix": True}, "feedback": {"rounding": "gptq"}}
QUICK_WEIGHTED = {("gpt2", "imatrix"), ("deepseek_v32", "imatrix"), ("mixtral", "feedback"), ("qwen3_5", "feedback")}


@pytest.mark.parametrize(
    ("name", "how"),
    slow_but(QUICK_WEIGHTED, itertools.product(WEIGHTED, HOW)),
)
def test_weighted_files_hold_nearly_the_source(tmp_path, name, how):
    """Rows of experts, fused and transposed weights get the importance and the codes that belong to them."""
    folder = saved(tmp_path / "model", name, BF16, **WEIGHTED[name])
    out = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), **HOW[how])
    far = name in ("kimi_linear", "bailing_hybrid", "deepseek_v32", "dots3_note_text")  # rows that fall back
    held_against(folder, out.folder, 0.4 if far else 0.15)
    if name == "deepseek_v3":
        assert any("latent values are rounded without calibration" in note for note in out.manifest.notes)


def two_pairs(model):
    """Routers whose first four rows are two pairs v, -v: one of each pair is above zero, where all others are."""
    for layer in model.model.layers:
        gate = dict(layer.mlp.named_parameters())["gate.weight"]
        gate[4:], gate[2:4] = 0, -gate[:2]


def test_experts_that_saw_nothing_keep_their_weights(tmp_path):
    folder = saved(tmp_path / "model", "mixtral", BF16, change=two_pairs, **TWO, num_local_experts=8)
    out = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), imatrix=True)
    assert any("8 of 16 experts saw fewer than" in note for note in out.manifest.notes)
    held_against(folder, out.folder, which=lambda name: ".experts." in name)


def test_matrices_of_single_heads_and_of_an_indexer_are_not_measured(tmp_path):
    plan = job_for(saved(tmp_path / "model", "dots3_note_text", **DOTS), "F16", tmp_path).check().checked.plan.plan
    left = {t.name.split(".", 2)[2] for t in plan.tensors if t.parts and len(t.shape) > 1 and not t.is_measured}
    indexer = {f"indexer.{part}.weight" for part in ("attn_k", "attn_q_b", "proj")}
    assert left == {"attn_k_b.weight", "attn_v_b.weight", *indexer}


def test_a_stack_of_another_shape_is_refused(tmp_path):
    folder = saved(tmp_path / "model", "gpt_oss")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    other = changed_copy(folder, tmp_path / "cut", lambda t: t.update({name: t[name][:3].contiguous()}))
    with pytest.raises((UnsupportedError, SourceError), match=r"gate_up_proj|experts\.\d\.(gate|up)_proj"):
        job_for(other, "F16", tmp_path / "out").check()


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next"])
def test_what_guesses_further_tokens_is_left_out(tmp_path, name):
    folder = saved(tmp_path / "model", name, BF16)
    path = folder / "model.safetensors"
    plain = written(job_for(folder, "F16", tmp_path / "plain"))
    tensors = load_file(path)
    own = {key: value for key, value in tensors.items() if key.startswith("model.layers.1.")}
    stem = "model.layers.3." if name == "glm4_moe" else "mtp.layers.0."
    further = {stem + key.removeprefix("model.layers.1."): value.clone() for key, value in own.items()}
    fused = {f"{stem}eh_proj.weight" if name == "glm4_moe" else "mtp.fc.weight": torch.zeros(64, 128)}
    save_file(tensors | further | fused, path)
    trial = job_for(folder, "F16", tmp_path / "out")
    assert identical_tensors(written(trial), plain) > 10
    told = f"{len(further) + 1} tensors for multi-token prediction"
    assert any(told in note for note in trial.check().checked.notes)
    save_file(tensors | {"model.layers.3.input_layernorm.weight": torch.ones(64)}, path)
    with pytest.raises(UnsupportedError, match="do not belong in a GGUF file"):
        job_for(folder, "F16", tmp_path / "other").check()


def test_columns_in_another_order(tmp_path):
    """An importance file weights like the measurement; codes of another format cannot be put in that order."""
    folder = saved(tmp_path / "model", "qwen3_5", BF16, **WEIGHTED["qwen3_5"])
    few = {**CALIBRATION, "sequences": 2}
    make_imatrix(str(folder), tmp_path / "imatrix.gguf", calibration=CalibrationSpec(**few))
    one = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "one", imatrix=True, calibration=few)
    other = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "two", imatrix_file=str(tmp_path / "imatrix.gguf"))
    assert identical_tensors(file_in(one.folder), file_in(other.folder)) > 10
    with pytest.raises(UnsupportedError, match=r"linear_attn\.out_proj\.weight reordered"):
        convert(str(folder), "rtn", "4", tmp_path / "out", format="gguf")


SCALED = {
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "phi3": {},
    "qwen3_moe": {},
    "qwen2": {},
    "qwen3_next": {},
    "deepseek_v3": {},
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_channels_do_not_change_what_a_file_computes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(channel_scales, "search_scale", any_scale)
    folder = saved(tmp_path / "model", name, **SCALED[name])
    made = {
        awq: convert(
            str(folder), "gguf", "Q2_K", tmp_path / str(awq), calibration=CALIBRATION, rounding="gptq", awq=awq,
            tensor_type={".": "F32"},
        )
        for awq in (False, True)
    }  # fmt: skip
    plain, scaled = (tensors_of(file_in(artifact.folder)) for artifact in made.values())
    changed = {key.split(".", 3)[-1] for key, value in scaled.items() if not torch.equal(value, plain[key])}
    assert any("norm" in key for key in changed), changed
    assert len(changed) > 4, changed
    tokens = np.arange(30).tolist()
    want, got = (logits_of_llama_cpp(file_in(artifact.folder), tokens) for artifact in made.values())
    assert far_apart(got, want) < 1e-3
