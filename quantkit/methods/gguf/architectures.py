"""What each architecture needs besides its name map: a row of `KNOWN` is an architecture.

The tensor names of a file come from gguf's own name maps. llama.cpp rotates neighbouring pairs of a head in
its "llama" architecture where transformers rotates halves, so rows of the query and key weights are reordered
there (conversion/llama.py of llama.cpp); qwen2 and qwen3 keep their order.

Not supported: other architectures, mixtures of experts, rope types but default, linear and (for llama)
llama3, vision towers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError, UnsupportedError
from quantkit.source import Source, first_line

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Buffers that old checkpoints store and every runtime computes.
IGNORED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Architecture:
    """One architecture: `name` in the file, the parts of a block, which parts may have a bias, rope types."""

    model_type: str
    name: str
    permuted: bool
    biases: tuple[str, ...]
    parts: tuple[str, ...] = (*ATTENTION, *MLP, *NORMS)
    rope_types: tuple[str, ...] = ("default", "linear")


_LLAMA_ROPES = ("default", "linear", "llama3")
KNOWN = {
    row.model_type: row
    for row in (
        Architecture("llama", "llama", True, (*ATTENTION, *MLP), rope_types=_LLAMA_ROPES),
        Architecture("mistral", "llama", True, (), rope_types=_LLAMA_ROPES),
        Architecture("qwen2", "qwen2", False, ATTENTION[:3]),
        Architecture("qwen3", "qwen3", False, (), parts=(*ATTENTION, *HEAD_NORMS, *MLP, *NORMS)),
    )
}


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that its file tells: counts, sizes in values, rope base and scaling."""

    blocks: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_epsilon: float
    tied: bool
    rope_theta: float
    rope_type: str
    rope: dict[str, Any]


def find_architecture(source: Source) -> Architecture:
    """Look the source's architecture up; raises UnsupportedError."""
    if source.architecture not in KNOWN:
        raise UnsupportedError(
            f"{source.model} has the architecture {source.architecture!r}, which is not converted to GGUF. "
            f"Known: {', '.join(KNOWN)}."
        )
    return KNOWN[source.architecture]


def read_shape(source: Source) -> Shape:
    """Read config.json with the defaults of transformers, old and new spelling; raises SourceError,
    UnsupportedError.

    What would load but compute something else is refused: activations but SiLU, other rope types, rotary
    dimensions that cover a part of the head.
    """
    from transformers import AutoConfig

    architecture = find_architecture(source)
    try:
        config = AutoConfig.for_model(**source.config).to_dict()
    except (ValueError, TypeError, KeyError) as error:
        raise SourceError(f"{source.model}: transformers cannot read config.json: {first_line(error)}.") from None
    if config["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedError(
            f"{source.model} has the activation {config['hidden_act']!r}; "
            f"llama.cpp computes silu for {architecture.name}"
        )
    rope = dict(config["rope_parameters"] or {})
    rope_type = str(rope.get("rope_type", rope.get("type", "default"))).lower()
    if rope_type not in architecture.rope_types or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError(
            f"{source.model} has the rope parameters {rope}, which are not converted to GGUF for "
            f"{source.architecture}. Known rope types: {', '.join(architecture.rope_types)}."
        )
    heads = int(config["num_attention_heads"])
    return Shape(
        blocks=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config["num_key_value_heads"] or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        context=int(config["max_position_embeddings"]),
        norm_epsilon=float(config["rms_norm_eps"]),
        tied=bool(config["tie_word_embeddings"]),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_type=rope_type,
        rope=rope,
    )


def sliding_window(source: Source, shape: Shape) -> int | None:
    """The attention window in tokens that llama.cpp ignores; None where it changes nothing."""
    window = source.config.get("sliding_window")
    used = source.config.get("use_sliding_window", source.architecture == "mistral")
    return int(window) if used and window and int(window) < shape.context else None


def expected_tensors(architecture: Architecture, shape: Shape) -> tuple[list[str], list[str]]:
    """Names of the source's tensors: those it must have, and the biases that it may have."""
    blocks = [f"model.layers.{block}." for block in range(shape.blocks)]
    must = [EMBEDDING, FINAL_NORM] + ([] if shape.tied else [HEAD])
    must += [f"{block}{part}.weight" for block in blocks for part in architecture.parts]
    return must, [f"{block}{part}.bias" for block in blocks for part in architecture.biases]


def name_map(architecture_name: str, blocks: int) -> Any:
    """gguf's map of tensor names for an architecture of llama.cpp."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[architecture_name], blocks)


def heads_of(architecture: Architecture, name: str, shape: Shape) -> int | None:
    """Number of heads whose rows are reordered in the tensor `name` of the source; None for no reordering."""
    part = name.rsplit(".", 1)[0]
    if architecture.permuted and part.endswith("q_proj"):
        return shape.heads
    if architecture.permuted and part.endswith("k_proj"):
        return shape.kv_heads
    return None


def permute(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Reorder rows (heads x head_dim, ...): halves of a head become neighbouring pairs."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermute(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Undo `permute`."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def rope_factors(shape: Shape) -> NDArray[np.float32] | None:
    """What llama.cpp divides each rope frequency by, (head_dim / 2,) float32, for llama3 scaling; else None.

    Frequencies with a wavelength of more than original / low tokens are divided by `factor`, those of less
    than original / high tokens are kept, and between the two the inverse is interpolated (transformers,
    modeling_rope_utils, `_compute_llama3_parameters`).
    """
    if shape.rope_type != "llama3":
        return None
    factor, low, high = (float(shape.rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(shape.rope["original_max_position_embeddings"])
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    turns = original * shape.rope_theta**-exponents / (2 * math.pi)  # turns within the original context
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)
