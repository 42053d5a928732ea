"""The output head as grouped codes, in the layouts whose readers find it there: one that is not tied to the embedding.

It is rounded to the nearest code, its scales searched for the least squared error, some rows at a time.
Read by vLLM and, in compressed-tensors, by transformers. Embeddings stay in 16 bits: transformers 5.23 loads none that
are packed, and vLLM 0.32 none that are not.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quantkit.contracts.format import Layout, TensorWriter
from quantkit.errors import RecipeError, UnsupportedError
from quantkit.formats._grouped_layout import Packing
from quantkit.models.skeleton import Skeleton, rows_of, weight_name
from quantkit.models.source import Source
from quantkit.numerics.grid import fit_grid, round_to_grid
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups

MODULE = "lm_head"  # by this name readers look for it
HEAD = f"{MODULE}.weight"
VLLM_UNIT = 64  # rows to which vLLM 0.32 fills up a head, which it cannot where they are codes
PIECE = 1 << 22  # values that are rounded at a time
ROW_UNIT = 32  # of a piece: zero points of so many rows fill whole words
HOLDERS = "compressed-tensors with codes holds one of 4 or 8 bits, gptq one of the layers' bits"


def refuse_head(holder: str, known: tuple[int, ...], source: Source, skeleton: Skeleton, layout: Layout) -> None:
    """Raise RecipeError, UnsupportedError for a head that the format `holder`, which has `known` bits, cannot hold."""
    if layout.head_bits is None:
        return
    if layout.head_bits not in known:
        has = f"bits {' and '.join(map(str, known))}" if known else "no quantized output head"
        raise RecipeError(
            f"head_bits = {layout.head_bits}: the format {holder} has {has} here. Leave head_bits out; {HOLDERS}"
        )
    model = skeleton.model
    layer = model.get_output_embeddings()
    if layer.weight is model.get_input_embeddings().weight:
        raise UnsupportedError(
            f"head_bits: the output head of {source.model} is tied to its embedding, which no reader of {holder} finds "
            "quantized. The method gguf quantizes both, with its token_embedding_type"
        )
    name = weight_name(model, layer)
    if type(layer).__name__ != "Linear" or name != HEAD:
        raise UnsupportedError(
            f"head_bits: the output head of {source.architecture!r} is {name}, a {type(layer).__name__}, and where "
            f"{holder} is read it is sought as the Linear {HEAD}"
        )


def head_notes(source: Source, skeleton: Skeleton, packing: Packing, layout: Layout) -> list[str]:
    """What the head has in bits, how much it is, and who cannot load it.

    Raises UnsupportedError for sides that words cannot hold.
    """
    rows, columns = skeleton.model.get_output_embeddings().weight.shape
    bits, group = int(layout.head_bits or 0), columns if layout.group_size == -1 else int(layout.group_size)
    if reason := packing.refusal(HEAD, rows, columns, bits):
        raise UnsupportedError(f"head_bits: {reason}")
    each = bits + (16 if layout.symmetric else 16 + bits) / group
    share = rows * columns / source.parameters
    notes = [f"the output head has {each:.2f} bits per weight, rounded to the nearest, and {share:.1%} of all weights"]
    if rows % VLLM_UNIT:
        notes.append(
            f"vLLM would refuse this artifact: its output head has codes for {rows} tokens, no multiple of {VLLM_UNIT}"
        )
    return notes


def add_head(writer: TensorWriter, packing: Packing, skeleton: Skeleton, layout: Layout) -> None:
    """Add the head that the layout asks for, as codes."""
    rows = rows_of(writer.source, skeleton, HEAD)
    count, columns = rows.shape
    bits, group = int(layout.head_bits or 0), columns if layout.group_size == -1 else int(layout.group_size)
    order, own = contiguous_groups(columns, group), replace(layout, bits=bits)
    step = max(1, PIECE // columns // ROW_UNIT) * ROW_UNIT
    pieces = []
    with writer.run.progress.step("rounding the output head", count, work=True) as advance:
        for start in range(0, count, step):
            weight = torch.from_numpy(rows.read(start, min(start + step, count)))
            grid = fit_grid(weight, group, bits, symmetric=layout.symmetric, search=True, least_zero=packing.least_zero)
            codes = round_to_grid(weight, grid, group)
            pieces.append(packing.pack(GroupedWeight(codes, grid.scales, grid.zeros, order, bits), own))
            advance(len(weight))
    for part, tensor in packing.join(pieces).items():
        writer.checkpoint.add(f"{MODULE}.{part}", tensor)
    writer.run.findings.count(f"int{bits}")
