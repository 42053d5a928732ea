"""Architectures without mixture-of-experts layers: every block has the same tensors and one MLP."""

from __future__ import annotations

from typing import Any

from quantkit.formats.gguf.architectures.record import (
    ATTENTION,
    EMBEDDING,
    FULL,
    GELU,
    GRANITE_SCALES,
    HEAD_NORMS,
    LLAMA,
    LLAMA_ROPES,
    MLP,
    NO_BIAS,
    NORMS,
    OUTSIDE,
    QUERY_KEY_VALUE_BIASES,
    RMS,
    ROTARY,
    SILU,
    SLIDING,
    UNBIASED,
    UNBIASED_MLP,
    Architecture,
    Transform,
    biases,
    every_fourth,
    layer_norm,
    require,
    unless,
    weights,
    windows,
)
from quantkit.formats.gguf.shapes import CONTEXT, GROUPS, INNER, KEY_HEADS


def _falcon_groups(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _two_norms(config: Any, _block: int) -> bool:
    """Return whether a Falcon block has two input norms (transformers' FalconDecoderLayer in modeling_falcon.py)."""
    return bool((config.num_ln_in_parallel_attn or (2 if config.new_decoder_architecture else 1)) == 2)


def _both(*parts: str) -> tuple[str, ...]:
    return weights(*parts) + biases(*parts)


_FUSED = ("query_key_value", "dense")
_FUSED_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_GPT2_PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
_PHI_PARTS = (*ATTENTION[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2", "input_layernorm")
_GATE_AND_UP = ("mlp.gate_up_proj", "mlp.down_proj")
_TWO_INNER = {"ffn_up": ("two inner", "hidden")}
_WIDE_NORMS = {"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)}
_WITH_BIAS = (*OUTSIDE, "model.norm.bias")
_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")

_MISTRAL = Architecture("mistral", "llama", LLAMA, transforms=ROTARY, keys=RMS, rope_types=LLAMA_ROPES)
_LLAMA = _MISTRAL.like("llama", per_block=(("attention_bias", biases(*ATTENTION)), ("mlp_bias", biases(*MLP))))
_GPT2 = Architecture(
    "gpt2", "gpt2", _both(*_GPT2_PARTS), blocks="transformer.h", rope_types=(),
    outside=(*weights("transformer.wte", "transformer.wpe", "transformer.ln_f"), "transformer.ln_f.bias"),
    keys=layer_norm("layer_norm_epsilon") | {INNER: lambda config: config.n_inner or 4 * config.n_embd},
    required_config={"activation_function": GELU, "scale_attn_weights": True},
)  # fmt: skip
_OLMO2 = Architecture(
    "olmo2", "olmo2", weights(*ATTENTION, *HEAD_NORMS, *MLP, *_BEHIND), head_always=True, keys=RMS,
    required_config=UNBIASED, shapes=_WIDE_NORMS,
)  # fmt: skip
_COHERE = Architecture(
    "cohere", "command-r", weights(*ATTENTION, *MLP, "input_layernorm"), rope_types=("default",),
    keys=layer_norm("layer_norm_eps") | {"logit_scale": "logit_scale"},
    required_config=UNBIASED,
)  # fmt: skip
_GRANITE = Architecture(
    "granite", "granite", LLAMA, transforms=ROTARY, keys=RMS | GRANITE_SCALES, required_config=UNBIASED_MLP
)
_GLM = Architecture(
    "glm", "chatglm", weights(*ATTENTION, *_GATE_AND_UP, *NORMS), head_always=True, keys=RMS, partial_rotary=True,
    per_block=(("attention_bias", QUERY_KEY_VALUE_BIASES),), rope_types=("default",), shapes=_TWO_INNER,
)  # fmt: skip
_ARCEE = Architecture(
    "arcee", "arcee", weights(*ATTENTION, *MLP[1:], *NORMS), transforms=ROTARY, keys=RMS,
    required_config={**UNBIASED_MLP, "hidden_act": "relu2"},
)  # fmt: skip

ROWS = (
    _LLAMA,
    _LLAMA.like("iquestcoder"),
    _LLAMA.like("internlm3", rope_types=(*LLAMA_ROPES, "dynamic")),
    _MISTRAL,
    _MISTRAL.like("ministral"),
    _MISTRAL.like("cwm"),
    _MISTRAL.like(
        "ministral3", "mistral3", rope_types=("yarn",),
        keys={"attention.temperature_scale": lambda config: config.rope_parameters["llama_4_scaling_beta"]},
    ),
    Architecture("qwen2", "qwen2", LLAMA + QUERY_KEY_VALUE_BIASES, keys=RMS),
    Architecture(
        "qwen3", "qwen3", weights(*ATTENTION, *HEAD_NORMS, *MLP, *NORMS), keys=RMS, required_config=UNBIASED
    ),
    Architecture(
        "phi", "phi2", _both(*_PHI_PARTS),
        outside=(EMBEDDING, "model.final_layernorm.weight", "model.final_layernorm.bias", "lm_head.bias"),
        head_always=True, keys=layer_norm("layer_norm_eps"), partial_rotary=True, rope_types=("default",),
        required_config={"hidden_act": GELU, "qk_layernorm": False},
    ),
    Architecture(
        "phi3", "phi3", weights("self_attn.qkv_proj", "self_attn.o_proj", *_GATE_AND_UP, *NORMS),
        keys=RMS | {"attention.sliding_window": lambda config: config.sliding_window or 0},
        partial_rotary=True, rope_types=("default", "longrope"), shapes=_TWO_INNER,
    ),
    _GPT2.like(
        "gpt2", transforms=dict.fromkeys(_GPT2_PARTS[:4], Transform(transposed=True)),
        required_config={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
    ),
    _GPT2.like(
        "gpt_bigcode", "starcoder", keys={KEY_HEADS: 1}, required_config={"multi_query": True}
    ),
    Architecture(
        "gpt_neox", "gptneox", _both(*(f"attention.{part}" for part in _FUSED), *_FUSED_MLP, *NORMS),
        blocks="gpt_neox.layers", head="embed_out.weight", head_always=True,
        outside=("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"),
        transforms={"attention.query_key_value": Transform(GROUPS)},
        keys=layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
        required_config={"hidden_act": GELU, "attention_bias": True}, partial_rotary=True,
    ),
    Architecture(
        "falcon", "falcon", weights(*(f"self_attention.{part}" for part in _FUSED), *_FUSED_MLP),
        per_block=((unless(_two_norms), _both("input_layernorm")), (_two_norms, _both("ln_attn", "ln_mlp"))),
        blocks="transformer.h", transforms={"self_attention.query_key_value": Transform(GROUPS)},
        outside=("transformer.word_embeddings.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"),
        keys=layer_norm("layer_norm_epsilon") | {
            INNER: "ffn_hidden_size", KEY_HEADS: _falcon_groups, "tensor_data_layout": lambda _config: "jploski",
        },
        required_config={"activation": GELU, "alibi": False, "bias": False}, rope_types=("default",),
        checks=(require(
            lambda config: config.parallel_attn or config.new_decoder_architecture,
            "parallel_attn = False, but llama.cpp has parallel blocks",
        ),),
    ),
    Architecture(
        "mpt", "mpt", weights("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2"),
        blocks="transformer.blocks", outside=("transformer.wte.weight", "transformer.norm_f.weight"), rope_types=(),
        keys=layer_norm("layer_norm_epsilon") | {
            INNER: lambda config: 4 * config.d_model, CONTEXT: "max_seq_len",
            "attention.clamp_kqv": lambda config: config.attn_config.clip_qkv,
            "attention.max_alibi_bias": lambda config: float(config.attn_config.alibi_bias_max),
        },
        required_config={
            "attn_config.qk_ln": False, "attn_config.alibi": True, "attn_config.softmax_scale": None,
            "attn_config.prefix_lm": False,
        },
    ),
    Architecture(
        "starcoder2", "starcoder2", _both(*ATTENTION, "mlp.c_fc", "mlp.c_proj", *NORMS), outside=_WITH_BIAS,
        keys=layer_norm("norm_epsilon"), required_config={"hidden_act": GELU, "use_bias": True},
    ),
    _OLMO2,
    _OLMO2.like("olmo3", keys=windows(None), follows_window=True, rope_types=("default", "yarn")),
    _COHERE.like("cohere", required_config={"use_qk_norm": False}),
    _COHERE.like(
        "cohere2", "cohere2", keys={"attention.sliding_window": "sliding_window"}, follows_window=True,
        required_config={"layer_types": every_fourth(FULL, SLIDING)},
    ),
    _GRANITE,
    _GRANITE.like(
        "hyperclovax", keys={"logit_scale": lambda config: 1 / config.logits_scaling},  # llama.cpp divides
        required_config={"use_post_norm": False},
    ),
    Architecture(
        "smollm3", "smollm3", LLAMA, transforms=ROTARY, keys=RMS,
        required_config={
            **UNBIASED_MLP, "no_rope_layers": every_fourth(0, 1), "layer_types": every_fourth(FULL, FULL)
        },
    ),
    Architecture(
        "stablelm", "stablelm", weights(*ATTENTION, *MLP) + _both("input_layernorm"), outside=_WITH_BIAS,
        per_block=(
            ("use_qkv_bias", QUERY_KEY_VALUE_BIASES),
            (lambda config, _block: not config.use_parallel_residual, _both("post_attention_layernorm")),
        ),
        head_always=True, partial_rotary=True, rope_types=("default",),
        keys=layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
        required_config={"hidden_act": SILU, "qk_layernorm": False},
    ),
    Architecture(
        "olmo", "olmo", weights(*ATTENTION, *MLP), outside=(EMBEDDING,), transforms=ROTARY, required_config=UNBIASED,
        keys={"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": "clip_qkv"},
    ),
    _GLM.like(
        "glm", required_config={"hidden_size": lambda config: config.num_attention_heads * config.head_dim}
    ),
    _GLM.like(
        "glm4", "glm4",
        parts=weights(*ATTENTION, *_GATE_AND_UP, *NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    Architecture(
        "apertus", "apertus",
        weights(*ATTENTION, *HEAD_NORMS, *MLP[1:], "attention_layernorm", "feedforward_layernorm"), head_always=True,
        keys=RMS, required_config={"hidden_act": "xielu", **NO_BIAS}, rope_types=("default", "llama3"),
        scalars={
            f"mlp.act_fn.{name}": (f"xielu.{name}", shape)
            for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ()))
        },
    ),
    Architecture(
        "exaone4", "exaone4", weights(*ATTENTION, *HEAD_NORMS, *MLP, *_BEHIND), keys=RMS,
        rope_types=("default", "llama3"), required_config={"hidden_act": SILU, "sliding_window": None},
        checks=(require(
            lambda config: config.num_hidden_layers != 64, "64 blocks, for which llama.cpp assumes windows",
        ),),
    ),
    Architecture(
        "seed_oss", "seed_oss", LLAMA, per_block=(("attention_bias", QUERY_KEY_VALUE_BIASES),), keys=RMS,
        required_config={"hidden_act": SILU, "attention_out_bias": False, "mlp_bias": False},
    ),
    Architecture(  # as llama, except that the rope turns neighbouring values in pairs
        "helium", "ernie4_5", LLAMA, keys=RMS, rope_types=("default",), required_config=UNBIASED_MLP
    ),
    Architecture(
        "ernie4_5", "ernie4_5", LLAMA, keys=RMS, rope_types=("default",),
        required_config={"hidden_act": SILU, "use_bias": False},
    ),
    Architecture(
        "hunyuan_v1_dense", "hunyuan-dense",
        weights(*ATTENTION, "self_attn.query_layernorm", "self_attn.key_layernorm", *MLP, *NORMS), keys=RMS,
        rope_types=("default", "dynamic"), required_config=UNBIASED,
    ),
    Architecture(
        "bloom", "bloom", _both(*(f"self_attention.{part}" for part in _FUSED), *_FUSED_MLP, *NORMS),
        blocks="transformer.h", rope_types=(), transforms={"self_attention.query_key_value": Transform(GROUPS)},
        outside=(
            "transformer.word_embeddings.weight",
            *(_both("transformer.word_embeddings_layernorm", "transformer.ln_f")),
        ),
        keys=layer_norm("layer_norm_epsilon") | {
            INNER: lambda config: 4 * config.hidden_size, CONTEXT: 2048,
        },
        required_config={"apply_residual_connection_post_layernorm": False},
    ),
    _ARCEE,
    Architecture(
        "nemotron", "nemotron", weights(*ATTENTION, *MLP[1:]) + _both(*NORMS), norm_shift=1.0, outside=_WITH_BIAS,
        head_always=True, keys=layer_norm("norm_eps"), partial_rotary=True, rope_types=("default",),
        required_config=_ARCEE.required_config,
    ),
    Architecture(
        "jais2", "jais2", _both(*ATTENTION, *MLP[1:], *NORMS), outside=_WITH_BIAS, keys=layer_norm("layer_norm_eps"),
        required_config={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    ),
)  # fmt: skip
