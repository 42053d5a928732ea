"""What is known of an architecture of transformers in llama.cpp, and the words that its rows share.

Names of tensors in a file come from gguf's own name maps, or from `named`. What llama.cpp wants otherwise than
transformers stores it is told by `orders` and `columns` (rows or columns in another order), `transposed`, `norm_shift`,
`functions`, and by `experts` and `heads` (stacked into one tensor); what its code has fixed is in `fixed` and `checks`,
so that a model that would load but compute something else is refused. Facts:
https://github.com/ggml-org/llama.cpp, conversion/ and src/models/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Setting = str | Callable[[Any], Any]  # a field of the transformers configuration, or what is made of it
Blocks = Callable[[Any, int], bool]  # of a configuration and a block's number: whether the block has something
SILU = ("silu", "swish")
# ggml has one GELU, the approximation with tanh; the exact one differs by less than 5e-4.
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
EMBEDDING = "model.embed_tokens.weight"
OUTSIDE = (EMBEDDING, "model.norm.weight")
ROTARY = {"self_attn.q_proj": "query halves", "self_attn.k_proj": "key halves"}
ROPES = ("default", "linear", "yarn")
LLAMA_ROPES = (*ROPES, "llama3")
FIXED_EPSILON = 1e-6  # of some norms in transformers, whatever config.json says
RMS: dict[str, Setting] = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
GRANITE_SCALES: dict[str, Setting] = {
    "residual_scale": "residual_multiplier", "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
EXPERTS: dict[str, Setting] = {"expert_used_count": "num_experts_per_tok"}
NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}
EXPERT_KINDS = ("gate", "down", "up")
# What a block lacks that takes the keys and values of an earlier one.
OWN_KEYS = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")


@dataclass(frozen=True)
class Stack:
    """A tensor of the checkpoint, `part` of a block, that holds a matrix or a bias of every expert or head.

    `pieces` are the names that those get one by one, with {} for the number. A matrix has the rows of all pieces, one
    after the other or, `interleaved`, taking turns; `transposed`: it lies (in, out). As many rows each of three
    dimensions (of biases two), or of `rows` in a configuration and a block: then they lie below one another in two.
    """

    part: str
    pieces: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    rows: Callable[[Any, int], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers in llama.cpp.

    `name` is llama.cpp's. `blocks` is the dotted name of the list of blocks; `outside` are the tensors beside it, the
    embedding first, `parts` those that a block must have, `optional` those that it has where a setting says so,
    `either` groups of which one must be there, `some` those that only some blocks have, with their names in the file
    where those depend on the block. `shapes` are those that differ from `expected_shapes.SHAPES`. `keys` are keys of
    the file without the architecture's name in front, `scalars` further keys, which list the one value that a tensor
    of each block has. `splits` are parts whose rows lie in several tensors of the file. `multipliers` are numbers of
    a configuration that a part, or a tensor outside, is multiplied by, one or (rows, number) pairs: they are put into
    the weights, and a file's configuration has `multiplied`. `roots`: a vector is multiplied in a file by the root of
    one length of `expected_shapes` over another. `forms`: the shape of a vector that the source has with further
    dimensions of one, -1 for its length.

    `outside_optional` are tensors outside that a model has where a setting says so, `outside_stacks` those of a file
    that hold several of the source. `mark` is a key of these files that those of another architecture of transformers
    with llama.cpp's same name lack. `by_block`: heads and widths differ from block to block, and keys of the file list
    them. `shares_keys`: the last blocks, as many as `num_kv_shared_layers` says, take keys and values of earlier ones;
    what a checkpoint has in their place is left out, and with `zero_keys` llama.cpp wants it, looks at its shape alone,
    and gets zeros.
    """

    model_type: str
    name: str
    parts: tuple[str, ...]
    optional: Mapping[str, Setting] = field(default_factory=dict)  # part -> its setting
    either: tuple[tuple[str, ...], ...] = ()
    some: tuple[tuple[Blocks, tuple[str, ...] | Mapping[str, str]], ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)  # part -> its name in the file, where gguf's maps lack it
    names_like: str = ""  # another of llama.cpp's with the same names, where gguf's maps lack this one
    name_with_experts: str = ""  # where llama.cpp calls those of a model with experts otherwise
    named_without_experts: Mapping[str, str] = field(default_factory=dict)  # the same of a model that has none
    blocks: str = "model.layers"
    outside: tuple[str, ...] = OUTSIDE
    outside_optional: Mapping[str, Setting] = field(default_factory=dict)
    outside_stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name in the file -> its parts
    head: str = "lm_head.weight"
    head_always: bool = False  # llama.cpp wants a head of its own also where it is tied
    orders: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)  # part -> the order of its columns
    transposed: tuple[str, ...] = ()
    norm_shift: float = 0.0
    unshifted: tuple[str, ...] = ()  # norms without that shift
    functions: Mapping[str, str] = field(default_factory=dict)  # part -> what is made of its values
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roots: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # part -> lengths, the root of their quotient
    forms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # part, a vector -> its shape in the source
    experts: Mapping[str, str] = field(default_factory=dict)  # part, with {} for the expert -> its name in the file
    experts_in: Blocks | None = None  # none: every block has experts
    heads: Mapping[str, str] = field(default_factory=dict)  # the same of heads
    heads_in: Blocks | None = None  # none: those of every block have matrices
    stacks: tuple[Stack, ...] = ()
    splits: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)  # part -> names and orders
    same_inputs: Mapping[str, str] = field(default_factory=dict)  # part that nobody measures -> one with its inputs
    scalars: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # part -> its key, its shape
    multipliers: Mapping[str, Setting] = field(default_factory=dict)
    multiplied: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Setting] = field(default_factory=dict)  # instead of hyperparameters.FIELDS
    keys: Mapping[str, Setting] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {"hidden_act": SILU})
    checks: tuple[Callable[[Any], str | None], ...] = ()
    rope_types: tuple[str, ...] = ROPES  # none: no rotary embedding
    partial_rotary: bool = False
    rotated_apart: bool = False  # a configuration says by another name, too, how much of a head turns
    follows_window: bool = False  # llama.cpp keeps to the sliding window
    yarn_scores: bool = False  # YaRN's scale is that of the scores, not of the rotated values
    mark: str = ""
    by_block: bool = False
    shares_keys: bool = False
    zero_keys: bool = False
    fixed_epsilon: str = ""  # what transformers computes with FIXED_EPSILON, and llama.cpp with that of all norms
    differs: str = ""  # what llama.cpp computes a little otherwise, as users are told

    @property
    def prefix(self) -> str:
        """What some checkpoints leave out in front of their names."""
        return self.blocks.partition(".")[0] + "."


def weights(*parts: str) -> tuple[str, ...]:
    """The weights of these parts of a block."""
    return tuple(f"{part}.weight" for part in parts)


def biases(*parts: str) -> tuple[str, ...]:
    """Their biases."""
    return tuple(f"{part}.bias" for part in parts)


def layer_norm(name: str) -> dict[str, Setting]:
    """The key of a LayerNorm's epsilon, which the setting `name` is."""
    return {"attention.layer_norm_epsilon": name}


def experts_of(stem: str, *parts: str, kind: str = "weight") -> dict[str, str]:
    """Gate, down and up of every expert, stacked into one tensor each."""
    return {f"{stem}.{p}.{kind}": f"ffn_{name}_exps.{kind}" for name, p in zip(EXPERT_KINDS, parts, strict=True)}


def windows(every: int | None) -> dict[str, Setting]:
    """Keys of the window and, where it is not that of all blocks but every so many-th, of the blocks that have it."""

    def pattern(config: Any) -> list[bool] | None:
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        usual = [(i + 1) % every != 0 for i in range(len(windows))] if every else None
        return None if windows == usual else windows

    return {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": pattern}


def where_unlike(numbers: Sequence[int]) -> list[int] | None:
    """A list of each block's number where they differ; elsewhere llama.cpp takes one number for all blocks."""
    return list(numbers) if len(set(numbers)) > 1 else None


def takes_keys(config: Any, block: int) -> bool:
    """Whether a block takes the keys and values of an earlier one."""
    return bool(block >= config.num_hidden_layers - config.num_kv_shared_layers)


def every_fourth(name: str, fourth: Any, others: Any) -> Callable[[Any], str | None]:
    """llama.cpp has fixed for these models that every fourth block differs from the others in a setting."""

    def check(config: Any) -> str | None:
        given = list(getattr(config, name))[: config.num_hidden_layers]
        meant = [fourth if (index + 1) % 4 == 0 else others for index in range(config.num_hidden_layers)]
        return None if given == meant else f"{name} = {given}, and llama.cpp has {meant}"

    return check


def whole_heads(config: Any) -> str | None:
    """llama.cpp's attention puts out as many values as the model has hidden ones."""
    size = config.num_attention_heads * config.head_dim
    return None if size == config.hidden_size else f"{size} values of its heads, and llama.cpp has {config.hidden_size}"


LLAMA = weights(*ATTENTION, *MLP, *NORMS)
PLAIN_EXPERTS = experts_of("mlp.experts.{}", "gate_proj", "down_proj", "up_proj")
