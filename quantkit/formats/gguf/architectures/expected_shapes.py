"""The shape that each tensor of a file has by the model's numbers.

llama.cpp holds every tensor of a file against the file's keys when it loads it (src/models/ of
https://github.com/ggml-org/llama.cpp), and transformers every tensor of a checkpoint against its config.json. A file
that is not held against both can be written, read back, and loaded by nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.formats.gguf.architectures.row_orders import Heads

Lengths = tuple[str, ...]  # names of lengths in `Sizes.lengths`, columns last
# Keys that may list a number for each block, the one of a head's values in blocks with a window, and of which have one.
QUERY_HEADS, KEY_HEADS, INNER = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
SLIDING_HEAD, SLIDING = "attention.key_length_swa", "attention.sliding_window_pattern"
# Of latent attention, which has others in blocks with a window where there are such keys with "_swa" behind.
LATENT = ("attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla")
LAUREL = 64  # rank of Gemma 3n's, which llama.cpp has fixed


@dataclass(frozen=True)
class Sizes:
    """A model's numbers that shapes depend on; `experts` is 0 where there are none.

    `keys` are further numbers by the file's keys, without the architecture's name in front, `lists` keys that list
    something for each block. `gate` are the gates of a query head, one or one for each of its values.
    """

    vocabulary: int
    context: int
    hidden: int
    inner: int
    heads: Heads
    experts: int = 0
    keys: Mapping[str, int] = field(default_factory=dict)
    lists: Mapping[str, list[Any]] = field(default_factory=dict)
    gate: int = 1
    recurs: bool = False  # whether it is a block without keys of an attention

    def of_block(self, block: int) -> Sizes:
        """Those of one block, where it has others; a list's 0 is of a block that has no such tensors."""

        def own(key: str, other: int) -> int:
            values = self.lists.get(key, [])
            return (values[block] if block < len(values) else 0) or other

        size = self.keys.get(SLIDING_HEAD) if own(SLIDING, 0) else None
        query, key = own(QUERY_HEADS, self.heads.query), own(KEY_HEADS, self.heads.key)
        heads = Heads(query, key, size or self.heads.size, self.heads.turned)
        recurs = self.lists.get(KEY_HEADS, [])[block : block + 1] == [0]
        keys = {**self.keys}
        if own(SLIDING, 0):
            keys |= {key: self.keys[f"{key}_swa"] for key in LATENT if f"{key}_swa" in self.keys}
        return replace(self, inner=own(INNER, self.inner), heads=heads, recurs=recurs, keys=keys)

    @property
    def linear_heads(self) -> Heads:
        """Those of a gated delta rule: values, keys, and the values of each."""
        values = self.keys.get("ssm.time_step_rank", 0)
        return Heads(values, self.keys.get("ssm.group_count", 0), self.keys.get("ssm.inner_size", 0) // max(values, 1))

    @property
    def index_heads(self) -> Heads:
        """Those of an indexer."""
        heads, size = (self.keys.get(f"attention.indexer.{name}", 0) for name in ("head_count", "key_length"))
        return Heads(heads, 1, size, self.keys.get("rope.dimension_count", 0))

    @property
    def lengths(self) -> dict[str, int]:
        """Every length by its name in `SHAPES`."""
        query, key = self.heads.query * self.heads.size, self.heads.key * self.heads.size
        own, linear = self.keys, self.linear_heads
        state = own.get("ssm.state_size", 0)
        channels = linear.query * linear.size + 2 * linear.key * state
        shared_inner = own.get("expert_shared_feed_forward_length")
        expert, shared = own.get("expert_feed_forward_length") or self.inner, own.get("expert_shared_count", 1)
        rotated, latent = own.get("rope.dimension_count", 0), own.get("attention.kv_lora_rank", 0)
        inputs, states = own.get("embedding_length_per_layer_input", 0), own.get("altup.num_inputs", 0)
        index = own.get("attention.indexer.key_length", 0)
        value = own.get("attention.value_length", 0)
        values = self.heads.query * value
        delta_head = own.get("kda.head_dim", 0)
        delta = self.heads.query * delta_head
        head_keys, head_values = (own.get(f"attention.{kind}_length_mla", 0) for kind in ("key", "value"))
        return {
            "tokens": self.vocabulary,
            "positions": self.context,
            "hidden": self.hidden,
            "inner": self.inner,
            "two inner": 2 * self.inner,
            "queries": query,
            "keys": key,
            "queries, keys, values": query + 2 * key,
            "head": self.heads.size,
            "experts": self.experts,
            "expert inner": expert,
            "shared inner": shared_inner or expert * shared,
            "two shared inner": 2 * (shared_inner or 0),
            "one": 1,
            "heads": self.heads.query,
            "two queries": 2 * query,
            "query latent": own.get("attention.q_lora_rank", 0),
            "latent": latent,
            "latent and rotated": latent + rotated,
            "head's keys": head_keys - rotated,
            "head's values": head_values,
            "latent queries": self.heads.query * head_keys,
            "delta or latent queries": delta if self.recurs else self.heads.query * head_keys,
            "delta or latent values": delta if self.recurs else self.heads.query * head_values,
            "delta": delta,
            "delta head": delta_head,
            "values": values,
            "key heads' values": self.heads.key * value,
            "gates": self.heads.query * self.gate,
            "unrotated keys, values": self.heads.query * (self.heads.size - rotated) + values,
            "latent values": self.heads.query * head_values,
            "kernel": own.get("ssm.conv_kernel") or own.get("shortconv.l_cache", 0),
            "three hidden": 3 * self.hidden,
            "steps": linear.query,
            "two steps": 2 * linear.query,
            "state": linear.size,
            "groups": linear.key,
            "values of a group": linear.query * linear.size // max(linear.key, 1),
            "linear values": linear.query * linear.size,
            "channels": channels,
            "gates, channels, steps": linear.query * linear.size + channels + linear.query,
            "inputs": inputs,
            "inputs of blocks": inputs * own.get("block_count", 0),
            "states": states,
            "other states": states - 1,
            "pairs of states": states * states,
            "laurel": LAUREL,
            "index queries": own.get("attention.indexer.head_count", 0) * index,
            "index head": index,
            "index heads": own.get("attention.indexer.head_count", 0),
            "rotated": rotated,
        }


# By the name in the file, without the block in front and ``.weight`` behind; a bias has not the last length.
SHAPES: Mapping[str, Lengths] = {
    "token_embd": ("tokens", "hidden"),
    "position_embd": ("positions", "hidden"),
    "output": ("tokens", "hidden"),
    "attn_q": ("queries", "hidden"),
    "attn_k": ("keys", "hidden"),
    "attn_v": ("keys", "hidden"),
    "attn_qkv": ("queries, keys, values", "hidden"),
    "attn_output": ("hidden", "queries"),
    "attn_q_norm": ("head",),
    "attn_k_norm": ("head",),
    "ffn_gate": ("inner", "hidden"),
    "ffn_up": ("inner", "hidden"),
    "ffn_down": ("hidden", "inner"),
    "ffn_gate_inp": ("experts", "hidden"),
    "ffn_gate_exps": ("experts", "expert inner", "hidden"),
    "ffn_up_exps": ("experts", "expert inner", "hidden"),
    "ffn_down_exps": ("experts", "hidden", "expert inner"),
    "ffn_gate_inp_shexp": ("one", "hidden"),
    "ffn_gate_shexp": ("shared inner", "hidden"),
    "ffn_up_shexp": ("shared inner", "hidden"),
    "ffn_down_shexp": ("hidden", "shared inner"),
    "exp_probs_b": ("experts",),
    "attn_sinks": ("heads",),
    "attn_q_a": ("query latent", "hidden"),
    "attn_q_a_norm": ("query latent",),
    "attn_q_b": ("latent queries", "query latent"),
    "attn_kv_a_mqa": ("latent and rotated", "hidden"),
    "attn_kv_a_norm": ("latent",),
    "attn_kv_b": ("unrotated keys, values", "latent"),
    "attn_k_b": ("heads", "latent", "head's keys"),
    "attn_v_b": ("heads", "head's values", "latent"),
    "attn_gate": ("linear values", "hidden"),
    "ssm_a": ("steps",),
    "ssm_dt": ("steps",),
    "ssm_alpha": ("steps", "hidden"),
    "ssm_beta": ("steps", "hidden"),
    "ssm_ba": ("two steps", "hidden"),
    "ssm_conv1d": ("channels", "kernel"),
    "ssm_norm": ("state",),
    "ssm_out": ("hidden", "linear values"),
    "ssm_in": ("gates, channels, steps", "hidden"),
    "ssm_d": ("steps", "one"),
    "shortconv.conv": ("hidden", "kernel"),
    "shortconv.in_proj": ("three hidden", "hidden"),
    "shortconv.out_proj": ("hidden", "hidden"),
    "indexer.q_proj": ("index queries", "hidden"),
    "indexer.k_proj": ("index head", "hidden"),
    **dict.fromkeys(("indexer.q_norm", "indexer.k_norm"), ("index head",)),
    "layer_output_scale": ("one",),
    "ffn_gate_inp.scale": ("hidden",),
    "ffn_down_exps.scale": ("experts",),
    "per_layer_token_embd": ("tokens", "inputs of blocks"),
    "per_layer_model_proj": ("inputs of blocks", "hidden"),
    "per_layer_proj_norm": ("inputs",),
    "inp_gate": ("inputs", "hidden"),
    "proj": ("hidden", "inputs"),
    "altup_proj": ("other states", "hidden", "hidden"),
    "altup_unembd_proj": ("other states", "hidden", "hidden"),
    "altup_correct_coef": ("states", "states"),
    "altup_correct_scale": ("hidden",),
    "altup_predict_coef": ("pairs of states", "states"),
    "altup_router": ("states", "hidden"),
    "laurel_l": ("laurel", "hidden"),
    "laurel_r": ("hidden", "laurel"),
    **dict.fromkeys(("token_embd_norm", "output_norm", "attn_norm", "attn_norm_2", "ffn_norm"), ("hidden",)),
    **dict.fromkeys(("post_attention_norm", "post_ffw_norm", "post_norm", "altup_router_norm"), ("hidden",)),
    **dict.fromkeys(("laurel_post_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), ("hidden",)),
}
BLOCK = re.compile(r"^blk\.(\d+)\.")
# Vectors that some files have as matrices.
FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")


def is_flat(name: str) -> bool:
    """Whether the tensor `name` of a file is a vector of the source, whatever its shape there."""
    return name.startswith("blk.") and name.split(".", 2)[2] in FLAT


def _of_name(name: str, sizes: Sizes) -> Sizes:
    block = BLOCK.match(name)
    return sizes if block is None else sizes.of_block(int(block[1]))


def root_factor(name: str, sizes: Sizes, root: tuple[str, str] | None) -> float:
    """What the tensor `name` of a file is multiplied by: the root of one length over another, 1 without such a pair."""
    if root is None:
        return 1.0
    lengths = _of_name(name, sizes).lengths
    return math.sqrt(lengths[root[0]] / max(lengths[root[1]], 1))


def expected_shape(name: str, sizes: Sizes, other: Mapping[str, Lengths]) -> tuple[int, ...]:
    """The shape in the file of the tensor `name`; `other` are an architecture's own. Raises KeyError for no name."""
    own = BLOCK.sub("", name)
    stem = re.sub(r"\.(weight|bias)$", "", own)
    lengths = _of_name(name, sizes).lengths
    shape = tuple(lengths[length] for length in other.get(stem) or SHAPES[stem])
    return shape[:-1] or shape if own.endswith(".bias") else shape
