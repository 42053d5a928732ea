"""Architectures whose blocks are all alike and have one feed-forward layer."""

from __future__ import annotations

from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EMBEDDING,
    GELU,
    GRANITE_SCALES,
    HEAD_NORMS,
    LLAMA,
    LLAMA_ROPES,
    MLP,
    NO_BIAS,
    NORMS,
    OUTSIDE,
    RMS,
    ROTARY,
    SILU,
    Architecture,
    Setting,
    biases,
    every_fourth,
    layer_norm,
    weights,
    whole_heads,
    windows,
)  # fmt: skip


def _falcon_groups(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


_NEOX_PARTS = (
    "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", *NORMS
)  # fmt: skip
_BLOOM_PARTS = (
    "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", *NORMS
)  # fmt: skip
_GPT2_PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
_PHI_PARTS = (*ATTENTION[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2", "input_layernorm")
_STARCODER_PARTS = (*ATTENTION, "mlp.c_fc", "mlp.c_proj", *NORMS)
_STABLELM_BIASES: dict[str, Setting] = dict.fromkeys(biases(*ATTENTION[:3]), "use_qkv_bias")
_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
_FALCON_NORMS = ("input_layernorm",), ("ln_attn", "ln_mlp")

ROWS = (
    *(
        Architecture(
            model_type, "llama", LLAMA,
            optional=dict.fromkeys(biases(*ATTENTION), "attention_bias") | dict.fromkeys(biases(*MLP), "mlp_bias"),
            orders=ROTARY, keys=RMS, rope_types=rope_types,
        )
        for model_type, rope_types in (
            ("llama", LLAMA_ROPES), ("iquestcoder", LLAMA_ROPES), ("internlm3", (*LLAMA_ROPES, "dynamic"))
        )
    ),
    Architecture("mistral", "llama", LLAMA, orders=ROTARY, keys=RMS, rope_types=LLAMA_ROPES),
    Architecture("ministral", "llama", LLAMA, orders=ROTARY, keys=RMS, rope_types=LLAMA_ROPES),
    Architecture("cwm", "llama", LLAMA, orders=ROTARY, keys=RMS, rope_types=LLAMA_ROPES),
    Architecture(
        "ministral3", "mistral3", LLAMA, orders=ROTARY, rope_types=("yarn",),
        keys=RMS | {"attention.temperature_scale": lambda config: config.rope_parameters["llama_4_scaling_beta"]},
    ),
    Architecture("qwen2", "qwen2", LLAMA + biases(*ATTENTION[:3]), keys=RMS),
    Architecture(
        "qwen3", "qwen3", weights(*ATTENTION, *HEAD_NORMS, *MLP, *NORMS), keys=RMS,
        fixed={"hidden_act": SILU} | NO_BIAS,
    ),
    Architecture(
        "phi", "phi2", weights(*_PHI_PARTS) + biases(*_PHI_PARTS),
        outside=(EMBEDDING, "model.final_layernorm.weight", "model.final_layernorm.bias", "lm_head.bias"),
        head_always=True, keys=layer_norm("layer_norm_eps"), partial_rotary=True, rope_types=("default",),
        fixed={"hidden_act": GELU, "qk_layernorm": (False,)},
    ),
    Architecture(
        "phi3", "phi3",
        weights("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", *NORMS),
        keys=RMS | {"attention.sliding_window": lambda config: config.sliding_window or 0},
        partial_rotary=True, rope_types=("default", "longrope"), shapes={"ffn_up": ("two inner", "hidden")},
    ),
    Architecture(
        "gpt2", "gpt2", weights(*_GPT2_PARTS) + biases(*_GPT2_PARTS), blocks="transformer.h",
        outside=(*weights("transformer.wte", "transformer.wpe", "transformer.ln_f"), "transformer.ln_f.bias"),
        transposed=weights(*_GPT2_PARTS[:4]), rope_types=(), keys=layer_norm("layer_norm_epsilon"),
        fields={"inner": lambda config: config.n_inner or 4 * config.n_embd},
        fixed={
            "activation_function": GELU, "scale_attn_weights": (True,), "add_cross_attention": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    Architecture(
        "gpt_bigcode", "starcoder", weights(*_GPT2_PARTS) + biases(*_GPT2_PARTS), blocks="transformer.h",
        outside=(*weights("transformer.wte", "transformer.wpe", "transformer.ln_f"), "transformer.ln_f.bias"),
        rope_types=(), keys=layer_norm("layer_norm_epsilon"),
        fields={"inner": lambda config: config.n_inner or 4 * config.n_embd, "kv_heads": lambda _config: 1},
        fixed={"activation_function": GELU, "scale_attn_weights": (True,), "multi_query": (True,)},
    ),
    Architecture(
        "gpt_neox", "gptneox", weights(*_NEOX_PARTS) + biases(*_NEOX_PARTS), blocks="gpt_neox.layers",
        outside=("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"),
        head="embed_out.weight", head_always=True, orders={"attention.query_key_value": "thirds"},
        keys=layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
        fixed={"hidden_act": GELU, "attention_bias": (True,)}, partial_rotary=True,
    ),
    Architecture(
        "falcon", "falcon",
        weights(
            "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
        ),
        either=tuple(weights(*norms) + biases(*norms) for norms in _FALCON_NORMS), blocks="transformer.h",
        outside=("transformer.word_embeddings.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"),
        orders={"self_attention.query_key_value": "groups"},
        fields={"inner": "ffn_hidden_size", "kv_heads": _falcon_groups},
        keys=layer_norm("layer_norm_epsilon") | {"tensor_data_layout": lambda _config: "jploski"},
        fixed={"activation": GELU, "alibi": (False,), "bias": (False,)}, rope_types=("default",),
        checks=(
            lambda config: None if config.parallel_attn or config.new_decoder_architecture
            else "parallel_attn = False, and llama.cpp has parallel blocks",
        ),
    ),
    Architecture(
        "mpt", "mpt", weights("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2"),
        blocks="transformer.blocks", outside=("transformer.wte.weight", "transformer.norm_f.weight"),
        fields={"inner": lambda config: 4 * config.d_model, "context": "max_seq_len"}, rope_types=(),
        keys=layer_norm("layer_norm_epsilon") | {
            "attention.clamp_kqv": lambda config: config.attn_config.clip_qkv,
            "attention.max_alibi_bias": lambda config: float(config.attn_config.alibi_bias_max),
        },
        fixed={
            "attn_config.qk_ln": (False,), "attn_config.alibi": (True,), "attn_config.softmax_scale": (None,),
            "attn_config.prefix_lm": (False,),
        },
    ),
    Architecture(
        "starcoder2", "starcoder2", weights(*_STARCODER_PARTS) + biases(*_STARCODER_PARTS),
        outside=(*OUTSIDE, "model.norm.bias"), keys=layer_norm("norm_epsilon"),
        fixed={"hidden_act": GELU, "use_bias": (True,)},
    ),
    Architecture(
        "olmo2", "olmo2",
        weights(*ATTENTION, *HEAD_NORMS, *MLP, "post_attention_layernorm", "post_feedforward_layernorm"),
        head_always=True, keys=RMS, fixed={"hidden_act": SILU} | NO_BIAS,
        shapes={"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)},
    ),
    Architecture(
        "olmo3", "olmo2",
        weights(*ATTENTION, *HEAD_NORMS, *MLP, "post_attention_layernorm", "post_feedforward_layernorm"),
        head_always=True, keys=RMS | windows(None), fixed={"hidden_act": SILU} | NO_BIAS, follows_window=True,
        shapes={"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)}, rope_types=("default", "yarn"),
    ),
    Architecture(
        "cohere", "command-r", weights(*ATTENTION, *MLP, "input_layernorm"), rope_types=("default",),
        keys=layer_norm("layer_norm_eps") | {"logit_scale": "logit_scale"},
        fixed={"hidden_act": SILU, "use_qk_norm": (False,), **NO_BIAS},
    ),
    Architecture(
        "cohere2", "cohere2", weights(*ATTENTION, *MLP, "input_layernorm"), rope_types=("default",),
        keys=layer_norm("layer_norm_eps") | {
            "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window",
        },
        checks=(every_fourth("layer_types", "full_attention", "sliding_attention"),), follows_window=True,
        fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    Architecture(
        "granite", "granite", LLAMA, orders=ROTARY,
        keys=RMS | GRANITE_SCALES,
        fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS},
    ),
    Architecture(
        "hyperclovax", "granite", LLAMA, orders=ROTARY,
        keys=RMS | GRANITE_SCALES | {"logit_scale": lambda config: 1 / config.logits_scaling},  # llama.cpp divides
        fixed={"hidden_act": SILU, "mlp_bias": (False,), "use_post_norm": (False,), **NO_BIAS},
    ),
    Architecture(
        "smollm3", "smollm3", LLAMA, orders=ROTARY, keys=RMS,
        checks=(
            every_fourth("no_rope_layers", 0, 1),
            every_fourth("layer_types", "full_attention", "full_attention"),
        ),
        fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS},
    ),
    Architecture(
        "stablelm", "stablelm", weights(*ATTENTION, *MLP, "input_layernorm") + biases("input_layernorm"),
        optional=_STABLELM_BIASES | dict.fromkeys(
            (*weights(NORMS[1]), *biases(NORMS[1])), lambda config: not config.use_parallel_residual
        ),
        outside=(*OUTSIDE, "model.norm.bias"), head_always=True, partial_rotary=True, rope_types=("default",),
        keys=layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
        fixed={"hidden_act": SILU, "qk_layernorm": (False,)},
    ),
    Architecture(
        "olmo", "olmo", weights(*ATTENTION, *MLP), outside=(EMBEDDING,), orders=ROTARY,
        keys={"attention.layer_norm_epsilon": lambda _config: 1e-5, "attention.clamp_kqv": "clip_qkv"},
        fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    Architecture(
        "glm4", "glm4",
        weights(
            *ATTENTION, "mlp.gate_up_proj", "mlp.down_proj", *NORMS, "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
        optional=dict.fromkeys(biases(*ATTENTION[:3]), "attention_bias"), head_always=True, keys=RMS,
        partial_rotary=True, rope_types=("default",), shapes={"ffn_up": ("two inner", "hidden")},
    ),
    Architecture(
        "glm", "chatglm", weights(*ATTENTION, "mlp.gate_up_proj", "mlp.down_proj", *NORMS),
        optional=dict.fromkeys(biases(*ATTENTION[:3]), "attention_bias"), head_always=True, keys=RMS,
        partial_rotary=True, rope_types=("default",), shapes={"ffn_up": ("two inner", "hidden")},
        checks=(whole_heads,),
    ),
    Architecture(
        "apertus", "apertus",
        weights(*ATTENTION, *HEAD_NORMS, *MLP[1:], "attention_layernorm", "feedforward_layernorm"), head_always=True,
        keys=RMS, fixed={"hidden_act": ("xielu",), **NO_BIAS}, rope_types=("default", "llama3"),
        scalars={
            f"mlp.act_fn.{name}": (f"xielu.{name}", shape)
            for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ()))
        },
    ),
    Architecture(
        "exaone4", "exaone4", weights(*ATTENTION, *HEAD_NORMS, *MLP, *_BEHIND), keys=RMS,
        rope_types=("default", "llama3"), fixed={"hidden_act": SILU, "sliding_window": (None,)},
        checks=(
            lambda config: "64 blocks, for which llama.cpp has windows" if config.num_hidden_layers == 64 else None,
        ),
    ),
    Architecture(
        "nemotron", "nemotron", weights(*ATTENTION, *MLP[1:], *NORMS) + biases(*NORMS), norm_shift=1.0,
        outside=(*OUTSIDE, "model.norm.bias"), head_always=True, keys=layer_norm("norm_eps"),
        partial_rotary=True, rope_types=("default",),
        fixed={"hidden_act": ("relu2",), "mlp_bias": (False,), **NO_BIAS},
    ),
    Architecture(
        "seed_oss", "seed_oss", LLAMA,
        optional=dict.fromkeys(biases(*ATTENTION[:3]), "attention_bias"), keys=RMS,
        fixed={"hidden_act": SILU, "attention_out_bias": (False,), "mlp_bias": (False,)},
    ),
    Architecture(
        "ernie4_5", "ernie4_5", LLAMA, keys=RMS, rope_types=("default",),
        fixed={"hidden_act": SILU, "use_bias": (False,)},
    ),
    Architecture(  # as llama, but for the rope, which turns neighbouring values in pairs
        "helium", "ernie4_5", LLAMA, keys=RMS, rope_types=("default",),
        fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS},
    ),
    Architecture(
        "hunyuan_v1_dense", "hunyuan-dense",
        weights(*ATTENTION, "self_attn.query_layernorm", "self_attn.key_layernorm", *MLP, *NORMS), keys=RMS,
        rope_types=("default", "dynamic"), fixed={"hidden_act": SILU, **NO_BIAS},
    ),
    Architecture(
        "bloom", "bloom", weights(*_BLOOM_PARTS) + biases(*_BLOOM_PARTS), blocks="transformer.h",
        outside=(
            "transformer.word_embeddings.weight",
            *(f"transformer.{norm}.{kind}" for norm in ("word_embeddings_layernorm", "ln_f")
              for kind in ("weight", "bias")),
        ),
        orders={"self_attention.query_key_value": "thirds"}, rope_types=(), keys=layer_norm("layer_norm_epsilon"),
        fields={"inner": lambda config: 4 * config.hidden_size, "context": lambda _config: 2048},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
    ),
    Architecture(
        "arcee", "arcee", weights(*ATTENTION, *MLP[1:], *NORMS), orders=ROTARY, keys=RMS,
        fixed={"hidden_act": ("relu2",), "mlp_bias": (False,), **NO_BIAS},
    ),
    Architecture(
        "jais2", "jais2", weights(*ATTENTION, *MLP[1:], *NORMS) + biases(*ATTENTION, *MLP[1:], *NORMS),
        outside=(*OUTSIDE, "model.norm.bias"), keys=layer_norm("layer_norm_eps"),
        fixed={"hidden_act": ("relu2",), "attention_bias": (True,), "mlp_bias": (True,)},
    ),
)  # fmt: skip
