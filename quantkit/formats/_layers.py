"""Checkpoints in safetensors whose quantized layers are several tensors each: codes, scales and what goes with them.

The layouts of GPTQ, AWQ, compressed-tensors and bitsandbytes are a `Packing` each; one reader and one writer serve all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.checkpoints.rows import Rows
from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.checkpoints.spool import Spool
from quantkit.checkpoints.writer import open_writer
from quantkit.contracts.format import Layout, Stored, TensorWriter, Written
from quantkit.contracts.run import Run
from quantkit.errors import ArtifactError, UnsupportedError
from quantkit.models.skeleton import Skeleton, rows_of, source_name, stack_of, stacks
from quantkit.models.source import Source
from quantkit.numerics.casting import cast_finite
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.numerics.normal_float import NormalFloatWeight
from quantkit.numerics.scaled.weight import ScaledWeight

AGAIN = "Convert again with --force."
PIECE = 1 << 22  # values of a tensor outside the blocks that are in memory at a time
SCALE_TYPES = {"float16", "bfloat16", "float32"}  # of other tools
Parts = Mapping[str, torch.Tensor]
Weight = TypeVar("Weight", GroupedWeight, ScaledWeight, NormalFloatWeight)


class Packing(ABC, Generic[Weight]):
    """How a weight of the type `holds` becomes the tensors NAME.PART of a layer, and how it is read back.

    `parts` are all that a layer can have, `codes` the one with its codes. A layer is quantized where all of `marks` are
    there; `loose` parts may be there without one. What is not quantized has the type `dtype`. `bits` are those that
    codes can have; `keeps_stacks`: experts that the source keeps stacked stay so.
    """

    holds: type[Weight]
    codes: str
    marks: tuple[str, ...]
    parts: tuple[str, ...]
    bits: tuple[int, ...]
    loose: tuple[str, ...] = ()
    keeps_stacks: bool = False
    dtype: torch.dtype = torch.float16

    @abstractmethod
    def pack(self, weight: Weight, layout: Layout, what: str) -> dict[str, torch.Tensor]:
        """The parts of a layer; `what` names it in errors."""

    @abstractmethod
    def unpack(self, parts: Parts, bits: int) -> Weight:
        """The layer of its parts; the inverse of `pack`."""

    def pack_scales(self, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """The part that has the scales (N, G)."""
        raise TypeError(f"the scales of a {self.holds.__name__} cannot be replaced")

    def type_name(self, bits: int) -> str:
        """How the manifest counts a layer with codes of so many bits."""
        return f"int{bits}"


def _stems(packing: Packing[Any], stored: Collection[str]) -> set[str]:
    """What the names of the parts of each quantized layer begin with."""
    first, *others = packing.marks
    stems = (name.removesuffix(first) for name in stored if name.endswith(f".{first}"))
    return {stem for stem in stems if all(stem + mark in stored for mark in others)}


def source_names(packing: Packing[Any], stored: Collection[str]) -> list[str]:
    """The names of what is stored as the source has them: of a layer that of its weight."""
    stems = _stems(packing, stored)
    parts = {stem + part for stem in stems for part in packing.parts}
    return sorted({*(stem + "weight" for stem in stems), *(name for name in stored if name not in parts)})


class FolderReader(ABC):
    """The tensors of a folder, some of which are quantized."""

    def __init__(self, folder: Path, files: tuple[str, ...]) -> None:
        self.folder, self.stored = folder, StoredTensors(folder, files)

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def quantization(self) -> str: ...

    def type_of(self, name: str) -> str:
        """How the manifest counts one of them."""
        return self.stored.dtype(name)

    def types(self) -> Mapping[str, int]:
        return Counter(map(self.type_of, self.names()))

    def layout(self) -> Layout:
        raise UnsupportedError(f"{self.folder} has no grouped codes: it is {self.quantization()}")


class LayerReader(FolderReader, Generic[Weight]):
    """Layers under their weight's name, the rest as stored; `others` are parts of layers of another kind."""

    def __init__(
        self, packing: Packing[Weight], folder: Path, files: tuple[str, ...], others: Collection[str] = ()
    ) -> None:
        super().__init__(folder, files)
        self.packing: Packing[Weight] = packing
        self.all = set(self.stored.names()) - set(others)
        self.stems = _stems(packing, self.all)
        self.parts = {stem + part for stem in self.stems for part in packing.parts}
        beside = [part for part in packing.parts if part not in (packing.codes, *packing.loose)]
        for name in sorted(self.all):
            part = next((part for part in beside if name.endswith(f".{part}")), None)
            if part is not None and name.removesuffix(part) not in self.stems:
                raise ArtifactError(f"{folder} has {name} without its {packing.codes}. {AGAIN}")

    @abstractmethod
    def refuse_parts(self, stem: str) -> None:
        """Raise ArtifactError where types and shapes of a layer's parts do not fit each other and config.json."""

    @abstractmethod
    def value_of(self, name: str, weight: Weight) -> Stored:
        """What is given of a layer; raises ArtifactError for values that engines cannot take."""

    @abstractmethod
    def shape_of(self, stem: str) -> tuple[int, int]:
        """The shape (N, K) of a layer's values, without reading them."""

    def bits_of(self, _name: str) -> int:
        """The bits of a layer's codes."""
        return self.packing.bits[0]

    def depends_on(self, stem: str) -> object:
        """What the values of a layer depend on beside its parts."""
        return self.bits_of(f"{stem}weight")

    def names(self) -> list[str]:
        return source_names(self.packing, self.all)

    def stem_of(self, name: str) -> str | None:
        """What the names of the parts of a layer begin with; None for a dense tensor."""
        stem = name.removesuffix("weight")
        return stem if stem != name and stem in self.stems else None

    def read(self, name: str) -> Stored:
        stem = self.stem_of(name)
        if stem is None:
            return self.stored.read(name)
        self.refuse_parts(stem)
        present = {part: self.stored.read(stem + part) for part in self.packing.parts if stem + part in self.all}
        return self.value_of(name, self.packing.unpack(present, self.bits_of(name)))

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        stem = self.stem_of(name)
        return None if stem is None else self.shape_of(stem)

    def type_of(self, name: str) -> str:
        return super().type_of(name) if self.stem_of(name) is None else self.packing.type_name(self.bits_of(name))


class RowsReader(FolderReader):
    """The tensors of a folder that is a source only; quantized ones are dequantized row by row.

    `shapes` are those of the values of quantized tensors by name; `beside` are tensors that only they need.
    """

    shapes: dict[str, tuple[int, ...]]
    beside: set[str]
    called: str

    @abstractmethod
    def dequantizer(self, name: str) -> Callable[[int, int], NDArray[np.float32]]:
        """What gives rows of a quantized tensor; raises ArtifactError where its scales are not finite."""

    def names(self) -> list[str]:
        return sorted({*self.stored.names(), *self.shapes} - self.beside)

    def read(self, name: str) -> torch.Tensor | Rows:
        shape = self.quantized_shape(name)
        return self.stored.read(name) if shape is None else Rows(shape, self.dequantizer(name))

    def quantized_shape(self, name: str) -> tuple[int, ...] | None:
        return self.shapes.get(name)

    def quantization(self) -> str:
        return self.called


class LayerWriter(TensorWriter, Generic[Weight]):
    """Takes layers and dense tensors of the blocks; at the end everything else comes from the source."""

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
            if (stem := name.removesuffix("weight")) in stems:
                parts = {part: self.checkpoint.get(stem + part) for part in self.packing.parts if stem + part in stored}
                found[name] = self.packing.unpack(parts, self.layout.bits_of(name))
            else:
                found[name] = self.checkpoint.get(name)
        return found

    def replace_scales(self, name: str, scales: torch.Tensor) -> None:
        for part, tensor in self.packing.pack_scales(scales).items():
            self.checkpoint.replace(name.removesuffix("weight") + part, tensor)


@contextmanager
def write_layers(
    packing: Packing[Weight], source: Source, skeleton: Skeleton, run: Run, layout: Layout, quantization: dict[str, Any]
) -> Iterator[LayerWriter[Weight]]:
    """Yield a writer; on success write the whole checkpoint, with `quantization` in its config.json."""
    with open_writer(run.folder, source, _words(packing.dtype), quantization) as checkpoint:
        writer = LayerWriter(checkpoint, source, run, packing, layout)
        yield writer
        _add_others(writer, skeleton)


def _add_others(writer: LayerWriter[Any], skeleton: Skeleton) -> None:
    """Add the parameters that no method has added, some rows at a time."""
    source, packing = writer.source, writer.packing
    done = set(source_names(packing, set(writer.checkpoint.names())))
    for parameter in skeleton.parameter_names():
        stack = stack_of(source, skeleton, parameter) if packing.keeps_stacks and parameter not in done else None
        name = stack or parameter
        if name not in done:
            done.add(name)
            rows = (
                source.in_rows(source_name(source, skeleton, parameter)) if stack else rows_of(source, skeleton, name)
            )
            what = f"{name} of {source.model}"
            pieces = (cast_finite(torch.from_numpy(piece), packing.dtype, what) for _, piece in rows.pieces(PIECE))
            writer.checkpoint.add_pieces(name, packing.dtype, rows.shape, pieces)
            writer.run.findings.count(_words(packing.dtype))


def refuse_stacked(source: Source, skeleton: Skeleton) -> None:
    """Raise UnsupportedError where weights stay stacked."""
    if stacked := stacks(skeleton):
        raise UnsupportedError(
            f"the architecture {source.architecture!r} keeps weights stacked ({stacked[0]}) in a way that is not "
            "known, and this layout cannot hold them so"
        )


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
