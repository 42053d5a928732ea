"""What one layout of grouped codes says of itself: how a layer's codes, scales and zero points become tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Kind, Layout
from quantkit.errors import ArtifactError
from quantkit.formats._quantization_config import Untouched
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source
from quantkit.numerics.grouped_weight import GroupedWeight, contiguous_groups

AGAIN = "Convert again with --force."
NEEDS_GPTQMODEL = "transformers loads it with the package gptqmodel, which quantkit does not start"
OTHERS = ""  # stands for all layers without a name of their own
Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LayerShape:
    """A layer with weight (`rows` N, `columns` K) whose codes of `bits` bits have `groups` G scales a row.

    `symmetric`: all zero points are in the middle; `ordered`: groups are not of neighbouring columns.
    """

    rows: int
    columns: int
    groups: int
    bits: int
    symmetric: bool
    ordered: bool


class Packing(ABC):
    """One layout: a layer is the tensors NAME.PART, and one that has the part `codes` is quantized.

    `parts` are all that a layer can have, and `order` the one that tells which group each column belongs to.
    `orders_columns`: it is written; `least_zero`: the smallest zero point that it can store; `tells_symmetry`: its
    config.json says whether all zero points are in the middle.
    """

    name: str
    bits: tuple[int, ...]
    codes: str
    scales: str
    parts: tuple[str, ...]
    order: str | None = None
    orders_columns = False
    least_zero = 0
    tells_symmetry = True

    @abstractmethod
    def stored(self, layer: LayerShape) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The parts of a layer, each with its dtype and shape."""

    @abstractmethod
    def pack(self, weight: GroupedWeight, layout: Layout) -> dict[str, torch.Tensor]:
        """The parts of a layer."""

    @abstractmethod
    def unpack(self, parts: Parts, bits: int) -> GroupedWeight:
        """The layer of its parts; the inverse of `pack`."""

    @abstractmethod
    def unpack_zeros(self, parts: Parts, bits: int, rows: int, groups: int) -> torch.Tensor:
        """The zero points (N, G) uint8 of a layer; none of its codes need be there."""

    def groups(self, parts: Parts, columns: int, count: int) -> torch.Tensor:
        """(K,) int64 the group of each column: as the part `order` says, else `count` groups side by side."""
        if self.order is not None and self.order in parts:
            return parts[self.order].to(torch.int64)
        return contiguous_groups(columns, columns // count)

    @abstractmethod
    def pack_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """The part `scales` of scales (N, G)."""

    @abstractmethod
    def size(self, stored: StoredTensors, stem: str, bits: int) -> tuple[int, int, int]:
        """N, K and G of the layer whose parts begin with `stem`; raises ArtifactError where they do not tell."""

    @abstractmethod
    def refusal(self, name: str, rows: int, columns: int, bits: int) -> str | None:
        """The reason why words cannot hold a layer, or None."""

    @abstractmethod
    def quantization(self, layout: Layout, untouched: Untouched) -> dict[str, Any]:
        """config.json's `quantization_config`; it names what is `untouched` where readers would not find that out."""

    def head_bits(self, _layout: Layout) -> tuple[int, ...]:
        """Bits that an output head may have beside the layers of a layout; none where readers find no codes there."""
        return ()

    def join(self, pieces: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The parts of a layer of those of its rows, some at a time."""
        raise NotImplementedError(f"{self.name} joins no layers")

    def settings(self, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
        """`bits`, `group_size`, `sym` and `desc_act` of a `quantization_config`, as far as it says them."""
        return quantization

    def layer_bits(self, _quantization: Mapping[str, Any]) -> Mapping[str, int]:
        """The bits of layers by name in a `quantization_config` that we wrote; `OTHERS` are all that it names not.

        Empty where it says one number for all. Raises ArtifactError for another one than we write.
        """
        return {}

    def stored_bits(self, _stored: StoredTensors, _stem: str, bits: int) -> int:
        """The bits of a layer of another tool's, where config.json says `bits`."""
        return bits

    def variant(self, _quantization: Mapping[str, Any]) -> Packing:
        """The layout of another tool's `quantization_config`; raises ArtifactError for one that is not known."""
        return self

    def notes(self, _layout: Layout) -> tuple[str, ...]:
        """Remarks for the user."""
        return ()

    def model_refusal(self, _source: Source, _skeleton: Skeleton) -> str | None:
        """The reason why readers of this layout do not find the layers of a model, or None."""
        return None


def kinds(packing: Packing) -> tuple[Kind, ...]:
    """What a layout holds, as engines tell it apart."""
    found = []
    for bits in packing.bits:
        for symmetric in (True, False) if packing.tells_symmetry else (False,):
            for ordered in (False, True) if packing.orders_columns else (False,):
                words = f"{'symmetric' if symmetric else 'zero points'}{', desc_act' if ordered else ''}"
                layout = Layout(bits, 128, symmetric, ordered)
                only = {"vllm": "cards"} if bits == 8 else {}  # its CPU build has no kernel
                found.append(Kind(str(bits), words, packing.quantization(layout, Untouched()), only))
    return tuple(found)


def mixes(packing: Packing) -> tuple[Kind, ...]:
    """What a layout holds that says the bits of each layer: mixes of those that engines multiply with, and others."""
    found = []
    for widths, words in (((4, 8), "4 and 8 bits by layer"), (packing.bits, "others by layer")):
        layout = Layout(4, 128, layer_bits={f"model.layers.{index}": bits for index, bits in enumerate(widths)})
        only = {"vllm": "cards"}  # its CPU build has a kernel for 4 bits alone
        found.append(Kind("auto", f"symmetric, {words}", packing.quantization(layout, Untouched()), only))
    return tuple(found)


def matrix(stored: StoredTensors, name: str) -> tuple[int, int]:
    """The shape of a tensor of two dimensions; raises ArtifactError for another."""
    shape = stored.shape(name)
    if len(shape) != 2:
        raise ArtifactError(f"the tensor {name} has the shape {shape}, not two dimensions. {AGAIN}")
    return shape[0], shape[1]
