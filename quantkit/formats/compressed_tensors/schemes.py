"""`quantization_config` of compressed-tensors where a layer's values are scaled: what it says, and how it is written.

Source: https://github.com/vllm-project/compressed-tensors, version 0.20, its presets W8A8, FP8_DYNAMIC, FP8_BLOCK,
NVFP4A16 and MXFP4A16. Read are also a scale for a whole tensor, and inputs that are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.contracts.format import Kind, Layout
from quantkit.errors import ArtifactError
from quantkit.formats._grouped_layout import AGAIN
from quantkit.formats._quantization_config import Untouched
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source
from quantkit.numerics.scaled_weight import InputRounding
from quantkit.untrusted import shown

METHOD, HEAD = "compressed-tensors", "lm_head"
CLASS = "Linear"  # of the modules that a group is for, where it names no single ones
# What the values of layers are, by the format's name; with `naive-quantized` the type says it.
FORMATS = {
    "int-quantized": "int8",
    "float-quantized": "float8",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}
NAIVE = "naive-quantized"
TYPES = {"int8": ("int", 8), "float8": ("float", 8), "nvfp4": ("float", 4), "mxfp4": ("float", 4)}
STRATEGIES = {
    "int8": ("tensor", "channel", "group"),
    "float8": ("tensor", "channel", "block", "group"),
    "nvfp4": ("tensor_group",),
    "mxfp4": ("group",),
}
FLOAT4 = {"nvfp4": (16, "torch.float8_e4m3fn"), "mxfp4": (32, "torch.uint8")}  # columns of a group, type of its scale
MOST_BLOCK = 1 << 24  # rows or columns


@dataclass(frozen=True)
class Scheme:
    """`values` of layers are int8, float8, nvfp4 or mxfp4; `block` (rows, columns) share a scale, 0 being all."""

    values: str
    block: tuple[int, int]

    @property
    def format(self) -> str:
        """The name of the layout."""
        return next(name for name, values in FORMATS.items() if values == self.values)

    @property
    def inputs(self) -> InputRounding | None:
        """How engines round what flows into a layer that we wrote."""
        if self.values not in ("int8", "float8"):
            return None
        return InputRounding(self.values, self.block[1] or None)

    @property
    def words(self) -> str:
        """What it is called."""
        rows, columns = self.block
        shares = {(0, 0): "whole tensors", (1, 0): "rows"}.get(self.block)
        return f"{self.format}, scales of {shares or (f'{rows} x {columns}' if rows > 1 else f'{columns} columns')}"

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns that share a scale in a layer of that shape."""
        return self.block[0] or rows, self.block[1] or columns


def scheme_for(layout: Layout) -> Scheme:
    """What a layout of scaled values asks for."""
    size = 0 if layout.group_size == -1 else int(layout.group_size)
    return Scheme(layout.values, (size if size and layout.values == "float8" else 1, size))


def group_of(scheme: Scheme) -> dict[str, Any]:
    """The one group of layers, as the package writes it."""
    kind, bits = TYPES[scheme.values]
    _, columns = scheme.block
    weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "group_size": None}
    inputs: dict[str, Any] | None = None
    if scheme.values in FLOAT4:
        group, scales = FLOAT4[scheme.values]
        weights |= {"group_size": group, "strategy": STRATEGIES[scheme.values][0], "scale_dtype": scales}
    else:
        weights |= {"strategy": "block", "block_structure": list(scheme.block)} if columns else {"strategy": "channel"}
        inputs = {
            "num_bits": bits,
            "type": kind,
            "symmetric": True,
            "dynamic": True,
            "strategy": "group" if columns else "token",
            "group_size": columns or None,
        }
    return {"targets": [CLASS], "format": scheme.format, "weights": weights, "input_activations": inputs}


def ignored(untouched: Untouched) -> list[str]:
    """What readers shall not replace; of some models the head has another name in the checkpoint."""
    return sorted({*untouched.linears, *(f"re:{pattern}" for pattern in untouched.patterns), HEAD})


def quantization(scheme: Scheme, untouched: Untouched) -> dict[str, Any]:
    """config.json's `quantization_config`: all linear layers but those that are `untouched`."""
    return {
        "quant_method": METHOD,
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_of(scheme)},
        "ignore": ignored(untouched),
    }


KINDS = tuple(
    Kind(bits, words, quantization(scheme_for(layout), Untouched()))
    for bits, words, layout in (
        ("8", "int8, inputs too", Layout(8, values="int8")),
        ("8", "FP8, inputs too", Layout(8, values="float8")),
        ("nvfp4", "", Layout(4, 16, values="nvfp4")),
        ("mxfp4", "", Layout(4, 32, values="mxfp4")),
    )
)


def only_group(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group of layers of a `quantization_config` that has one; empty for another."""
    groups = groups_of(stored)
    return groups[0] if len(groups) == 1 else {}


def groups_of(stored: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of layers of a `quantization_config`; none where one of them is no mapping."""
    groups = stored.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    return found if all(isinstance(group, dict) for group in found) else []


def is_scaled(stored: Mapping[str, Any]) -> bool:
    """Whether its format is one of scaled values."""
    name = stored.get("format")
    return isinstance(name, str) and (name in FORMATS or name == NAIVE)


def scheme_of(stored: Mapping[str, Any], own: bool) -> Scheme:
    """The scheme of a `quantization_config`; raises ArtifactError for one that is not known.

    `own`: quantkit wrote it, so it is word for word what `group_of` gives.
    """
    name, group = stored.get("format"), only_group(stored)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ArtifactError(f"quantization_config is no {METHOD} of one group of layers with weights. {AGAIN}")
    values = _values(name, weights)
    if values is None or weights.get("symmetric") is not True or weights.get("strategy") not in STRATEGIES[values]:
        said = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "symmetric", "group_size")}
        raise ArtifactError(f"quantization_config: {METHOD} of the format {shown(name)} with {shown(said)} is not read")
    scheme = Scheme(values, _block(values, weights))
    if own and group != group_of(scheme):
        raise ArtifactError(f"quantization_config: its group of layers is not the one of {scheme.words}. {AGAIN}")
    return scheme


def _values(name: object, weights: Mapping[str, Any]) -> str | None:
    kind = weights.get("type"), weights.get("num_bits")
    if name == NAIVE:
        return next((values for values in ("int8", "float8") if TYPES[values] == kind), None)
    values = FORMATS.get(str(name))
    return values if values is not None and TYPES[values] == kind else None


def _block(values: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    strategy = weights.get("strategy")
    if strategy in ("tensor", "channel"):
        return (0, 0) if strategy == "tensor" else (1, 0)
    sizes = weights.get("block_structure") if strategy == "block" else [1, weights.get("group_size")]
    right = FLOAT4.get(values, (None,))[0]
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and 0 < size < MOST_BLOCK for size in sizes)
        or (right is not None and sizes[1] != right)
    ):
        raise ArtifactError(f"quantization_config: {shown(sizes)} are no rows and columns that share a scale. {AGAIN}")
    return sizes[0], sizes[1]


def unfound_layer(source: Source, skeleton: Skeleton) -> str | None:
    """Why readers do not find a model's layers, or None: they replace linear ones, and leave GPT-2's alone."""
    for name, origin in skeleton.origins.items():
        if origin.transposed:
            return (
                f"the architecture {source.architecture!r} has no linear layer where {name} is, and readers of "
                f"{METHOD} look for one."
            )
    for name, layer in skeleton.linears_of(0).items():
        if type(layer).__name__ != "Linear":  # which is what `targets` names
            return (
                f"{name} of the architecture {source.architecture!r} is a {type(layer).__name__}, which readers of "
                f"{METHOD} do not replace."
            )
    return None
