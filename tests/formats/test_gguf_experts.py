"""Experts, latent attention and gated delta rules in GGUF: stacks taken apart, and put together again; YaRN."""

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
from tiny_architectures import ARCHITECTURES, YARN, save_architecture
from tiny_llama import VOCABULARY, calibration
from tiny_models import CALIBRATION, changed_copy

from quantkit.conversion.convert import convert
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.contents import contents_of
from quantkit.formats.source import open_source
from quantkit.methods.gguf.imatrix import make_imatrix
from quantkit.recipe import CalibrationSpec

LIMIT = 1e-5


@pytest.fixture(autouse=True)
def known_tokenizer(monkeypatch, tmp_path):
    take_any_tokenizer(monkeypatch)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))


def saved(folder, name, dtype=torch.float32, **changes):
    return save_architecture(folder, name, dtype=dtype, changes=ARCHITECTURES[name].for_gguf | changes)


def difference(folder, out):
    """Of llama.cpp's logits from the F32 file to those of transformers, relative to the largest."""
    ids = torch.randint(2, VOCABULARY, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = logits_of_transformers(folder, ids)
    ours = logits_of_llama_cpp(written(job_for(folder, "F32", out)), ids)
    return float((ours - theirs).abs().max() / theirs.abs().max())


# YaRN, whose scale a file tells where it is not the usual one.
SCALED = [
    ("qwen3", {"attention_factor": 1.3}),
    ("llama", {"mscale": 0.7, "mscale_all_dim": 0.5}),
    ("deepseek_v3", {"mscale": 0.7, "mscale_all_dim": 0.7}),
    ("qwen2_moe", {}),
]


@pytest.mark.parametrize(("name", "more"), SCALED)
def test_yarn_is_computed_as_transformers_does(tmp_path, name, more):
    assert difference(saved(tmp_path / "model", name, rope_parameters=YARN | more), tmp_path / "out") < LIMIT


def test_yarn_s_range_that_llama_cpp_rounds_is_told(tmp_path):
    folder = saved(tmp_path / "model", "gpt_oss", rope_parameters=YARN | {"truncate": False})
    assert any(
        "rounds the range of frequencies" in note for note in job_for(folder, "F32", tmp_path).check().checked.notes
    )
    plain = saved(tmp_path / "plain", "gpt_oss")
    assert not any("rounds" in note for note in job_for(plain, "F32", tmp_path).check().checked.notes)


def test_norms_of_latent_values_with_another_epsilon_are_told(tmp_path):
    folder = saved(tmp_path / "model", "glm4_moe_lite", rms_norm_eps=1e-5)
    assert any(
        "epsilon 1e-05 for the norms of latent values, the source 1e-06" in note
        for note in job_for(folder, "F32", tmp_path).check().checked.notes
    )
    assert difference(folder, tmp_path / "out") < 1e-4


def test_lengths_of_delta_attention_with_another_epsilon_are_told(tmp_path):
    for epsilon, told in ((1e-5, True), (1e-6, False)):
        folder = saved(tmp_path / f"{epsilon}", "qwen3_next", rms_norm_eps=epsilon)
        notes = job_for(folder, "F32", tmp_path).check().checked.notes
        assert any("1e-05 for the lengths of queries and keys" in note for note in notes) == told


def test_hunyuan_s_theta_is_scaled_by_its_alpha(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
    folder = saved(tmp_path / "model", "hunyuan_v1_moe", rope_parameters=rope, moe_topk=[2] * 3, num_experts=4)
    assert difference(folder, tmp_path / "out") < LIMIT


OTHERWISE = [
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2}, "topk_method = 'group_limited_greedy'"),
    ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank = None with 3 blocks"),
    ("deepseek_v3", {"rope_parameters": YARN}, "mscale and mscale_all_dim"),
    ("qwen3", {"rope_parameters": YARN | {"beta_fast": 16}}, "beta_fast = 16"),
    ("llama4", {"attention_chunk_size": 32}, "attention_chunk_size = 32"),
    ("llama4", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers = "),
    ("dots1", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("lfm2", {"conv_bias": True}, "conv_bias = True"),
    ("lfm2_moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor = 2.0"),
    ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("qwen3_5", {"linear_value_head_dim": 8}, r"linear heads of \(16, 8\)"),
    ("qwen3_5", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "mrope_section = "),
    ("glm", {"head_dim": 32}, "128 values of its heads"),
    ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index = 1"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types = "),
    ("phimoe", {}, "llama.cpp weighs its experts otherwise"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), OTHERWISE)
def test_settings_that_llama_cpp_has_otherwise_are_refused(tmp_path, name, changes, reason):
    folder = saved(tmp_path / "model", name, torch.bfloat16, **changes)
    with pytest.raises(UnsupportedError, match=reason):
        job_for(folder, "F16", tmp_path / "out").check()


def test_a_stack_of_another_shape_is_refused(tmp_path):
    folder = saved(tmp_path / "model", "gpt_oss")
    path, name = folder / "model.safetensors", "model.layers.0.mlp.experts.gate_up_proj"
    for change in (
        lambda stack: stack[..., :-1],
        lambda stack: stack[:3],
        lambda stack: stack[0, 0],
        lambda s: s[..., :2],
    ):
        tensors = load_file(path)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, tmp_path / "other.safetensors")
        other = changed_copy(folder, tmp_path / f"copy{len(list(tmp_path.iterdir()))}")
        (tmp_path / "other.safetensors").replace(other / "model.safetensors")
        with pytest.raises((UnsupportedError, SourceError), match=r"gate_up_proj|experts\.\d\.(gate|up)_proj"):
            job_for(other, "F16", tmp_path / "out").check()


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next"])
def test_what_guesses_further_tokens_is_left_out(tmp_path, name):
    folder = saved(tmp_path / "model", name, torch.bfloat16)
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
    assert any(
        f"{len(further) + 1} tensors of the source that guess further tokens" in n for n in trial.check().checked.notes
    )
    save_file(tensors | {"model.layers.3.input_layernorm.weight": torch.ones(64)}, path)
    with pytest.raises(UnsupportedError, match="no place in a GGUF file"):
        job_for(folder, "F16", tmp_path / "other").check()


WIDE = {"hidden_size": 256, "intermediate_size": 256}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 256,
}
DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
BYTES = [
    ("gpt_oss", "Q4_K_M", WIDE),
    ("deepseek_v3", "Q3_K_M", WIDE | LATENT),
    ("qwen3_next", "Q4_K_M", WIDE | DELTA | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}),
    ("qwen3_5", "Q5_K_M", WIDE | DELTA),
    ("lfm2_moe", "Q4_K_S", WIDE | {"moe_intermediate_size": 256}),
]


@pytest.mark.parametrize(("name", "bits", "changes"), BYTES)
def test_bytes_equal_llama_cpp(tmp_path, name, bits, changes):
    folder = saved(tmp_path / "model", name, torch.bfloat16, **changes)
    theirs = quantized_by_llama_cpp(written(job_for(folder, "BF16", tmp_path / "base")), tmp_path / "theirs.gguf", bits)
    assert identical_tensors(written(job_for(folder, bits, tmp_path / "out")), theirs) > 10
    assert any(tensor.type == bits[:4] for tensor in contents_of(theirs).tensors)


@pytest.mark.parametrize(("name", "bits", "changes"), [BYTES[0], BYTES[1], BYTES[3]], ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("options", [{"imatrix": True}, {"rounding": "gptq"}], ids=["imatrix", "feedback"])
def test_weighted_files_hold_nearly_the_source(tmp_path, name, bits, changes, options):
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if name == "qwen3_5" else {"layer_types": None}
    folder = saved(tmp_path / "model", name, torch.bfloat16, **changes | kinds | {"num_hidden_layers": 2})
    out = convert(str(folder), "gguf", "Q4_K_M", tmp_path / "out", calibration=calibration(), **options)
    read, source = tensors_of(next(out.folder.glob("*.gguf"))), open_source(str(folder))
    for tensor, info in source.tensors.items():
        if len(info.shape) > 1:
            expected = source.tensor(tensor).float()
            assert float((read[tensor] - expected).norm()) < 0.15 * float(expected.norm()), tensor
    latent = any("latent values is rounded without the calibration" in note for note in out.manifest.notes)
    assert latent == (name == "deepseek_v3")


def test_codes_for_columns_in_another_order_are_refused(tmp_path):
    folder = saved(tmp_path / "model", "qwen3_5")
    with pytest.raises(UnsupportedError, match=r"linear_attn\.out_proj\.weight in another order"):
        convert(str(folder), "rtn", "4", tmp_path / "out", format="gguf")


def test_an_importance_file_weights_like_the_measurement(tmp_path):
    """Also where columns lie in another order in the file."""
    folder = saved(tmp_path / "model", "qwen3_5", torch.bfloat16, **WIDE, **DELTA)
    make_imatrix(str(folder), tmp_path / "imatrix.gguf", calibration=CalibrationSpec(**CALIBRATION))
    for name, options in (("measured", {"imatrix": True}), ("read", {"imatrix_file": str(tmp_path / "imatrix.gguf")})):
        more = {"calibration": CALIBRATION} if name == "measured" else {}
        convert(str(folder), "gguf", "Q4_K_M", tmp_path / name, **options, **more)
    [one, other] = [next((tmp_path / name).glob("*.gguf")) for name in ("measured", "read")]
    assert identical_tensors(one, other) > 10
