"""`pack-quantized`: grouped integer codes as vLLM's own tools write them.

Per linear layer with weight (N, K) and bits b: `weight_packed` int32 [N, ceil(K*b/32)], each row one little-endian bit
string of codes; `weight_scale` float16 [N, G]; `weight_shape` int64 [2]; with zero points `weight_zero_point` int32
[ceil(N*b/32), G], packed along N. A stored code is the signed one plus 2^(b-1), so it is ours.
Format: https://github.com/vllm-project/compressed-tensors, version 0.20. Former versions had `weight_g_idx` int32 [K],
which is read and not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.checkpoints.safetensors import StoredTensors
from quantkit.contracts.format import Layout
from quantkit.errors import ArtifactError
from quantkit.formats._grouped_layout import AGAIN, OTHERS, LayerShape, Packing, Parts, matrix
from quantkit.formats._packing import pack_string, unpack_string, words
from quantkit.formats._quantization_config import Untouched
from quantkit.formats.compressed_tensors.schemes import CLASS, HEAD, METHOD, groups_of, ignored, unfound_layer
from quantkit.models.skeleton import Skeleton
from quantkit.models.source import Source
from quantkit.numerics.grouped_weight import GroupedWeight
from quantkit.untrusted import shown

KIND = "pack-quantized"
CODES, SCALES, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ZEROS, ORDER = "weight_zero_point", "weight_g_idx"
MOST_SIDE = 1 << 31  # rows or columns of a layer


class CompressedPacking(Packing):
    """Rows of codes as bit strings."""

    name = "compressed-tensors"
    bits = (2, 3, 4, 8)
    codes, scales = CODES, SCALES
    parts = (CODES, SCALES, SHAPE, ZEROS, ORDER)
    order = ORDER

    def stored(self, layer: LayerShape) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Zero points only where they are not all in the middle."""
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            CODES: ("int32", (layer.rows, words(layer.columns, layer.bits))),
            SCALES: ("float16", (layer.rows, layer.groups)),
            SHAPE: ("int64", (2,)),
        }
        if not layer.symmetric:
            parts[ZEROS] = ("int32", (words(layer.rows, layer.bits), layer.groups))
        if layer.ordered:
            parts[ORDER] = ("int32", (layer.columns,))
        return parts

    def pack(self, weight: GroupedWeight, layout: Layout) -> dict[str, torch.Tensor]:
        """The parts that `stored` names."""
        parts = {
            CODES: pack_string(weight.codes, weight.bits),
            SCALES: self.pack_scales(weight.scales),
            SHAPE: torch.tensor(weight.shape),
        }
        if not layout.symmetric:
            parts[ZEROS] = pack_string(weight.zeros.T, weight.bits).T.contiguous()
        return parts

    def unpack(self, parts: Parts, bits: int) -> GroupedWeight:
        """The inverse."""
        rows, columns = parts[SHAPE].tolist()
        scales = parts[SCALES]
        zeros = self.unpack_zeros(parts, bits, rows, scales.shape[1])
        groups = self.groups(parts, columns, scales.shape[1])
        return GroupedWeight(unpack_string(parts[CODES], bits, columns), scales, zeros, groups, bits)

    def unpack_zeros(self, parts: Parts, bits: int, rows: int, groups: int) -> torch.Tensor:
        """In the middle, where none are stored."""
        if ZEROS in parts:
            return unpack_string(parts[ZEROS].T, bits, rows).T.contiguous()
        return torch.full((rows, groups), 1 << (bits - 1), dtype=torch.uint8)

    def pack_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """(N, G) float16."""
        return scales.contiguous().to(torch.float16)

    def size(self, stored: StoredTensors, stem: str, _bits: int) -> tuple[int, int, int]:
        """As `weight_shape` says; the number of columns cannot be told from the words."""
        name = stem + SHAPE
        if stored.shape(name) != (2,) or stored.dtype(name) != "int64":
            raise ArtifactError(f"{name} is no pair of int64. {AGAIN}")
        rows, columns = stored.read(name).tolist()
        if not (0 < rows < MOST_SIDE and 0 < columns < MOST_SIDE):
            raise ArtifactError(f"{name} says {rows} x {columns}. {AGAIN}")
        return rows, columns, matrix(stored, stem + SCALES)[1]

    def refusal(self, _name: str, _rows: int, _columns: int, _bits: int) -> str | None:
        """The last word of a row may have room left."""
        return None

    def quantization(self, layout: Layout, untouched: Untouched) -> dict[str, Any]:
        """One group of layers, all linear ones but those that are `untouched`, and one of the output head.

        Where layers' bits differ, a group for each, by their names: vLLM would find the class of a layer that it has
        joined, such as QKVParallelLinear, before the names of its parts.
        """
        whole_row = layout.group_size == -1
        weights = {
            "num_bits": layout.bits,
            "type": "int",
            "symmetric": layout.symmetric,
            "strategy": "channel" if whole_row else "group",
            "group_size": None if whole_row else layout.group_size,
            "dynamic": False,
        }
        of_bits: dict[int, list[str]] = {layout.bits: [] if layout.layer_bits else [CLASS]}
        for name, bits in layout.layer_bits.items():
            of_bits.setdefault(bits, []).append(name)
        ignore = {*ignored(untouched)}
        parts = list(of_bits.items())
        if layout.head_bits is not None:
            parts.append((layout.head_bits, [HEAD]))
            ignore -= {HEAD}
        return {
            "quant_method": METHOD,
            "format": KIND,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": {"targets": targets, "format": KIND, "weights": {**weights, "num_bits": bits}}
                for number, (bits, targets) in enumerate(parts)
            },
            "ignore": sorted(ignore),
        }

    def head_bits(self, _layout: Layout) -> tuple[int, ...]:
        """Those that vLLM loads."""
        return 4, 8

    def join(self, pieces: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Rows lie along the first dimension."""
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0] if name != SHAPE}
        shapes = torch.stack([piece[SHAPE] for piece in pieces])
        return joined | {SHAPE: torch.stack([shapes[:, 0].sum(), shapes[0, 1]])}

    def settings(self, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of the first group of layers, from which others differ in their bits alone.

        Raises ArtifactError where it is another kind of file.
        """
        weights = (groups_of(quantization) or [{}])[0].get("weights")
        if quantization.get("format") != KIND or not isinstance(weights, dict) or weights.get("type") != "int":
            raise ArtifactError(
                f"quantization_config is no {METHOD} of one group of integer codes in the format {KIND}, but "
                f"{shown(quantization.get('format'))}. {AGAIN}"
            )
        size = weights.get("group_size")
        return {
            "bits": weights.get("num_bits"),
            "group_size": -1 if size is None and weights.get("strategy") == "channel" else size,
            "sym": weights.get("symmetric"),
            "desc_act": weights.get("actorder") == "group",  # of former versions
        }

    def layer_bits(self, quantization: Mapping[str, Any]) -> Mapping[str, int]:
        """Of several groups those that name layers."""
        first, *others = groups_of(quantization) or [{}]
        if not others:
            return {}
        bits = self.settings(quantization)["bits"]
        if first.get("targets") == [CLASS]:
            return {**_named_bits(first, others), OTHERS: bits}
        return _named_bits(first, [first, *others])

    def model_refusal(self, source: Source, skeleton: Skeleton) -> str | None:
        """Readers replace linear layers."""
        reason = unfound_layer(source, skeleton)
        return reason and f"{reason} Take the format gptq."


def _named_bits(first: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> dict[str, int]:
    """The bits of layers by the names in `groups`; raises ArtifactError where these differ otherwise from the first."""
    named: dict[str, int] = {}
    weights = first.get("weights") or {}
    for group in groups:
        own, targets = group.get("weights"), group.get("targets")
        bits = own.get("num_bits") if isinstance(own, dict) else None
        if (
            not isinstance(own, dict)
            or {**own, "num_bits": None} != {**weights, "num_bits": None}
            or type(bits) is not int
            or bits not in CompressedPacking.bits
            or not isinstance(targets, list)
        ):
            raise ArtifactError(f"quantization_config has groups of layers that differ in more than bits. {AGAIN}")
        for name in targets:
            if not isinstance(name, str) or named.setdefault(name, bits) != bits:
                raise ArtifactError(f"quantization_config: {shown(name)} is no name of a layer of {bits} bits. {AGAIN}")
    return named


PACKING = CompressedPacking()


def refusals(stored: Mapping[str, Any]) -> Mapping[str, str]:
    """Why engines cannot take a folder of this `quantization_config` of one group."""
    if not stored:
        return {}
    reasons, settings = {}, PACKING.settings(stored)
    if settings.get("bits") not in (4, 8):
        reasons["vllm"] = "vLLM loads weights of 4 and 8 bits in this format"
    if not settings.get("sym"):
        reasons["transformers"] = f"transformers does not load packed zero points with {METHOD} 0.20; vLLM does"
    return reasons
