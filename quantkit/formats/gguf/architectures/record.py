"""The record of an architecture of transformers in llama.cpp, and the words that its rows share.

A part is a tensor of a block by its name in transformers, without the block. One with {expert} or {head} in its name
stands for all of them, which a file has in one tensor. Facts: conversion/ and src/models/ of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.formats.gguf.shapes import KEY_HALVES, QUERY_HALVES, Lengths, Order

# A field of the transformers configuration, what is made of it, or what llama.cpp has fixed.
Setting = str | Callable[[Any], Any] | float | None
Condition = str | Callable[[Any, int], Any]  # the same, of a configuration and a block's number
Parts = tuple[str, ...] | Mapping[str, str]  # with their names in the file, where those depend on the condition
Values = NDArray[np.float32]
Check = Callable[[Any], str | None]  # of a configuration: what is wrong
RequiredConfig = Mapping[str, Any]  # what settings must be: a value, a tuple of them, or what makes these of the others
SILU = ("silu", "swish")
# ggml has one GELU, the approximation with tanh; the exact one differs by less than 5e-4.
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
EMBEDDING = "model.embed_tokens.weight"
SLIDING, FULL = "sliding_attention", "full_attention"
OUTSIDE = (EMBEDDING, "model.norm.weight")
ROPES = ("default", "linear", "yarn")
LLAMA_ROPES = (*ROPES, "llama3")
FIXED_EPSILON = 1e-6  # of some norms in transformers, whatever config.json says
RMS: dict[str, Setting] = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
GRANITE_SCALES: dict[str, Setting] = {
    "residual_scale": "residual_multiplier", "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
EXPERTS_USED: dict[str, Setting] = {"expert_used_count": "num_experts_per_tok"}
NO_BIAS: RequiredConfig = {"attention_bias": False}
EQUAL_HEADS: RequiredConfig = {"num_key_value_heads": lambda config: config.num_attention_heads}
UNBIASED: RequiredConfig = {"hidden_act": SILU, **NO_BIAS}
UNBIASED_MLP: RequiredConfig = {**UNBIASED, "mlp_bias": False}
# What a block lacks that takes the keys and values of an earlier one.
OWN_KEYS = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
# How the names of parts end that gguf's maps lack, and their names in the file, both without ``.weight`` or ``.bias``.
# The first that fits counts.
ENDINGS = {
    "{expert}.gate_proj": "ffn_gate_exps", "{expert}.up_proj": "ffn_up_exps", "{expert}.down_proj": "ffn_down_exps",
    "{expert}.w1": "ffn_gate_exps", "{expert}.w3": "ffn_up_exps", "{expert}.w2": "ffn_down_exps",
    "keys.{head}": "attn_k_b", "values.{head}": "attn_v_b",
    "altup_projections.{state}": "altup_proj", "altup_unembed_projections.{state}": "altup_unembd_proj",
    "correct_output_scale": "altup_correct_scale.weight", "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "mixer.gate": "ffn_gate_inp", "block_sparse_moe.router": "ffn_gate_inp",
    "shared_experts.up_proj": "ffn_up_shexp", "shared_experts.down_proj": "ffn_down_shexp",
    "shared_mlp.gate": "ffn_gate_shexp", "shared_mlp.up": "ffn_up_shexp",
    "e_score_correction_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias",
    "sinks": "attn_sinks.weight", "sink_bias": "attn_sinks.weight",
    "A_log": "ssm_a", ".D": "ssm_d", "dt_bias": "ssm_dt.bias", "b_proj": "ssm_beta", "o_norm": "ssm_norm",
    "q_conv1d": "ssm_conv1d_q", "k_conv1d": "ssm_conv1d_k", "v_conv1d": "ssm_conv1d_v",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm", "g_proj": "attn_gate", "k_rope_only_layernorm": "attn_k_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Function:
    """What a file holds instead of a tensor's values, and the way back."""

    to_file: Callable[[Values], Values]
    from_file: Callable[[Values], Values]


# The decay of a gated delta rule, whose logarithm is learned; without minus, where it is taken times below zero. What
# is not finite is refused by whoever reads it.
MINUS_EXP = Function(lambda values: -np.exp(values), lambda values: np.log(-values))
EXP = Function(np.exp, np.log)


@dataclass(frozen=True)
class Transform:
    """How a file holds a tensor otherwise than transformers: the same facts for writing and reading."""

    rows: Order | None = None
    columns: Order | None = None
    transposed: bool = False  # the source has it (in, out)
    # A vector becomes `function` of (vector * root + shift), where root is that of the quotient of two lengths.
    function: Function | None = None
    shift: float = 0.0
    sqrt_factors: tuple[str, str] | None = None
    source_shape: tuple[int, ...] = (-1,)  # of a vector that the source has with further dimensions of one
    split: Mapping[str, Order] = field(default_factory=dict)  # tensors of the file by name -> their rows of it


# By the ends of parts, as `ENDINGS`, where an architecture has none of its own.
TRANSFORMS = {"A_log": Transform(function=MINUS_EXP), "keys.{head}": Transform(transposed=True)}


@dataclass(frozen=True)
class Stack:
    """A tensor of the checkpoint, `part` of a block, that holds a matrix or a bias of every expert or head.

    A matrix has the rows of all `pieces`, one after the other or, `interleaved`, in turns; `transposed`: it is (in,
    out). The tensor has three dimensions (of biases two), or two with as many `rows` of each piece.
    """

    part: str
    pieces: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    rows: Callable[[Any, int], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Names:
    """What transformers and llama.cpp call an architecture."""

    model_type: str
    name: str
    _: KW_ONLY
    name_with_experts: str = ""  # llama.cpp's, if it is another
    mark: str = ""  # a key of these files that others of llama.cpp's same name lack


@dataclass(frozen=True)
class Tensors:
    """Which tensors a file has, by transformers' names, and what is done to them."""

    parts: tuple[str, ...]  # of every block
    _: KW_ONLY
    per_block: tuple[tuple[Condition, Parts], ...] = ()  # of some blocks
    blocks: str = "model.layers"  # the dotted name of the list of blocks
    outside: tuple[str, ...] = OUTSIDE  # of the blocks, the embedding first
    outside_if: tuple[tuple[Condition, tuple[str, ...]], ...] = ()  # of some models
    head: str = "lm_head.weight"
    head_always: bool = False  # llama.cpp wants a head of its own also if it is tied
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # before gguf's own maps and `ENDINGS`
    names_like: str = ""  # the architecture whose maps of gguf are taken, if it is another
    stacks: tuple[Stack, ...] = ()  # tensors of a checkpoint that hold several parts
    shapes: Mapping[str, Lengths] = field(default_factory=dict)  # before `shapes.SHAPES`
    same_inputs: Mapping[str, str] = field(default_factory=dict)  # a part that nobody measures -> one with its inputs
    transforms: Mapping[str, Transform] = field(default_factory=dict)  # before `TRANSFORMS`, without ``.weight``
    norm_shift: float = 0.0  # added to every norm without a transform
    # What weights are multiplied by: one number, or (rows, number) pairs; a file's configuration has `multiplied`.
    multipliers: Mapping[str, Setting] = field(default_factory=dict)
    multiplied: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # part -> key of all, and shape
    shares_keys: bool = False  # the last `num_kv_shared_layers` blocks take keys and values of earlier ones
    zero_keys: bool = False  # llama.cpp wants those blocks' own, looks at their shape alone, and gets zeros

    @property
    def prefix(self) -> str:
        """What some checkpoints leave out in front of their names."""
        return self.blocks.partition(".")[0] + "."

    def block_and_part(self, name: str) -> tuple[int, str]:
        """Return a tensor's block and part, -1 and its name outside of the blocks; `name` may lack the prefix."""
        own, stem = name.removeprefix(self.prefix), self.blocks.removeprefix(self.prefix) + "."
        block, _, part = own.removeprefix(stem).partition(".")
        return (int(block), part) if own.startswith(stem) and block.isdecimal() else (-1, own)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of a file, without the architecture's name in front, besides or instead of the common ones."""

    keys: Mapping[str, Setting] = field(default_factory=dict)
    gate: Setting = 1  # the gates of a query head
    rope_types: tuple[str, ...] = ROPES  # none: no rotary embedding
    partial_rotary: bool = False  # only a share of a head may turn
    rotated_apart: bool = False  # a configuration says by another name, too, how much does
    yarn_scores: bool = False  # YaRN's scale is that of the scores, not of the rotated values
    by_block: bool = False  # heads and widths differ from block to block, and keys list them


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """What llama.cpp's code has fixed, so that models it computes otherwise are refused; at last notes for the user."""

    required_config: RequiredConfig = field(default_factory=lambda: {"hidden_act": SILU})
    checks: tuple[Check, ...] = ()
    follows_window: bool = False  # llama.cpp keeps to the sliding window
    fixed_epsilon: str = ""  # what transformers computes with FIXED_EPSILON, llama.cpp with the epsilon of all norms
    differs: str = ""  # what llama.cpp computes a little otherwise


@dataclass(frozen=True)
class Architecture(Tensors, Keys, Refusals, Names):
    """One architecture of transformers in llama.cpp."""

    def like(self, model_type: str, name: str = "", **changes: Any) -> Architecture:
        """Return this row for another model type: mappings are added to this row's, all else is in its place."""
        merged: dict[str, Any] = {
            key: {**getattr(self, key), **value} if isinstance(value, Mapping) else value
            for key, value in changes.items()
        }
        return replace(self, model_type=model_type, name=name or self.name, **merged)


def of_config(config: Any, setting: Setting) -> Any:
    """Return what a setting of a row is in a configuration of transformers."""
    if callable(setting):
        return setting(config)
    return reduce(getattr, setting.split("."), config) if isinstance(setting, str) else setting


def weights(*parts: str) -> tuple[str, ...]:
    """Return the weights of these parts of a block."""
    return tuple(f"{part}.weight" for part in parts)


def biases(*parts: str) -> tuple[str, ...]:
    """Return their biases."""
    return tuple(f"{part}.bias" for part in parts)


def layer_norm(name: str) -> dict[str, Setting]:
    """Return the key of a LayerNorm's epsilon, which the setting `name` is."""
    return {"attention.layer_norm_epsilon": name}


def experts_of(stem: str, *matrices: str, kind: str = "weight") -> tuple[str, ...]:
    """Return gate, up and down of every expert, which may be called otherwise."""
    return tuple(f"{stem}.{{expert}}.{name}.{kind}" for name in matrices or ("gate_proj", "up_proj", "down_proj"))


def fused_experts(stem: str, transposed: bool = False, interleaved: bool = False) -> tuple[Stack, ...]:
    """Return the stacks of a checkpoint that has gate and up of all experts in one tensor, and down in another."""
    gate, up, down = experts_of(stem)
    return (
        Stack(f"{stem}.gate_up_proj", (gate, up), transposed, interleaved),
        Stack(f"{stem}.down_proj", (down,), transposed, interleaved),
    )


def unless(condition: Callable[[Any, int], Any]) -> Callable[[Any, int], bool]:
    """Return the opposite condition."""
    return lambda config, block: not condition(config, block)


def windows(every: int | None) -> dict[str, Setting]:
    """Return keys of the window and of the blocks that have it, if not all but every so many-th."""

    def pattern(config: Any) -> list[bool] | None:
        windows = [kind == SLIDING for kind in config.layer_types]
        usual = [(i + 1) % every != 0 for i in range(len(windows))] if every else None
        return None if windows == usual else windows

    return {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": pattern}


def one_or_list(numbers: Sequence[int]) -> int | list[int]:
    """Return the number of all blocks, or the list of each block's where they differ."""
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def require(holds: Callable[[Any], Any], otherwise: str) -> Check:
    """Return a check that reports `otherwise`, where {0} is the configuration."""
    return lambda config: None if holds(config) else otherwise.format(config)


def takes_keys(config: Any, block: int) -> bool:
    """Whether a block takes the keys and values of an earlier one."""
    return bool(block >= config.num_hidden_layers - config.num_kv_shared_layers)


def every_fourth(fourth: Any, others: Any) -> Callable[[Any], list[Any]]:
    """Return the list of a setting of each block, of which every fourth has another."""
    return lambda config: [fourth if (block + 1) % 4 == 0 else others for block in range(config.num_hidden_layers)]


LLAMA = weights(*ATTENTION, *MLP, *NORMS)
PLAIN_EXPERTS = experts_of("mlp.experts")
W_EXPERTS = experts_of("block_sparse_moe.experts", "w1", "w3", "w2")
ROTARY = {"self_attn.q_proj": Transform(QUERY_HALVES), "self_attn.k_proj": Transform(KEY_HALVES)}
QUERY_KEY_VALUE_BIASES = biases(*ATTENTION[:3])
