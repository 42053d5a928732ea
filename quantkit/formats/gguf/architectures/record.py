"""The `Architecture` record, which maps a transformers architecture to llama.cpp, and helpers to write its rows.

A "part" is a tensor's transformers name within its block. In a part name, {expert} or {head} stands for every expert
or head; GGUF stores them as one tensor. Source: conversion/ and src/models/ of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.formats.gguf.shapes import KEY_HALVES, QUERY_HALVES, Lengths, Order

# A field of the transformers configuration, a function of the configuration, or a constant of llama.cpp.
Setting = str | Callable[[Any], Any] | float | None
Condition = str | Callable[[Any, int], Any]  # a field, or a function of a configuration and a block's number
Parts = tuple[str, ...] | Mapping[str, str]  # a mapping has their names in the file, if these depend on the condition
Values = NDArray[np.float32]
Check = Callable[[Any], str | None]  # returns what is wrong with a configuration
RequiredConfig = Mapping[str, Any]  # required values: one, a tuple, or a function of other settings
SILU = ("silu", "swish")
# ggml has one GELU, the tanh approximation; the exact GELU differs by less than 5e-4.
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
FIXED_EPSILON = 1e-6  # of some norms in transformers, independent of config.json
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
# Parts that are missing in a block that reuses keys and values.
OWN_KEYS = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
# Endings of part names that gguf's maps lack, and their names in the file, without ``.weight`` or ``.bias``.
# The first match wins.
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
    """An element-wise function applied to a tensor when it is written to GGUF, with its inverse for reading."""

    to_file: Callable[[Values], Values]
    from_file: Callable[[Values], Values]


# The decay of a gated delta rule, whose logarithm is learned; without minus if its factor is negative. Values that
# are not finite are refused by the reader.
MINUS_EXP = Function(lambda values: -np.exp(values), lambda values: np.log(-values))
EXP = Function(np.exp, np.log)


@dataclass(frozen=True)
class Transform:
    """How a GGUF tensor's layout and values differ from the transformers tensor; used for writing and reading."""

    rows: Order | None = None
    columns: Order | None = None
    transposed: bool = False  # the source has it (in, out)
    # A vector becomes `function` of (vector * root + shift); root is the square root of a quotient of two lengths.
    function: Function | None = None
    shift: float = 0.0
    sqrt_factors: tuple[str, str] | None = None
    source_shape: tuple[int, ...] = (-1,)  # shape of a vector that the source stores with extra dimensions of size 1
    split: Mapping[str, Order] = field(default_factory=dict)  # the file's tensors -> their rows


# By the ends of parts, like `ENDINGS`; an architecture's own transforms come first.
TRANSFORMS = {"A_log": Transform(function=MINUS_EXP), "keys.{head}": Transform(transposed=True)}


@dataclass(frozen=True)
class Stack:
    """A checkpoint tensor `part` that stacks one matrix (or bias) per expert or head.

    Each matrix concatenates the rows of all `pieces`, or interleaves them if `interleaved`. `transposed` matrices are
    (in, out). The tensor is 3-D (biases: 2-D), or 2-D if `rows` gives the number of rows of each piece.
    """

    part: str
    pieces: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    rows: Callable[[Any, int], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Names:
    """The architecture's names in transformers (`model_type`) and llama.cpp (`name`)."""

    model_type: str
    name: str
    _: KW_ONLY
    name_with_experts: str = ""  # llama.cpp's name with experts, if it differs
    mark: str = ""  # a key that distinguishes these files from others of the same llama.cpp name


@dataclass(frozen=True)
class Tensors:
    """The GGUF file's tensors, listed by their transformers names, and their transforms."""

    parts: tuple[str, ...]  # of every block
    _: KW_ONLY
    per_block: tuple[tuple[Condition, Parts], ...] = ()  # of some blocks
    blocks: str = "model.layers"  # the dotted name of the list of blocks
    outside: tuple[str, ...] = OUTSIDE  # of the blocks, the embedding first
    outside_if: tuple[tuple[Condition, tuple[str, ...]], ...] = ()  # of some models
    head: str = "lm_head.weight"
    head_always: bool = False  # llama.cpp needs a separate head even if it is tied
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # before gguf's own maps and `ENDINGS`
    names_like: str = ""  # the architecture whose gguf name maps are used, if it differs
    stacks: tuple[Stack, ...] = ()  # checkpoint tensors with several parts
    shapes: Mapping[str, Lengths] = field(default_factory=dict)  # before `shapes.SHAPES`
    same_inputs: Mapping[str, str] = field(default_factory=dict)  # an unmeasured part -> one with its inputs
    transforms: Mapping[str, Transform] = field(default_factory=dict)  # before `TRANSFORMS`, without ``.weight``
    norm_shift: float = 0.0  # added to every norm without a transform
    # Factors of weights: one number, or (rows, number) pairs; `multiplied` are the settings of a file's configuration.
    multipliers: Mapping[str, Setting] = field(default_factory=dict)
    multiplied: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # part -> key of all, and shape
    shares_keys: bool = False  # the last `num_kv_shared_layers` blocks take keys and values of earlier ones
    zero_keys: bool = False  # llama.cpp needs tensors for those blocks but uses only their shapes, so zeros are written

    @property
    def prefix(self) -> str:
        """Return the base model's prefix, such as ``model.``, which some checkpoints omit from tensor names."""
        return self.blocks.partition(".")[0] + "."

    def block_and_part(self, name: str) -> tuple[int, str]:
        """Split a tensor name into (block index, part); (-1, name) outside the blocks. The base prefix is optional."""
        own, stem = name.removeprefix(self.prefix), self.blocks.removeprefix(self.prefix) + "."
        block, _, part = own.removeprefix(stem).partition(".")
        return (int(block), part) if own.startswith(stem) and block.isdecimal() else (-1, own)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The architecture's GGUF keys, without its prefix; they extend or override the common keys."""

    keys: Mapping[str, Setting] = field(default_factory=dict)
    gate: Setting = 1  # the gates of a query head
    rope_types: tuple[str, ...] = ROPES  # empty: no rotary embedding
    partial_rotary: bool = False  # part of a head may be unrotated
    rotated_apart: bool = False  # another setting also gives the rotated share
    yarn_scores: bool = False  # YaRN scales the scores, not the rotated values
    by_block: bool = False  # heads and widths differ from block to block, and keys list them


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """Behavior that llama.cpp hard-codes: models that need anything else are refused or get a note."""

    required_config: RequiredConfig = field(default_factory=lambda: {"hidden_act": SILU})
    checks: tuple[Check, ...] = ()
    follows_window: bool = False  # llama.cpp applies the sliding window
    fixed_epsilon: str = ""  # norms with FIXED_EPSILON in transformers, and with the common epsilon in llama.cpp
    differs: str = ""  # a small difference in what llama.cpp computes


@dataclass(frozen=True)
class Architecture(Tensors, Keys, Refusals, Names):
    """A transformers architecture as a GGUF architecture: tensors, keys, checks and names."""

    def like(self, model_type: str, name: str = "", **changes: Any) -> Architecture:
        """Return a copy of this row for another `model_type`; `changes` are merged into mappings or replace fields."""
        merged: dict[str, Any] = {
            key: {**getattr(self, key), **value} if isinstance(value, Mapping) else value
            for key, value in changes.items()
        }
        return replace(self, model_type=model_type, name=name or self.name, **merged)


def of_config(config: Any, setting: Setting) -> Any:
    """Evaluate a Setting: call it, read it as a dotted config attribute, or return it as a constant."""
    if callable(setting):
        return setting(config)
    return reduce(getattr, setting.split("."), config) if isinstance(setting, str) else setting


def weights(*parts: str) -> tuple[str, ...]:
    """Append ``.weight`` to each part name."""
    return tuple(f"{part}.weight" for part in parts)


def biases(*parts: str) -> tuple[str, ...]:
    """Append ``.bias`` to each part name."""
    return tuple(f"{part}.bias" for part in parts)


def layer_norm(name: str) -> dict[str, Setting]:
    """Return the GGUF key of the LayerNorm epsilon, read from the config attribute `name`."""
    return {"attention.layer_norm_epsilon": name}


def experts_of(stem: str, *matrices: str, kind: str = "weight") -> tuple[str, ...]:
    """Return the part patterns of every expert's gate, up and down projections, or of `matrices` if these are given."""
    return tuple(f"{stem}.{{expert}}.{name}.{kind}" for name in matrices or ("gate_proj", "up_proj", "down_proj"))


def fused_experts(stem: str, transposed: bool = False, interleaved: bool = False) -> tuple[Stack, ...]:
    """Return Stacks for checkpoints with a fused `gate_up_proj` and a `down_proj`, each holding all experts."""
    gate, up, down = experts_of(stem)
    return (
        Stack(f"{stem}.gate_up_proj", (gate, up), transposed, interleaved),
        Stack(f"{stem}.down_proj", (down,), transposed, interleaved),
    )


def unless(condition: Callable[[Any, int], Any]) -> Callable[[Any, int], bool]:
    """Return a condition that holds where `condition` does not."""
    return lambda config, block: not condition(config, block)


def windows(every: int | None) -> dict[str, Setting]:
    """Return the keys of the sliding window: its size, and which blocks have it (usually all but every `every`-th)."""

    def pattern(config: Any) -> list[bool] | None:
        windows = [kind == SLIDING for kind in config.layer_types]
        usual = [(i + 1) % every != 0 for i in range(len(windows))] if every else None
        return None if windows == usual else windows

    return {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": pattern}


def one_or_list(numbers: Sequence[int]) -> int | list[int]:
    """Return a single number if all entries are equal, else the list."""
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def require(holds: Callable[[Any], Any], otherwise: str) -> Check:
    """Return a Check that fails with the text `otherwise`, formatted with the config as {0}, unless `holds(config)`."""
    return lambda config: None if holds(config) else otherwise.format(config)


def takes_keys(config: Any, block: int) -> bool:
    """Return whether a block reuses the keys and values of an earlier block."""
    return bool(block >= config.num_hidden_layers - config.num_kv_shared_layers)


def every_fourth(fourth: Any, others: Any) -> Callable[[Any], list[Any]]:
    """Return a function that lists, per block, `fourth` for every fourth block and `others` for the rest."""
    return lambda config: [fourth if (block + 1) % 4 == 0 else others for block in range(config.num_hidden_layers)]


LLAMA = weights(*ATTENTION, *MLP, *NORMS)
PLAIN_EXPERTS = experts_of("mlp.experts")
W_EXPERTS = experts_of("block_sparse_moe.experts", "w1", "w3", "w2")
ROTARY = {"self_attn.q_proj": Transform(QUERY_HALVES), "self_attn.k_proj": Transform(KEY_HALVES)}
QUERY_KEY_VALUE_BIASES = biases(*ATTENTION[:3])
