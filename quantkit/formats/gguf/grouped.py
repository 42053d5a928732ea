"""Repack grouped codes as GGUF blocks: symmetric 4-bit codes to Q4_0, 8-bit to Q8_0, MXFP4 to MXFP4.

A Q4_0 block is 32 values (q - 8) * d, a Q8_0 block 32 values q * d, with d float16. A group of b-bit codes c with scale
s has the values (c - 2^(b-1)) * s, so q = c for Q4_0, q = c - 128 for Q8_0, and d = s in each block of the group.
An MXFP4 block is an E8M0 exponent and 32 E2M1 codes (OCP Microscaling Formats 1.0).
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
    """Raise UnsupportedError for codes that these blocks cannot hold, or models that llama.cpp cannot run."""
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
    """Return the GGUF tensor type for this layout: Q4_0, Q8_0 or MXFP4."""
    return TYPES[layout.bits] if layout.values == "codes" else FLOATS


def _plan(source: Source, skeleton: Skeleton, layout: Layout) -> GgufFile:
    """Plan the GGUF file: linear layers of the blocks get the type of the codes."""
    linears, kind = skeleton.linears(), type_of(layout)
    file = plan_file(source, OTHERS)
    coded = [tensor.name for tensor in file.plan.tensors if tensor.parts and tensor.parts.keys() <= linears.keys()]
    return replace(file.with_types(dict.fromkeys(coded, kind)), file_type=kind)


class _Writer(TensorWriter):
    """Packs quantized layers into a temporary spool; `write` assembles the file from it at the end."""

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
    """Yield a writer for the quantized layers; write the GGUF file when the context ends without an error."""
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
    """Return the Q4_0 or Q8_0 blocks of a symmetric 4- or 8-bit weight, uint8 (N, bytes per row)."""
    rows, columns = weight.shape
    codes = weight.codes.reshape(rows, columns // BLOCK, BLOCK)
    each = weight.scales.repeat_interleave(columns // weight.scales.shape[1] // BLOCK, 1)
    scales = each.to(torch.float16).contiguous().unsqueeze(-1).view(torch.uint8)
    values = _nibbles(codes) if weight.bits == 4 else codes ^ 128  # c - 128 as a signed byte
    return torch.cat([scales, values], -1).reshape(rows, -1)


def unpack(stored: torch.Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Invert `pack`; the result has one scale per `group_size` columns (-1: per row)."""
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
    """Return the MXFP4 blocks of a weight, uint8 (N, bytes per row)."""
    rows, columns = weight.shape
    codes = weight.values.reshape(rows, columns // BLOCK, BLOCK)
    return torch.cat([weight.scales.unsqueeze(-1), _nibbles(codes)], -1).reshape(rows, -1)


def unpack_floats(stored: torch.Tensor) -> ScaledWeight:
    """Invert `pack_floats`."""
    blocks = stored.reshape(len(stored), -1, 1 + BLOCK // 2)
    return ScaledWeight(_of_nibbles(blocks[..., 1:]).flatten(1), blocks[..., 0].contiguous(), (1, BLOCK))


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack two codes per byte: the first half of a block in the low nibbles, the second half in the high nibbles."""
    return codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)


def _of_nibbles(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values & 15, values >> 4], -1)
