"""The shape that each tensor of a file has by the model's numbers.

llama.cpp holds every tensor of a file against the file's keys when it loads it (src/models/ of
https://github.com/ggml-org/llama.cpp), and transformers every tensor of a checkpoint against its config.json. A file
that is not held against both can be written, read back, and loaded by nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.formats.gguf.architectures.row_orders import Heads

Lengths = tuple[str, ...]  # names of lengths in `Sizes.lengths`, columns last


@dataclass(frozen=True)
class Sizes:
    """A model's numbers that shapes depend on; `experts` is 0 where there are none."""

    vocabulary: int
    context: int
    hidden: int
    inner: int
    heads: Heads
    experts: int = 0
    expert_inner: int = 0

    @property
    def lengths(self) -> dict[str, int]:
        """Every length by its name in `SHAPES`."""
        query, key = self.heads.query * self.heads.size, self.heads.key * self.heads.size
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
            "expert inner": self.expert_inner or self.inner,
        }


# By the name in the file, without the block in front and ``.weight`` behind; a bias has the first length.
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
    **dict.fromkeys(("token_embd_norm", "output_norm", "attn_norm", "attn_norm_2", "ffn_norm"), ("hidden",)),
    **dict.fromkeys(("post_attention_norm", "post_ffw_norm"), ("hidden",)),
}


def expected_shape(name: str, sizes: Sizes, other: Mapping[str, Lengths]) -> tuple[int, ...]:
    """The shape in the file of the tensor `name`; `other` are an architecture's own. Raises KeyError for no name."""
    stem, _, kind = re.sub(r"^blk\.\d+\.", "", name).rpartition(".")
    lengths = sizes.lengths
    shape = tuple(lengths[length] for length in other.get(stem) or SHAPES[stem])
    return shape[:1] if kind == "bias" else shape
