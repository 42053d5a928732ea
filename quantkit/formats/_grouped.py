"""Checkpoints of grouped integer codes, the codes of a layer beside its scales and zero points in safetensors.

What GPTQ's and AWQ's layouts have in common. What they differ in is data, a Packing each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.artifact import Artifact
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.checkpoints.writer import open_writer
from quantkit.contracts.format import Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, RecipeError, UnsupportedError
from quantkit.formats._quantization_config import dtype_of, quantization_of, refuse_other_dtypes
from quantkit.formats._vllm import tensor_parallel_notes
from quantkit.models.skeleton import Skeleton, linears_to_quantize, refuse_shapes, rows_of
from quantkit.models.source import Source
from quantkit.numerics.casting import cast_finite
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups
from quantkit.untrusted import shown, whole_number

GROUP_SIZES = (128, 64, 32)
DTYPE = torch.float16  # of everything that is not quantized
LARGEST_SCALE = torch.finfo(DTYPE).max  # where numerics/grid.py cuts scales off
PIECE = 1 << 22  # values of a tensor outside the blocks that are in memory at a time
CODES, ZEROS, SCALES, ORDER = "qweight", "qzeros", "scales", "g_idx"
AGAIN = "Convert again with --force."
MOST_COLUMNS = 1 << 24  # of a group

Matrix = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """One layout. Matrices come as it stores them, (K, N) codes and (G, N) zeros, with their bits.

    refusal(name, N, K, bits) is the reason why words cannot hold a layer, or None. `orders_columns`: it stores which
    group each column belongs to; `least_zero`: the smallest zero point that it can store; `packs_rows`: a word holds
    codes of one output, else of neighbouring ones. quantization(layout, group size) is config.json's
    `quantization_config`; notes(layout) are remarks for the user.
    """

    name: str
    bits: tuple[int, ...]
    pack: Matrix
    unpack: Matrix
    pack_zeros: Matrix
    unpack_zeros: Matrix
    refusal: Callable[[str, int, int, int], str | None]
    quantization: Callable[[Layout, int | str], dict[str, Any]]
    notes: Callable[[Layout], tuple[str, ...]] = lambda _layout: ()
    least_zero: int = 0
    orders_columns: bool = False
    packs_rows: bool = True

    def columns(self, codes: tuple[int, ...], bits: int) -> int:
        """The K input columns of a layer whose codes are stored in this shape."""
        return codes[0] * 32 // bits if self.packs_rows else codes[0]

    def shapes(self, n: int, k: int, groups: int, bits: int) -> dict[str, tuple[int, ...]]:
        """What the codes and the zero points of a layer (N, K) with that many groups are stored in."""
        codes = (k * bits // 32, n) if self.packs_rows else (k, n * bits // 32)
        return {CODES: codes, ZEROS: (groups, n * bits // 32)}


def resolve_group_size(group_size: int | str, linears: Mapping[str, tuple[int, int]]) -> int | str:
    """Return the group size in columns (or -1 for the whole row) that fits every layer.

    ``auto`` is the largest of 128, 64 and 32 that divides all. Raises UnsupportedError for one that does not.
    """
    columns = sorted({shape[1] for shape in linears.values()})
    dividing = [size for size in GROUP_SIZES if all(k % size == 0 for k in columns)]
    if group_size == "auto":
        return dividing[0] if dividing else -1
    size = int(group_size)
    if size != -1 and (size < 1 or any(k % size for k in columns)):
        bad = next((k for k in columns if size > 0 and k % size), columns[0])
        fits = ", ".join(map(str, dividing)) or "none of 128, 64, 32"
        raise UnsupportedError(
            f"group_size {group_size} does not divide the {bad} input columns of some layers. "
            f"These divide all layers: {fits}; -1 (the whole row) always does. "
            "vLLM and gptqmodel fail on a layer whose last group is not full."
        )
    return group_size


def check(packing: Packing, source: Source, skeleton: Skeleton, layout: Layout) -> Checked:
    """Refuse models and shapes that the layout cannot hold; resolve the group size, and count the bytes."""
    if layout.bits not in packing.bits:
        known = ", ".join(map(str, packing.bits))
        raise RecipeError(f"the format {packing.name} holds codes of {known} bits, not of {layout.bits}")
    if layout.column_order and not packing.orders_columns:
        raise RecipeError(f"the format {packing.name} cannot say which columns form a group: leave desc_act out")
    refuse_shapes(source, skeleton)
    linears = linears_to_quantize(source, skeleton)
    stacked = [n for n, p in skeleton.blocks.named_parameters() if p.ndim > 2]
    if stacked:
        raise UnsupportedError(
            f"the architecture {source.architecture!r} keeps stacked experts ({stacked[0]}), which this layout cannot "
            "hold"
        )
    group_size = resolve_group_size(layout.group_size, linears)
    for name, (n, k) in linears.items():
        if reason := packing.refusal(name, n, k, layout.bits):
            raise UnsupportedError(reason)
    quantized = sum(n * k for n, k in linears.values())
    group = group_size if isinstance(group_size, int) and group_size > 0 else min(k for _, k in linears.values())
    nbytes = int(quantized * (layout.bits + 24 / group) / 8 + (source.parameters - quantized) * 2 + 50_000_000)
    notes = (*packing.notes(layout), *tensor_parallel_notes(linears, group_size))
    return Checked(
        nbytes, {"group_size": group_size}, notes, replace(layout, group_size=group_size, least_zero=packing.least_zero)
    )


class GroupedReader:
    """The tensors of such a checkpoint: quantized layers under their weight's name, the rest as stored."""

    def __init__(self, packing: Packing, folder: Path, files: tuple[str, ...], _config: dict[str, Any]) -> None:
        self._packing, self._folder, self._stored = packing, folder, StoredTensors(folder, files)
        self._all = set(self._stored.names())
        self._settings = quantization_of(folder)
        where = f"{folder / 'config.json'}: quantization_config"
        bits = whole_number(self._settings, "bits", min(packing.bits), max(packing.bits), where, ArtifactError)
        if bits not in packing.bits:
            raise ArtifactError(f"{where} does not say how many bits codes have, but {shown(bits)}. {AGAIN}")
        self._bits = bits
        self._group = whole_number(self._settings, "group_size", -1, MOST_COLUMNS, where, ArtifactError) or -1
        for name in sorted(self._all):
            stem, _, leaf = name.rpartition(".")
            if leaf in (ZEROS, SCALES, ORDER) and f"{stem}.{CODES}" not in self._all:
                raise ArtifactError(f"{folder} has {name} without its {CODES}. {AGAIN}")

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        return _source_names(self._stored.names())

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """One of them; raises ArtifactError for parts that do not belong together."""
        if (stem := name.removesuffix("weight")) + CODES in self._all:
            self._refuse_parts(stem)
        value = _read(self._packing, self._bits, self._all, self._stored.read, name)
        if isinstance(value, GroupedWeight):
            self._refuse_values(name, value)
        return value

    def types(self) -> Mapping[str, int]:
        """Layers by the bits of their codes, and dense tensors by their type."""
        return Counter(
            f"int{self._bits}" if name.removesuffix("weight") + CODES in self._all else self._stored.dtype(name)
            for name in self.names()
        )

    def _refuse_parts(self, stem: str) -> None:
        """Hold the types and shapes of a layer's parts against each other and against config.json."""
        kinds = {CODES: "int32", ZEROS: "int32", SCALES: "float16"}
        if self._packing.orders_columns:
            kinds[ORDER] = "int32"
        for part, kind in kinds.items():
            if (stored := self._stored.dtype(stem + part)) != kind:
                raise ArtifactError(f"{self._folder}: {stem + part} is {stored}, not {kind}. {AGAIN}")
        shapes = {part: self._stored.shape(stem + part) for part in kinds}
        if any(len(shape) != (1 if part == ORDER else 2) or 0 in shape for part, shape in shapes.items()):
            raise ArtifactError(f"{self._folder}: the parts of {stem}weight have the shapes {shapes}. {AGAIN}")
        groups, rows = shapes[SCALES]
        columns = self._packing.columns(shapes[CODES], self._bits)
        group = columns if self._group == -1 else self._group
        want = {**self._packing.shapes(rows, columns, groups, self._bits), SCALES: (groups, rows)}
        if self._packing.orders_columns:
            want[ORDER] = (columns,)
        if shapes != want or groups * group != columns:
            raise ArtifactError(
                f"{self._folder}: the parts of {stem}weight have the shapes {shapes}, which do not fit {self._bits} "
                f"bits and groups of {group} columns. {AGAIN}"
            )

    def _refuse_values(self, name: str, weight: GroupedWeight) -> None:
        """Hold scales, zero points and the order of columns against what engines may take for granted."""
        wrong = None
        groups = weight.scales.shape[1]
        if not bool((weight.scales.isfinite() & (weight.scales > 0)).all()):
            wrong = "has scales that are not above 0"
        elif not bool(((weight.g_idx >= 0) & (weight.g_idx < groups)).all()):
            wrong = f"has columns of other groups than its {groups}"
        elif self._settings.get("sym") is True and not bool((weight.zeros == 1 << (self._bits - 1)).all()):
            wrong = "is not symmetric, and config.json says it is"
        elif self._settings.get("desc_act") is False and not weight.g_idx.equal(
            contiguous_groups(weight.shape[1], weight.shape[1] // groups)
        ):
            wrong = "has groups of columns that do not lie side by side, and config.json says they do"
        if wrong is not None:
            raise ArtifactError(f"{self._folder}: the layer {name} {wrong}. {AGAIN}")


def tells(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """What config.json says of the recipe."""
    stored, types = quantization_of(artifact.folder), artifact.manifest.tensor_types
    dense = [name for name in types if not name.startswith("int")]
    refuse_other_dtypes(artifact.folder, dtype_of(artifact.folder), dense)
    said: dict[str, tuple[object, ...]] = {"bits": (str(stored.get("bits")),)}
    return said | {name: (stored[name],) for name in ("group_size", "sym", "desc_act") if name in stored}


def _source_names(stored: list[str]) -> list[str]:
    parts = tuple(f".{part}" for part in (ZEROS, SCALES, ORDER))
    return [
        name.removesuffix(CODES) + "weight" if name.endswith(f".{CODES}") else name
        for name in stored
        if not name.endswith(parts)
    ]


def _read(
    packing: Packing, bits: int, stored: set[str], get: Callable[[str], torch.Tensor], name: str
) -> torch.Tensor | GroupedWeight:
    """A dense tensor, or the layer whose weight is called `name`; `get` reads one stored tensor."""
    stem = name.removesuffix("weight")
    if stem + CODES not in stored:
        return get(name)
    codes = packing.unpack(get(stem + CODES), bits).T.contiguous()
    scales = get(stem + SCALES).T.contiguous()
    zeros = packing.unpack_zeros(get(stem + ZEROS), bits).T.contiguous()
    if packing.orders_columns:
        groups = get(stem + ORDER).to(torch.int64)
    else:
        groups = contiguous_groups(codes.shape[1], codes.shape[1] // scales.shape[1])
    return GroupedWeight(codes, scales, zeros, groups, bits)


class GroupedWriter(TensorWriter):
    """Takes layers of codes and dense tensors of the blocks; at the end everything else comes from the source."""

    packing: Packing
    bits: int

    def add(self, name: str, value: Written) -> None:
        """Pack a layer's codes and add its tensors, or add a dense tensor in float16."""
        if isinstance(value, torch.Tensor):
            self.checkpoint.add(name, cast_finite(value, DTYPE, f"{name} of {self.source.model}"))
            self.run.findings.count("float16")
            return
        if not isinstance(value, GroupedWeight):
            return super().add(name, value)
        if bool((value.scales >= LARGEST_SCALE).any()):
            raise UnsupportedError(
                f"{name} of {self.source.model} has values beyond what {self.bits}-bit codes with float16 scales reach "
                f"(about {LARGEST_SCALE * (1 << self.bits - 1):g}). Rescale the checkpoint, or take the method nf4 or "
                "bits BF16 of gguf."
            )
        stem = name.removesuffix("weight")
        self.checkpoint.add(stem + CODES, self.packing.pack(value.codes.T, self.bits))
        self.checkpoint.add(stem + ZEROS, self.packing.pack_zeros(value.zeros.T, self.bits))
        self.checkpoint.add(stem + SCALES, value.scales.T.to(torch.float16))
        if self.packing.orders_columns:
            self.checkpoint.add(stem + ORDER, value.g_idx.to(torch.int32))
        self.run.findings.count(f"int{self.bits}")

    def block(self, prefix: str) -> dict[str, torch.Tensor | GroupedWeight]:
        """What was added of the block whose names begin with `prefix`."""
        stored = {name for name in self.checkpoint.names() if name.startswith(prefix)}
        names = _source_names(sorted(stored))
        return {name: _read(self.packing, self.bits, stored, self.checkpoint.get, name) for name in names}

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        """Give a layer other scales (N, G)."""
        self.checkpoint.replace(name.removesuffix("weight") + SCALES, scales.T.contiguous().to(torch.float16))

    def add_others(self, skeleton: Skeleton) -> None:
        """Add the parameters that are not there yet, quantized or not, as float16, some rows at a time."""
        there = set(_source_names(list(self.checkpoint.names())))
        for name in skeleton.parameter_names():
            if name not in there:
                rows, what = rows_of(self.source, skeleton, name), f"{name} of {self.source.model}"
                pieces = (cast_finite(torch.from_numpy(piece), DTYPE, what) for _, piece in rows.pieces(PIECE))
                self.checkpoint.add_pieces(name, DTYPE, rows.shape, pieces)
                self.run.findings.count("float16")


@contextmanager
def write(packing: Packing, source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[GroupedWriter]:
    """Yield a writer; on success write the whole checkpoint."""
    quantization = packing.quantization(layout, layout.group_size)
    with open_writer(run.folder, source.config, "float16", quantization) as checkpoint:
        writer = GroupedWriter(checkpoint, source, run)
        writer.packing, writer.bits = packing, layout.bits
        yield writer
        writer.add_others(skeleton)
