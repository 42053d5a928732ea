"""Choose each tensor's quantization type: the mixes behind file types such as Q4_K_M.

The rules follow llama.cpp's `llama_model_quantize` (src/llama-quant.cpp, llama-cpp-python 0.3.36); tests compare the
results. User-chosen types take precedence. Not supported as file types: TQ types, Q4_0 .. Q5_1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantkit.formats.gguf.ggml.library import block_type

# Types whose rounding ignores importance.
UNWEIGHTED = ("Q8_0", "F16", "BF16", "F32")
MIXES = ("Q2_K_S", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")
NARROW_IQ = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")  # have rules of their own
IQ_MIXES = (*NARROW_IQ, "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_XS", "IQ4_NL")
# The type that a file type gives to tensors without a rule; "auto": to tensors without a chosen type.
DEFAULT = {mix: mix[:4] for mix in MIXES} | {mix: mix for mix in IQ_MIXES} | {kind: kind for kind in UNWEIGHTED}
DEFAULT |= {"IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S", "auto": "Q6_K"}
# llama.cpp makes them only with an importance matrix.
WEIGHTED_ONLY = ("Q2_K_S", *NARROW_IQ, "IQ3_XXS", "IQ3_XS")
PLAIN = (*UNWEIGHTED, "Q6_K", "auto")
# The types that a tensor may be given by name, narrow ones first.
TENSOR_TYPES = (
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS",
    "Q4_0", "IQ4_NL", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", *UNWEIGHTED,
)  # fmt: skip
# Fallback types for rows that are not a multiple of 256 values.
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
FALLBACK |= {kind: "IQ4_NL" for kind in TENSOR_TYPES if kind.startswith("IQ") and kind != "IQ4_NL"}
NARROWEST = "F16"
FLOAT_PARTS = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "token_types.weight",
    *(f"ssm_conv1d{part}.weight" for part in ("", "_q", "_k", "_v")), "shortconv.conv.weight",
    "altup_correct_coef.weight", "altup_predict_coef.weight", "indexer.q_proj.weight", "indexer.k_proj.weight",
)  # fmt: skip
# Tensors that llama.cpp leaves in the input file's type, which is BF16.
HALF_PARTS = ("altup", "laurel", "per_layer_model_proj")
FALCON = "falcon"  # has rules of its own
# Tensors that the rules count together.
VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
DOWN = ("ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
GATE = ("ffn_gate.weight", "ffn_gate_exps.weight", "ffn_gate_shexp.weight", "ffn_gate_up_exps.weight")
UP = ("ffn_up.weight", "ffn_up_exps.weight", "ffn_up_shexp.weight")
OUTPUT, EMBEDDING, PER_LAYER = "output.weight", "token_embd.weight", "per_layer_token_embd.weight"
TABLES = (EMBEDDING, PER_LAYER)  # with a row per token; both have the type of a tied head
# By file type: types of an untied embedding, and of a dense model's attention output.
EMBEDDINGS = dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "Q2_K")
EMBEDDINGS |= dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "IQ3_S")
# Type of values that four heads share, and the number of first blocks with Q5_K.
VALUES_OF = {"Q2_K": "Q3_K", "IQ3_M": "Q4_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
SHARED_VALUES = dict.fromkeys(("Q2_K", "Q2_K_S", "IQ3_XXS", "IQ3_XS", "IQ3_S"), "Q4_K")
SHARED_VALUES |= {"IQ4_XS": "Q5_K", "IQ4_NL": "Q5_K"}
FIRST_VALUES = {"Q3_K_M": 2, "Q4_K_S": 4}
# Types of the down projections, and of those in the first eighth of the blocks.
DOWN_OF = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
FIRST_DOWN = {"Q2_K_S": "Q4_K", "Q4_K_S": "Q5_K", "IQ3_M": "Q4_K", "IQ4_XS": "Q5_K", "IQ4_NL": "Q5_K"}
ATTENTION_OUTPUTS = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_XXS": "IQ3_S", "IQ3_M": "Q4_K"}


@dataclass(frozen=True)
class ModelCounts:
    """Model dimensions that the type rules use; `experts` is 0 for dense models, `weighted`: an imatrix is given."""

    blocks: int
    heads: int
    kv_heads: int
    experts: int = 0
    name: str = "llama"
    values: int = 0  # number of blocks with attention values
    weighted: bool = False

    @property
    def sharing(self) -> int:
        """Return the number of query heads per key-value head in the first block; 0 if that block has no attention."""
        return self.heads // self.kv_heads if self.kv_heads else 0


@dataclass(frozen=True)
class Choice:
    """The chosen type of a tensor, and the type it would have if its rows were a whole number of blocks."""

    type: str
    intended: str


def stays_float(name: str, dimensions: int) -> bool:
    """Return whether the tensor `name` is F32 in every file type: vectors, norms, routers and the like."""
    return dimensions < 2 or not name.endswith("weight") or name.endswith(("_norm.weight", *FLOAT_PARTS))


def stays_half(name: str) -> bool:
    """Return whether a tensor stays BF16 (F32 or F16 in such files) unless the user chooses its type."""
    return any(part in name for part in HALF_PARTS)


def block_of(name: str) -> int:
    """Return the block index in a tensor name such as ``blk.3.attn_q.weight``; -1 outside the blocks."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def given_type(name: str, types: Mapping[str, str]) -> str | None:
    """Return the user-chosen type of a tensor, or None; the last matching pattern (regular expression or name) wins."""
    matching = [kind for pattern, kind in types.items() if pattern == name or re.search(pattern, name)]
    return matching[-1] if matching else None


def choose_types(
    shapes: Mapping[str, tuple[int, ...]], file_type: str, model: ModelCounts, types: Mapping[str, str] | None = None
) -> dict[str, Choice]:
    """Choose every tensor's type from the tensor names and shapes in the file.

    `file_type` is a key of `DEFAULT`; `types` maps regular expressions of names to entries of `TENSOR_TYPES`.
    """
    chosen: dict[str, Choice] = {}
    seen: Counter[tuple[str, ...]] = Counter()
    values = sum(re.sub(r"^blk\.\d+\.", "", name) in VALUES for name in shapes)
    for name, shape in sorted(shapes.items(), key=lambda item: (block_of(item[0]), item[0])):
        if stays_float(name, len(shape)):
            chosen[name] = Choice("F32", "F32")
            continue
        kind = re.sub(r"^blk\.\d+\.(indexer\.(?=attn_k\.))?", "", name)
        family = next((family for family in (VALUES, DOWN, GATE, UP) if kind in family), (kind,))
        by_block = model.experts > 1 and family in (DOWN, GATE, UP) and file_type not in NARROW_IQ
        index = block_of(name) if by_block else seen[family]
        by_rule = _type_by_rule(kind, index, file_type, replace(model, values=values), tied=OUTPUT not in shapes)
        if stays_half(name):
            by_rule = file_type if file_type in ("F32", "F16") else "BF16"
        seen[family] += 1
        given = given_type(name, types or {})
        intended = given or by_rule
        fits = fitting(intended, shape[-1])
        if fits == FALLBACK["Q5_K"] and not given and _is_head(kind, tied=OUTPUT not in shapes):
            fits = FALLBACK["Q6_K"]
        chosen[name] = Choice(fits, intended)
    return chosen


def fitting(intended: str, columns: int) -> str:
    """Return `intended`, or a fallback type if a row of `columns` values is not a whole number of its blocks."""
    for name in (intended, FALLBACK.get(intended, NARROWEST)):
        if columns % block_type(name).block == 0:
            return name
    return NARROWEST


def _is_head(kind: str, tied: bool) -> bool:
    return kind == OUTPUT or (kind in TABLES and tied)


def _type_by_rule(kind: str, i: int, file_type: str, model: ModelCounts, tied: bool) -> str:
    default = DEFAULT[file_type]
    head = _is_head(kind, tied)
    if file_type in PLAIN:
        return "Q8_0" if head and model.name == FALCON and file_type == "Q6_K" else default
    if head:
        narrow = file_type in (*NARROW_IQ, "IQ3_XXS")
        return "Q8_0" if model.name == FALCON else "Q5_K" if narrow else "Q6_K"
    if kind in TABLES:
        return EMBEDDINGS.get(file_type, default)
    if file_type in NARROW_IQ:
        return _narrow_iq(kind, i, file_type, default, model)
    if kind in VALUES:
        return _values(i, file_type, default, model)
    if kind == "attn_k.weight" and model.experts == 8:
        return "Q8_0"
    if kind in ("attn_k.weight", "attn_q.weight"):
        return {"IQ3_XXS": "IQ2_S", "IQ3_XS": "IQ3_XXS"}.get(file_type, default)
    if kind in (*GATE, *UP):
        middle = model.blocks // 8 <= i < 7 * model.blocks // 8
        return "IQ3_XXS" if file_type == "IQ3_XS" and middle else default
    if kind in DOWN:
        return (_down_of_falcon if model.name == FALCON else _down)(i, file_type, default, model)
    if kind == "attn_output.weight":
        if model.name == FALCON:
            return "Q4_K" if file_type == "Q3_K_L" else default
        if model.experts == 8:
            return "Q5_K" if default[:3] in ("Q2_", "Q3_", "Q4_", "IQ3", "IQ4") else default
        return ATTENTION_OUTPUTS.get(file_type, default)
    return default


def _narrow_iq(kind: str, i: int, file_type: str, default: str, model: ModelCounts) -> str:
    """Return a tensor's type in the 1-bit and 2-bit IQ mixes, which give a few sensitive tensors more bits."""
    wider = "IQ3_S" if file_type in ("IQ2_S", "IQ2_M") else "Q2_K"
    if kind in VALUES:
        return "Q4_K" if model.sharing >= 4 or model.experts >= 4 else wider
    if kind == "attn_k.weight" and model.experts == 8:
        return "Q4_K"
    if kind in DOWN and i < model.blocks // 8:
        return wider
    if kind == "attn_output.weight":
        if model.experts == 8:
            return "Q5_K"
        return {"IQ1_S": "IQ2_XXS", "IQ1_M": "IQ2_XXS", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S"}.get(file_type, default)
    return default


def _more(i: int, n: int) -> bool:
    """Return whether block i of n gets more bits: the first and last eighth, and every third block between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _values(i: int, file_type: str, default: str, model: ModelCounts) -> str:
    kind = VALUES_OF.get(file_type, default)
    if model.sharing >= 4:
        kind = SHARED_VALUES.get(file_type, kind)
    if i < FIRST_VALUES.get(file_type, 0):
        kind = "Q5_K"
    if file_type in ("Q4_K_M", "Q5_K_M") and _more(i, model.values):
        kind = "Q6_K"
    # llama.cpp knows Llama-2-70B and Qwen2-72B by these numbers; eight query heads share the values there.
    large = model.blocks == 80 and (model.name == "qwen2" or (model.name == "llama" and model.heads != model.kv_heads))
    if large and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if model.experts == 8 else kind


def _down(i: int, file_type: str, default: str, model: ModelCounts) -> str:
    n, in_first = model.blocks, i < model.blocks // 8
    if file_type == "Q3_K_M" and i < n // 16:
        return "Q5_K"
    if file_type in ("Q4_K_M", "Q5_K_M") and _more(i, n):
        return "Q6_K"
    if file_type == "IQ3_M" and model.experts == 8 and _more(i, n):
        return "Q4_K"
    if in_first and file_type in FIRST_DOWN and not (file_type in ("IQ4_XS", "IQ4_NL") and model.weighted):
        return FIRST_DOWN[file_type]
    return DOWN_OF.get(file_type, default)


def _down_of_falcon(i: int, file_type: str, default: str, model: ModelCounts) -> str:
    n = model.blocks
    if file_type == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K" if _more(i, n) else "Q3_K"
    if file_type == "Q4_K_M":
        return "Q6_K" if i < n // 16 else "Q5_K" if _more(i, n) else "Q4_K"
    return {"Q3_K_L": "Q4_K", "Q4_K_S": default}.get(file_type) or _down(i, file_type, default, model)


def describe_fallbacks(chosen: dict[str, Choice]) -> list[str]:
    """Return notes that count the tensors whose row length forced a fallback type."""
    changes = Counter((c.intended, c.type) for c in chosen.values() if c.type != c.intended)
    counts: dict[int, list[str]] = {}
    totals: Counter[int] = Counter()
    for (intended, kind), count in sorted(changes.items()):
        width = block_type(intended).block
        counts.setdefault(width, []).append(f"{count} {intended} -> {kind}")
        totals[width] += count
    return [
        f"wider types for {totals[width]} of {len(chosen)} tensors, whose rows are not a multiple of {width}: "
        f"{', '.join(pairs)}"
        for width, pairs in sorted(counts.items())
    ]
