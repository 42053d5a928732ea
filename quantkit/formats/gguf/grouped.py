"""Grouped codes as GGUF blocks: symmetric 4-bit groups become Q4_0, 8-bit groups Q8_0, and MXFP4 stays MXFP4.

A block of Q4_0 is 32 values (q - 8) * d, one of Q8_0 is 32 values q * d, with d float16. A group of codes c of b bits
with the scale s has the values (c - 2^(b-1)) * s; so q = c for Q4_0, q = c - 128 for Q8_0, and d = s, repeated in each
block of the group. A block of MXFP4 is an exponent of E8M0 and 32 codes of E2M1 (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from quantkit.checkpoints.spool import Spool
from quantkit.contracts.format import Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import RecipeError, UnsupportedError
from quantkit.formats._grouped_codes import refuse_head, resolve_group_size
from quantkit.formats.gguf.writer import GgufFile, plan_file, write_file
from quantkit.models.config import keep_tokenizer
from quantkit.models.skeleton import Skeleton, linears_to_quantize, refuse_shapes
from quantkit.models.source import Source
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight, contiguous_groups

TYPES = {4: "Q4_0", 8: "Q8_0"}
FLOATS = "MXFP4"
BLOCK = 32  # values of a block, in all three types
OTHERS = "F16"  # type of embedding and head


def check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    """Refuse codes that these blocks cannot hold, and models that llama.cpp lacks."""
    if layout.values not in ("codes", "mxfp4"):
        raise RecipeError(f"the format gguf cannot store {layout.values} with scales. Use --format compressed-tensors.")
    if len(layout.every_bits) > 1:
        raise RecipeError(
            "the format gguf stores codes of one width: use --format compressed-tensors, or --method gguf --bits auto"
        )
    if layout.bits not in TYPES:
        raise RecipeError(f"the format gguf stores grouped codes of 4 bits (Q4_0) and 8 bits (Q8_0), not {layout.bits}")
    if not layout.symmetric:
        raise RecipeError("the blocks of Q4_0 and Q8_0 have no zero points: the codes must be symmetric (--sym)")
    if layout.column_order:
        raise RecipeError("the format gguf cannot store an order of columns: leave desc_act out")
    refuse_shapes(source, skeleton)
    refuse_head("gguf", (), source, skeleton, layout)
    linears = linears_to_quantize(source, skeleton)
    size = BLOCK if layout.group_size == "auto" else layout.group_size  # a scale is stored for each block anyway
    group_size = resolve_group_size(size, linears)
    for name, (_, columns) in linears.items():
        group = columns if group_size == -1 else int(group_size)
        if group % BLOCK:
            raise UnsupportedError(
                f"{type_of(layout)} has a scale per {BLOCK} columns, but {name} one per {group}: give a group_size "
                f"that is a multiple of {BLOCK}"
            )
    file = _plan(source, skeleton, layout)
    straight = {part for tensor in file.plan.tensors if tensor.columns is None for part in tensor.parts}
    if other := sorted(linears.keys() - straight):
        raise UnsupportedError(
            f"{source.model}: a GGUF file has the columns of {other[0]} reordered or transposed, and these codes "
            "cannot be reordered. Use --method gguf."
        )
    notes = (*file.vocabulary.algorithm.notes, f"the blocks of the file are {file.file_type}, the rest {OTHERS}")
    return Checked(
        replace(layout, group_size=group_size),
        2 * file.plan.tensor_bytes + file.metadata_bytes,  # packed rows stay until the file is checked
        {"group_size": group_size},
        notes,
    )


def type_of(layout: Layout) -> str:
    """Return the type whose blocks hold such layers."""
    return TYPES[layout.bits] if layout.values == "codes" else FLOATS


def _plan(source: Source, skeleton: Skeleton, layout: Layout) -> GgufFile:
    """Plan the file, with the type of the codes for each linear layer of the blocks."""
    linears, kind = skeleton.linears(), type_of(layout)
    file = plan_file(source, OTHERS)
    coded = [tensor.name for tensor in file.plan.tensors if tensor.parts and tensor.parts.keys() <= linears.keys()]
    return replace(file.with_types(dict.fromkeys(coded, kind)), file_type=kind)


class _Writer(TensorWriter):
    """Packs layers of codes into a spool as they come; the file is written at the end."""

    layout: Layout
    skeleton: Skeleton
    floats: Collection[str]  # names of tensors that the file has in float32

    def add(self, name: str, value: Written) -> None:
        if isinstance(value, GroupedWeight):
            self.checkpoint.add(name, pack(value))
        elif isinstance(value, ScaledWeight):
            self.checkpoint.add(name, pack_floats(value))
        elif isinstance(value, torch.Tensor) and name in self.floats:
            rows = value.reshape(len(value), -1).to(torch.float32).contiguous()
            self.checkpoint.add(name, rows.view(torch.uint8))
        else:
            super().add(name, value)

    def block(self, prefix: str) -> dict[str, torch.Tensor | GroupedWeight | ScaledWeight]:
        return {name: self._read(name) for name in sorted(self.checkpoint.names()) if name.startswith(prefix)}

    def _read(self, name: str) -> torch.Tensor | GroupedWeight | ScaledWeight:
        stored = self.checkpoint.get(name)
        if name not in self.skeleton.linears():
            values = stored.view(torch.float32)
            return values if values.shape[1] > 1 else values.reshape(-1)
        if self.layout.values != "codes":
            return unpack_floats(stored)
        size = self.layout.group_size
        return unpack(stored, self.layout.bits, size if isinstance(size, int) else -1)

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        value = self._read(name)
        assert isinstance(value, GroupedWeight)
        self.checkpoint.replace(name, pack(replace(value, scales=scales)))


@contextmanager
def write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[_Writer]:
    """Yield a writer; on success write the file."""
    keep_tokenizer(source.tokenizer(), run.folder)
    file, spool = _plan(source, skeleton, layout), Spool(run.folder)
    try:
        writer = _Writer(spool, source, run)
        writer.layout, writer.skeleton = layout, skeleton
        writer.floats = {part for tensor in file.plan.tensors if tensor.type == "F32" for part in tensor.parts}
        yield writer
        write_file(file, run, {}, spool=spool)
    finally:
        spool.close()


def pack(weight: GroupedWeight) -> torch.Tensor:
    """Return the blocks of a symmetric layer of 4 or 8 bits, (N, bytes of a row) uint8."""
    rows, columns = weight.shape
    codes = weight.codes.reshape(rows, columns // BLOCK, BLOCK)
    each = weight.scales.repeat_interleave(columns // weight.scales.shape[1] // BLOCK, 1)
    scales = each.to(torch.float16).contiguous().unsqueeze(-1).view(torch.uint8)
    values = _nibbles(codes) if weight.bits == 4 else codes ^ 128  # c - 128 as a signed byte
    return torch.cat([scales, values], -1).reshape(rows, -1)


def unpack(stored: torch.Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Invert `pack`, with a scale per `group_size` columns (-1: per row)."""
    width = 2 + (BLOCK // 2 if bits == 4 else BLOCK)
    blocks = stored.reshape(len(stored), -1, width)
    scales, values = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
    codes = _of_nibbles(values) if bits == 4 else values ^ 128
    columns = codes.shape[1] * BLOCK
    group = columns if group_size == -1 else group_size
    scales = scales[:, :: group // BLOCK].contiguous()
    return GroupedWeight(
        codes.reshape(len(stored), columns), scales, torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8),
        contiguous_groups(columns, group), bits,
    )  # fmt: skip


def pack_floats(weight: ScaledWeight) -> torch.Tensor:
    """Return the blocks of a layer of MXFP4, (N, bytes of a row) uint8."""
    rows, columns = weight.shape
    codes = weight.values.reshape(rows, columns // BLOCK, BLOCK)
    return torch.cat([weight.scales.unsqueeze(-1), _nibbles(codes)], -1).reshape(rows, -1)


def unpack_floats(stored: torch.Tensor) -> ScaledWeight:
    """Invert `pack_floats`."""
    blocks = stored.reshape(len(stored), -1, 1 + BLOCK // 2)
    return ScaledWeight(_of_nibbles(blocks[..., 1:]).flatten(1), blocks[..., 0].contiguous(), (1, BLOCK))


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Put two codes into a byte: the first half of a block low, the second half high."""
    return codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)


def _of_nibbles(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values & 15, values >> 4], -1)
