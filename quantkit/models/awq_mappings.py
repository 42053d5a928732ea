"""Which input channels of which layers AWQ may scale in each architecture, and how the inverse is folded away.

A model's function does not change when the inputs of some linear layers are divided by a scale that their columns
are multiplied with, as long as the layer before them (a norm or a linear layer) divides its output, and everything
that reads this output is scaled along. An architecture is an entry of `SCALINGS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Fused = Literal["", "qkv", "qkv_by_group", "gate_up"]


@dataclass(frozen=True)
class Scaling:
    """Input channels of `layers` can be scaled because `before` (a norm or a linear layer) can take the inverse.

    Names are those within a block; `*` stands for every expert. `follow`: layers that read the same output and are
    not quantized, such as a router. `fused`: `before` computes more than what `layers` read, and only these rows take
    the inverse: of a stacked `qkv` the values, also where each group of heads has its own q, k, v (`qkv_by_group`); of
    `gate_up` the second half. `offset`: the norm multiplies by weight + offset. `when`: (attribute of the model's
    configuration, its value) pairs that must hold.
    """

    before: str
    layers: tuple[str, ...]
    follow: tuple[str, ...] = ()
    fused: Fused = ""
    offset: float = 0.0
    when: tuple[tuple[str, object], ...] = ()


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (Scaling("input_layernorm", QKV), Scaling("self_attn.v_proj", ("self_attn.o_proj",)))
GATED_MLP = (
    Scaling("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Scaling("mlp.up_proj", ("mlp.down_proj",)),
)
GEMMA = (
    Scaling("input_layernorm", QKV, offset=1.0),
    Scaling("self_attn.v_proj", ("self_attn.o_proj",)),
    Scaling("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj"), offset=1.0),
    Scaling("mlp.up_proj", ("mlp.down_proj",)),
)


def experts(block: str, gate: str, up: str, down: str, shared: str = "") -> tuple[Scaling, ...]:
    """The scalings of a mixture of experts: its norm feeds the router, every expert, and perhaps a shared one."""
    first = tuple(f"{block}.experts.*.{name}" for name in (gate, up))
    router: tuple[str, ...] = (f"{block}.gate",)
    inner: tuple[Scaling, ...] = (Scaling(f"{block}.experts.*.{up}", (f"{block}.experts.*.{down}",)),)
    if shared:
        first += tuple(f"{block}.{shared}.{name}" for name in (gate, up))
        router += (f"{block}.{shared}_gate",)
        inner += (Scaling(f"{block}.{shared}.{up}", (f"{block}.{shared}.{down}",)),)
    return (Scaling("post_attention_layernorm", first, router), *inner)


FALCON = ("self_attention.query_key_value", "mlp.dense_h_to_4h")
# By model_type. Between a layer and its GELU's or SiLU's successor nothing can be scaled; ReLU lets scales through.
SCALINGS: dict[str, tuple[Scaling, ...]] = {
    "llama": ATTENTION + GATED_MLP,
    "mistral": ATTENTION + GATED_MLP,
    "qwen2": ATTENTION + GATED_MLP,
    "qwen3": ATTENTION + GATED_MLP,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": (
        Scaling("input_layernorm", ("self_attn.qkv_proj",)),
        Scaling("self_attn.qkv_proj", ("self_attn.o_proj",), fused="qkv"),
        Scaling("post_attention_layernorm", ("mlp.gate_up_proj",)),
        Scaling("mlp.gate_up_proj", ("mlp.down_proj",), fused="gate_up"),
    ),
    "phi": (  # one norm for attention and MLP side by side
        Scaling("input_layernorm", (*QKV, "mlp.fc1")),
        Scaling("self_attn.v_proj", ("self_attn.dense",)),
    ),
    "gptj": (
        Scaling("ln_1", ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in")),
        Scaling("attn.v_proj", ("attn.out_proj",)),
    ),
    "gpt_neox": (
        Scaling("input_layernorm", ("attention.query_key_value",)),
        Scaling("attention.query_key_value", ("attention.dense",), fused="qkv_by_group"),
        Scaling("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    ),
    "falcon": (
        Scaling("input_layernorm", FALCON, when=(("parallel_attn", True),)),
        Scaling("input_layernorm", FALCON[:1], when=(("parallel_attn", False),)),
        Scaling("post_attention_layernorm", FALCON[1:], when=(("parallel_attn", False),)),
        Scaling("ln_attn", FALCON[:1]),
        Scaling("ln_mlp", FALCON[1:]),
        Scaling("self_attention.query_key_value", ("self_attention.dense",), fused="qkv_by_group"),
    ),
    "mpt": (
        Scaling("norm_1", ("attn.Wqkv",)),
        Scaling("attn.Wqkv", ("attn.out_proj",), fused="qkv", when=(("attn_config.clip_qkv", None),)),
        Scaling("norm_2", ("ffn.up_proj",)),
    ),
    "gpt2": (
        Scaling("ln_1", ("attn.c_attn",)),
        Scaling("attn.c_attn", ("attn.c_proj",), fused="qkv"),
        Scaling("ln_2", ("mlp.c_fc",)),
    ),
    "starcoder2": (*ATTENTION, Scaling("post_attention_layernorm", ("mlp.c_fc",))),
    "olmo2": (ATTENTION[1], GATED_MLP[1]),  # its norms stand behind the layers
    "mixtral": ATTENTION + experts("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": ATTENTION + GATED_MLP + experts("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_expert"),
    "qwen3_moe": ATTENTION + GATED_MLP + experts("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": (
        ATTENTION[0],
        replace(ATTENTION[1], when=(("clip_qkv", None),)),
        *experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "opt": (  # with its norms behind the layers, they feed the residual stream too
        Scaling("self_attn_layer_norm", QKV, when=(("do_layer_norm_before", True),)),
        Scaling("self_attn.v_proj", ("self_attn.out_proj",)),
        Scaling("final_layer_norm", ("fc1",), when=(("do_layer_norm_before", True),)),
        Scaling("fc1", ("fc2",), when=(("activation_function", "relu"),)),
    ),
}


def scalings_of(architecture: str, config: Any, names: Iterable[str]) -> list[Scaling]:
    """The architecture's scalings that hold in a block whose weights are called `names`, each expert written out."""
    stems = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    scalings = []
    for scaling in SCALINGS[architecture]:
        if not all(_attribute(config, name) == value for name, value in scaling.when):
            continue
        for one in _each_expert(scaling, stems) if "*" in scaling.before else [scaling]:
            layers, follow = _written_out(one.layers, stems), _written_out(one.follow, stems)
            if one.before in stems and layers:
                scalings.append(replace(one, layers=layers, follow=follow))
    return scalings


def _attribute(config: Any, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _each_expert(scaling: Scaling, stems: set[str]) -> Iterable[Scaling]:
    index = 0
    while scaling.before.replace("*", str(index)) in stems:
        layers = tuple(name.replace("*", str(index)) for name in scaling.layers)
        yield replace(scaling, before=scaling.before.replace("*", str(index)), layers=layers)
        index += 1


def _written_out(names: tuple[str, ...], stems: set[str]) -> tuple[str, ...]:
    written: list[str] = []
    for name in names:
        if "*" not in name:
            written += [name] if name in stems else []
        index = 0
        while "*" in name and (one := name.replace("*", str(index))) in stems:
            written.append(one)
            index += 1
    return tuple(written)


def rows_before(fused: Fused, rows: int, columns: int, heads: int) -> torch.Tensor:
    """Indices of the rows of the layer before (of `rows`) whose outputs become the `columns` inputs of the next.

    They are fewer than `columns` where several of the `heads` query heads read one value head.
    """
    if fused == "gate_up":
        return torch.arange(rows // 2, rows)
    if fused == "qkv":
        return torch.arange(rows - (rows - columns) // 2, rows)
    if fused == "qkv_by_group":
        size = columns // heads
        groups = (rows - columns) // (2 * size)
        return torch.arange(rows).reshape(groups, -1, size)[:, -1].reshape(-1)
    return torch.arange(rows)


def heads_of(scaling: Scaling, values: dict[str, torch.Tensor], prefix: str, config: Any) -> tuple[int, int]:
    """(query heads, key-value heads) whose channels must share scales; (1, 1) where every channel is free."""
    before = values[f"{prefix}{scaling.before}.weight"]
    if before.ndim == 1:
        return 1, 1
    columns = values[f"{prefix}{scaling.layers[0]}.weight"].shape[1]
    heads = int(config.num_attention_heads)
    count = len(rows_before(scaling.fused, before.shape[0], columns, heads))
    if scaling.fused in ("", "gate_up") and count == columns:
        return 1, 1
    return heads, count // (columns // heads)


def fold(
    scaling: Scaling, values: dict[str, torch.Tensor], prefix: str, scale: torch.Tensor, heads: tuple[int, int]
) -> None:
    """Scale the columns of the layers in `values` (float32, by full name) by `scale` (K,); divide what is before.

    `heads` are those of `heads_of`; the scales of query heads that read one value head are equal.
    """
    for name in scaling.layers + scaling.follow:
        values[f"{prefix}{name}.weight"] = values[f"{prefix}{name}.weight"] * scale
    stem = f"{prefix}{scaling.before}."
    weight, bias = values[stem + "weight"], values.get(stem + "bias")
    if weight.ndim == 1:
        values[stem + "weight"] = (weight + scaling.offset) / scale - scaling.offset
        if bias is not None:
            values[stem + "bias"] = bias / scale
        return
    total, shared = heads
    divisor = scale.reshape(shared, total // shared, -1)[:, 0].reshape(-1)
    per_row = torch.ones(weight.shape[0], device=weight.device)
    per_row[rows_before(scaling.fused, weight.shape[0], len(scale), total).to(weight.device)] = divisor
    values[stem + "weight"] = weight / per_row[:, None]
    if bias is not None:
        values[stem + "bias"] = bias / per_row
