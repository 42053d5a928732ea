"""GGUF files of the further architectures: what llama.cpp computes of each, and what is read back.

Each takes a CPU second or two, so they run only when they are asked for (`pytest -m slow`).
"""

from dataclasses import replace

import pytest
import test_gguf_architectures as plain
from test_gguf_architectures import known_tokenizer, made, no_kept_scores  # noqa: F401
from tiny_architectures import ARCHITECTURES, LAYERS, Tiny, save_architecture
from tiny_more import MORE, settings_of
from transformers import CONFIG_MAPPING

from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.architectures.known import KNOWN

pytestmark = pytest.mark.slow
LATENT = ("bailing_hybrid", "deepseek_v32", "dots3_note_text", "kimi_linear")  # test_gguf_latent.py has them
SLIDING = ["sliding_attention"] * 3
TURNS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SPARSE = {
    "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense"] + ["sparse"] * 2,
    "dense_intermediate_size": 96, "shared_intermediate_size": 64, "intermediate_size": 32,
}  # fmt: skip
# Settings that llama.cpp has; without them the tiny model is refused, with this reason.
NEEDED = {
    "minimax_m3_vl_text": (SPARSE, "layer_types = .*, and llama.cpp attends to some tokens alone"),
    "mimo_v2_flash": (
        {"rope_parameters": {"full_attention": {**TURNS, "rope_theta": 5e5}, "sliding_attention": TURNS}},
        "which rotate nothing",
    ),
    "afmoe": ({"mup_enabled": True}, "mup_enabled = False"),
    "hyperclovax": (
        {"use_post_norm": False, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        "use_post_norm = True",
    ),
}

OTHER = {
    "cohere2_moe": {"logit_scale": 2.0},  # with its own all logits would be near zero
    "gemma4_unified_text": {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
LIMITS = {"gemma4_unified_text": 5e-3}  # of what is computed with ggml's GELU, which test_gguf_gemma.py has apart


@pytest.fixture
def tiny(monkeypatch, request):
    kind = request.param
    found = Tiny(CONFIG_MAPPING[kind].__name__, MORE[kind] / LAYERS, settings_of(kind))
    changes, _ = NEEDED.get(kind, (OTHER.get(kind, {}), ""))
    monkeypatch.setitem(ARCHITECTURES, kind, replace(found, for_gguf=changes, limit=LIMITS.get(kind, 0.0)))
    return kind


@pytest.mark.parametrize("tiny", [kind for kind in MORE if kind in KNOWN and kind not in LATENT], indirect=True)
def test_an_architecture_in_llama_cpp_and_back(tmp_path, tiny, made):  # noqa: F811
    plain.test_llama_cpp_computes_what_transformers_computes(tiny, made)
    plain.test_file_reads_back_as_the_source(tiny, made)
    plain.test_file_imports_as_a_checkpoint_that_computes_the_same(tmp_path, tiny, made)


@pytest.mark.parametrize("tiny", NEEDED, indirect=True)
def test_settings_that_llama_cpp_lacks_are_refused(tmp_path, tiny):
    folder = save_architecture(tmp_path / "model", tiny)
    with pytest.raises(UnsupportedError, match=NEEDED[tiny][1]):
        plain.job_for(folder, "F16", tmp_path / "out").check()


@pytest.mark.parametrize("tiny", ["afmoe"], indirect=True)
def test_a_fourth_block_has_no_window_and_no_rope(tmp_path, tiny):
    changes = {"num_hidden_layers": 4, "layer_types": [*SLIDING, "full_attention"], **NEEDED[tiny][0]}
    folder = save_architecture(tmp_path / "model", tiny, dtype=plain.torch.float32, changes=changes)
    ids = plain.torch.randint(2, plain.VOCABULARY, (100,), generator=plain.torch.Generator().manual_seed(0)).tolist()
    ours = plain.logits_of_llama_cpp(plain.written(plain.job_for(folder, "F32", tmp_path / "out")), ids)
    theirs = plain.logits_of_transformers(folder, ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < plain.LIMIT_WITH_SILU


@pytest.mark.parametrize("tiny", ["internlm3"], indirect=True)
def test_a_rope_that_stretches_beyond_the_context_alone_is_the_plain_one_within(tmp_path, tiny):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}
    folder = save_architecture(tmp_path / "model", tiny, dtype=plain.torch.float32, changes={"rope_parameters": rope})
    ids = plain.torch.randint(2, plain.VOCABULARY, (128,), generator=plain.torch.Generator().manual_seed(0)).tolist()
    ours = plain.logits_of_llama_cpp(plain.written(plain.job_for(folder, "F32", tmp_path / "out")), ids)
    theirs = plain.logits_of_transformers(folder, ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < plain.LIMIT_WITH_SILU


FULL, SLIDE = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
COHERE = {
    "num_hidden_layers": 4,
    "logit_scale": 2.0,
    "sliding_window": 16,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "layer_types": [FULL, SLIDE, FULL, SLIDE],
    "prefix_dense_intermediate_size": 96,
}
WINDOWED = NEEDED["mimo_v2_flash"][0]
# Settings of blocks with and without windows, ropes and experts, and what else llama.cpp has none of.
VARIANTS = {
    "no rope in some": ("granite_swa", {"sliding_window": 16, "layer_rope_theta": [0, 1e4, 1e4]}),
    "scaled": ("granite_swa", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "a shared expert": ("granitemoe_swa", {"shared_intermediate_size": 96, "layer_rope_theta": [0, 1e4, 0]}),
    "windows": ("mellum", {
        "sliding_window": 16, "layer_types": [SLIDE, FULL, SLIDE],
        "rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN},
    }),
    "sigmoid": ("cohere2_moe", {**COHERE, "expert_selection_fn": "sigmoid", "num_shared_experts": 2}),
    "not normed": ("cohere2_moe", {
        **COHERE, "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0,
    }),
    "softmax, root mean square": ("cohere2_moe", {**COHERE, "rms_norm_eps": 1e-5}),
    "factors of embedding, blocks and head": (
        "minicpm3", {"scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 32, "v_head_dim": 24},
    ),
    "states in two groups": ("bamba", {"mamba_n_groups": 2, "attn_layer_indices": [0, 2]}),
    "a head of its embedding": ("bamba", {"tie_word_embeddings": True}),
    "more key heads in a window": ("mimo_v2_flash", {
        **WINDOWED, "sliding_window": 16, "layer_types": [FULL, SLIDE, SLIDE],
        "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_value_scale": None, "v_head_dim": 8, "n_group": 1,
    }),
    "a window first": ("mimo_v2_flash", {
        **WINDOWED, "sliding_window": 16, "layer_types": [SLIDE, FULL, SLIDE],
    }),
    "more heads in a window": ("laguna", {
        "layer_types": [FULL, SLIDE, SLIDE], "num_attention_heads_per_layer": [4, 8, 4], "sliding_window": 16,
        "moe_routed_scaling_factor": 1.5, "gating": "per-head",
        "rope_parameters": {
            FULL: {**YARN, "partial_rotary_factor": 0.5}, SLIDE: {**PLAIN, "rope_theta": 5e5},
        },
    }),
    "a gate for each value, tied": ("laguna", {
        "layer_types": [SLIDE] * 3, "gating": "per-element", "tie_word_embeddings": True, "sliding_window": 16,
        "mlp_layer_types": ["sparse"] * 3,
        "rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "partial_rotary_factor": 0.5}},
    }),
    "divisors of what turns of a head": ("minicpm3", {"rope_parameters": {
        **PLAIN, "rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 9.0],
    }}),
}  # fmt: skip
REFUSED = [
    ("minimax_m3_vl_text", {**SPARSE, "mlp_layer_types": ["sparse", "dense", "sparse"]}, "has dense blocks first"),
    ("minimax_m3_vl_text", {**SPARSE, "index_n_heads": 1}, "index_n_heads = 1, and llama.cpp has 2, the key heads"),
    ("minimax_m3_vl_text", {**SPARSE, "index_head_dim": 8}, "index_head_dim = 8, and llama.cpp turns 16 values"),
    ("minimax_m3_vl_text", {**SPARSE, "shared_intermediate_size": 48}, "has a multiple of the 32 of an expert"),
    ("minimax_m3_vl_text", {**SPARSE, "swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
    ("bamba", {"attn_layer_indices": []}, "blocks of linear_attention alone, and llama.cpp ends"),
    ("bamba", {"mamba_expand": 4, "mamba_d_head": 32}, "mamba_expand = 4; llama.cpp computes 2"),
    ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
    ("mimo_v2_flash", {**WINDOWED, "layer_types": [FULL] * 3}, "layer_types = .*, and llama.cpp ends so"),
    ("mimo_v2_flash", {**WINDOWED, "routed_scaling_factor": 2.0}, "routed_scaling_factor = 2.0"),
    ("mimo_v2_flash", {**WINDOWED, "attention_value_scale": 0.0}, "attention_value_scale = 0, and llama.cpp has none"),
    (
        "mimo_v2_flash",
        {"rope_parameters": {FULL: {**PLAIN, "partial_rotary_factor": 0.5}, SLIDE: PLAIN}},
        r"partial_rotary_factor = \[0.5, None\], and llama.cpp has one for all",
    ),
    ("mimo_v2_flash", {**WINDOWED, "num_key_value_heads": 4}, "4 query heads and 8 key heads"),
    ("laguna", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types = .*, and llama.cpp has dense"),
    ("laguna", {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping = 3.0"),
    ("laguna", {"num_attention_heads_per_layer": [8, 7, 8]}, r"\[8, 7, 8\] query heads and 2 key heads"),
    (
        "laguna",
        {"rope_parameters": {FULL: PLAIN, SLIDE: {**PLAIN, "partial_rotary_factor": 0.07}}},
        "1 values of a head that turn in blocks with a window",
    ),
    ("minicpm3", {"q_lora_rank": None}, "q_lora_rank = None, and llama.cpp has a rank"),
    ("minicpm3", {"mlp_bias": True}, "mlp_bias = True"),
    (
        "minicpm3",
        {
            "rope_parameters": {
                **PLAIN,
                "rope_type": "longrope",
                "original_max_position_embeddings": 128,
                "factor": 2.0,
                "mscale_all_dim": 1.0,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
            }
        },
        "mscale_all_dim = 1.0, and llama.cpp has none",
    ),
    ("granite_swa", {"layer_rope_theta": [1e4, 5e5, 0]}, "layer_rope_theta = .*, and llama.cpp has"),
    ("granite_swa", {"layer_types": [FULL] * 3}, "layer_types = .*, and llama.cpp ends so"),
    ("granitemoe_swa", {"attention_bias": True}, "attention_bias = True"),
    ("mellum", {"layer_types": [SLIDE, FULL, SLIDE]}, "rope_theta = .*, and llama.cpp has one"),
    ("mellum", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, "experts in every block"),
    ("cohere2_moe", {"mlp_layer_types": ["sparse", "dense", "sparse"], "prefix_dense_intermediate_size": 96}, "first"),
    ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}, "strategy = 'sum'"),
    (
        "cohere2_moe",
        {**COHERE, "prefix_dense_sliding_window_pattern": 2},
        "prefix_dense_sliding_window_pattern = 2, and llama.cpp rotates",
    ),
]

WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
# Types of a file of wide models; what a block has of its own decides some of them.
IDENTICAL = [
    ("bamba", "Q2_K", {"hidden_size": 256, "mamba_d_head": 64, "num_key_value_heads": 1}),
    ("bamba", "Q4_K_M", {"hidden_size": 256, "mamba_d_head": 64, "num_key_value_heads": 1}),
    ("mimo_v2_flash", "Q4_K_M", {**WINDOWED, **WIDE}),
    ("mimo_v2_flash", "Q2_K", {**WINDOWED, **WIDE, "num_attention_heads": 8, "layer_types": [SLIDE, FULL, SLIDE]}),
    ("laguna", "Q4_K_M", {**WIDE, "layer_types": [FULL, SLIDE, SLIDE], "num_attention_heads_per_layer": [4, 8, 4]}),
    ("laguna", "Q2_K", {**WIDE, "layer_types": [FULL, SLIDE, SLIDE], "num_attention_heads_per_layer": [4, 8, 4]}),
    ("gemma4_unified_text", "Q4_K_M", {"hidden_size": 256, "global_head_dim": 32}),
    (
        "minimax_m3_vl_text",
        "Q4_K_M",
        {**SPARSE, **WIDE, "dense_intermediate_size": 256, "shared_intermediate_size": 256},
    ),
    ("minicpm3", "Q4_K_M", {"hidden_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "v_head_dim": 64}),
    ("minicpm3", "Q2_K", {"hidden_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "v_head_dim": 64}),
]


def changed(monkeypatch, kind, changes):
    """The name of such a tiny model."""
    name = f"{kind}, {changes}"
    found = Tiny(CONFIG_MAPPING[kind].__name__, 0, settings_of(kind))
    monkeypatch.setitem(ARCHITECTURES, name, replace(found, for_gguf=changes))
    return name


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_with_windows_and_ropes_of_their_own(monkeypatch, variant, made):  # noqa: F811
    name = changed(monkeypatch, *VARIANTS[variant])
    plain.test_llama_cpp_computes_what_transformers_computes(name, made)
    plain.test_file_reads_back_as_the_source(name, made)


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED)
def test_blocks_that_llama_cpp_has_otherwise_are_refused(tmp_path, monkeypatch, kind, changes, reason):
    folder = save_architecture(tmp_path / "model", changed(monkeypatch, kind, changes), changes=changes)
    with pytest.raises(UnsupportedError, match=reason):
        plain.job_for(folder, "F16", tmp_path / "out").check()


@pytest.mark.parametrize(("kind", "bits", "changes"), IDENTICAL)
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_equal_llama_cpp_s(tmp_path, monkeypatch, kind, bits, changes, weighted):
    name = changed(monkeypatch, kind, {})
    plain.test_bytes_equal_llama_cpp(tmp_path, name, bits, changes, weighted)


# 3 of 7 blocks of 16 tokens, the own one among them.
INDEXED = {**SPARSE, "index_block_size": 16, "index_topk_blocks": 3, "index_local_blocks": 1}


@pytest.mark.parametrize("turning", [1.0, 0.5])
def test_tokens_attend_to_the_blocks_that_score_best(tmp_path, monkeypatch, turning):
    """llama.cpp has that with flash attention alone, as a note says."""
    rope = {"rope_parameters": {**PLAIN, "partial_rotary_factor": turning}}
    name = changed(monkeypatch, "minimax_m3_vl_text", {**INDEXED, **rope})
    folder = save_architecture(
        tmp_path / "model", name, dtype=plain.torch.float32, changes=ARCHITECTURES[name].for_gguf
    )
    ids = plain.torch.randint(2, plain.VOCABULARY, (100,), generator=plain.torch.Generator().manual_seed(0)).tolist()
    trial = plain.job_for(folder, "F32", tmp_path / "out")
    assert any("with flash attention on (-fa on)" in note for note in trial.check().checked.notes)
    file, theirs = plain.written(trial), plain.logits_of_transformers(folder, ids)
    away = [
        float((plain.logits_of_llama_cpp(file, ids, flash_attn=fast) - theirs).abs().max() / theirs.abs().max())
        for fast in (True, False)
    ]
    assert away[0] < plain.LIMIT, away
    assert away[1] > 0.05, away
