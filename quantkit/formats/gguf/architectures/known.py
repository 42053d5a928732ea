"""What GGUF files of each architecture hold: a row of `KNOWN` is an architecture.

Names of tensors in a file come from gguf's own name maps. What llama.cpp wants otherwise than transformers stores it is
told by `orders` (rows in another order), `transposed`, `norm_shift` and `experts` (stacked into one tensor); what its
code has fixed is in `fixed` and `checks`, so that a model that would load but compute something else is refused. Facts:
https://github.com/ggml-org/llama.cpp, conversion/ and src/models/.

Not here: OPT and GPT-J, which llama.cpp does not have; vision towers; what a checkpoint's own code computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Setting = str | Callable[[Any], Any]  # a field of the transformers configuration, or what is made of it
SILU = ("silu", "swish")
# ggml has one GELU, the approximation with tanh; the exact one differs by less than 5e-4.
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def _weights(*parts: str) -> tuple[str, ...]:
    return tuple(f"{part}.weight" for part in parts)


def _biases(*parts: str) -> tuple[str, ...]:
    return tuple(f"{part}.bias" for part in parts)


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
EMBEDDING = "model.embed_tokens.weight"
OUTSIDE = (EMBEDDING, "model.norm.weight")
ROTARY = {"self_attn.q_proj": "query halves", "self_attn.k_proj": "key halves"}
ROPES = ("default", "linear")


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers in llama.cpp.

    `name` is llama.cpp's. `blocks` is the dotted name of the list of blocks; `outside` are the tensors beside it, the
    embedding first, `parts` those that a block must have, `optional` those that it has where a setting says so,
    `either` groups of which one must be there. `shapes` are those that differ from `expected_shapes.SHAPES`. `keys` are
    keys of the file without the architecture's name in front.
    """

    model_type: str
    name: str
    parts: tuple[str, ...]
    optional: Mapping[str, Setting] = field(default_factory=dict)  # part -> its setting
    either: tuple[tuple[str, ...], ...] = ()
    blocks: str = "model.layers"
    outside: tuple[str, ...] = OUTSIDE
    head: str = "lm_head.weight"
    head_always: bool = False  # llama.cpp wants a head of its own also where it is tied
    orders: Mapping[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    norm_shift: float = 0.0
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)  # part, with {} for the expert -> its name in the file
    fields: Mapping[str, Setting] = field(default_factory=dict)  # instead of hyperparameters.FIELDS
    keys: Mapping[str, Setting] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {"hidden_act": SILU})
    checks: tuple[Callable[[Any], str | None], ...] = ()
    rope_types: tuple[str, ...] = ROPES  # none: no rotary embedding
    partial_rotary: bool = False
    follows_window: bool = False  # llama.cpp keeps to the sliding window

    @property
    def prefix(self) -> str:
        """What some checkpoints leave out in front of their names."""
        return self.blocks.partition(".")[0] + "."


# Of the proven architectures those that llama.cpp does not compute.
LACKING = ("flex_olmo", "gptj", "helium", "opt")
RMS: dict[str, Setting] = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
EXPERTS: dict[str, Setting] = {"expert_used_count": "num_experts_per_tok"}
NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}
EXPERT_KINDS = ("gate", "down", "up")


def _layer_norm(name: str) -> dict[str, Setting]:
    return {"attention.layer_norm_epsilon": name}


def _query_scale(config: Any) -> str | None:
    """llama.cpp scales queries by the head's size; in its 27B models by hidden size over heads."""
    large = config.num_hidden_layers == (46 if config.model_type == "gemma2" else 62)
    size = config.hidden_size // config.num_attention_heads if large else config.head_dim
    if config.query_pre_attn_scalar == size:
        return None
    return f"query_pre_attn_scalar = {config.query_pre_attn_scalar}, and llama.cpp has {size} for such a model"


def _windows(every: int) -> dict[str, Setting]:
    """Gemma's keys, of them which blocks have the window, where it is not all but every so many-th."""

    def pattern(config: Any) -> list[bool] | None:
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        return None if windows == [(i + 1) % every != 0 for i in range(len(windows))] else windows

    keys = {"final_logit_softcapping": "final_logit_softcapping", "attention.sliding_window": "sliding_window"}
    return {**keys, "attention.sliding_window_pattern": pattern}


def _experts(stem: str, *parts: str) -> dict[str, str]:
    """Gate, down and up of every expert, stacked into one tensor each."""
    return {f"{stem}.{p}.weight": f"ffn_{kind}_exps.weight" for kind, p in zip(EXPERT_KINDS, parts, strict=True)}


def _falcon_groups(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _every_fourth(name: str, fourth: Any, others: Any) -> Callable[[Any], str | None]:
    """llama.cpp has fixed for these models that every fourth block differs from the others in a setting."""

    def check(config: Any) -> str | None:
        given = list(getattr(config, name))[: config.num_hidden_layers]
        meant = [fourth if (index + 1) % 4 == 0 else others for index in range(config.num_hidden_layers)]
        return None if given == meant else f"{name} = {given}, and llama.cpp has {meant}"

    return check


_LLAMA_ROPES = (*ROPES, "llama3")
_LLAMA = (*_weights(*ATTENTION, *MLP, *NORMS),)
_NEOX_PARTS = (
    "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", *NORMS
)  # fmt: skip
_BLOOM_PARTS = (
    "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", *NORMS
)  # fmt: skip
_GPT2_PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
_PHI_PARTS = (*ATTENTION[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2", "input_layernorm")
_STARCODER_PARTS = (*ATTENTION, "mlp.c_fc", "mlp.c_proj", *NORMS)
_STABLELM_BIASES: dict[str, Setting] = dict.fromkeys(_biases(*ATTENTION[:3]), "use_qkv_bias")
_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
_FALCON_NORMS = ("input_layernorm",), ("ln_attn", "ln_mlp")

KNOWN = {
    row.model_type: row
    for row in (
        Architecture(
            "llama", "llama", _LLAMA,
            optional=dict.fromkeys(_biases(*ATTENTION), "attention_bias") | dict.fromkeys(_biases(*MLP), "mlp_bias"),
            orders=ROTARY, keys=RMS, rope_types=_LLAMA_ROPES,
        ),
        Architecture("mistral", "llama", _LLAMA, orders=ROTARY, keys=RMS, rope_types=_LLAMA_ROPES),
        Architecture(
            "mixtral", "llama", _weights(*ATTENTION, *NORMS, "block_sparse_moe.gate"), orders=ROTARY,
            experts=_experts("block_sparse_moe.experts.{}", "w1", "w2", "w3"),
            fields={"experts": "num_local_experts"}, keys=RMS | EXPERTS,
        ),
        Architecture("qwen2", "qwen2", _LLAMA + _biases(*ATTENTION[:3]), keys=RMS),
        Architecture(
            "qwen3", "qwen3", _weights(*ATTENTION, *HEAD_NORMS, *MLP, *NORMS), keys=RMS,
            fixed={"hidden_act": SILU} | NO_BIAS,
        ),
        Architecture(
            "qwen3_moe", "qwen3moe", _weights(*ATTENTION, *HEAD_NORMS, *NORMS, "mlp.gate"),
            experts=_experts("mlp.experts.{}", "gate_proj", "down_proj", "up_proj"),
            fields={"experts": "num_experts"},
            keys=RMS | EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
            fixed={
                "hidden_act": SILU, "norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],),
                **NO_BIAS,
            },
        ),
        Architecture(
            "gemma2", "gemma2", _weights(*ATTENTION, *MLP, *FOUR_NORMS), norm_shift=1.0, checks=(_query_scale,),
            keys=RMS | {"attn_logit_softcapping": "attn_logit_softcapping"} | _windows(2),
            fixed={"hidden_activation": ("gelu_pytorch_tanh",)} | NO_BIAS, follows_window=True, rope_types=("default",),
        ),
        Architecture(
            "gemma3_text", "gemma3", _weights(*ATTENTION, *HEAD_NORMS, *MLP, *FOUR_NORMS), norm_shift=1.0,
            checks=(_query_scale,), keys=RMS | _windows(6),
            fixed={
                "hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,),
                "use_bidirectional_attention": (False,), **NO_BIAS,
            },
            follows_window=True,
        ),
        Architecture(
            "phi", "phi2", _weights(*_PHI_PARTS) + _biases(*_PHI_PARTS),
            outside=(EMBEDDING, "model.final_layernorm.weight", "model.final_layernorm.bias", "lm_head.bias"),
            head_always=True, keys=_layer_norm("layer_norm_eps"), partial_rotary=True, rope_types=("default",),
            fixed={"hidden_act": GELU, "qk_layernorm": (False,)},
        ),
        Architecture(
            "phi3", "phi3",
            _weights("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", *NORMS),
            keys=RMS | {"attention.sliding_window": lambda config: config.sliding_window or 0},
            partial_rotary=True, rope_types=("default", "longrope"), shapes={"ffn_up": ("two inner", "hidden")},
        ),
        Architecture(
            "gpt2", "gpt2", _weights(*_GPT2_PARTS) + _biases(*_GPT2_PARTS), blocks="transformer.h",
            outside=(*_weights("transformer.wte", "transformer.wpe", "transformer.ln_f"), "transformer.ln_f.bias"),
            transposed=_weights(*_GPT2_PARTS[:4]), rope_types=(), keys=_layer_norm("layer_norm_epsilon"),
            fields={"inner": lambda config: config.n_inner or 4 * config.n_embd},
            fixed={
                "activation_function": GELU, "scale_attn_weights": (True,), "add_cross_attention": (False,),
                "scale_attn_by_inverse_layer_idx": (False,),
            },
        ),
        Architecture(
            "gpt_neox", "gptneox", _weights(*_NEOX_PARTS) + _biases(*_NEOX_PARTS), blocks="gpt_neox.layers",
            outside=("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"),
            head="embed_out.weight", head_always=True, orders={"attention.query_key_value": "thirds"},
            keys=_layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
            fixed={"hidden_act": GELU, "attention_bias": (True,)}, partial_rotary=True,
        ),
        Architecture(
            "falcon", "falcon",
            _weights(
                "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
            ),
            either=tuple(_weights(*norms) + _biases(*norms) for norms in _FALCON_NORMS), blocks="transformer.h",
            outside=("transformer.word_embeddings.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"),
            orders={"self_attention.query_key_value": "groups"},
            fields={"inner": "ffn_hidden_size", "kv_heads": _falcon_groups},
            keys=_layer_norm("layer_norm_epsilon") | {"tensor_data_layout": lambda _config: "jploski"},
            fixed={"activation": GELU, "alibi": (False,), "bias": (False,)}, rope_types=("default",),
            checks=(
                lambda config: None if config.parallel_attn or config.new_decoder_architecture
                else "parallel_attn = False, and llama.cpp has parallel blocks",
            ),
        ),
        Architecture(
            "mpt", "mpt", _weights("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", "norm_2"),
            blocks="transformer.blocks", outside=("transformer.wte.weight", "transformer.norm_f.weight"),
            fields={"inner": lambda config: 4 * config.d_model, "context": "max_seq_len"}, rope_types=(),
            keys=_layer_norm("layer_norm_epsilon") | {
                "attention.clamp_kqv": lambda config: config.attn_config.clip_qkv,
                "attention.max_alibi_bias": lambda config: float(config.attn_config.alibi_bias_max),
            },
            fixed={
                "attn_config.qk_ln": (False,), "attn_config.alibi": (True,), "attn_config.softmax_scale": (None,),
                "attn_config.prefix_lm": (False,),
            },
        ),
        Architecture(
            "starcoder2", "starcoder2", _weights(*_STARCODER_PARTS) + _biases(*_STARCODER_PARTS),
            outside=(*OUTSIDE, "model.norm.bias"), keys=_layer_norm("norm_epsilon"),
            fixed={"hidden_act": GELU, "use_bias": (True,)},
        ),
        Architecture(
            "olmo2", "olmo2",
            _weights(*ATTENTION, *HEAD_NORMS, *MLP, "post_attention_layernorm", "post_feedforward_layernorm"),
            head_always=True, keys=RMS, fixed={"hidden_act": SILU} | NO_BIAS,
            shapes={"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)},
        ),
        Architecture(
            "gemma", "gemma", _LLAMA, norm_shift=1.0, keys=RMS,
            fixed={"hidden_act": ("gelu_pytorch_tanh",)} | NO_BIAS, rope_types=("default",),
        ),
        Architecture(
            "cohere", "command-r", _weights(*ATTENTION, *MLP, "input_layernorm"), rope_types=("default",),
            keys=_layer_norm("layer_norm_eps") | {"logit_scale": "logit_scale"},
            fixed={"hidden_act": SILU, "use_qk_norm": (False,), **NO_BIAS},
        ),
        Architecture(
            "cohere2", "cohere2", _weights(*ATTENTION, *MLP, "input_layernorm"), rope_types=("default",),
            keys=_layer_norm("layer_norm_eps") | {
                "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window",
            },
            checks=(_every_fourth("layer_types", "full_attention", "sliding_attention"),), follows_window=True,
            fixed={"hidden_act": SILU, **NO_BIAS},
        ),
        Architecture(
            "granite", "granite", _LLAMA, orders=ROTARY,
            keys=RMS | {
                "residual_scale": "residual_multiplier", "embedding_scale": "embedding_multiplier",
                "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
            },
            fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS},
        ),
        Architecture(
            "smollm3", "smollm3", _LLAMA, orders=ROTARY, keys=RMS,
            checks=(
                _every_fourth("no_rope_layers", 0, 1),
                _every_fourth("layer_types", "full_attention", "full_attention"),
            ),
            fixed={"hidden_act": SILU, "mlp_bias": (False,), **NO_BIAS},
        ),
        Architecture(
            "stablelm", "stablelm", _weights(*ATTENTION, *MLP, "input_layernorm") + _biases("input_layernorm"),
            optional=_STABLELM_BIASES | dict.fromkeys(
                (*_weights(NORMS[1]), *_biases(NORMS[1])), lambda config: not config.use_parallel_residual
            ),
            outside=(*OUTSIDE, "model.norm.bias"), head_always=True, partial_rotary=True, rope_types=("default",),
            keys=_layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
            fixed={"hidden_act": SILU, "qk_layernorm": (False,)},
        ),
        Architecture(
            "olmo", "olmo", _weights(*ATTENTION, *MLP), outside=(EMBEDDING,), orders=ROTARY,
            keys={"attention.layer_norm_epsilon": lambda _config: 1e-5, "attention.clamp_kqv": "clip_qkv"},
            fixed={"hidden_act": SILU, **NO_BIAS},
        ),
        Architecture(
            "glm4", "glm4",
            _weights(
                *ATTENTION, "mlp.gate_up_proj", "mlp.down_proj", *NORMS, "post_self_attn_layernorm",
                "post_mlp_layernorm",
            ),
            optional=dict.fromkeys(_biases(*ATTENTION[:3]), "attention_bias"), head_always=True, keys=RMS,
            partial_rotary=True, rope_types=("default",), shapes={"ffn_up": ("two inner", "hidden")},
        ),
        Architecture(
            "exaone4", "exaone4", _weights(*ATTENTION, *HEAD_NORMS, *MLP, *_BEHIND), keys=RMS,
            rope_types=("default", "llama3"), fixed={"hidden_act": SILU, "sliding_window": (None,)},
            checks=(
                lambda config: "64 blocks, for which llama.cpp has windows" if config.num_hidden_layers == 64 else None,
            ),
        ),
        Architecture(
            "nemotron", "nemotron", _weights(*ATTENTION, *MLP[1:], *NORMS) + _biases(*NORMS), norm_shift=1.0,
            outside=(*OUTSIDE, "model.norm.bias"), head_always=True, keys=_layer_norm("norm_eps"),
            partial_rotary=True, rope_types=("default",),
            fixed={"hidden_act": ("relu2",), "mlp_bias": (False,), **NO_BIAS},
        ),
        Architecture(
            "seed_oss", "seed_oss", _LLAMA,
            optional=dict.fromkeys(_biases(*ATTENTION[:3]), "attention_bias"), keys=RMS,
            fixed={"hidden_act": SILU, "attention_out_bias": (False,), "mlp_bias": (False,)},
        ),
        Architecture(
            "ernie4_5", "ernie4_5", _LLAMA, keys=RMS, rope_types=("default",),
            fixed={"hidden_act": SILU, "use_bias": (False,)},
        ),
        Architecture(
            "hunyuan_v1_dense", "hunyuan-dense",
            _weights(*ATTENTION, "self_attn.query_layernorm", "self_attn.key_layernorm", *MLP, *NORMS), keys=RMS,
            rope_types=("default",), fixed={"hidden_act": SILU, **NO_BIAS},
        ),
        Architecture(
            "bloom", "bloom", _weights(*_BLOOM_PARTS) + _biases(*_BLOOM_PARTS), blocks="transformer.h",
            outside=(
                "transformer.word_embeddings.weight",
                *(f"transformer.{norm}.{kind}" for norm in ("word_embeddings_layernorm", "ln_f")
                  for kind in ("weight", "bias")),
            ),
            orders={"self_attention.query_key_value": "thirds"}, rope_types=(), keys=_layer_norm("layer_norm_epsilon"),
            fields={"inner": lambda config: 4 * config.hidden_size, "context": lambda _config: 2048},
            fixed={"apply_residual_connection_post_layernorm": (False,)},
        ),
        Architecture(
            "olmoe", "olmoe", _weights(*ATTENTION, *HEAD_NORMS, *NORMS, "mlp.gate"),
            experts=_experts("mlp.experts.{}", "gate_proj", "down_proj", "up_proj"), fields={"experts": "num_experts"},
            head_always=True, keys=RMS | EXPERTS, rope_types=("default",),
            shapes={"attn_q_norm": ("queries",), "attn_k_norm": ("keys",)},
            fixed={"hidden_act": SILU, "norm_topk_prob": (False,), "clip_qkv": (None,), **NO_BIAS},
            checks=(
                lambda config: None if config.num_key_value_heads == config.num_attention_heads
                else f"num_key_value_heads = {config.num_key_value_heads}, and llama.cpp has one for each query head",
            ),
        ),
        Architecture(
            "arcee", "arcee", _weights(*ATTENTION, *MLP[1:], *NORMS), orders=ROTARY, keys=RMS,
            fixed={"hidden_act": ("relu2",), "mlp_bias": (False,), **NO_BIAS},
        ),
    )
}  # fmt: skip
