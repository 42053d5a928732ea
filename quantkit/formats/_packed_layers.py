"""Safetensors checkpoints that store each quantized layer as several tensors: reader and writer for all layouts.

GPTQ, AWQ, compressed-tensors and bitsandbytes each define a `Packing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.checkpoints.spool import Spool, open_writer
from quantkit.contracts.format import Layout, Stored, TensorWriter, Written
from quantkit.contracts.run import Run
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.models.skeleton import Skeleton, rows_of, source_name, stack_of, stacks
from quantkit.models.source import Source
from quantkit.numerics.grid import cast_finite
from quantkit.numerics.normal_float import NormalFloatWeight
from quantkit.numerics.quantized_weight import GroupedWeight, ScaledWeight

AGAIN = "Convert again with --force."
PIECE = 1 << 22  # values of a tensor outside the blocks in memory at a time
FLOATS = ("float16", "bfloat16", "float32", "float64")
SCALE_TYPES = {"float16", "bfloat16", "float32"}  # types of other tools' scales
Parts = Mapping[str, torch.Tensor]
Weight = TypeVar("Weight", GroupedWeight, ScaledWeight, NormalFloatWeight)


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer in `folder`: tensors named STEM + part, for each part in `parts`."""

    folder: Path
    stored: StoredTensors
    stem: str
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.stem}weight"

    def dtype(self, part: str) -> str:
        return self.stored.dtype(self.stem + part)

    def shape(self, part: str) -> tuple[int, ...]:
        return self.stored.shape(self.stem + part)

    def matrix(self, part: str) -> tuple[int, int]:
        """Return the shape of a 2-D part; raise ArtifactError for other numbers of dimensions."""
        shape = self.shape(part)
        if len(shape) != 2:
            raise ArtifactError(f"the tensor {self.stem + part} has the shape {shape}, not two dimensions. {AGAIN}")
        return shape[0], shape[1]

    def read(self, parts: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read the given parts; skip those that the layer lacks."""
        return {part: self.stored.read(self.stem + part) for part in parts if part in self.parts}


class Packing(ABC, Generic[Weight]):
    """How a format stores a quantized weight of type `holds` as tensors NAME.PART, and how it reads it back."""

    holds: type[Weight]
    codes: str  # the part with the codes
    marks: tuple[str, ...]  # parts that every quantized layer has
    parts: tuple[str, ...]  # all parts that a layer may have
    bits: tuple[int, ...]
    loose: tuple[str, ...] = ()  # parts that may exist without a layer
    keeps_stacks: bool = False  # experts that the source stores stacked stay stacked
    dtype: torch.dtype = torch.float16  # of all other tensors
    code_type = "int32"

    @abstractmethod
    def pack(self, weight: Weight, layout: Layout, what: str) -> dict[str, torch.Tensor]:
        """Return the layer's tensors by part name; `what` names the layer in errors."""

    @abstractmethod
    def unpack(self, parts: Parts, bits: int) -> Weight:
        """Rebuild the weight from its tensors; inverse of `pack`."""

    @abstractmethod
    def shape(self, layer: StoredLayer) -> tuple[int, int]:
        """Return the weight's shape (N, K) without reading its values."""

    @abstractmethod
    def called(self, layers: Iterable[StoredLayer]) -> str:
        """Describe the quantization of these layers in a few words, such as ``gptq, 4 bits, groups of 128``."""

    @abstractmethod
    def value(self, layer: StoredLayer, weight: Weight) -> Stored:
        """Return the layer's value for readers; raise ArtifactError for values that engines reject."""

    def refuse_parts(self, layer: StoredLayer) -> None:
        """Raise ArtifactError if dtypes or shapes of the layer's tensors contradict each other or config.json."""

    def layout(self, _layers: Sequence[StoredLayer]) -> Layout | None:
        """Return a Layout that lets other formats store these codes unchanged, or None if none can."""
        return None

    def bits_of(self, _layer: StoredLayer) -> int:
        return self.bits[0]

    def depends_on(self, layer: StoredLayer) -> object:
        """Return the settings (other than the tensors) that determine the layer's values, to compare packings."""
        return self.bits_of(layer)

    def pack_scales(self, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensor that stores scales (N, G), by part name."""
        raise TypeError(f"the scales of a {self.holds.__name__} cannot be replaced")

    def rescaled(self, scales: torch.Tensor, _stored: Callable[[str], torch.Tensor], _bits: int) -> Parts:
        """Return the tensors that change with new scales (N, G); `_stored` reads the current tensor of a part."""
        return self.pack_scales(scales)

    def type_name(self, bits: int) -> str:
        return f"int{bits}"


def _stems(packing: Packing[Any], stored: Collection[str]) -> set[str]:
    """Return the names of all quantized layers, each with its trailing dot."""
    first, *others = packing.marks
    stems = (name.removesuffix(first) for name in stored if name.endswith(f".{first}"))
    return {stem for stem in stems if all(stem + mark in stored for mark in others)}


def source_names(packing: Packing[Any], stored: Collection[str]) -> list[str]:
    """Return the names of the stored tensors in the source; a quantized layer appears once, as its weight."""
    stems = _stems(packing, stored)
    parts = {stem + part for stem in stems for part in packing.parts}
    return sorted({*(stem + "weight" for stem in stems), *(name for name in stored if name not in parts)})


class FolderReader(ABC):
    """Reads the tensors of a folder in which some are quantized."""

    def __init__(self, folder: Path, files: tuple[str, ...]) -> None:
        self.folder, self.stored = folder, StoredTensors(folder, files)
        self.known = frozenset(self.stored.names())

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def quantization(self) -> str: ...

    def type_of(self, name: str) -> str:
        return self.stored.dtype(name)

    def types(self) -> Mapping[str, int]:
        return Counter(map(self.type_of, self.names()))

    def layout(self) -> Layout:
        raise UnsupportedError(f"{self.folder} has no grouped codes: it is {self.quantization()}")


class LayerReader(FolderReader):
    """Reads quantized layers under their weights' names, other tensors as stored; raises ArtifactError.

    If there are several `packings`, the one that matches a layer's tensor dtypes and shapes reads the layer.
    """

    def __init__(self, folder: Path, files: tuple[str, ...], packings: Sequence[Packing[Any]]) -> None:
        super().__init__(folder, files)
        self._packings = packings
        claims: dict[str, list[Packing[Any]]] = {}
        for packing in packings:
            for stem in _stems(packing, self.known):
                if len(packings) == 1 or self.stored.dtype(stem + packing.codes) == packing.code_type:
                    claims.setdefault(stem, []).append(packing)
        owners = ((stem, self._owner(stem, claimants)) for stem, claimants in sorted(claims.items()))
        self._layers = {f"{stem}weight": (self._layer(stem, packing), packing) for stem, packing in owners}
        parts = {layer.stem + part for layer, packing in self._layers.values() for part in packing.parts}
        self._rest = self.known - parts
        for name in sorted(self._rest):
            for packing in packings:
                self._refuse_lone_part(name, packing)

    def _layer(self, stem: str, packing: Packing[Any]) -> StoredLayer:
        parts = tuple(part for part in packing.parts if stem + part in self.known)
        return StoredLayer(self.folder, self.stored, stem, parts)

    def _owner(self, stem: str, claimants: list[Packing[Any]]) -> Packing[Any]:
        if len(self._packings) == 1:
            return claimants[0]
        if len({packing.codes for packing in claimants}) > 1:
            raise ArtifactError(f"{self.folder} has the layer {stem[:-1]} twice, in two kinds of codes. {AGAIN}")
        fitting: dict[Packing[Any], object] = {}
        for packing in claimants:
            layer = self._layer(stem, packing)
            with suppress(ArtifactError):
                packing.refuse_parts(layer)
                fitting[packing] = packing.depends_on(layer)
        if len(set(fitting.values())) != 1:
            which = "several" if fitting else "none"
            kinds = "; ".join(packing.called([]).partition(", ")[2] for packing in self._packings)
            raise ArtifactError(
                f"{self.folder}: the parts of {stem}weight fit {which} of the groups of config.json ({kinds}). {AGAIN}"
            )
        return next(iter(fitting))

    def _refuse_lone_part(self, name: str, packing: Packing[Any]) -> None:
        for part in packing.parts:
            if not name.endswith(f".{part}") or part in packing.loose:
                continue
            if part != packing.codes:
                raise ArtifactError(f"{self.folder} has {name} without its {packing.codes}. {AGAIN}")
            if (dtype := self.stored.dtype(name)) not in FLOATS:
                what = f"the codes {name} of {dtype} have no scales, or config.json has no such group"
                raise ArtifactError(f"{self.folder} has {what}. {AGAIN}")

    def names(self) -> list[str]:
        return sorted({*self._layers, *self._rest})

    def read(self, name: str) -> Stored:
        if name not in self._layers:
            return self.stored.read(name)
        layer, packing = self._layers[name]
        packing.refuse_parts(layer)
        return packing.value(layer, packing.unpack(layer.read(packing.parts), packing.bits_of(layer)))

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._layers:
            return None
        layer, packing = self._layers[name]
        return packing.shape(layer)

    def type_of(self, name: str) -> str:
        if name not in self._layers:
            return super().type_of(name)
        layer, packing = self._layers[name]
        return packing.type_name(packing.bits_of(layer))

    def quantization(self) -> str:
        own = [[layer for layer, owner in self._layers.values() if owner is packing] for packing in self._packings]
        first, *others = (packing.called(layers) for packing, layers in zip(self._packings, own, strict=True))
        return "; ".join([first, *(other.partition(", ")[2] for other in others)])

    def layout(self) -> Layout:
        if len(self._packings) > 1:
            raise several_kinds(self.folder, self.quantization())
        layout = self._packings[0].layout([layer for layer, _ in self._layers.values()])
        return super().layout() if layout is None else layout


def several_kinds(folder: Path, quantization: str) -> UnsupportedError:
    """Return the error for a folder whose layers need different layouts."""
    return UnsupportedError(f"{folder} has layers of several kinds ({quantization}), but keep writes only one kind")


class RowsReader(FolderReader):
    """Reads a source-only format, dequantized by rows."""

    shapes: dict[str, tuple[int, ...]]  # of the values of quantized tensors
    scale_names: set[str]  # tensors with scales
    called: str

    @abstractmethod
    def dequantizer(self, name: str) -> Callable[[int, int], NDArray[np.float32]]:
        """Return a function that dequantizes rows (start, stop); raise ArtifactError for scales that are not finite."""

    def names(self) -> list[str]:
        return sorted({*self.known, *self.shapes} - self.scale_names)

    def read(self, name: str) -> torch.Tensor | Rows:
        shape = self.quantized_shape(name)
        return self.stored.read(name) if shape is None else Rows(shape, self.dequantizer(name))

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        return self.shapes.get(name)

    def quantization(self) -> str:
        return self.called


class LayerWriter(TensorWriter, Generic[Weight]):
    """Writes quantized layers and dense tensors of the blocks; remaining tensors are copied from the source last."""

    def __init__(self, checkpoint: Spool, source: Source, run: Run, packing: Packing[Weight], layout: Layout) -> None:
        super().__init__(checkpoint, source, run)
        self.packing: Packing[Weight] = packing
        self.layout = layout

    def add(self, name: str, value: Written) -> None:
        what = f"{name} of {self.source.model}"
        if isinstance(value, torch.Tensor):
            self.checkpoint.add(name, cast_finite(value, self.packing.dtype, what))
            self.run.findings.count(_words(self.packing.dtype))
            return
        if not isinstance(value, self.packing.holds):
            return super().add(name, value)
        for part, tensor in self.packing.pack(value, self.layout, what).items():
            self.checkpoint.add(name.removesuffix("weight") + part, tensor)
        self.run.findings.count(self.packing.type_name(self.layout.bits_of(name)))

    def block(self, prefix: str) -> dict[str, Any]:
        stored = {name for name in self.checkpoint.names() if name.startswith(prefix)}
        stems = _stems(self.packing, stored)
        found: dict[str, Any] = {}
        for name in source_names(self.packing, stored):
            if (stem := name.removesuffix("weight")) not in stems:
                found[name] = self.checkpoint.get(name)
                continue
            parts = {part: self.checkpoint.get(stem + part) for part in self.packing.parts if stem + part in stored}
            found[name] = self.packing.unpack(parts, self.layout.bits_of(name))
        return found

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        stem, bits = name.removesuffix("weight"), self.layout.bits_of(name)
        for part, tensor in self.packing.rescaled(scales, lambda part: self.checkpoint.get(stem + part), bits).items():
            self.checkpoint.replace(stem + part, tensor)


@contextmanager
def write_layers(
    packing: Packing[Weight], source: Source, skeleton: Skeleton, run: Run, layout: Layout, quantization: dict[str, Any]
) -> Iterator[LayerWriter[Weight]]:
    """Yield a writer; complete the checkpoint and its `quantization_config` when the context ends without an error."""
    with open_writer(run.folder, source, _words(packing.dtype), quantization) as checkpoint:
        writer = LayerWriter(checkpoint, source, run, packing, layout)
        yield writer
        _add_others(writer, skeleton)


def _add_others(writer: LayerWriter[Any], skeleton: Skeleton) -> None:
    """Write the parameters that were not added yet, a slab of rows at a time."""
    source, packing = writer.source, writer.packing
    done = set(source_names(packing, set(writer.checkpoint.names())))
    for parameter in skeleton.parameter_names():
        stack = stack_of(source, skeleton, parameter) if packing.keeps_stacks and parameter not in done else None
        name = stack or parameter
        if name in done:
            continue
        done.add(name)
        rows = source.in_rows(source_name(source, skeleton, parameter)) if stack else rows_of(source, skeleton, name)
        what = f"{name} of {source.model}"
        pieces = (cast_finite(torch.from_numpy(piece), packing.dtype, what) for _, piece in rows.pieces(PIECE))
        writer.checkpoint.add_pieces(name, packing.dtype, rows.shape, pieces)
        writer.run.findings.count(_words(packing.dtype))


def refuse_stacked(source: Source, skeleton: Skeleton) -> None:
    """Raise UnsupportedError if the model has stacked weights that quantkit cannot split."""
    if stacked := stacks(skeleton):
        raise UnsupportedError(
            f"the architecture {source.architecture!r} keeps weights stacked ({stacked[0]}) in an unknown way, "
            "and this layout cannot store stacked weights"
        )


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
