"""compressed-tensors layouts of int8, FP8 and FP4 values with a scale per row, block or group.

Per linear layer with weight (N, K):

- `int-quantized`: `weight` int8 [N, K], `weight_scale` [N, 1]
- `float-quantized`: `weight` float8_e4m3fn [N, K], `weight_scale` [N, 1], or [ceil(N/128), ceil(K/128)] for blocks
- `nvfp4-pack-quantized`: `weight_packed` uint8 [N, K/2], two codes per byte, first one low; `weight_scale`
  float8_e4m3fn [N, K/16]; `weight_global_scale` float32 [1], the divisor of the scales
- `mxfp4-pack-quantized`: `weight_packed` likewise; `weight_scale` uint8 [N, K/32], E8M0 exponents

Other tensors, and the scales of 8-bit values, are bfloat16: the package's presets W8A8, FP8_DYNAMIC, FP8_BLOCK,
NVFP4A16 and MXFP4A16. Per-tensor scales and other activation quantization can be read as sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantkit.contracts.format import Kind, Layout, TensorWriter
from quantkit.contracts.run import Checked, Run
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.formats._grouped_codes import refuse_head
from quantkit.formats._packed_layers import (
    AGAIN,
    SCALE_TYPES,
    Packing,
    Parts,
    StoredLayer,
    refuse_stacked,
    write_layers,
)
from quantkit.formats._quantization_config import (
    Untouched,
    gpus_only,
    quantization_of,
    refuse_other_dtypes,
    untouched,
)
from quantkit.formats.compressed_tensors.groups import CLASS, METHOD, groups_of, quantization, refuse_unfound_layers
from quantkit.models.skeleton import Skeleton, linears_to_quantize, refuse_shapes
from quantkit.models.source import Source
from quantkit.numerics.quantized_weight import InputRounding, ScaledWeight
from quantkit.records.artifact import Artifact
from quantkit.system.untrusted import shown

SCALE, DIVISOR, PACKED, ZEROS = "weight_scale", "weight_global_scale", "weight_packed", "weight_zero_point"
# Parts that other tools add to a layer, and that its values do not need.
BESIDE = ("input_scale", "input_zero_point", "input_global_scale", ZEROS, "weight_shape")
NAIVE = "naive-quantized"  # in this format, only the type shows the kind of values
MOST_BLOCK = 1 << 24  # rows or columns
KERNEL_STEP = 16  # vLLM's GPU kernels need 8-bit layers in multiples of this
NO_EXPONENT = 255  # E8M0's NaN


@dataclass(frozen=True)
class ValueType:
    """How config.json and tensors describe one type of values; `columns` share a scale (None: any number)."""

    format: str
    type: str
    bits: int
    strategies: tuple[str, ...]
    stored: str
    columns: int | None = None
    scales: str = "bfloat16"

    @property
    def codes(self) -> str:
        return PACKED if self.bits == 4 else "weight"


VALUES = {
    "int8": ValueType("int-quantized", "int", 8, ("tensor", "channel", "group"), "int8"),
    "float8": ValueType("float-quantized", "float", 8, ("tensor", "channel", "block", "group"), "float8_e4m3fn"),
    "nvfp4": ValueType("nvfp4-pack-quantized", "float", 4, ("tensor_group",), "uint8", 16, "float8_e4m3fn"),
    "mxfp4": ValueType("mxfp4-pack-quantized", "float", 4, ("group",), "uint8", 32, "uint8"),
}
FORMATS = {kind.format: values for values, kind in VALUES.items()}
WHOLE = {(0, 0): "whole tensors", (1, 0): "rows"}  # blocks that have a name


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme: `values` is a key of VALUES; each `block` (rows, columns; 0: all) shares a scale."""

    values: str
    block: tuple[int, int]

    @property
    def kind(self) -> ValueType:
        return VALUES[self.values]

    @property
    def inputs(self) -> InputRounding | None:
        """Return how engines round the activations of a layer that quantkit wrote, or None if they do not."""
        return InputRounding(self.values, self.block[1] or None) if self.kind.bits == 8 else None

    @property
    def words(self) -> str:
        rows, columns = self.block
        each = f"{rows} x {columns}" if rows > 1 else f"{columns} columns"
        return f"{self.kind.format}, scales of {WHOLE.get(self.block, each)}"

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        return self.block[0] or rows, self.block[1] or columns

    def group(self) -> dict[str, Any]:
        """Return the config group for config.json, as the compressed-tensors package writes it."""
        kind, columns = self.kind, self.block[1]
        common = {"num_bits": kind.bits, "type": kind.type, "symmetric": True}
        weights: dict[str, Any] = {**common, "dynamic": False, "group_size": kind.columns}
        inputs = None
        if kind.columns is not None:
            weights |= {"strategy": kind.strategies[0], "scale_dtype": f"torch.{kind.scales}"}
        elif columns:
            weights |= {"strategy": "block", "block_structure": list(self.block)}
            inputs = {**common, "dynamic": True, "strategy": "group", "group_size": columns}
        else:
            weights |= {"strategy": "channel"}
            inputs = {**common, "dynamic": True, "strategy": "token", "group_size": None}
        return {"targets": [CLASS], "format": kind.format, "weights": weights, "input_activations": inputs}


def _scheme_for(layout: Layout) -> Scheme:
    size = 0 if layout.group_size == -1 else int(layout.group_size)
    return Scheme(layout.values, (size if size and layout.values == "float8" else 1, size))


def _quantization(scheme: Scheme, untouched: Untouched, cache: bool = False) -> dict[str, Any]:
    return quantization(scheme.kind.format, [scheme.group()], untouched, cache=cache)


KINDS = tuple(
    Kind(bits, words, _quantization(_scheme_for(layout), Untouched()))
    for bits, words, layout in (
        ("8", "int8, inputs too", Layout(8, values="int8")),
        ("8", "FP8, inputs too", Layout(8, values="float8")),
        ("nvfp4", "", Layout(4, 16, values="nvfp4")),
        ("mxfp4", "", Layout(4, 32, values="mxfp4")),
    )
)


def is_scaled(stored: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` describes scaled values, not grouped codes."""
    name = stored.get("format")
    return isinstance(name, str) and (name in FORMATS or name == NAIVE)


def scheme_of(stored: Mapping[str, Any], own: bool = False) -> Scheme:
    """Return a `quantization_config`'s scheme; `own`: quantkit wrote it. Raises ArtifactError for an unknown one."""
    name, groups = stored.get("format"), groups_of(stored)
    weights = groups[0].get("weights") if len(groups) == 1 else None
    if not isinstance(weights, dict):
        raise ArtifactError(f"quantization_config is not {METHOD} with one group of layers with weights. {AGAIN}")
    own_types = [FORMATS[name]] if isinstance(name, str) and name in FORMATS else ["int8", "float8"] * (name == NAIVE)
    said = (weights.get("type"), weights.get("num_bits"))
    values = next((values for values in own_types if (VALUES[values].type, VALUES[values].bits) == said), None)
    strategy = weights.get("strategy")
    if values is None or weights.get("symmetric") is not True or strategy not in VALUES[values].strategies:
        given = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "symmetric", "group_size")}
        raise ArtifactError(f"quantization_config: quantkit does not read {METHOD} {shown(name)} with {shown(given)}")
    scheme = Scheme(values, _block(weights, VALUES[values].columns))
    if own and groups[0] != scheme.group():
        raise ArtifactError(f"quantization_config: its group of layers does not describe {scheme.words}. {AGAIN}")
    return scheme


def _block(weights: Mapping[str, Any], right: int | None) -> tuple[int, int]:
    strategy = weights.get("strategy")
    if strategy in ("tensor", "channel"):
        return (0, 0) if strategy == "tensor" else (1, 0)
    sizes = weights.get("block_structure") if strategy == "block" else [1, weights.get("group_size")]
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and 0 < size < MOST_BLOCK for size in sizes)
        or (right is not None and sizes[1] != right)
    ):
        raise ArtifactError(f"quantization_config: {shown(sizes)} is not a valid block or group size. {AGAIN}")
    return sizes[0], sizes[1]


class ScaledPacking(Packing[ScaledWeight]):
    """Packing of scaled values. `own`: quantkit wrote it; other tools may use other scale dtypes and more tensors."""

    holds = ScaledWeight
    dtype = torch.bfloat16

    def __init__(self, scheme: Scheme, own: bool = True) -> None:
        self.key, self._own, self._kind = scheme, own, scheme.kind
        self.codes, self.code_type, self.bits = self._kind.codes, self._kind.stored, (self._kind.bits,)
        self.loose = () if own else BESIDE
        self.marks, self.parts = (self.codes, SCALE), (self.codes, SCALE, DIVISOR, *self.loose)

    def pack(self, weight: ScaledWeight, _layout: Layout, _what: str) -> dict[str, torch.Tensor]:
        values = weight.values
        values = values[:, ::2] | (values[:, 1::2] << 4) if self.codes == PACKED else values
        parts = {self.codes: values, SCALE: weight.scales}
        return parts if weight.divisor is None else parts | {DIVISOR: weight.divisor}

    def unpack(self, parts: Parts, _bits: int) -> ScaledWeight:
        values = parts[self.codes]
        if self.codes == PACKED:
            values = torch.stack([values & 15, values >> 4], -1).flatten(1)
        rows, columns = values.shape
        high, wide = self.key.block_of(rows, columns)
        scales = parts[SCALE].reshape(-(-rows // high), -(-columns // wide))
        divisor = parts[DIVISOR].reshape(1) if DIVISOR in parts else None
        return ScaledWeight(values, scales, (high, wide), divisor, self.key.inputs if self._own else None)

    def type_name(self, _bits: int) -> str:
        return self.key.values

    def shape(self, layer: StoredLayer) -> tuple[int, int]:
        rows, columns = layer.matrix(self.codes)
        return rows, columns * (2 if self.codes == PACKED else 1)

    def called(self, _layers: Iterable[StoredLayer]) -> str:
        return f"{METHOD}, {self.key.words}"

    def depends_on(self, layer: StoredLayer) -> object:
        rows, columns = self.shape(layer)
        high, wide = self.key.block_of(rows, columns)
        return self.key.values, min(high, rows), min(wide, columns)

    def layout(self, layers: Sequence[StoredLayer]) -> Layout | None:
        if self.key.values != "mxfp4":
            return None
        for layer in layers:
            self.refuse_parts(layer)
        return Layout(4, self.key.block[1], values="mxfp4")

    def refuse_parts(self, layer: StoredLayer) -> None:
        kind, (rows, columns) = self._kind, self.shape(layer)
        high, wide = self.key.block_of(rows, columns)
        grid = (-(-rows // max(high, 1)), -(-columns // max(wide, 1)))
        types = {kind.codes: {kind.stored}, SCALE: SCALE_TYPES if kind.bits == 8 and not self._own else {kind.scales}}
        if self.key.values == "nvfp4":
            types[DIVISOR] = {"float32"}
        for part, known in types.items():
            if (dtype := layer.dtype(part)) not in known:
                raise ArtifactError(
                    f"{layer.folder}: {layer.stem + part} is {dtype}, not {' or '.join(sorted(known))}. {AGAIN}"
                )
        scales = layer.shape(SCALE)
        flat = len(scales) < 2 and 1 in grid  # (N,) for (N, 1); the package broadcasts (1, N) over columns
        loose = not self._own and (flat or grid == (1, 1)) and math.prod(scales) == math.prod(grid)
        divisor = layer.shape(DIVISOR) if DIVISOR in types else (1,)
        if (
            0 in (rows, columns)
            or (kind.columns is not None and columns % wide)
            or math.prod(divisor) != 1
            or not (scales == grid or loose)
        ):
            raise ArtifactError(
                f"{layer.folder}: the parts of {layer.name} have the shapes {(rows, columns)}, {scales} and {divisor}, "
                f"which do not fit {self.key.words}. {AGAIN}"
            )

    def value(self, layer: StoredLayer, weight: ScaledWeight) -> ScaledWeight:
        """Return `weight`; raise ArtifactError for values or scales that engines reject."""
        factors, wrong = weight.factors(), None
        zeros = layer.read([ZEROS] if ZEROS in self.parts else [])
        if weight.scales.dtype == torch.uint8 and bool((weight.scales == NO_EXPONENT).any()):
            wrong = "has scales that are NaN"
        elif not bool(factors.isfinite().all()) or (self._own and not bool((factors > 0).all())):
            wrong = "has scales that are not finite" + (", or not above 0" if self._own else "")
        elif weight.values.dtype == torch.float8_e4m3fn and not bool(weight.steps().isfinite().all()):
            wrong = "has values that are NaN"
        elif zeros and bool((zeros[ZEROS].to(torch.float32) != 0).any()):
            wrong = "has zero points, but config.json says that it is symmetric"
        if wrong is not None:
            raise ArtifactError(f"{layer.folder}: the layer {layer.name} {wrong}. {AGAIN}")
        return weight


def check(source: Source, skeleton: Skeleton, layout: Layout) -> Checked[Layout]:
    """Check that the layout can store the model, and estimate the output size in bytes."""
    refuse_shapes(source, skeleton)
    refuse_unfound_layers(source, skeleton)
    refuse_stacked(source, skeleton)
    refuse_head(f"{METHOD} with {layout.values}", (), source, skeleton, layout)
    scheme, linears = _scheme_for(layout), linears_to_quantize(source, skeleton)
    columns = scheme.block[1]
    for name, (_, k) in linears.items():
        if columns and k % columns:
            how = " Use --granularity channel." if layout.values == "float8" else ""
            raise UnsupportedError(
                f"{name} has {k} input columns, not a multiple of {columns}, which share a scale in "
                f"{scheme.kind.format}.{how}"
            )
    quantized = sum(n * k for n, k in linears.values())
    bits = 8 if scheme.kind.bits == 8 else 4.5
    nbytes = int(quantized * bits / 8 + 2 * sum(n for n, _ in linears.values()))
    nbytes += (source.parameters - quantized) * 2 + 50_000_000
    return Checked(replace(layout, dtype="bfloat16"), nbytes, notes=_notes(linears, scheme.block[0]))


def _notes(linears: Mapping[str, tuple[int, int]], rows: int) -> tuple[str, ...]:
    for name, (n, k) in linears.items():
        if n % KERNEL_STEP or k % KERNEL_STEP:
            return (f"vLLM on a GPU would refuse this artifact: {name} is {n} x {k}, not multiples of {KERNEL_STEP}",)
        if n % rows:
            what = f"{n} rows are not whole blocks of {rows}"
            return (f"vLLM would refuse to compute {name} and its neighbours as one layer: {what}",)
    return ()


def write(source: Source, skeleton: Skeleton, run: Run, layout: Layout) -> AbstractContextManager[TensorWriter]:
    """Return a context manager that yields a writer and completes the checkpoint on success."""
    packing = ScaledPacking(_scheme_for(layout))
    settings = _quantization(packing.key, untouched(source, skeleton), layout.kv_scales)
    return write_layers(packing, source, skeleton, run, layout, settings)


def refusals(stored: Mapping[str, Any]) -> Mapping[str, str]:
    """Return, by engine, why it cannot load a folder with this `quantization_config`."""
    scheme = scheme_of(stored)
    return gpus_only("0.23", f"{scheme.values}/marlin") if scheme.kind.bits == 4 else {}


def recorded_options(artifact: Artifact) -> Mapping[str, tuple[object, ...]]:
    """Return the recipe options that config.json records."""
    scheme = scheme_of(quantization_of(artifact.folder), own=True)
    refuse_other_dtypes(artifact.folder, [name for name in artifact.manifest.tensor_types if name != scheme.values])
    if scheme.kind.columns is not None:
        return {"bits": (scheme.values,), "group_size": (scheme.block[1],), "sym": (True,), "desc_act": (False,)}
    return {"bits": ("8",), "granularity": ("block" if scheme.block[1] else "channel",)}
