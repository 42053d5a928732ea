"""Expected tensor shapes in a GGUF file, computed from its keys, and row permutations.

llama.cpp checks tensors against the file's keys, and transformers checks them against config.json. These tables catch
a mismatch before a file is written. llama.cpp needs some fused or rotary weights in another row order: a RowOrder
lists, for each row of the file, the source row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Value = bool | int | float | str | list[Any]
Factors = dict[str, NDArray[np.float32]]
Lengths = tuple[str, ...]  # names of lengths in `ModelShape.lengths`, columns last
# Numbers of every model. Those in `BY_BLOCK` may be a list with one per block.
BLOCKS, CONTEXT, HIDDEN, EXPERTS = "block_count", "context_length", "embedding_length", "expert_count"
QUERY_HEADS, KEY_HEADS, INNER = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
KEY_LENGTH, VALUE_LENGTH = "attention.key_length", "attention.value_length"
NUMBERS = (BLOCKS, CONTEXT, HIDDEN, INNER, QUERY_HEADS, KEY_HEADS, KEY_LENGTH, VALUE_LENGTH, EXPERTS)
BY_BLOCK = (QUERY_HEADS, KEY_HEADS, INNER)
ROTATED = "rope.dimension_count"  # set if only part of a head may rotate
SHARED = "attention.shared_kv_layers"  # number of last blocks that reuse keys and values
SLIDING_BLOCKS = "attention.sliding_window_pattern"  # which blocks have a window
# Keys that may have another value in blocks with a window, in a key with the suffix "_swa".
OF_WINDOWS = (KEY_LENGTH, "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla")
LAUREL = 64  # rank in Gemma 3n, fixed in llama.cpp


@dataclass(frozen=True)
class Heads:
    """Numbers of query and key-value heads, and the rows per head."""

    query: int
    key: int
    size: int
    turned: int = 0  # rotated rows; 0: all


@dataclass(frozen=True)
class ModelShape:
    """A model's dimensions: its GGUF keys and the values derived from them."""

    keys: Mapping[str, Value]  # the file's keys, without the architecture's prefix
    vocabulary: int
    gate: int = 1  # gates per query head: one, or one per value
    tied: bool = False  # whether the head is the embedding
    factors: Factors = field(default_factory=dict)  # the rope's divisors (rotated / 2,) by tensor name
    recurs: bool = False  # whether these are the numbers of a block without attention

    def number(self, key: str, default: int = 0) -> int:
        """Return the integer at `key` (a per-block list's maximum), or `default` if missing or not an integer."""
        value = self.keys.get(key)
        value = max(value, default=None) if isinstance(value, list) and key in BY_BLOCK else value
        return value if isinstance(value, int) else default

    @property
    def blocks(self) -> int:
        return self.number(BLOCKS)

    @property
    def hidden(self) -> int:
        return self.number(HIDDEN)

    @property
    def experts(self) -> int:
        return self.number(EXPERTS)

    @property
    def own_blocks(self) -> int:
        """Return the number of blocks with their own key and value projections; later blocks reuse keys and values."""
        return self.blocks - self.number(SHARED)

    @property
    def heads(self) -> Heads:
        query = self.number(QUERY_HEADS)
        size = self.number(KEY_LENGTH, self.hidden // max(query, 1))
        return Heads(query, self.number(KEY_HEADS), size, self.number(ROTATED))

    @property
    def linear_heads(self) -> Heads:
        """Return the heads of linear attention (gated delta rule): `query` counts value heads, `key` key heads."""
        values = self.number("ssm.time_step_rank")
        return Heads(values, self.number("ssm.group_count"), self.number("ssm.inner_size") // max(values, 1))

    @property
    def index_heads(self) -> Heads:
        """Return the heads of the sparse-attention indexer; all query heads share one key head."""
        heads, size = (self.number(f"attention.indexer.{name}") for name in ("head_count", "key_length"))
        return Heads(heads, 1, size, self.number(ROTATED))

    def of_block(self, block: int) -> ModelShape:
        """Return one block's dimensions; a per-block 0 (tensor absent) is replaced by the maximum over all blocks."""
        listed = {key: value[block : block + 1] for key, value in self.keys.items() if isinstance(value, list)}
        own = {key: (listed[key] or [0])[0] or self.number(key) for key in BY_BLOCK if key in listed}
        if any(listed.get(SLIDING_BLOCKS, [])):
            own |= {key: value for key in OF_WINDOWS if isinstance(value := self.keys.get(f"{key}_swa"), int)}
        return replace(self, keys={**self.keys, **own}, recurs=listed.get(KEY_HEADS) == [0])

    @property
    def lengths(self) -> dict[str, int]:
        """Return every named dimension that the table `SHAPES` uses."""
        heads, linear, index, number = self.heads, self.linear_heads, self.index_heads, self.number
        query, key, value = heads.query * heads.size, heads.key * heads.size, number(VALUE_LENGTH)
        inner, rotated, latent = number(INNER), number(ROTATED), number("attention.kv_lora_rank")
        expert, shared = number("expert_feed_forward_length") or inner, number("expert_shared_feed_forward_length")
        latent_keys, latent_values = (number(f"attention.{kind}_length_mla") for kind in ("key", "value"))
        linear_values = linear.query * linear.size
        channels = linear_values + 2 * linear.key * number("ssm.state_size")
        delta_head, states = number("kda.head_dim"), number("altup.num_inputs")
        inputs = number("embedding_length_per_layer_input")
        delta_queries, delta_values = (
            heads.query * (delta_head if self.recurs else size) for size in (latent_keys, latent_values)
        )
        return {
            "one": 1, "tokens": self.vocabulary, "positions": number(CONTEXT),
            "hidden": self.hidden, "three hidden": 3 * self.hidden, "inner": inner, "two inner": 2 * inner,
            "head": heads.size, "heads": heads.query, "rotated": rotated, "gates": heads.query * self.gate,
            "queries": query, "two queries": 2 * query, "keys": key, "queries, keys, values": query + 2 * key,
            "values": heads.query * value, "key heads' values": heads.key * value,
            "experts": self.experts, "expert inner": expert, "two shared inner": 2 * shared,
            "shared inner": shared or expert * number("expert_shared_count", 1),
            "query latent": number("attention.q_lora_rank"), "latent": latent, "latent and rotated": latent + rotated,
            "head's keys": latent_keys - rotated, "head's values": latent_values,
            "latent queries": heads.query * latent_keys, "latent values": heads.query * latent_values,
            "unrotated keys, values": heads.query * (heads.size - rotated + value),
            "delta": heads.query * delta_head, "delta head": delta_head,
            "delta or latent queries": delta_queries, "delta or latent values": delta_values,
            "kernel": number("ssm.conv_kernel") or number("shortconv.l_cache"),
            "steps": linear.query, "two steps": 2 * linear.query, "state": linear.size, "groups": linear.key,
            "linear values": linear_values, "values of a group": linear_values // max(linear.key, 1),
            "channels": channels, "gates, channels, steps": linear_values + channels + linear.query,
            "inputs": inputs, "inputs of blocks": inputs * self.blocks, "laurel": LAUREL,
            "states": states, "other states": states - 1, "pairs of states": states * states,
            "index queries": index.query * index.size, "index head": index.size, "index heads": index.query,
        }  # fmt: skip


# By the name in the file, without the block's prefix and ``.weight``; a bias lacks the last length.
SHAPES: Mapping[str, Lengths] = {
    "token_embd": ("tokens", "hidden"), "position_embd": ("positions", "hidden"), "output": ("tokens", "hidden"),
    "attn_q": ("queries", "hidden"), "attn_k": ("keys", "hidden"), "attn_v": ("keys", "hidden"),
    "attn_qkv": ("queries, keys, values", "hidden"), "attn_output": ("hidden", "queries"), "attn_sinks": ("heads",),
    "attn_gate": ("linear values", "hidden"), "attn_q_norm": ("head",), "attn_k_norm": ("head",),
    "ffn_gate": ("inner", "hidden"), "ffn_up": ("inner", "hidden"), "ffn_down": ("hidden", "inner"),
    "ffn_gate_inp": ("experts", "hidden"), "ffn_gate_inp.scale": ("hidden",), "ffn_gate_inp_shexp": ("one", "hidden"),
    "ffn_gate_exps": ("experts", "expert inner", "hidden"), "ffn_up_exps": ("experts", "expert inner", "hidden"),
    "ffn_down_exps": ("experts", "hidden", "expert inner"), "ffn_down_exps.scale": ("experts",),
    "ffn_gate_shexp": ("shared inner", "hidden"), "ffn_up_shexp": ("shared inner", "hidden"),
    "ffn_down_shexp": ("hidden", "shared inner"), "exp_probs_b": ("experts",),
    "attn_q_a": ("query latent", "hidden"), "attn_q_a_norm": ("query latent",),
    "attn_q_b": ("latent queries", "query latent"), "attn_kv_a_mqa": ("latent and rotated", "hidden"),
    "attn_kv_a_norm": ("latent",), "attn_kv_b": ("unrotated keys, values", "latent"),
    "attn_k_b": ("heads", "latent", "head's keys"), "attn_v_b": ("heads", "head's values", "latent"),
    "ssm_a": ("steps",), "ssm_dt": ("steps",), "ssm_d": ("steps", "one"), "ssm_norm": ("state",),
    "ssm_alpha": ("steps", "hidden"), "ssm_beta": ("steps", "hidden"), "ssm_ba": ("two steps", "hidden"),
    "ssm_conv1d": ("channels", "kernel"), "ssm_in": ("gates, channels, steps", "hidden"),
    "ssm_out": ("hidden", "linear values"), "shortconv.conv": ("hidden", "kernel"),
    "shortconv.in_proj": ("three hidden", "hidden"), "shortconv.out_proj": ("hidden", "hidden"),
    "indexer.q_proj": ("index queries", "hidden"), "indexer.k_proj": ("index head", "hidden"),
    "indexer.q_norm": ("index head",), "indexer.k_norm": ("index head",), "layer_output_scale": ("one",),
    "per_layer_token_embd": ("tokens", "inputs of blocks"), "per_layer_model_proj": ("inputs of blocks", "hidden"),
    "per_layer_proj_norm": ("inputs",), "inp_gate": ("inputs", "hidden"), "proj": ("hidden", "inputs"),
    "altup_proj": ("other states", "hidden", "hidden"), "altup_unembd_proj": ("other states", "hidden", "hidden"),
    "altup_correct_coef": ("states", "states"), "altup_correct_scale": ("hidden",),
    "altup_predict_coef": ("pairs of states", "states"), "altup_router": ("states", "hidden"),
    "laurel_l": ("laurel", "hidden"), "laurel_r": ("hidden", "laurel"),
    **dict.fromkeys(
        (
            "token_embd_norm", "output_norm", "attn_norm", "attn_norm_2", "ffn_norm", "post_attention_norm",
            "post_ffw_norm", "post_norm", "altup_router_norm", "laurel_post_norm", "pre_ffw_norm_2",
            "post_ffw_norm_1", "post_ffw_norm_2",
        ),
        ("hidden",),
    ),
}  # fmt: skip


def expected_shape(name: str, lengths: Mapping[str, int], other: Mapping[str, Lengths]) -> tuple[int, ...]:
    """Return the shape that the file's tensor `name` must have; `other` overrides `SHAPES`. Raises KeyError."""
    own = re.sub(r"^blk\.\d+\.", "", name)
    stem = own.removesuffix(".weight").removesuffix(".bias")
    shape = tuple(lengths[length] for length in other.get(stem) or SHAPES[stem])
    return shape[:-1] or shape if own.endswith(".bias") else shape


RowOrder = NDArray[np.int64]
RowReader = Callable[[int, int], NDArray[Any]]  # (start, stop) -> those rows


@dataclass(frozen=True)
class Order:
    """A row permutation: `rows` computes it from `heads`; a `rotary` one needs an even number of rotated rows."""

    rows: Callable[[Heads], RowOrder]
    heads: Callable[[ModelShape], Heads] = lambda shape: shape.heads
    rotary: bool = False

    def of(self, shape: ModelShape, count: int) -> RowOrder:
        """Return the permutation for a tensor of `count` rows; raise ValueError if `count` does not match the heads."""
        heads = self.heads(shape)
        turned = heads.turned or heads.size
        uneven = self.rotary and (turned % 2 != 0 or turned > heads.size)
        if not (heads.query and heads.key and heads.size) or heads.query % heads.key or uneven:
            raise ValueError(f"{count} rows do not match {heads.query} query and {heads.key} key heads of {heads.size}")
        order = self.rows(heads)
        if len(order) != count:
            raise ValueError(f"{count} rows, but its heads have {len(order)}")
        return order


def _halves(count: int, heads: Heads) -> RowOrder:
    """Return the RoPE permutation: transformers pairs a head's row i with i + half, ggml pairs neighbouring rows."""
    turned = heads.turned or heads.size
    rows = np.arange(count * heads.size).reshape(count, heads.size)
    halves = rows[:, :turned].reshape(count, 2, turned // 2)
    return np.concatenate([halves.swapaxes(1, 2).reshape(count, turned), rows[:, turned:]], 1).reshape(-1)


def _groups(heads: Heads) -> RowOrder:
    """Return the permutation that splits fused QKV: from (key head: its queries, key, value) to all Q, all K, all V."""
    rows = np.arange((heads.query + 2 * heads.key) * heads.size).reshape(heads.key, -1, heads.size)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


def _tiled(heads: Heads, size: int, before: int = 0) -> RowOrder:
    """Reorder values of `size` rows from grouped by key head to interleaved; the first `before` rows stay."""
    values = np.arange(heads.query * size).reshape(heads.key, -1, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + values])


def _of_groups(heads: Heads, gates: bool) -> RowOrder:
    """Return the rows of Q, K and V, or of the gates, in a fused weight with rows (key head: Q, K, values, gates)."""
    shared = heads.query // heads.key
    rows = np.arange(2 * (heads.key + heads.query) * heads.size).reshape(heads.key, -1, heads.size)
    if gates:
        return rows[:, 2 + shared :].reshape(-1)
    return np.concatenate([rows[:, 0].reshape(-1), rows[:, 1].reshape(-1), rows[:, 2 : 2 + shared].reshape(-1)])


QUERY_HALVES = Order(lambda heads: _halves(heads.query, heads), rotary=True)
KEY_HALVES = Order(lambda heads: _halves(heads.key, heads), rotary=True)
GROUPS = Order(_groups)
# Orders of a gated delta rule.
_linear = partial(Order, heads=lambda shape: shape.linear_heads)
TILED_HEADS = _linear(lambda heads: _tiled(heads, 1))
TILED_VALUES = _linear(lambda heads: _tiled(heads, heads.size))
TILED_CHANNELS = _linear(lambda heads: _tiled(heads, heads.size, 2 * heads.key * heads.size))
CHANNELS_OF_GROUPS = _linear(lambda heads: _of_groups(heads, gates=False))
GATES_OF_GROUPS = _linear(lambda heads: _of_groups(heads, gates=True))
# Orders of an indexer, whose heads share one key: neighbouring pairs of rotated rows become halves.
_indexer = partial(Order, heads=lambda shape: shape.index_heads, rotary=True)
INDEX_QUERY_PAIRS = _indexer(lambda heads: np.argsort(_halves(heads.query, heads)))
INDEX_KEY_PAIRS = _indexer(lambda heads: np.argsort(_halves(heads.key, heads)))


def in_order(read: RowReader, order: RowOrder | None) -> RowReader:
    """Return a reader of permuted rows; it reads each contiguous run of source rows with one call of `read`."""
    if order is None:
        return read

    def gather(start: int, stop: int) -> NDArray[Any]:
        sort = np.argsort(order[start:stop])
        ascending = order[start:stop][sort]
        cuts = np.flatnonzero(np.diff(ascending) != 1) + 1
        runs = [read(int(run[0]), int(run[-1]) + 1) for run in np.split(ascending, cuts)]
        return np.concatenate(runs)[np.argsort(sort)]

    return gather


def concatenated(parts: list[tuple[RowReader, int]]) -> RowReader:
    """Return a reader over the concatenated rows of several tensors, given as (reader, number of rows)."""

    def read(start: int, stop: int) -> NDArray[Any]:
        found, first = [], 0
        for rows, count in parts:
            if (one := max(start, first)) < (end := min(stop, first + count)):
                found.append(rows(one - first, end - first))
            first += count
        return np.concatenate(found)

    return read
