"""A tiny random checkpoint of every architecture that is promised; tiny_more.py has further ones, by model type."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny_llama import VOCABULARY, save_tokenizer
from tiny_more import MORE, settings_of
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantkit.numerics.matmul import use_products

HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 64, 128, 3, 4, 128
SLIDING, FULL = "sliding_attention", "full_attention"
NAMES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
GROUPED = {**NAMES, "num_key_value_heads": 2}
OLD_NAMES = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4}
FEW = {"num_experts": 4, "moe_intermediate_size": 32}
SHARED = {**FEW, "shared_expert_intermediate_size": 96}
# Latent attention, experts in groups beside a shared one behind a dense first block, and a gated delta rule.
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32}
GROUPS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", FULL, "linear_attention"],
}  # fmt: skip
MIXERS = ["linear_attention", FULL]
NEMOTRON = {
    **GROUPED, "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "chunk_size": 16,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SECTIONS = {**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
# Inputs of each block that depend on the text, and keys and values that the last two blocks take from the first two.
PER_LAYER = {
    **GROUPED, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY, "head_dim": 16, "sliding_window": 16,
    "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """One architecture: its configuration's class, settings, and the linear layers of a block that are quantized
    (the mean where blocks differ).

    `not_gguf` is what the refusal to make a GGUF file of it says, where llama.cpp cannot compute it; `for_gguf` are
    other settings, those that llama.cpp has.
    """

    config: str
    linears: float
    settings: dict[str, Any] = field(default_factory=dict)
    not_gguf: str = ""
    for_gguf: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self):
        return str(getattr(transformers, self.config).model_type)


def tiny(config, linears, *common, not_gguf="", for_gguf=None, **own):
    """A row: settings that others have, too, and its own ones."""
    settings = {name: value for part in (*common, own) for name, value in part.items()}
    return Tiny(config, linears, settings, not_gguf, for_gguf or {})


ARCHITECTURES = {
    "llama": tiny("LlamaConfig", 7, GROUPED, pad_token_id=VOCABULARY - 1),
    "llama, tied": tiny("LlamaConfig", 7, GROUPED, tie_word_embeddings=True, attention_bias=True),
    "mistral": tiny("MistralConfig", 7, GROUPED, sliding_window=16),
    "qwen2": tiny("Qwen2Config", 7, GROUPED, use_sliding_window=False),
    "qwen3": tiny("Qwen3Config", 7, GROUPED, head_dim=32),
    "gemma2": tiny("Gemma2Config", 7, GROUPED, head_dim=16, query_pre_attn_scalar=16, sliding_window=16),
    "gemma3": tiny(
        "Gemma3TextConfig", 7, GROUPED, head_dim=32, query_pre_attn_scalar=32, sliding_window=16,
        layer_types=[SLIDING, FULL, SLIDING],
    ),
    "phi": tiny("PhiConfig", 6, NAMES),
    "phi3": tiny("Phi3Config", 4, GROUPED, pad_token_id=VOCABULARY - 1),
    "phi3, long": tiny(
        "Phi3Config", 4, GROUPED, pad_token_id=VOCABULARY - 1, original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64, "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 4.0, 6.0, 9.0],
        },
    ),
    "starcoder2": tiny("Starcoder2Config", 6, GROUPED),
    "olmo2": tiny("Olmo2Config", 7, GROUPED, pad_token_id=VOCABULARY - 1),
    "gpt2": tiny("GPT2Config", 4, OLD_NAMES),
    "gpt_neox": tiny("GPTNeoXConfig", 4, NAMES),
    "gpt_neox, one after the other": tiny("GPTNeoXConfig", 4, NAMES, use_parallel_residual=False),
    "gpt_neox, tied": tiny("GPTNeoXConfig", 4, NAMES, tie_word_embeddings=True),
    "falcon, one key-value head": tiny("FalconConfig", 4, NAMES),
    "falcon, grouped": tiny("FalconConfig", 4, NAMES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon, one norm": tiny(
        "FalconConfig", 4, NAMES, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
    ),
    "falcon, alibi": tiny(
        "FalconConfig", 4, NAMES, alibi=True, multi_query=False, parallel_attn=False, bias=True,
        not_gguf="alibi = True, but llama.cpp has False",
    ),
    "mpt": tiny("MptConfig", 4, d_model=HIDDEN, n_layers=LAYERS, n_heads=HEADS, max_seq_len=POSITIONS),
    "opt": tiny("OPTConfig", 6, NAMES, ffn_dim=INNER, word_embed_proj_dim=32),
    "opt, norms behind": tiny("OPTConfig", 6, NAMES, ffn_dim=INNER, do_layer_norm_before=False),
    "gptj": tiny("GPTJConfig", 6, OLD_NAMES, rotary_dim=8),
    "mixtral": tiny("MixtralConfig", 16, EXPERTS, LOCAL),
    "qwen2_moe": tiny("Qwen2MoeConfig", 19, EXPERTS, SHARED),
    "qwen2_moe, last block dense": tiny(
        "Qwen2MoeConfig", 15, EXPERTS, SHARED, mlp_only_layers=[2], not_gguf=r"mlp_only_layers = \[2\]",
    ),
    "qwen3_moe": tiny("Qwen3MoeConfig", 16, EXPERTS, FEW, norm_topk_prob=True),
    "qwen3_moe, first block dense": tiny(
        "Qwen3MoeConfig", 13, EXPERTS, FEW, mlp_only_layers=[0], norm_topk_prob=True,
        not_gguf=r"mlp_only_layers = \[0\]",
    ),
    "olmoe": tiny("OlmoeConfig", 16, EXPERTS, num_experts=4, num_key_value_heads=HEADS),
    "gemma": tiny("GemmaConfig", 7, GROUPED, head_dim=32),
    "cohere": tiny("CohereConfig", 7, GROUPED, logit_scale=2.0),
    "cohere2": tiny("Cohere2Config", 7, GROUPED, sliding_window=16, logit_scale=2.0),
    "granite": tiny(
        "GraniteConfig", 7, GROUPED, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.25,
        logits_scaling=2.0,
    ),
    "smollm3": tiny("SmolLM3Config", 7, GROUPED, no_rope_layers=[1, 1, 1], pad_token_id=0),
    "stablelm": tiny("StableLmConfig", 7, GROUPED, use_qkv_bias=True),
    "stablelm, side by side": tiny("StableLmConfig", 7, GROUPED, use_parallel_residual=True),
    "olmo": tiny("OlmoConfig", 7, GROUPED, clip_qkv=0.5),
    "olmo3": tiny(
        "Olmo3Config", 7, GROUPED, pad_token_id=0, sliding_window=16,
        for_gguf={"layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": {FULL: YARN, SLIDING: PLAIN}},
    ),
    "glm4": tiny("Glm4Config", 6, GROUPED, head_dim=16, attention_bias=True, pad_token_id=0),
    "exaone4": tiny("Exaone4Config", 7, GROUPED, sliding_window=None, layer_types=[FULL] * LAYERS),
    "nemotron": tiny("NemotronConfig", 6, GROUPED, head_dim=16),
    "seed_oss": tiny("SeedOssConfig", 7, GROUPED, head_dim=32, pad_token_id=0),
    "ernie4_5": tiny("Ernie4_5Config", 7, GROUPED, head_dim=32, pad_token_id=0),
    "hunyuan_v1_dense": tiny("HunYuanDenseV1Config", 7, GROUPED, head_dim=16),
    "bloom": tiny("BloomConfig", 4, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS),
    "glm": tiny("GlmConfig", 6, GROUPED, head_dim=16, pad_token_id=0),
    "apertus": tiny("ApertusConfig", 6, GROUPED),
    "arcee": tiny("ArceeConfig", 6, GROUPED),
    "helium": tiny("HeliumConfig", 7, GROUPED, head_dim=16, pad_token_id=0),
    "ministral": tiny("MinistralConfig", 7, GROUPED, head_dim=16, sliding_window=16),
    "deepseek_v2": tiny(
        "DeepseekV2Config", 16, EXPERTS, LATENT, GROUPS, num_key_value_heads=4, topk_method="group_limited_greedy",
        for_gguf={"topk_method": "greedy"},  # which looks at no groups,
    ),
    "deepseek_v3": tiny("DeepseekV3Config", 16, EXPERTS, LATENT, GROUPS, num_key_value_heads=4),
    "phimoe": tiny("PhimoeConfig", 16, EXPERTS, LOCAL, lm_head_bias=True, attention_bias=True),
    "granitemoe": tiny(
        "GraniteMoeConfig", 16, EXPERTS, LOCAL, embedding_multiplier=3.0, residual_multiplier=0.5,
        attention_multiplier=0.25,
    ),
    "llama4": tiny(
        "Llama4TextConfig", 11, EXPERTS, LOCAL, intermediate_size=32, intermediate_size_mlp=128, head_dim=16,
        interleave_moe_layer_step=2, no_rope_layers=[1, 0, 1], attention_chunk_size=32, pad_token_id=0,
        num_experts_per_tok=1,
        for_gguf={
            "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192,
            "layer_types": ["chunked_attention"] * 3 + [FULL], "moe_layers": [1, 3],
        },
    ),
    "gpt_oss": tiny(
        "GptOssConfig", 16, EXPERTS, LOCAL, intermediate_size=32, head_dim=16, sliding_window=16,
        layer_types=[SLIDING, FULL, SLIDING], for_gguf={"rope_parameters": YARN},
    ),
    "qwen3_next": tiny("Qwen3NextConfig", 55 / LAYERS, EXPERTS, DELTA, SHARED, head_dim=16),
    "lfm2": tiny(
        "Lfm2Config", 17 / LAYERS, GROUPED, block_auto_adjust_ff_dim=False, layer_types=["conv", FULL, "conv"],
    ),
    "glm4_moe": tiny("Glm4MoeConfig", 15, EXPERTS, GROUPS, head_dim=16, pad_token_id=0),
    "lfm2_moe": tiny(
        "Lfm2MoeConfig", 35 / LAYERS, EXPERTS, FEW, num_dense_layers=1, layer_types=["conv", FULL, "conv"],
    ),
    "flex_olmo": tiny("FlexOlmoConfig", 16, EXPERTS, num_experts=4, pad_token_id=0),
    "dots1": tiny("Dots1Config", 15, EXPERTS, GROUPS, head_dim=16, for_gguf={"num_key_value_heads": HEADS}),
    "hunyuan_v1_moe": tiny("HunYuanMoEV1Config", 19, EXPERTS, num_experts=4, moe_topk=2, head_dim=16),
    "qwen3_5": tiny(
        "Qwen3_5TextConfig", 23 / LAYERS, GROUPED, DELTA, head_dim=16, for_gguf={"rope_parameters": SECTIONS},
    ),
    "qwen3_5_moe": tiny(
        "Qwen3_5MoeTextConfig", 59 / LAYERS, EXPERTS, DELTA, SHARED, head_dim=16,
        for_gguf={"rope_parameters": SECTIONS},
    ),
    "glm4_moe_lite": tiny(
        "Glm4MoeLiteConfig", 16, EXPERTS, LATENT, GROUPS, num_key_value_heads=4, pad_token_id=0,
        for_gguf={"rms_norm_eps": 1e-6},
    ),
    "ministral3": tiny(
        "Ministral3Config", 7, GROUPED, head_dim=16, pad_token_id=0,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    ),
    "minimax_m2": tiny("MiniMaxM2Config", 16, EXPERTS, LOCAL, intermediate_size=32, head_dim=16),
    "ernie4_5_moe": tiny(
        "Ernie4_5_MoeConfig", 15, GROUPED, moe_num_experts=4, moe_k=2, moe_intermediate_size=32,
        moe_num_shared_experts=1,
    ),
    "granitemoehybrid": tiny(
        "GraniteMoeHybridConfig", 50 / LAYERS, EXPERTS, LOCAL, shared_intermediate_size=96, mamba_n_heads=8,
        mamba_d_state=16, mamba_chunk_size=16, mamba_d_head=16, layer_types=["mamba", "attention", "mamba"],
    ),
    "solar_open": tiny("SolarOpenConfig", 19, EXPERTS, GROUPS, head_dim=16),
    "falcon_h1": tiny(
        "FalconH1Config", 9, GROUPED, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16,
        mamba_chunk_size=16, mamba_norm_before_gate=False, attention_in_multiplier=1.5, attention_out_multiplier=0.9,
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.7, key_multiplier=0.8, embedding_multiplier=1.7,
        lm_head_multiplier=0.6, mlp_multipliers=[0.9, 1.3], ssm_multipliers=[0.7, 1.2, 0.9, 1.1, 0.8],
    ),
    "jais2": tiny("Jais2Config", 6, GROUPED, head_dim=16),
    "exaone_moe": tiny(
        "ExaoneMoeConfig", 15, EXPERTS, FEW, sliding_window=16, layer_types=[SLIDING, FULL, SLIDING], pad_token_id=0,
        for_gguf={"layer_types": [SLIDING] * 3},
    ),
    "nemotron_h": tiny("NemotronHConfig", 8 / LAYERS, NEMOTRON, layers_block_type=[*MIXERS, "mlp"]),
    "nemotron_h, experts": tiny(
        "NemotronHConfig", 16 / LAYERS, EXPERTS, NEMOTRON, layers_block_type=[*MIXERS, "moe"], n_routed_experts=4,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=96,
    ),
    "gemma4": tiny(
        "Gemma4TextConfig", 32 / LAYERS, PER_LAYER, global_head_dim=32, use_double_wide_mlp=True,
    ),
    "gemma4, experts": tiny(
        "Gemma4TextConfig", 55 / LAYERS, GROUPED, FEW, layer_types=[SLIDING, FULL, FULL], hidden_size_per_layer_input=0,
        attention_k_eq_v=True, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, sliding_window=16,
        enable_moe_block=True, top_k_experts=2, pad_token_id=0,
    ),
    "gemma3n": tiny(
        "Gemma3nTextConfig", 40 / LAYERS, PER_LAYER, laurel_rank=32, intermediate_size=[INNER] * 4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        for_gguf={
            "num_kv_shared_layers": 0, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
            "intermediate_size": 1024, "activation_sparsity_pattern": [0.95] * 4,
        },
    ),
}  # fmt: skip


def tiny_of(name):
    """A row of `ARCHITECTURES`, or of a model type of `tiny_more.py`."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    return Tiny(CONFIG_MAPPING[name].__name__, MORE.get(name, 0) / LAYERS, settings_of(name))


def save_architecture(folder, name, dtype=torch.bfloat16, change=lambda _model: None, changes=None, **how):
    """Random weights and biases, norms far from one: what is folded wrongly must show.

    `changes` are other settings, `change` may change the model before it is saved; `how` goes to `save_pretrained`.
    """
    tiny = tiny_of(name)
    settings = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1} | tiny.settings | (changes or {})
    settings = deepcopy(settings)  # of ropes transformers changes what it is given
    config = getattr(transformers, tiny.config)(**settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.05)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        change(model)
    model.to(dtype).save_pretrained(folder, **how)
    save_tokenizer(folder)
    return folder


def whole_model(folder, dtype=torch.float32):
    """The model as transformers loads it; parameters in `dtype`, buffers in float32, experts one after the other.

    Linear layers multiply as quantkit's do, which test_matmul.py holds against float64.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(parameter.data.to(dtype), requires_grad=False))
    model.tie_weights()
    use_products(model)
    return model
