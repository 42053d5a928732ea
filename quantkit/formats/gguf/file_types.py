"""Which tensor gets which type: the mixes behind names such as Q4_K_M.

The rules are those of llama.cpp's `llama_model_quantize` (src/llama-quant.cpp, llama-cpp-python 0.3.36), so
that a file of quantkit equals the file of llama.cpp's own two steps. Tests hold them against that library.

Types that are given for single tensors come before the rules. Not here: the IQ and TQ types but IQ4_NL, Q4_0 .. Q5_1
as file types.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantkit.formats.gguf.ggml.library import block_type

# Types that no importance changes.
UNWEIGHTED = ("Q8_0", "F16", "BF16", "F32")
MIXES = ("Q2_K_S", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")
# The type that a file type gives to tensors without a rule of their own; "auto": to those for which none is chosen.
DEFAULT = {mix: mix[:4] for mix in MIXES} | {kind: kind for kind in UNWEIGHTED} | {"auto": "Q6_K"}
WEIGHTED_ONLY = ("Q2_K_S",)  # llama.cpp makes them only with an importance matrix
PLAIN = (*UNWEIGHTED, "Q6_K", "auto")
# The types that a tensor may be given by name, narrow ones first.
TENSOR_TYPES = ("Q2_K", "Q3_K", "Q4_0", "IQ4_NL", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", *UNWEIGHTED)
# The type that stands in where a row is no whole number of 256-value blocks.
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
NARROWEST = "F16"
FLOAT_PARTS = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "token_types.weight",
    "ssm_conv1d.weight", "shortconv.conv.weight",
)  # fmt: skip
FALCON = "falcon"  # has rules of its own
# Tensors that are counted together.
VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
DOWN = ("ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True)
class ModelCounts:
    """Counts that the rules go by, experts 0 if dense, and llama.cpp's name of the architecture."""

    blocks: int
    heads: int
    kv_heads: int
    experts: int = 0
    name: str = "llama"
    values: int = 0  # of blocks with values of an attention

    @property
    def sharing(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Choice:
    """The type of a tensor, and the type that was meant before the row length was looked at."""

    type: str
    intended: str


def stays_float(name: str, dimensions: int) -> bool:
    """Whether a tensor of the file stays F32 in every file type."""
    return dimensions < 2 or not name.endswith("weight") or name.endswith(("_norm.weight", *FLOAT_PARTS))


def block_of(name: str) -> int:
    """The block that a tensor name such as ``blk.3.attn_q.weight`` belongs to; -1 for none."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def given_type(name: str, types: Mapping[str, str]) -> str | None:
    """The type that is given for the tensor `name`, or None: the last pattern that is its name or is found in it."""
    matching = [kind for pattern, kind in types.items() if pattern == name or re.search(pattern, name)]
    return matching[-1] if matching else None


def choose_types(
    shapes: Mapping[str, tuple[int, ...]], file_type: str, model: ModelCounts, types: Mapping[str, str] | None = None
) -> dict[str, Choice]:
    """Choose the type of every tensor by its name in the file and its shape (rows, columns), in the order of the file.

    Tensors come sorted by block and name, those outside of blocks first. `file_type` is a key of `DEFAULT`. `types`
    are given by regular expression, each one of `TENSOR_TYPES`; they change no tensor that stays F32.
    """
    chosen: dict[str, Choice] = {}
    seen: Counter[tuple[str, ...]] = Counter()
    values = sum(re.sub(r"^blk\.\d+\.", "", name) in VALUES for name in shapes)
    for name, shape in sorted(shapes.items(), key=lambda item: (block_of(item[0]), item[0])):
        if stays_float(name, len(shape)):
            chosen[name] = Choice("F32", "F32")
            continue
        kind = re.sub(r"^blk\.\d+\.", "", name)
        family = next((family for family in (VALUES, DOWN) if kind in family), (kind,))
        index = block_of(name) if family == DOWN and model.experts > 1 else seen[family]
        by_rule = _type_by_rule(kind, index, file_type, replace(model, values=values), tied=OUTPUT not in shapes)
        seen[family] += 1
        intended = given_type(name, types or {}) or by_rule
        chosen[name] = Choice(fitting(intended, shape[-1]), intended)
    return chosen


def fitting(intended: str, columns: int) -> str:
    """`intended`, or the type that stands in for it where `columns` is no whole number of its blocks."""
    for name in (intended, FALLBACK.get(intended, NARROWEST)):
        if columns % block_type(name).block == 0:
            return name
    return NARROWEST


def _type_by_rule(kind: str, i: int, file_type: str, model: ModelCounts, tied: bool) -> str:
    default = DEFAULT[file_type]
    head = kind == OUTPUT or (kind == EMBEDDING and tied)
    if file_type in PLAIN:
        return "Q8_0" if head and model.name == FALCON and file_type == "Q6_K" else default
    if head:
        return "Q8_0" if model.name == FALCON else "Q6_K"
    if kind in VALUES:
        return _values(i, file_type, default, model)
    if kind == "attn_k.weight":
        return "Q8_0" if model.experts == 8 else default
    if kind in DOWN:
        return (_down_of_falcon if model.name == FALCON else _down)(i, file_type, default, model.blocks)
    if kind == "attn_output.weight":
        if model.name == FALCON:
            return "Q4_K" if file_type == "Q3_K_L" else default
        if model.experts == 8:
            return "Q5_K" if default in ("Q2_K", "Q3_K", "Q4_K") else default
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(file_type, default)
    return default


def _more(i: int, n: int) -> bool:
    """The first and the last eighth of the blocks, and every third between, get more bits."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _values(i: int, file_type: str, default: str, model: ModelCounts) -> str:
    kind = default
    if file_type == "Q2_K":
        kind = "Q4_K" if model.sharing >= 4 else "Q3_K"
    elif file_type == "Q2_K_S":
        kind = "Q4_K" if model.sharing >= 4 else default
    elif file_type == "Q3_K_M":
        kind = "Q5_K" if i < 2 else "Q4_K"
    elif file_type == "Q3_K_L" or (file_type == "Q4_K_S" and i < 4):
        kind = "Q5_K"
    elif file_type in ("Q4_K_M", "Q5_K_M") and _more(i, model.values):
        kind = "Q6_K"
    # llama.cpp knows Llama-2-70B and Qwen2-72B by these numbers; eight query heads share the values there.
    large = model.blocks == 80 and (model.name == "qwen2" or (model.name == "llama" and model.heads != model.kv_heads))
    if large and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if model.experts == 8 else kind


def _down(i: int, file_type: str, default: str, n: int) -> str:
    if file_type == "Q2_K":
        return "Q3_K"
    if file_type == "Q2_K_S":
        return "Q4_K" if i < n // 8 else default
    if file_type == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K"
    if file_type == "Q3_K_L" or (file_type == "Q4_K_S" and i < n // 8):
        return "Q5_K"
    if file_type in ("Q4_K_M", "Q5_K_M") and _more(i, n):
        return "Q6_K"
    return default


def _down_of_falcon(i: int, file_type: str, default: str, n: int) -> str:
    if file_type == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K" if _more(i, n) else "Q3_K"
    if file_type == "Q4_K_M":
        return "Q6_K" if i < n // 16 else "Q5_K" if _more(i, n) else "Q4_K"
    return {"Q3_K_L": "Q4_K", "Q4_K_S": default}.get(file_type) or _down(i, file_type, default, n)


def describe_fallbacks(chosen: dict[str, Choice]) -> list[str]:
    """Say in a sentence each how many tensors have rows that do not fit the type that was meant."""
    changes = Counter((c.intended, c.type) for c in chosen.values() if c.type != c.intended)
    counts: dict[int, list[str]] = {}
    totals: Counter[int] = Counter()
    for (intended, kind), count in sorted(changes.items()):
        width = block_type(intended).block
        counts.setdefault(width, []).append(f"{count} {intended} -> {kind}")
        totals[width] += count
    return [
        f"{totals[width]} of {len(chosen)} tensors have rows that are no multiple of {width}: {', '.join(pairs)}"
        for width, pairs in sorted(counts.items())
    ]
