"""What AWQ scales, and how the inverse is folded away.

A model's function does not change when the inputs of some linear layers are divided by a scale that their columns
are multiplied with, as long as the layer before them (a norm or a linear layer) divides its output, and everything
that reads this output is scaled along. Which layers these are is found and proven in awq_folds.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

Fused = Literal["", "qkv", "qkv_by_group", "kv_by_head", "gate_up"]
FUSED: tuple[Fused, ...] = get_args(Fused)


@dataclass(frozen=True)
class Scaling:
    """Input channels of `layers` can be scaled because `before` (a norm or a linear layer) can take the inverse.

    Names are those within a block; `*` stands for every expert. `follow`: layers that read the same output and are
    not quantized, such as a router. `fused`: `before` computes more than what `layers` read, and only these rows take
    the inverse: of a stacked `qkv` the last part, which are the values, also where each group of heads has its own q,
    k, v (`qkv_by_group`) or each head its own k, v of other sizes (`kv_by_head`); of `gate_up` the second half.
    `offset`: the norm multiplies by weight + offset.
    """

    before: str
    layers: tuple[str, ...]
    follow: tuple[str, ...] = ()
    fused: Fused = ""
    offset: float = 0.0


def written_out(scaling: Scaling, stems: set[str]) -> Iterator[Scaling]:
    """The scalings that one stands for in a block whose weights have the names `stems`: one for each expert."""
    for one in _each_expert(scaling, stems) if "*" in scaling.before else [scaling]:
        layers, follow = _written_out(one.layers, stems), _written_out(one.follow, stems)
        if one.before in stems and layers:
            yield replace(one, layers=layers, follow=follow)


def _each_expert(scaling: Scaling, stems: set[str]) -> Iterator[Scaling]:
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
    if fused == "kv_by_head":
        return torch.arange(rows).reshape(heads, -1)[:, -(columns // heads) :].reshape(-1)
    return torch.arange(rows)


def fits(fused: Fused, rows: int, columns: int, heads: int) -> bool:
    """Whether a layer before with so many rows can be fused so; the arguments are those of `rows_before`."""
    if fused == "gate_up" or rows == columns:
        return (rows == columns) == (fused == "") and rows in (columns, 2 * columns)
    size = columns // heads
    if columns % heads:
        return False
    if fused == "kv_by_head":
        return rows % heads == 0 and rows // heads > size
    values = rows if fused == "" else (rows - columns) // 2
    count = values // size
    if values <= 0 or values % size or heads % count or (fused != "" and (rows - columns) % 2):
        return False
    return fused != "qkv_by_group" or rows % (count * size) == 0


def heads_of(scaling: Scaling, values: dict[str, torch.Tensor], prefix: str, config: Any) -> tuple[int, int]:
    """(query heads, key-value heads) whose channels must share scales; (1, 1) where every channel is free."""
    before = values[f"{prefix}{scaling.before}.weight"]
    if before.ndim == 1:
        return 1, 1
    columns = values[f"{prefix}{scaling.layers[0]}.weight"].shape[1]
    heads = query_heads(config)
    count = len(rows_before(scaling.fused, before.shape[0], columns, heads))
    if scaling.fused in ("", "gate_up") and count == columns:
        return 1, 1
    return heads, count // (columns // heads)


def query_heads(config: Any) -> int:
    """How many heads the attention of a configuration has; 1 where there is none, or not the same in every block."""
    if "num_attention_heads" in (getattr(config, "per_layer_attributes", None) or ()):
        return 1
    heads = getattr(config, "num_attention_heads", 1)
    return heads if isinstance(heads, int) else 1


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
