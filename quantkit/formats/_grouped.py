"""Checkpoints of grouped integer codes, the codes of a layer beside its scales and zero points in safetensors.

What GPTQ's, AWQ's and compressed-tensors' layouts have in common. What they differ in is a Packing each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.checkpoints.writer import open_writer
from quantkit.contracts.format import Layout, TensorWriter, Written
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, RecipeError, UnsupportedError, ValuesError
from quantkit.formats._grouped_layout import AGAIN, OTHERS, LayerShape, Packing
from quantkit.formats._head import add_head, head_notes, refuse_head
from quantkit.formats._quantization_config import quantization_of, untouched
from quantkit.formats._source_settings import layer_overrides, source_settings
from quantkit.formats._vllm import tensor_parallel_notes
from quantkit.models.skeleton import (
    Skeleton,
    linears_to_quantize,
    refuse_shapes,
    rows_of,
    source_name,
    stack_of,
    stacks,
)
from quantkit.models.source import Source
from quantkit.numerics.casting import cast_finite
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups
from quantkit.untrusted import shown, whole_number

GROUP_SIZES = (128, 64, 32)
DTYPE = torch.float16  # of everything that is not quantized
LARGEST_SCALE = torch.finfo(DTYPE).max  # where numerics/grid.py cuts scales off
PIECE = 1 << 22  # values of a tensor outside the blocks that are in memory at a time
SCALE_TYPES = {"float16", "bfloat16", "float32"}
MOST_COLUMNS = 1 << 24  # of a group


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
    if unheld := [bits for bits in layout.every_bits if bits not in packing.bits]:
        known = ", ".join(map(str, packing.bits))
        raise RecipeError(
            f"the format {packing.name} holds codes of {known} bits, not of {', '.join(map(str, unheld))}. Give other "
            "--bits, or another --format, such as compressed-tensors"
        )
    if layout.column_order and not packing.orders_columns:
        raise RecipeError(f"the format {packing.name} cannot say which columns form a group: leave desc_act out")
    refuse_shapes(source, skeleton)
    if reason := packing.model_refusal(source, skeleton):
        raise UnsupportedError(reason)
    linears = linears_to_quantize(source, skeleton)
    refuse_stacked(source, skeleton)
    group_size = resolve_group_size(layout.group_size, linears)
    for name, (n, k) in linears.items():
        for bits in layout.choices or (layout.bits_of(name),):
            if reason := packing.refusal(name, n, k, bits):
                raise UnsupportedError(reason)
    refuse_head(packing.name, packing.head_bits(layout), source, skeleton, layout)
    quantized = sum(n * k for n, k in linears.values())
    group = group_size if isinstance(group_size, int) and group_size > 0 else min(k for _, k in linears.values())
    codes = sum(n * k * layout.bits_of(name) for name, (n, k) in linears.items())
    nbytes = int((codes + quantized * 24 / group) / 8 + (source.parameters - quantized) * 2 + 50_000_000)
    notes = [*packing.notes(layout), *tensor_parallel_notes(linears, group_size)]
    plan = replace(layout, group_size=group_size, least_zero=packing.least_zero)
    if layout.head_bits is not None:
        notes += head_notes(source, skeleton, packing, plan)
    return Checked(nbytes, {"group_size": group_size}, tuple(notes), plan)


def refuse_stacked(source: Source, skeleton: Skeleton) -> None:
    """Raise UnsupportedError where weights stay stacked."""
    if stacked := stacks(skeleton):
        raise UnsupportedError(
            f"the architecture {source.architecture!r} keeps weights stacked ({stacked[0]}) in a way that is not "
            "known, and this layout cannot hold them so"
        )


class GroupedReader:
    """The tensors of such a checkpoint: quantized layers under their weight's name, the rest as stored.

    `own`: quantkit wrote it. Other tools store scales in other floats, and leave out an order of columns that is plain.
    `quantization`: the `quantization_config` to read by, where that is not config.json's. `others`: names of tensors
    that are parts of layers of another kind.
    """

    def __init__(
        self, packing: Packing, folder: Path, files: tuple[str, ...], _config: dict[str, Any], own: bool = True,
        quantization: Mapping[str, Any] | None = None, others: Collection[str] = (),
    ) -> None:  # fmt: skip
        where = "config.json: quantization_config"
        if quantization is None:
            where, quantization = (where, quantization_of(folder)) if own else source_settings(folder)
            quantization = quantization or {}
        self._packing = packing = packing if own else packing.variant(quantization)
        self._folder, self._stored, self._own = folder, StoredTensors(folder, files), own
        self._all = set(self._stored.names()) - set(others)
        self._settings = settings = packing.settings(quantization)
        where = f"{folder}/{where}"
        bits = whole_number(settings, "bits", min(packing.bits), max(packing.bits), where, ArtifactError)
        if bits not in packing.bits:
            raise ArtifactError(f"{where} does not say how many bits codes have, but {shown(bits)}. {AGAIN}")
        self._bits = bits
        group = whole_number(settings, "group_size", -1, MOST_COLUMNS, where, ArtifactError)
        if group == 0:
            raise ArtifactError(f"{where}: group_size is 0, not a number of columns. {AGAIN}")
        self._group = -1 if group is None else group
        overrides = [] if own else layer_overrides(quantization)
        sizes = [whole_number(other, "group_size", -1, MOST_COLUMNS, where, ArtifactError) for other in overrides]
        self._groups = (self._group, *(size for size in dict.fromkeys(sizes) if size not in (None, 0, self._group)))
        for name in ("sym", "desc_act"):  # where layers differ, their tensors alone say it
            if any(other.get(name, settings.get(name)) != settings.get(name) for other in overrides):
                self._settings = {**self._settings, name: None}
        self._layer_bits = packing.layer_bits(quantization) if own else {}
        beside = set(packing.parts) - {packing.codes}
        for name in sorted(self._all):
            stem, _, leaf = name.rpartition(".")
            if leaf in beside and f"{stem}.{packing.codes}" not in self._all:
                raise ArtifactError(f"{folder} has {name} without its {packing.codes}. {AGAIN}")

    def names(self) -> list[str]:
        """The tensors' names in the source."""
        return _source_names(self._packing, sorted(self._all))

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        """One of them; raises ArtifactError for parts that do not belong together."""
        if self._is_quantized(name):
            self._refuse_parts(name.removesuffix("weight"))
        value = _read(self._packing, self._bits_of(name), self._all, self._stored.read, name)
        if isinstance(value, GroupedWeight):
            self._refuse_values(name, value)
        return value

    def types(self) -> Mapping[str, int]:
        """Layers by the bits of their codes, and dense tensors by their type."""
        return Counter(self.type_of(name) for name in self.names())

    def type_of(self, name: str) -> str:
        """The bits of a layer's codes, or the type of a dense tensor."""
        return f"int{self._bits_of(name)}" if self._is_quantized(name) else self._stored.dtype(name)

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        """Bits and group size as config.json says them, and whether codes are symmetric and columns in an order."""
        symmetric, ordered = (self._settings.get(name) is True for name in ("sym", "desc_act"))
        return self._bits, self._group, symmetric, ordered

    def fits(self, name: str) -> object:
        """What a layer's values depend on: its bits; None where its parts are not as config.json says."""
        try:
            self._refuse_parts(name.removesuffix("weight"))
        except ArtifactError:
            return None
        return self._bits_of(name)

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape (N, K) of a quantized layer's values; None for a dense tensor."""
        if not self._is_quantized(name):
            return None
        return self._packing.size(self._stored, name.removesuffix("weight"), self._bits_of(name))[:2]

    def quantization(self) -> str:
        """Format, bits and groups."""
        kinds = set(map(self._kind_of, self._layers())) or {(self._bits, self._group)}
        bits = " and ".join(map(str, sorted({bits for bits, _ in kinds})))
        groups = " and ".join(map(str, sorted({group for _, group in kinds})))
        return f"{self._packing.name}, {bits} bits, {'whole rows' if groups == '-1' else f'groups of {groups}'}"

    def layout(self) -> Layout:
        """What would hold these codes; symmetry, order of columns and least zero point as the tensors have them.

        Raises ArtifactError where parts are damaged, or scales are 0 or no float16 numbers, and UnsupportedError where
        layers differ in their bits or in the columns of a group.
        """
        kinds = {self._kind_of(name) for name in self._layers()} or {(self._bits, self._group)}
        if len(kinds) > 1:
            raise UnsupportedError(
                f"{self._folder} has layers of several kinds ({self.quantization()}), and keep writes one kind only"
            )
        ((bits, group),) = kinds
        symmetric, ordered, least = True, False, 1 << bits
        for name in self.names():
            if (shape := self.quantized_shape(name)) is None:
                continue
            stem = name.removesuffix("weight")
            self._refuse_parts(stem)
            present = [part for part in self._packing.parts if part != self._packing.codes and stem + part in self._all]
            parts = {part: self._stored.read(stem + part) for part in present}
            scales = parts[self._packing.scales]
            if not scales.to(DTYPE).to(scales.dtype).equal(scales) or bool((scales.to(DTYPE) == 0).any()):
                raise ArtifactError(f"{self._folder}: the layer {name} has scales that are 0 or no float16 numbers")
            groups = scales.numel() // shape[0]
            zeros = self._packing.unpack_zeros(parts, bits, shape[0], groups)
            symmetric = symmetric and bool((zeros == 1 << (bits - 1)).all())
            least = min(least, int(zeros.min()))
            order = self._packing.groups(parts, shape[1], groups)
            ordered = ordered or not order.equal(contiguous_groups(shape[1], shape[1] // groups))
        return Layout(bits, group, symmetric, ordered, least_zero=least)

    def _layers(self) -> list[str]:
        return list(filter(self._is_quantized, self.names()))

    def _bits_of(self, name: str) -> int:
        """As config.json says; of other tools' files as the tensors do, where the layout tells."""
        stem = name.removesuffix("weight")
        if not self._is_quantized(name):
            return self._bits
        if not self._own:
            return self._packing.stored_bits(self._stored, stem, self._bits)
        if not self._layer_bits:
            return self._bits
        bits = self._layer_bits.get(stem.removesuffix("."), self._layer_bits.get(OTHERS))
        if bits is None:
            raise ArtifactError(f"{self._folder / 'config.json'} names no bits of the layer {stem[:-1]}. {AGAIN}")
        return bits

    def _kind_of(self, name: str) -> tuple[int, int]:
        """Bits and columns of a group of a layer: of the sizes that layers may have, the one that its parts fit."""
        bits = self._bits_of(name)
        if len(self._groups) == 1:
            return bits, self._group
        _, columns, groups = self._packing.size(self._stored, name.removesuffix("weight"), bits)
        fitting = (size for size in self._groups if groups * (columns if size == -1 else size) == columns)
        return bits, next(fitting, self._group)

    def _is_quantized(self, name: str) -> bool:
        return name.removesuffix("weight") + self._packing.codes in self._all

    def _refuse_parts(self, stem: str) -> None:
        """Hold the types and shapes of a layer's parts against each other and against config.json."""
        packing = self._packing
        shapes = {part: self._stored.shape(stem + part) for part in packing.parts if stem + part in self._all}
        told = f"{self._folder}: the parts of {stem}weight have the shapes {shapes}"
        if packing.scales not in shapes or any(0 in shape for shape in shapes.values()):
            raise ArtifactError(f"{told}. {AGAIN}")
        bits = self._bits_of(f"{stem}weight")
        rows, columns, groups = packing.size(self._stored, stem, bits)
        _, _, symmetric, ordered = self.kind
        want = packing.stored(LayerShape(rows, columns, groups, bits, symmetric, ordered))
        if not self._own and packing.orders_columns and (not ordered or groups == 1):
            # An order that is plain need not be there.
            want = {part: kind for part, kind in want.items() if part in shapes or part != packing.order}
        if missing := sorted(want.keys() - shapes.keys()):
            raise ArtifactError(f"{self._folder} lacks the tensor {stem + missing[0]}. {AGAIN}")
        for part, (kind, _) in want.items():
            kinds = {kind} if self._own or part != packing.scales else SCALE_TYPES
            if (dtype := self._stored.dtype(stem + part)) not in kinds:
                raise ArtifactError(f"{self._folder}: {stem + part} is {dtype}, not {kind}. {AGAIN}")
        if reason := packing.refusal(stem + "weight", rows, columns, bits):
            raise ArtifactError(f"{self._folder}: {reason}. {AGAIN}")
        sizes = [columns if size == -1 else size for size in self._groups]
        if shapes != {part: shape for part, (_, shape) in want.items()} or columns not in [groups * n for n in sizes]:
            known = " or ".join(map(str, sizes))
            raise ArtifactError(f"{told}, which do not fit {bits} bits and groups of {known} columns. {AGAIN}")

    def _refuse_values(self, name: str, weight: GroupedWeight) -> None:
        """Hold scales, zero points and the order of columns against what engines may take for granted."""
        wrong = None
        groups = weight.scales.shape[1]
        if not bool((weight.scales.isfinite() & ((weight.scales != 0) | (not self._own))).all()):
            wrong = "has scales that are 0 or not finite"
        elif not bool(((weight.g_idx >= 0) & (weight.g_idx < groups)).all()):
            wrong = f"has columns of other groups than its {groups}"
        elif self._settings.get("sym") is True and not bool((weight.zeros == 1 << (weight.bits - 1)).all()):
            wrong = "is not symmetric, and config.json says it is"
        elif self._settings.get("desc_act") is False and not weight.g_idx.equal(
            contiguous_groups(weight.shape[1], weight.shape[1] // groups)
        ):
            wrong = "has groups of columns that do not lie side by side, and config.json says they do"
        if wrong is not None:
            raise ArtifactError(f"{self._folder}: the layer {name} {wrong}. {AGAIN}")


def _source_names(packing: Packing, stored: list[str]) -> list[str]:
    others = tuple(f".{part}" for part in packing.parts if part != packing.codes)
    return [
        name.removesuffix(packing.codes) + "weight" if name.endswith(f".{packing.codes}") else name
        for name in stored
        if not name.endswith(others)
    ]


def _read(
    packing: Packing, bits: int, stored: set[str], get: Callable[[str], torch.Tensor], name: str
) -> torch.Tensor | GroupedWeight:
    """A dense tensor, or the layer whose weight is called `name`; `get` reads one stored tensor."""
    stem = name.removesuffix("weight")
    if stem + packing.codes not in stored:
        return get(name)
    return packing.unpack({part: get(stem + part) for part in packing.parts if stem + part in stored}, bits)


class GroupedWriter(TensorWriter):
    """Takes layers of codes and dense tensors of the blocks; at the end everything else comes from the source."""

    packing: Packing
    layout: Layout

    def add(self, name: str, value: Written) -> None:
        """Pack a layer's codes and add its tensors, or add a dense tensor in float16."""
        if isinstance(value, torch.Tensor):
            self.checkpoint.add(name, cast_finite(value, DTYPE, f"{name} of {self.source.model}"))
            self.run.findings.count("float16")
            return
        if not isinstance(value, GroupedWeight):
            return super().add(name, value)
        if bool((value.scales.abs() >= LARGEST_SCALE).any()):
            bits = value.bits
            raise ValuesError(
                f"{name} of {self.source.model} has values beyond what {bits}-bit codes with float16 scales reach "
                f"(about {LARGEST_SCALE * (1 << bits - 1):g}). Rescale the checkpoint, or take the method nf4 or "
                "bits BF16 of gguf."
            )
        stem = name.removesuffix("weight")
        for part, tensor in self.packing.pack(value, self.layout).items():
            self.checkpoint.add(stem + part, tensor)
        self.run.findings.count(f"int{value.bits}")

    def block(self, prefix: str) -> dict[str, torch.Tensor | GroupedWeight]:
        """What was added of the block whose names begin with `prefix`."""
        stored = {name for name in self.checkpoint.names() if name.startswith(prefix)}
        names = _source_names(self.packing, sorted(stored))
        get, bits_of = self.checkpoint.get, self.layout.bits_of
        return {name: _read(self.packing, bits_of(name), stored, get, name) for name in names}

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        """Give a layer other scales (N, G)."""
        self.checkpoint.replace(name.removesuffix("weight") + self.packing.scales, self.packing.pack_scales(scales))


def add_others(
    writer: TensorWriter, skeleton: Skeleton, there: Collection[str], dtype: torch.dtype, keep_stacks: bool = False
) -> None:
    """Add the parameters whose names are not `there`, quantized or not, in `dtype`, some rows at a time.

    `keep_stacks`: experts that the checkpoint keeps stacked stay so, under transformers' name.
    """
    source, done = writer.source, set(there)
    for parameter in skeleton.parameter_names():
        stack = stack_of(source, skeleton, parameter) if keep_stacks and parameter not in done else None
        name = stack or parameter
        if name not in done:
            done.add(name)
            whole = source_name(source, skeleton, parameter)
            rows = source.in_rows(whole) if stack else rows_of(source, skeleton, parameter)
            what = f"{name} of {source.model}"
            pieces = (cast_finite(torch.from_numpy(piece), dtype, what) for _, piece in rows.pieces(PIECE))
            writer.checkpoint.add_pieces(name, dtype, rows.shape, pieces)
            writer.run.findings.count(str(dtype).removeprefix("torch."))


def _named(layout: Layout, source: Source) -> Layout:
    """The layout with the bits of each layer by all names that readers may know it by, without `weight`."""
    places = source.text_prefixes

    def names(module: str) -> tuple[str, ...]:
        return (module,) if places is None else places.modules(module)

    bits = {name: bits for weight, bits in layout.layer_bits.items() for name in names(weight.removesuffix(".weight"))}
    return replace(layout, layer_bits=bits)


@contextmanager
def write(packing: Packing, source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> Iterator[GroupedWriter]:
    """Yield a writer; on success write the whole checkpoint."""
    quantization = packing.quantization(_named(layout, source), untouched(source, skeleton))
    with open_writer(run.folder, source, "float16", quantization) as checkpoint:
        writer = GroupedWriter(checkpoint, source, run)
        writer.packing, writer.layout = packing, layout
        yield writer
        if layout.head_bits is not None:
            add_head(writer, packing, skeleton, layout)
        add_others(writer, skeleton, set(_source_names(packing, list(checkpoint.names()))), DTYPE)
