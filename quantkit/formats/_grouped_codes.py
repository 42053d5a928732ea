"""Checkpoints of grouped integer codes (GPTQ, AWQ, compressed-tensors, MLX): a `GroupedPacking` per layout.

The output head may be quantized too, rounded to nearest with searched scales. Embeddings stay 16-bit:
transformers 5.23 cannot load packed embeddings, and vLLM 0.32 loads only packed ones.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Kind, Layout, Loading, Stored
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, RecipeError, UnsupportedError, ValuesError
from quantkit.formats._packed_layers import (
    AGAIN,
    SCALE_TYPES,
    LayerReader,
    LayerWriter,
    Packing,
    Parts,
    StoredLayer,
    refuse_stacked,
    several_kinds,
    write_layers,
)
from quantkit.formats._quantization_config import (
    Untouched,
    layer_overrides,
    quantization_of,
    refuse_other_dtypes,
    source_quantization,
    untouched,
)
from quantkit.models.skeleton import Skeleton, linears_to_quantize, refuse_shapes, rows_of, weight_name
from quantkit.models.source import Source
from quantkit.numerics.grid import fit_grid, round_to_grid
from quantkit.numerics.quantized_weight import GroupedWeight, contiguous_groups
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import shown, whole_number

MOST_COLUMNS = 1 << 24  # columns of a group
UNIT = 32  # vLLM needs multiples of this many rows and columns on each device
PARALLEL_SIZES = (2, 4, 8)
GROUP_SIZES = (128, 64, 32)
# Tensor parallel engines split the columns of these layers, and the rows of all others.
SPLIT_COLUMNS = ("o_proj", "out_proj", "dense", "c_proj", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")
LARGEST_SCALE = torch.finfo(torch.float16).max  # numerics/grid.py clips scales here
OTHERS = ""  # key of all layers that are not named
IN_REFERENCE = Loading(weights="packed", packed_bits=("2", "3", "4"))  # codes that torch's int4 kernel takes
NEEDS_GPTQMODEL = "transformers loads it with the package gptqmodel, which quantkit does not start"
HEAD = "lm_head"  # the name by which readers find an output head
HEAD_UNIT = 64  # vLLM 0.32 pads a head to a multiple of this many rows; it cannot pad codes
HEAD_HOLDERS = "compressed-tensors with codes holds one of 4 or 8 bits, gptq one of the layers' bits"
PIECE = 1 << 22  # values of a head rounded at a time
ROW_UNIT = 32  # rows of a piece are a multiple of this, so that zero points fill whole words


class GroupedPacking(Packing[GroupedWeight]):
    """Tensor layout of grouped integer codes; the defaults are the tensor names that GPTQ and AWQ share."""

    holds = GroupedWeight
    name: str
    codes, scales = "qweight", "scales"
    marks: tuple[str, ...] = ("qweight",)
    transposed = True  # codes and scales are (K, N)
    order: str | None = None  # name of the part with the group of each column
    orders_columns = False  # whether that part is written
    least_zero = 0  # smallest zero point that can be stored
    records_symmetry = True  # config.json says whether codes are symmetric
    group_bits = 0  # bits of a group besides its codes; 0: a float16 scale and perhaps a zero point
    for_vllm = True  # whether vLLM reads it, so that notes name what vLLM refuses
    names_layers = False  # whether other tools name the layers with other bits, too
    ties_head = False  # whether an embedding that is also the output head can be quantized
    # Settings in config.json of the folder that is read.
    _own: bool
    _bits: int
    _groups: tuple[int, ...]
    _symmetric: object
    _ordered: object
    _layer_bits: Mapping[str, int]

    @abstractmethod
    def stored(self, rows: int, columns: int, groups: int, kind: Layout) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each tensor of a layer (N, K) with G groups per row, by part name."""

    @abstractmethod
    def pack_codes(self, weight: GroupedWeight, layout: Layout) -> dict[str, torch.Tensor]:
        """Return all tensors of a layer except its scales, by part name."""

    @abstractmethod
    def unpack_codes(self, parts: Parts, bits: int) -> torch.Tensor:
        """Unpack a layer's codes (N, K) uint8."""

    @abstractmethod
    def unpack_zeros(self, parts: Parts, bits: int, rows: int, groups: int) -> torch.Tensor:
        """Unpack a layer's zero points (N, G) uint8; the codes are not read."""

    @abstractmethod
    def quantization(self, layout: Layout, untouched: Untouched) -> dict[str, Any]:
        """Return the `quantization_config` for config.json."""

    def pack(self, weight: GroupedWeight, layout: Layout, what: str) -> dict[str, torch.Tensor]:
        if bool((weight.scales.abs() >= LARGEST_SCALE).any()):
            raise ValuesError(
                f"{what} has values beyond the range of {weight.bits}-bit codes with float16 scales "
                f"(about {LARGEST_SCALE * (1 << weight.bits - 1):g}). Rescale the checkpoint, or use the method nf4 "
                "or bits BF16 of gguf."
            )
        return self.pack_codes(weight, layout) | self.pack_scales(weight.scales)

    def pack_scales(self, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        return {self.scales: (scales.T if self.transposed else scales).contiguous().to(torch.float16)}

    def unpack(self, parts: Parts, bits: int) -> GroupedWeight:
        codes, scales = self.unpack_codes(parts, bits), parts[self.scales]
        scales = scales.T.contiguous() if self.transposed else scales
        zeros = self.unpack_zeros(parts, bits, *scales.shape)
        return GroupedWeight(codes, scales, zeros, self.groups(parts, codes.shape[1], scales.shape[1]), bits)

    def groups(self, parts: Parts, columns: int, count: int) -> torch.Tensor:
        """Return each column's group index, (K,) int64: stored (`order`), or `count` contiguous groups."""
        if self.order is not None and self.order in parts:
            return parts[self.order].to(torch.int64)
        return contiguous_groups(columns, columns // count)

    def join(self, pieces: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Concatenate a layer's tensors from pieces with consecutive rows."""
        rows = 1 if self.transposed else 0
        return {
            part: first if part == self.order else torch.cat([piece[part] for piece in pieces], rows)
            for part, first in pieces[0].items()
        }

    def size(self, layer: StoredLayer, bits: int) -> tuple[int, int, int]:
        """Return a layer's rows N, columns K and groups per row G."""
        codes, (groups, rows) = layer.matrix(self.codes), layer.matrix(self.scales)
        return rows, codes[0] * 32 // bits, groups

    def refusal(self, _name: str, _rows: int, _columns: int, _bits: int) -> str | None:
        """Return why this layout cannot store a layer of this shape, or None if it can."""
        return None

    def head_bits(self, _layout: Layout) -> tuple[int, ...]:
        """Return the bit widths that an output head may have; empty if engines cannot load a quantized head."""
        return ()

    def settings(self, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `bits`, `group_size`, `sym` and `desc_act` from a `quantization_config`; absent ones are left out."""
        return quantization

    def layer_bits(self, _quantization: Mapping[str, Any]) -> Mapping[str, int]:
        """Return the bits by layer name that quantkit wrote (`OTHERS`: all other layers); empty if uniform."""
        return {}

    def overrides(self, quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the settings of single layers in another tool's `quantization_config`."""
        return layer_overrides(quantization)

    def variant(self, _quantization: Mapping[str, Any]) -> GroupedPacking:
        """Return the variant of this layout that another tool's config describes; raise ArtifactError if unknown."""
        return self

    def notes(self, _layout: Layout) -> tuple[str, ...]:
        return ()

    def of_folder(self, folder: Path, own: bool, quantization: Mapping[str, Any] | None = None) -> GroupedPacking:
        """Return this layout configured by a folder's `quantization_config`; raise ArtifactError for invalid settings.

        `own`: quantkit wrote the folder. Other tools may use other scale dtypes and omit `g_idx` if it is sorted.
        """
        where = "config.json: quantization_config"
        if quantization is None:
            where, quantization = (where, quantization_of(folder)) if own else source_quantization(folder)
            quantization = quantization or {}
        made = copy.copy(self if own else self.variant(quantization))
        made._own, settings, where = own, made.settings(quantization), f"{folder}/{where}"
        bits = whole_number(settings, "bits", min(self.bits), max(self.bits), where, ArtifactError)
        if bits not in self.bits:
            raise ArtifactError(f"{where} has no valid number of bits: {shown(bits)}. {AGAIN}")
        group = whole_number(settings, "group_size", -1, MOST_COLUMNS, where, ArtifactError)
        if group == 0:
            raise ArtifactError(f"{where}: group_size is 0. {AGAIN}")
        overrides = [] if own else self.overrides(quantization)
        sizes = [whole_number(other, "group_size", -1, MOST_COLUMNS, where, ArtifactError) for other in overrides]
        first = -1 if group is None else group
        made._bits = bits
        made._groups = (first, *(size for size in dict.fromkeys(sizes) if size not in (None, 0, first)))
        # If layers differ, only their tensors show their bits.
        made._symmetric, made._ordered = (
            settings.get(name) if all(other.get(name, settings.get(name)) == settings.get(name) for other in overrides)
            else None
            for name in ("sym", "desc_act")
        )  # fmt: skip
        made._layer_bits = made.layer_bits(quantization) if own or self.names_layers else {}
        return made

    @property
    def key(self) -> tuple[int, int, bool, bool]:
        """Return the settings that affect dequantized values, to compare layouts."""
        return self._bits, self._groups[0], self._symmetric is True, self._ordered is True

    def bits_of(self, layer: StoredLayer) -> int:
        if not self._layer_bits:
            return self._bits
        name = layer.stem[:-1]
        bits = self._layer_bits.get(name, self._layer_bits.get(OTHERS))
        if bits is None:
            raise ArtifactError(f"{layer.folder / 'config.json'} names no bits of the layer {name}. {AGAIN}")
        return bits

    def shape(self, layer: StoredLayer) -> tuple[int, int]:
        return self.size(layer, self.bits_of(layer))[:2]

    def called(self, layers: Iterable[StoredLayer]) -> str:
        kinds = self._kinds(layers)
        bits, groups = (" and ".join(map(str, sorted(set(each)))) for each in zip(*kinds, strict=True))
        return f"{self.name}, {bits} bits, {'whole rows' if groups == '-1' else f'groups of {groups}'}"

    def _kinds(self, layers: Iterable[StoredLayer]) -> set[tuple[int, int]]:
        """Return the (bits, group size) pairs that occur in the layers."""
        found = set()
        for layer in layers:
            bits, fitting = self.bits_of(layer), list(self._groups)
            if fitting[1:]:
                _, columns, groups = self.size(layer, bits)
                fitting = [size for size in fitting if groups * (columns if size == -1 else size) == columns]
            found.add((bits, (fitting or self._groups)[0]))
        return found or {(self._bits, self._groups[0])}

    def layout(self, layers: Sequence[StoredLayer]) -> Layout:
        """Read symmetry, column order and smallest zero point from the tensors; raise ArtifactError if invalid."""
        if len(kinds := self._kinds(layers)) > 1:
            raise several_kinds(layers[0].folder, self.called(layers))
        ((bits, group),) = kinds
        symmetric, ordered, least = True, False, 1 << bits
        for layer in layers:
            self.refuse_parts(layer)
            rows, columns, groups = self.size(layer, bits)
            parts = layer.read(part for part in self.parts if part != self.codes)
            scales, half = parts[self.scales], parts[self.scales].to(torch.float16)
            if not half.to(scales.dtype).equal(scales) or bool((half == 0).any()):
                what = "has scales that are 0 or not finite in float16"
                raise ArtifactError(f"{layer.folder}: the layer {layer.name} {what}")
            zeros = self.unpack_zeros(parts, bits, rows, groups)
            symmetric = symmetric and bool((zeros == 1 << (bits - 1)).all())
            least = min(least, int(zeros.min()))
            plain = contiguous_groups(columns, columns // groups)
            ordered = ordered or not self.groups(parts, columns, groups).equal(plain)
        return Layout(bits, group, symmetric, ordered, least_zero=least)

    def refuse_parts(self, layer: StoredLayer) -> None:
        folder, shapes, bits = layer.folder, {part: layer.shape(part) for part in layer.parts}, self.bits_of(layer)
        found = f"{folder}: the parts of {layer.name} have the shapes {shapes}"
        if self.scales not in shapes or any(0 in shape for shape in shapes.values()):
            raise ArtifactError(f"{found}. {AGAIN}")
        rows, columns, groups = self.size(layer, bits)
        _, _, symmetric, ordered = self.key
        want = self.stored(rows, columns, groups, Layout(bits, -1, symmetric, ordered))
        if not self._own and self.orders_columns and (not ordered or groups == 1):
            # A sorted order may be missing.
            want = {part: kind for part, kind in want.items() if part in shapes or part != self.order}
        if missing := sorted(want.keys() - shapes.keys()):
            raise ArtifactError(f"{folder} lacks the tensor {layer.stem + missing[0]}. {AGAIN}")
        for part, (kind, _) in want.items():
            types = {kind} if self._own or kind != "float16" else SCALE_TYPES
            if (dtype := layer.dtype(part)) not in types:
                raise ArtifactError(f"{folder}: {layer.stem + part} is {dtype}, not {kind}. {AGAIN}")
        if reason := self.refusal(layer.name, rows, columns, bits):
            raise ArtifactError(f"{folder}: {reason}. {AGAIN}")
        sizes = [columns if size == -1 else size for size in self._groups]
        if shapes != {part: shape for part, (_, shape) in want.items()} or columns not in [groups * n for n in sizes]:
            known = " or ".join(map(str, sizes))
            raise ArtifactError(f"{found}, which do not fit {bits} bits and groups of {known} columns. {AGAIN}")

    def value(self, layer: StoredLayer, weight: GroupedWeight) -> Stored:
        """Return `weight`; raise ArtifactError for scales, zero points or column orders that engines reject."""
        wrong, groups = None, weight.scales.shape[1]
        plain = contiguous_groups(weight.shape[1], weight.shape[1] // groups)
        if not bool((weight.scales.isfinite() & ((weight.scales != 0) | (not self._own))).all()):
            wrong = "has scales that are 0 or not finite"
        elif not bool(((weight.g_idx >= 0) & (weight.g_idx < groups)).all()):
            wrong = f"has columns outside its {groups} groups"
        elif self._symmetric is True and not bool((weight.zeros == 1 << (weight.bits - 1)).all()):
            wrong = "is not symmetric, but config.json says it is"
        elif self._ordered is False and not weight.g_idx.equal(plain):
            wrong = "has groups of columns that are not contiguous, but config.json says they are"
        if wrong is not None:
            raise ArtifactError(f"{layer.folder}: the layer {layer.name} {wrong}. {AGAIN}")
        return weight


def open_grouped(
    packing: GroupedPacking, folder: Path, files: tuple[str, ...], _config: dict[str, Any], own: bool = True
) -> LayerReader:
    """Open a folder of this layout; `own`: quantkit wrote it."""
    return LayerReader(folder, files, [packing.of_folder(folder, own)])


def kinds(packing: GroupedPacking) -> tuple[Kind, ...]:
    """List the variants of a layout (bits, symmetry and so on) that engines support differently."""
    found = []
    for bits in packing.bits:
        for symmetric in (True, False) if packing.records_symmetry else (False,):
            for ordered in (False, True) if packing.orders_columns else (False,):
                words = f"{'symmetric' if symmetric else 'zero points'}{', desc_act' if ordered else ''}"
                layout = Layout(bits, 128, symmetric, ordered)
                found.append(Kind(str(bits), words, packing.quantization(layout, Untouched())))
    return tuple(found)


def mixes(packing: GroupedPacking) -> tuple[Kind, ...]:
    """List the kinds with mixed bits per layer: one that engines support, and all others."""
    found = []
    for widths, words in (((4, 8), "4 and 8 bits by layer"), (packing.bits, "others by layer")):
        layout = Layout(4, 128, layer_bits={f"model.layers.{index}": bits for index, bits in enumerate(widths)})
        found.append(Kind("auto", f"symmetric, {words}", packing.quantization(layout, Untouched())))
    return tuple(found)


def usage(packages: str, vllm: str = "vLLM") -> str:
    """Return the model card's instructions for loading a folder in vLLM and transformers."""
    return (
        f"\n{vllm}:\n\n```bash\nvllm serve FOLDER\n```\n\n"
        f"transformers, with `pip install {packages}`:\n\n{{transformers}}\n"
    )


def resolve_group_size(group_size: int | str, linears: Mapping[str, tuple[int, int]]) -> int | str:
    """Return the group size for all layers (-1: whole row); ``auto`` is the largest of GROUP_SIZES that fits them."""
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


def check(packing: GroupedPacking, source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    """Check that the layout can store the model, resolve the group size, and estimate the output size in bytes."""
    if unheld := [bits for bits in layout.every_bits if bits not in packing.bits]:
        known = ", ".join(map(str, packing.bits))
        raise RecipeError(
            f"the format {packing.name} holds codes of {known} bits, not {', '.join(map(str, unheld))}. Give other "
            "--bits, or another --format, such as compressed-tensors"
        )
    if layout.column_order and not packing.orders_columns:
        raise RecipeError(f"the format {packing.name} cannot store an order of columns: leave desc_act out")
    refuse_shapes(source, skeleton)
    linears = linears_to_quantize(source, skeleton)
    refuse_stacked(source, skeleton)
    group_size = resolve_group_size(layout.group_size, linears)
    for name, (n, k) in linears.items():
        for bits in layout.choices or (layout.bits_of(name),):
            if reason := packing.refusal(name, n, k, bits):
                raise UnsupportedError(reason)
    refuse_head(packing.name, packing.head_bits(layout), source, skeleton, layout, packing.ties_head)
    quantized = sum(n * k for n, k in linears.values())
    group = group_size if isinstance(group_size, int) and group_size > 0 else min(k for _, k in linears.values())
    codes = sum(n * k * layout.bits_of(name) for name, (n, k) in linears.items())
    nbytes = int((codes + quantized * 24 / group) / 8 + (source.parameters - quantized) * 2 + 50_000_000)
    notes = [*packing.notes(layout), *(_vllm_notes(linears, group_size) if packing.for_vllm else ())]
    plan = replace(layout, group_size=group_size, least_zero=packing.least_zero)
    if layout.head_bits is not None:
        notes += _head_notes(source, skeleton, packing, plan)
    return Checked(plan, nbytes, {"group_size": group_size}, tuple(notes))


def _vllm_notes(linears: Mapping[str, tuple[int, int]], group_size: int | str) -> tuple[str, ...]:
    """Return notes on layer shapes that vLLM cannot load, at all or with some tensor-parallel sizes."""
    for name, (n, k) in linears.items():
        if n % UNIT or k % UNIT:
            return (f"vLLM would refuse this artifact: {name} is {n} x {k}, and it needs multiples of {UNIT}",)
    refused = {size: reason for size in PARALLEL_SIZES if (reason := _cannot_split(linears, group_size, size))}
    if not refused:
        return ()
    sizes = " or ".join(map(str, refused))
    return (f"vLLM would refuse this artifact with tensor parallel size {sizes}: {next(iter(refused.values()))}",)


def _cannot_split(linears: Mapping[str, tuple[int, int]], group_size: int | str, size: int) -> str | None:
    """Return why `size` devices cannot run the layers tensor-parallel, or None; too few KV heads are replicated."""
    group = group_size if isinstance(group_size, int) and group_size > 0 else UNIT
    by_columns = {name: k for name, (_, k) in linears.items() if name.split(".")[-2] in SPLIT_COLUMNS}
    for name, (n, k) in linears.items():
        if name in by_columns and k % (size * group):
            smaller = (g for g in GROUP_SIZES if g < group and all(k % (size * g) == 0 for k in by_columns.values()))
            hint = f"; group_size {fits} would" if (fits := next(smaller, None)) else ""
            return f"the {k} columns of {name} do not split into {size} parts of whole groups of {group}{hint}"
        if name not in by_columns and name.split(".")[-2] not in ("k_proj", "v_proj") and n % (size * UNIT):
            return f"the {n} rows of {name} do not split into {size} parts of a multiple of {UNIT}"
    return None


def head_name(skeleton: Skeleton) -> str:
    """Return the output head's module name; the embedding's if the head is tied to it."""
    model = skeleton.model
    embedding = model.get_input_embeddings()
    tied = model.get_output_embeddings().weight is embedding.weight
    return weight_name(model, embedding).removesuffix(".weight") if tied else HEAD


def refuse_head(
    holder: str, known: tuple[int, ...], source: Source, skeleton: Skeleton, layout: Layout, ties: bool = False
) -> None:
    """Raise RecipeError or UnsupportedError if the format `holder` cannot store the requested output head.

    `known` are the head's possible bit widths; `ties`: the format can store a quantized tied embedding.
    """
    if layout.head_bits is None:
        return
    if layout.head_bits not in known:
        has = f"bits {' and '.join(map(str, known))}" if known else "no quantized output head"
        raise RecipeError(
            f"head_bits = {layout.head_bits}: the format {holder} has {has} here. Leave head_bits out; {HEAD_HOLDERS}"
        )
    model = skeleton.model
    layer = model.get_output_embeddings()
    if layer.weight is model.get_input_embeddings().weight:
        if ties:
            return
        raise UnsupportedError(
            f"head_bits: the output head of {source.model} is tied to its embedding, which no reader of {holder} loads "
            "quantized. Use the method gguf, whose token_embedding_type sets both"
        )
    name = weight_name(model, layer)
    if type(layer).__name__ != "Linear" or name != f"{HEAD}.weight":
        raise UnsupportedError(
            f"head_bits: the output head of {source.architecture!r} is {name}, a {type(layer).__name__}, but readers "
            f"of {holder} need the Linear {HEAD}.weight"
        )


def _head_notes(source: Source, skeleton: Skeleton, packing: GroupedPacking, layout: Layout) -> list[str]:
    """Return notes on the head (bits, share of weights, engines that refuse it); raise UnsupportedError."""
    rows, columns = skeleton.model.get_output_embeddings().weight.shape
    bits, group = int(layout.head_bits or 0), columns if layout.group_size == -1 else int(layout.group_size)
    if reason := packing.refusal(f"{HEAD}.weight", rows, columns, bits):
        raise UnsupportedError(f"head_bits: {reason}")
    each = bits + (packing.group_bits or (16 if layout.symmetric else 16 + bits)) / group
    share = rows * columns / source.parameters
    notes = [f"the output head has {each:.2f} bits per weight, rounded to nearest, and {share:.1%} of all weights"]
    if packing.for_vllm and rows % HEAD_UNIT:
        notes.append(
            f"vLLM would refuse this artifact: its output head has codes for {rows} tokens, which is not a multiple of "
            f"{HEAD_UNIT}"
        )
    return notes


@contextmanager
def write(
    packing: GroupedPacking, source: Source, skeleton: Skeleton, run: Run, layout: Layout
) -> Iterator[LayerWriter[GroupedWeight]]:
    """Yield a writer for layers; complete the checkpoint when the context ends without an error."""
    quantization = packing.quantization(_named(layout, source), untouched(source, skeleton))
    with write_layers(packing, source, skeleton, run, layout, quantization) as writer:
        yield writer
        if layout.head_bits is not None:
            _add_head(writer, packing, skeleton, layout)


def _named(layout: Layout, source: Source) -> Layout:
    """Return the layout with each layer's bits listed under every module name that engines use for the layer."""
    modules = {weight.removesuffix(".weight"): bits for weight, bits in layout.layer_bits.items()}
    if (prefixes := source.text_prefixes) is not None:
        modules = {name: bits for module, bits in modules.items() for name in prefixes.modules(module)}
    return replace(layout, layer_bits=modules)


def _add_head(writer: LayerWriter[GroupedWeight], packing: GroupedPacking, skeleton: Skeleton, layout: Layout) -> None:
    name = head_name(skeleton)
    rows = rows_of(writer.source, skeleton, f"{name}.weight")
    count, columns = rows.shape
    bits, group = int(layout.head_bits or 0), columns if layout.group_size == -1 else int(layout.group_size)
    order, own = contiguous_groups(columns, group), replace(layout, bits=bits)
    step = max(1, PIECE // columns // ROW_UNIT) * ROW_UNIT
    pieces = []
    with writer.run.progress.step("rounding the output head", count, work=True) as advance:
        for start in range(0, count, step):
            weight = torch.from_numpy(rows.read(start, min(start + step, count)))
            grid = fit_grid(weight, group, bits, symmetric=layout.symmetric, search=True, least_zero=packing.least_zero)
            codes = GroupedWeight(round_to_grid(weight, grid, group), grid.scales, grid.zeros, order, bits)
            pieces.append(packing.pack_codes(codes, own) | packing.pack_scales(codes.scales))
            advance(len(weight))
    for part, tensor in packing.join(pieces).items():
        writer.checkpoint.add(f"{name}.{part}", tensor)
    writer.run.findings.count(f"int{bits}")


def recorded_options(packing: GroupedPacking, artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """Return the recipe options that config.json records: bits, group size, symmetry."""
    quantization, manifest = quantization_of(artifact.folder), artifact.manifest
    stored, bits = packing.settings(quantization), packing.layer_bits(quantization)
    refuse_other_dtypes(artifact.folder, [name for name in manifest.tensor_types if not name.startswith("int")])
    ending, base = f".{packing.codes}", bits.get(OTHERS, stored.get("bits"))
    names = StoredTensors(artifact.folder, manifest.weight_files).names()
    layers = (name.removesuffix(ending) for name in names if name.endswith(ending))
    every = {layer: bits.get(layer, base) for layer in layers if layer != HEAD}
    # The recipe may name the bits of any layer, or auto.
    said: dict[str, tuple[object, ...]] = {"bits": (*sorted(set(map(str, every.values())) or {str(base)}), "auto")}
    named = manifest.options.get("layer_bits")
    if isinstance(named, dict) and named.keys() <= every.keys():  # otherwise the keys are patterns
        said["layer_bits"] = ({name: every[name] for name in named},)
    return said | {name: (stored[name],) for name in ("group_size", "sym", "desc_act") if name in stored}
